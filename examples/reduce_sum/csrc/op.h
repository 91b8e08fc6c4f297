// One step of a sum as plain values and pointers, and the CPU backend's function. Both backends and
// the binding include it. Torch-free, so that plain nvcc compiles kernel.cu in seconds.
#pragma once

#include <cstdint>

namespace reduce_sum {

enum class DType { kFloat16, kBFloat16, kFloat32, kFloat64 };

// Rows are cut into parts, and the sum of each part is one element of the output. A row of one part
// is done; of a longer one, the sums are the row of a second step.
struct SumArgs {
  DType input_dtype;
  DType output_dtype;  // the input's, or that of its accumulator; or of one whose accumulator is
                       // the input
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t part;   // elements of a part; the last one of a row may be shorter
  std::int64_t parts;  // of a row
  const void* input;   // [rows, cols], dense
  void* output;        // [rows, parts]
};

// A function of nothing but the row's length: the order of a sum, and so its bits, must not depend
// on the number of rows, of threads or of multiprocessors.
constexpr std::int64_t kPart = 16384;
inline std::int64_t parts_of(std::int64_t cols) { return (cols + kPart - 1) / kPart; }

template <typename T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <typename T>
using Accumulator = typename AccumulatorOf<T>::type;

// Calls function.operator()<T>(). Types names the 16-bit types of a backend.
template <typename Types, typename Function>
void with_dtype(DType dtype, Function&& function) {
  switch (dtype) {
    case DType::kFloat16:
      return function.template operator()<typename Types::Float16>();
    case DType::kBFloat16:
      return function.template operator()<typename Types::BFloat16>();
    case DType::kFloat32:
      return function.template operator()<float>();
    case DType::kFloat64:
      return function.template operator()<double>();
  }
}

// The pairs that occur: 16 bits to float, float to 16 bits, and each to itself.
template <typename Types, typename Function>
void with_dtypes(const SumArgs& args, Function&& function) {
  with_dtype<Types>(args.input_dtype, [&]<typename In>() {
    if (args.input_dtype == args.output_dtype) {
      return function.template operator()<In, In>();
    }
    if (args.output_dtype == DType::kFloat32) {
      if constexpr (sizeof(In) == 2) {
        return function.template operator()<In, float>();
      }
    }
    if constexpr (sizeof(In) == 4) {
      with_dtype<Types>(args.output_dtype, [&]<typename Out>() {
        if constexpr (sizeof(Out) == 2) {
          function.template operator()<float, Out>();
        }
      });
    }
  });
}

namespace cpu {
// Output elements first, ..., last - 1: the binding spreads ranges over threads.
void sum_parts(const SumArgs& args, std::int64_t first, std::int64_t last);
}  // namespace cpu

}  // namespace reduce_sum
