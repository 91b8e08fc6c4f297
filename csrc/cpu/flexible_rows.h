// Rows of a call that is_flexible(): a dtype for each tensor, and dropout. They are converted to
// accumulators, and then treated as rows of those.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/rows.h"

namespace fused_op::cpu {

struct CpuTypes {
  using Float16 = c10::Half;
  using BFloat16 = c10::BFloat16;
};

template <typename Function>
void with_element(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kFloat16:
      return function.template operator()<c10::Half>();
    case DType::kBFloat16:
      return function.template operator()<c10::BFloat16>();
    case DType::kFloat32:
      return function.template operator()<float>();
    case DType::kFloat64:
      return function.template operator()<double>();
  }
}

// `count` elements of any dtype, to accumulators and back.
template <typename A>
void read_any(const void* from, DType dtype, std::int64_t first, std::int64_t count, A* to) {
  const auto convert = [&]<typename T>() {
    const T* const elements = static_cast<const T*>(from) + first;
    for (std::int64_t j = 0; j < count; ++j) {
      T element;
      memcpy(&element, elements + j, sizeof(T));  // at any address
      to[j] = static_cast<A>(element);
    }
  };
  with_element(dtype, convert);
}
template <typename A>
void write_any(const A* from, void* to, DType dtype, std::int64_t first, std::int64_t count) {
  const auto convert = [&]<typename T>() {
    T* const elements = static_cast<T*>(to) + first;
    for (std::int64_t j = 0; j < count; ++j) {
      elements[j] = static_cast<T>(from[j]);
    }
  };
  with_element(dtype, convert);
}

template <typename A>
void drop(const Dropout& dropout, std::int64_t row, std::vector<A>& values) {
  const DropoutRow mask(DropoutState(dropout), row);
  const auto cols = static_cast<std::int64_t>(values.size());
  for (std::int64_t col = 0; col < cols; col += kMaskCols) {
    const std::int64_t count = std::min<std::int64_t>(kMaskCols, cols - col);
    A part[kMaskCols] = {};
    std::copy_n(values.begin() + col, count, part);
    mask.apply(dropout, col, part);
    std::copy_n(part, count, values.begin() + col);
  }
}

template <typename A>
std::vector<A> read_parameters(const void* parameters, DType dtype, std::int64_t cols) {
  std::vector<A> values;
  if (parameters != nullptr) {
    values.resize(static_cast<std::size_t>(cols));
    read_any(parameters, dtype, 0, cols, values.data());
  }
  return values;
}
template <typename A>
const A* pointer(const std::vector<A>& values) {
  return values.empty() ? nullptr : values.data();
}

template <typename A, typename Norm>
void flexible_forward(const NormForwardArgs& args, std::int64_t first_row, std::int64_t last_row) {
  const std::int64_t cols = args.cols;
  const auto weight = read_parameters<A>(args.weight, args.param_dtype, cols);
  const auto bias = read_parameters<A>(args.bias, args.param_dtype, cols);
  std::vector<A> x(static_cast<std::size_t>(cols)), addend(x.size()), output(x.size());
  A stats[2];
  NormForwardArgs row_args = args;
  row_args.rows = 1;
  row_args.input = {.data = x.data()};
  row_args.weight = pointer(weight);
  row_args.bias = pointer(bias);
  row_args.output.data = output.data();
  row_args.stats = stats;
  for (std::int64_t row = first_row; row < last_row; ++row) {
    const auto read = [&](const ConstRows& rows, std::vector<A>& to) {
      read_any(rows.data, rows.dtype, rows.split.offset(row, rows.stride), cols, to.data());
    };
    read(args.input, x);
    if (args.sum != nullptr) {
      read(args.residual, addend);
      if (args.dropout.active) {
        drop(args.dropout, row, x);
      }
      for (std::size_t j = 0; j < x.size(); ++j) {
        x[j] += addend[j];
      }
      write_any(x.data(), args.sum, args.dtype, row * cols, cols);
      read_any(args.sum, args.dtype, row * cols, cols, x.data());
    }
    forward_row<A, Norm, Plain<A>>(row_args, 0);
    if (args.sum == nullptr && args.dropout.active) {
      drop(args.dropout, row, output);
    }
    write_any(output.data(), args.output.data, args.output.dtype, row * cols, cols);
    for (int i = 0; args.stats != nullptr && i < Norm::kStats; ++i) {
      static_cast<A*>(args.stats)[i * args.rows + row] = stats[i];
    }
  }
}

