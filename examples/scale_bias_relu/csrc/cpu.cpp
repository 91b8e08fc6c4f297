// The CPU backend: the formula in plain loops. Of torch it sees only the 16-bit types.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

#include "op.h"

namespace scale_bias_relu::cpu {
namespace {

struct CpuTypes {
  using Float16 = c10::Half;
  using BFloat16 = c10::BFloat16;
};

}  // namespace

void forward(const ForwardArgs& args, std::int64_t first_row, std::int64_t last_row) {
  with_dtype<CpuTypes>(args.dtype, [&]<typename T>() {
    using A = Accumulator<T>;
    const A scale = static_cast<A>(args.scale);
    const T* bias = static_cast<const T*>(args.bias);
    for (std::int64_t row = first_row; row < last_row; ++row) {
      const T* x = static_cast<const T*>(args.input) + row * args.cols;
      T* y = static_cast<T*>(args.output) + row * args.cols;
      for (std::int64_t col = 0; col < args.cols; ++col) {
        const A b = bias == nullptr ? A(0) : static_cast<A>(bias[col]);
        y[col] = static_cast<T>(scale_bias_relu(static_cast<A>(x[col]), scale, b));
      }
    }
  });
}

// Step one of the column sum: rows are split into parts, and each part has its own partial sums.
// The parts depend on the shape, never on the number of threads, so neither do the bits of the
// result.
std::int64_t backward_parts(std::int64_t rows) {
  return std::clamp<std::int64_t>(rows / 16, 1, 64);
}

void backward(const BackwardArgs& args, std::int64_t first_part, std::int64_t last_part) {
  with_dtype<CpuTypes>(args.dtype, [&]<typename T>() {
    using A = Accumulator<T>;
    const A scale = static_cast<A>(args.scale);
    for (std::int64_t part = first_part; part < last_part; ++part) {
      A* partial = nullptr;
      if (args.grad_bias != nullptr) {
        partial = static_cast<A*>(args.partials) + part * args.cols;
        std::fill(partial, partial + args.cols, A(0));
      }
      const std::int64_t last_row = args.rows * (part + 1) / args.parts;
      for (std::int64_t row = args.rows * part / args.parts; row < last_row; ++row) {
        const T* dy = static_cast<const T*>(args.grad_output) + row * args.cols;
        const T* y = static_cast<const T*>(args.output) + row * args.cols;
        T* dx = args.grad_input == nullptr ? nullptr
                                           : static_cast<T*>(args.grad_input) + row * args.cols;
        if (dx != nullptr) {
          for (std::int64_t col = 0; col < args.cols; ++col) {
            const A dz = through_relu(static_cast<A>(dy[col]), static_cast<A>(y[col]));
            dx[col] = static_cast<T>(dz * scale);
          }
        }
        if (partial != nullptr) {  // a loop of its own: the row is in the cache, and both vectorise
          for (std::int64_t col = 0; col < args.cols; ++col) {
            partial[col] += through_relu(static_cast<A>(dy[col]), static_cast<A>(y[col]));
          }
        }
      }
    }
  });
}

// Step two: the partial sums of a column, first part first.
void finish_grad_bias(const BackwardArgs& args, std::int64_t first_col, std::int64_t last_col) {
  with_dtype<CpuTypes>(args.dtype, [&]<typename T>() {
    using A = Accumulator<T>;
    const A* partials = static_cast<const A*>(args.partials);
    for (std::int64_t col = first_col; col < last_col; ++col) {
      A sum = 0;
      for (std::int64_t part = 0; part < args.parts; ++part) {
        sum += partials[part * args.cols + col];
      }
      static_cast<T*>(args.grad_bias)[col] = static_cast<T>(sum);
    }
  });
}

}  // namespace scale_bias_relu::cpu
