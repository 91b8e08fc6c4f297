// Calls of a variant from Python, of which the two ops of variant.h are the ends: a call of plain
// tensors runs from here to its kernel, and back, without Python.
#pragma once

#include <pybind11/pybind11.h>

namespace fused_op {

// Binds VariantOps, of which fused_op/_variant.py has one for each variant.
void bind_variant_call(pybind11::module_& m);

}  // namespace fused_op
