// The Python module fused_op_cuda, which eager calls use. torch.compile sees the ops of the
// dispatcher instead: dispatcher.cpp.
#include "fused_op.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "autograd.h"
#include "backend.h"
#include "checks.h"
#include "kernel_tools.h"
#include "python_arguments.h"
#include "routing.h"
#include "torch_override.h"
#include "variant_call.h"

#ifndef FUSED_OP_NO_CUDA_REASON
#define FUSED_OP_NO_CUDA_REASON ""
#endif

namespace fused_op {

extern const char* const kSourceHash;  // defined in a file that setup.py writes

namespace {

namespace py = pybind11;

// Results for Python, which takes over our reference to each. pybind11 would add a reference and
// drop ours, and that takes the interpreter lock again. Undefined tensors become None.
py::object to_python(at::Tensor&& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}
template <typename... Tensors>
py::tuple to_python(std::tuple<Tensors...>&& tensors) {
  return std::apply([](Tensors&... each) { return py::make_tuple(to_python(std::move(each))...); },
                    tensors);
}

// The members of enum.Enum("Route", ...), in the order of the C++ enum. They live as long as the
// process, so handing one out costs only a reference.
constexpr std::array kRouteNames = {"AUTOGRAD",  "CHECK",  "DROPOUT", "DISPATCH",
                                    "COMPOSITE", "RECORD", "CAST"};
std::array<PyObject*, kRouteNames.size()> route_members;

py::object make_route_enum() {
  using py::literals::operator""_a;
  const py::object members = py::module_::import("enum").attr("Enum")(
      "Route", py::cast(kRouteNames), "module"_a = "fused_op_cuda");
  for (std::size_t i = 0; i < kRouteNames.size(); ++i) {
    route_members[i] = py::object(members.attr(kRouteNames[i])).release().ptr();
  }
  return members;
}

py::object to_python(Route route) {
  return py::reinterpret_borrow<py::object>(route_members[static_cast<std::size_t>(route)]);
}

// What a public function returns.
py::object to_python(Outputs&& outputs) {
  auto& [output, sum] = outputs;
  return sum.defined() ? to_python(std::make_tuple(std::move(output), std::move(sum)))
                       : to_python(std::move(output));
}

// The outputs, or the Route that the call has to take instead.
py::object norm(py::handle tensors, py::handle options) {
  const std::variant<NormCall, Route> unpacked = unpack_usual(tensors, options);
  if (const Route* const route = std::get_if<Route>(&unpacked)) {
    return to_python(*route);
  }
  const NormCall& call = std::get<NormCall>(unpacked);
  auto result = route_norm(call.tensors, call.options);
  if (const Route* const route = std::get_if<Route>(&result)) {
    const bool in_cpp = *route == Route::kAutograd && records_in_cpp() && !call.main_grad;
    return in_cpp ? to_python(record_norm(call.tensors, call.options, call.memory_efficient))
                  : to_python(*route);
  }
  auto& [output, sum, stats] = std::get<ThreeTensors>(result);
  return to_python({std::move(output), std::move(sum)});
}

py::tuple bound_norm_forward(py::handle tensors, py::handle options, bool save_stats) {
  NormCall call = unpack(tensors, options);
  call.options.save_stats = save_stats;
  return to_python(route_norm_forward(call.tensors, call.options));
}

py::tuple bound_norm_backward(py::handle tensors, py::handle options, std::array<bool, 4> wanted) {
  const BackwardCall call = unpack_backward(tensors, options, wanted);
  return to_python(route_norm_backward(call.tensors, call.options));
}

py::tuple bound_norm_backward_into(py::handle tensors, py::handle options,
                                   std::array<bool, 4> wanted, py::handle main_grads) {
  const BackwardCall call = unpack_backward(tensors, options, wanted);
  return to_python(
      route_norm_backward_into(call.tensors, call.options, unpack_main_grads(main_grads)));
}

void bound_check_main_grads(const at::Tensor& x, std::int64_t normalized_ndim,
                            py::handle main_grad_tuple) {
  const MainGrads main_grads = unpack_main_grads(main_grad_tuple);
  check_main_grads("fused_op::norm_backward", main_grads, main_grads.weight.has_value(),
                   main_grads.bias.has_value(), x, normalized_ndim);
}

py::object bound_dropout_state(const at::Tensor& input) {
  return to_python(route_dropout_state(input));
}

py::dict build_info() {
  using py::literals::operator""_a;
#ifdef NDEBUG
  const bool debug = false;
#else
  const bool debug = true;
#endif
  return py::dict("version"_a = FUSED_OP_VERSION, "torch"_a = FUSED_OP_TORCH_VERSION,
                  "cuda"_a = FUSED_OP_CUDA_VERSION, "cuda_archs"_a = FUSED_OP_CUDA_ARCHS,
                  "no_cuda_reason"_a = FUSED_OP_NO_CUDA_REASON, "debug"_a = debug,
                  "source_hash"_a = kSourceHash);
}

}  // namespace

PYBIND11_MODULE(fused_op_cuda, m) {
  m.doc() = "The compiled half of fused_op: CPU and CUDA kernels behind one door.";
  m.attr("Route") = make_route_enum();
  m.def("norm", &norm);
  m.def("norm_forward", &bound_norm_forward);
  m.def("norm_backward", &bound_norm_backward);
  m.def("norm_backward_into", &bound_norm_backward_into);
  m.def("check_main_grads", &bound_check_main_grads);
  m.def("dropout_state", &bound_dropout_state);
  m.def("record_in_cpp", &record_in_cpp);
  m.def("open_disabled_block", &open_disabled_block);
  m.def("close_disabled_block", &close_disabled_block);
  m.def("override_torch", &override_torch);
  m.def("restore_torch", &restore_torch);
  m.def("override_counts", &override_counts);
  bind_kernel_tools(m);
  bind_variant_call(m);
  m.def("build_info", &build_info);
  m.def("cpu_level", &backend::cpu_level);
}

}  // namespace fused_op
