// The CPU backend: a row of the batch at a time. Of torch it sees only the 16-bit types.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <vector>

#include "op.h"

namespace convrnn::cpu {
namespace {

struct CpuTypes {
  using Float16 = c10::Half;
  using BFloat16 = c10::BFloat16;
};

// A state with zeros at both ends.
template <typename A>
struct Padded {
  Padded(std::int64_t cols, std::int64_t padding) : values(cols + 2 * padding), padding(padding) {}
  A* data() { return values.data() + padding; }

  std::vector<A> values;
  std::int64_t padding;
};

template <typename T>
void widen(const T* from, std::int64_t count, Accumulator<T>* to) {
  for (std::int64_t i = 0; i < count; ++i) {
    to[i] = static_cast<Accumulator<T>>(from[i]);
  }
}

}  // namespace

void forward(const ForwardArgs& args, std::int64_t first, std::int64_t last) {
  const auto [batch, steps, cols, taps] = args.sizes;
  with_dtype<CpuTypes>(args.dtype, [&]<typename T>() {
    using A = Accumulator<T>;
    Padded<A> state(cols, padding(taps));
    std::vector<A> sum(cols), kernel(taps);
    widen(static_cast<const T*>(args.kernel), taps, kernel.data());
    for (std::int64_t row = first; row < last; ++row) {
      widen(static_cast<const T*>(args.hidden) + row * cols, cols, state.data());
      for (std::int64_t t = 0; t < steps; ++t) {
        const std::int64_t at = (row * steps + t) * cols;
        widen(static_cast<const T*>(args.x) + at, cols, sum.data());
        for (std::int64_t k = 0; k < taps; ++k) {
          const A* shifted = state.data() + k - left(taps);
          for (std::int64_t i = 0; i < cols; ++i) {
            sum[i] += kernel[k] * shifted[i];
          }
        }
        T* y = static_cast<T*>(args.output) + at;
        for (std::int64_t i = 0; i < cols; ++i) {
          y[i] = static_cast<T>(std::tanh(sum[i]));
        }
        widen(y, cols, state.data());  // rounded: the state is what backward will read
      }
    }
  });
}

// From the last step to the first. dz is the gradient before the tanh; what it passes on to the
// step before is dz convolved with the kernel turned around.
void backward(const BackwardArgs& args, std::int64_t first, std::int64_t last) {
  const auto [batch, steps, cols, taps] = args.sizes;
  with_dtype<CpuTypes>(args.dtype, [&]<typename T>() {
    using A = Accumulator<T>;
    Padded<A> dz(cols, padding(taps)), before(cols, padding(taps));
    std::vector<A> dh(cols), kernel(taps);
    widen(static_cast<const T*>(args.kernel), taps, kernel.data());
    for (std::int64_t row = first; row < last; ++row) {
      A* grad_kernel = static_cast<A*>(args.grad_kernel) + row * taps;
      std::fill(grad_kernel, grad_kernel + taps, A(0));
      std::fill(dh.begin(), dh.end(), A(0));  // what the step after passes on
      for (std::int64_t t = steps - 1; t >= 0; --t) {
        const std::int64_t at = (row * steps + t) * cols;
        const T* dy = static_cast<const T*>(args.grad_output) + at;
        const T* y = static_cast<const T*>(args.output) + at;
        T* dx = static_cast<T*>(args.grad_x) + at;
        for (std::int64_t i = 0; i < cols; ++i) {
          const A h = static_cast<A>(y[i]);
          dz.data()[i] = (static_cast<A>(dy[i]) + dh[i]) * (A(1) - h * h);
          dx[i] = static_cast<T>(dz.data()[i]);
        }
        const T* hidden = static_cast<const T*>(args.hidden) + row * cols;
        widen(t > 0 ? y - cols : hidden, cols, before.data());
        std::fill(dh.begin(), dh.end(), A(0));
        for (std::int64_t k = 0; k < taps; ++k) {
          const A* shifted = dz.data() - k + left(taps);
          const A* read = before.data() + k - left(taps);
          A sum = 0;
          for (std::int64_t i = 0; i < cols; ++i) {
            dh[i] += kernel[k] * shifted[i];
            sum += dz.data()[i] * read[i];
          }
          grad_kernel[k] += sum;
        }
      }
      T* grad_hidden = static_cast<T*>(args.grad_hidden) + row * cols;
      for (std::int64_t i = 0; i < cols; ++i) {
        grad_hidden[i] = static_cast<T>(dh[i]);
      }
    }
  });
}

}  // namespace convrnn::cpu