// x̂ of a row that holds the output: as the GPU has it.
template <typename A>
void xhat_of_output(const std::vector<A>& weight, const std::vector<A>& bias, std::vector<A>& x) {
  for (std::size_t j = 0; j < x.size(); ++j) {
    const A divisor = weight.empty() ? A(1) : weight[j];
    const A smallest = std::copysign(static_cast<A>(kSmallestWeight), divisor);
    x[j] = (x[j] - (bias.empty() ? A(0) : bias[j])) /
           (std::abs(divisor) < std::abs(smallest) ? smallest : divisor);
  }
}

template <typename A, typename Norm>
void flexible_backward(const NormBackwardArgs& args, std::int64_t first_row, std::int64_t last_row,
                       A* partials) {
  const std::int64_t cols = args.cols;
  const auto weight = read_parameters<A>(args.weight, args.param_dtype, cols);
  const auto bias = read_parameters<A>(args.bias, args.param_dtype, cols);
  std::vector<A> x(static_cast<std::size_t>(cols)), dy(x.size()), dsum(x.size()), dx(x.size());
  A stats[2];
  const bool wants_dx = args.grad_input.data != nullptr || args.grad_residual.data != nullptr;
  NormBackwardArgs row_args = args;
  row_args.rows = 1;
  row_args.x = {.data = x.data()};
  row_args.grad_output = {.data = dy.data()};
  row_args.grad_sum = {.data = dsum.data()};
  row_args.weight = pointer(weight);
  row_args.stats = stats;
  row_args.grad_input.data = wants_dx ? dx.data() : nullptr;
  for (std::int64_t row = first_row; row < last_row; ++row) {
    const auto read = [&](const ConstRows& rows, std::vector<A>& to) {
      read_any(rows.data, rows.dtype, rows.split.offset(row, rows.stride), cols, to.data());
    };
    read(args.x, x);
    read(args.grad_output, dy);
    for (int i = 0; i < Norm::kStats; ++i) {
      stats[i] = static_cast<const A*>(args.stats)[i * args.rows + row];
    }
    if (args.dropout.active && !args.drops_input) {
      drop(args.dropout, row, dy);
    }
    if (args.x_is_output) {  // x̂ itself is the row then, of mean 0 and scale 1
      xhat_of_output(weight, bias, x);
      const A rstd = stats[Norm::kStats - 1];
      for (A& xhat : x) {
        xhat /= rstd;
      }
      stats[0] = Norm::kStats == 2 ? A(0) : rstd;
    }
    if (args.grad_sum.data != nullptr) {
      read(args.grad_sum, dsum);
      backward_row<A, Norm, AddResidual<A>>(row_args, 0, partials);
    } else {
      backward_row<A, Norm, Plain<A>>(row_args, 0, partials);
    }
    const auto write = [&](const Rows& rows) {
      if (rows.data != nullptr) {
        write_any(dx.data(), rows.data, rows.dtype, row * cols, cols);
      }
    };
    write(args.grad_residual);
    if (args.drops_input && wants_dx) {
      drop(args.dropout, row, dx);
    }
    write(args.grad_input);
  }
}

// Calls function with the accumulator and the norm of a flexible call.
template <typename Function>
void with_flexible(DType dtype, NormKind kind, Function&& function) {
  with_norm(kind, [&]<typename Norm>() {
    if (dtype == DType::kFloat64) {
      function.template operator()<double, Norm>();
    } else {
      function.template operator()<float, Norm>();
    }
  });
}

}  // namespace fused_op::cpu
