// What the launch of a quantised forward and its kernels share. Host and device; torch-free.
#pragma once

#include "core/quantize.h"

namespace fused_op::cuda {

struct QuantizedForwardArgs : NormForwardArgs {
  Quantization to;
};

constexpr int kQuantizeThreads = 256;  // of a CTA of quantize_rows_kernel

}  // namespace fused_op::cuda
