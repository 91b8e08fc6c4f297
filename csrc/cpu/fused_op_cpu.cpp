// The CPU backend over a range of rows, called by backend.cpp. Reads c10's 16-bit types and nothing
// else of torch.
#include "cpu/fused_op_cpu.h"

#include <algorithm>

#include "cpu/dispatch.h"
#include "cpu/flexible_rows.h"
#include "cpu/rows.h"

namespace fused_op::cpu {
namespace {

bool wants_parameter_gradients(const NormBackwardArgs& args) {
  return args.grad_weight != nullptr || args.grad_bias != nullptr;
}

// Calls rows(first, last, partials) for each chunk, with its partial sums of the parameter
// gradients: [chunks, Norm::kGrads, cols] in the workspace.
template <typename Norm, typename A, typename Function>
void for_each_chunk(const NormBackwardArgs& args, std::int64_t first_chunk, std::int64_t last_chunk,
                    Function&& rows) {
  const std::int64_t chunks = norm_backward_chunks(args);
  const std::int64_t size = Norm::kGrads * args.cols;
  for (std::int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
    A* partials = nullptr;
    if (wants_parameter_gradients(args)) {
      partials = static_cast<A*>(args.workspace) + chunk * size;
      std::fill(partials, partials + size, A(0));
    }
    rows(args.rows * chunk / chunks, args.rows * (chunk + 1) / chunks, partials);
  }
}

}  // namespace

void norm_forward(const NormForwardArgs& args, std::int64_t first_row, std::int64_t last_row) {
  if (is_flexible(args)) {
    with_flexible(args.dtype, args.kind, [&]<typename A, typename Norm>() {
      flexible_forward<A, Norm>(args, first_row, last_row);
    });
    return;
  }
  with_dtypes<CpuTypes>(args.dtype, args.param_dtype, [&]<typename T, typename W>() {
    with_norm(args.kind, [&]<typename Norm>() {
      with_source<T>(args.residual, [&]<typename Source>() {
        for (std::int64_t row = first_row; row < last_row; ++row) {
          forward_row<W, Norm, Source>(args, row);
        }
      });
    });
  });
}

std::int64_t norm_backward_chunks(const NormBackwardArgs& args) {
  return std::clamp<std::int64_t>(args.rows / 16, 1, 64);
}

std::size_t norm_backward_workspace(const NormBackwardArgs& args) {
  if (!wants_parameter_gradients(args)) {
    return 0;
  }
  const std::int64_t grads = args.kind == NormKind::kLayerNorm ? 2 : 1;
  const std::int64_t bytes = args.dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
  return static_cast<std::size_t>(norm_backward_chunks(args) * grads * args.cols * bytes);
}

void norm_backward_rows(const NormBackwardArgs& args, std::int64_t first_chunk,
                        std::int64_t last_chunk) {
  if (is_flexible(args)) {
    with_flexible(args.dtype, args.kind, [&]<typename A, typename Norm>() {
      for_each_chunk<Norm, A>(args, first_chunk, last_chunk,
                              [&](std::int64_t row, std::int64_t last_row, A* partials) {
                                flexible_backward<A, Norm>(args, row, last_row, partials);
                              });
    });
    return;
  }
  with_dtypes<CpuTypes>(args.dtype, args.param_dtype, [&]<typename T, typename W>() {
    with_norm(args.kind, [&]<typename Norm>() {
      with_source<T>(args.grad_sum, [&]<typename Source>() {
        for_each_chunk<Norm, Accumulator<T>>(
            args, first_chunk, last_chunk,
            [&](std::int64_t row, std::int64_t last_row, Accumulator<T>* partials) {
              for (; row < last_row; ++row) {
                backward_row<W, Norm, Source>(args, row, partials);
              }
            });
      });
    });
  });
}

void norm_backward_columns(const NormBackwardArgs& args, std::int64_t first_col,
                           std::int64_t last_col) {
  const std::int64_t chunks = norm_backward_chunks(args);
  const std::int64_t grads = args.kind == NormKind::kLayerNorm ? 2 : 1;
  void* const targets[2] = {args.grad_weight, args.grad_bias};
  const auto sum_columns = [&]<typename A>() {
    for (std::int64_t grad = 0; grad < grads; ++grad) {
      if (targets[grad] == nullptr) {
        continue;
      }
      const A* partials = static_cast<const A*>(args.workspace) + grad * args.cols;
      for (std::int64_t col = first_col; col < last_col; ++col) {
        double total = 0;
        for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
          total += static_cast<double>(partials[chunk * grads * args.cols + col]);
        }
        const auto rounded = static_cast<A>(total);
        if (args.add_grads) {
          static_cast<float*>(targets[grad])[col] += static_cast<float>(rounded);
        } else {
          write_any(&rounded, targets[grad], args.param_dtype, col, 1);
        }
      }
    }
  };
  if (args.dtype == DType::kFloat64) {
    sum_columns.template operator()<double>();
  } else {
    sum_columns.template operator()<float>();
  }
}

}  // namespace fused_op::cpu
