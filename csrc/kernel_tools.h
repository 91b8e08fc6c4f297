// Python's view of the kernels that are compiled at first use (cuda/kernel_files.h), for `python -m
// fused_op cache` and the tests. No op goes through here.
#pragma once

#include <pybind11/pybind11.h>

namespace fused_op {

// In a build without CUDA, each function raises an error that names the reason.
void bind_kernel_tools(pybind11::module_& m);

}  // namespace fused_op
