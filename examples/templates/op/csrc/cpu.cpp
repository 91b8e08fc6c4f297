// The CPU backend: the formula in plain loops. Of torch it sees only the 16-bit types.
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "op.h"

namespace template_op::cpu {
namespace {

struct CpuTypes {
  using Float16 = c10::Half;
  using BFloat16 = c10::BFloat16;
};

}  // namespace

// YOUR OP: write these two first, until the tests pass; then kernel.cu.
void forward(const ForwardArgs& args, std::int64_t first, std::int64_t last) {
  with_dtype<CpuTypes>(args.dtype, [&]<typename T>() {
    using A = Accumulator<T>;
    const T* x = static_cast<const T*>(args.input);
    T* y = static_cast<T*>(args.output);
    for (std::int64_t i = first; i < last; ++i) {
      y[i] = static_cast<T>(forward_formula(static_cast<A>(x[i]), static_cast<A>(args.scale)));
    }
  });
}

void backward(const BackwardArgs& args, std::int64_t first, std::int64_t last) {
  with_dtype<CpuTypes>(args.dtype, [&]<typename T>() {
    using A = Accumulator<T>;
    const T* dy = static_cast<const T*>(args.grad_output);
    T* dx = static_cast<T*>(args.grad_input);
    for (std::int64_t i = first; i < last; ++i) {
      dx[i] = static_cast<T>(backward_formula(static_cast<A>(dy[i]), static_cast<A>(args.scale)));
    }
  });
}

}  // namespace template_op::cpu
