// The Python module fused_op_cuda, which eager calls use. torch.compile sees the ops of the
// dispatcher instead: dispatcher.cpp.
#include "fused_op.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <limits>

#include "autograd.h"
#include "checks.h"
#include "kernel_tools.h"
#include "routing.h"

#ifndef FUSED_OP_NO_CUDA_REASON
#define FUSED_OP_NO_CUDA_REASON ""
#endif

namespace fused_op {

extern const char* const kSourceHash;  // setup.py writes its file

namespace {

namespace py = pybind11;

constexpr const char* kForward = "fused_op::norm_forward";
constexpr const char* kBackward = "fused_op::norm_backward";

// A tuple of fused_op/_options.py, by its places. Fields are borrowed from it.
class Fields {
 public:
  Fields(const char* op, const char* name, py::handle tuple, Py_ssize_t count)
      : tuple_(tuple.ptr()), op_(op) {
    TORCH_CHECK_TYPE(PyTuple_Check(tuple_) && PyTuple_GET_SIZE(tuple_) == count, op, ": ", name,
                     " must be a tuple of ", count, ", as fused_op/_options.py has it, not ",
                     Py_TYPE(tuple_)->tp_name);
  }

  PyObject* at(Py_ssize_t place) const { return PyTuple_GET_ITEM(tuple_, place); }
  bool is_none(Py_ssize_t place) const { return at(place) == Py_None; }

  double number(Py_ssize_t place) const {
    PyObject* const field = at(place);
    return PyFloat_CheckExact(field) ? PyFloat_AS_DOUBLE(field)
                                     : py::cast<double>(py::handle(field));
  }
  bool flag(Py_ssize_t place) const {
    PyObject* const field = at(place);
    return PyBool_Check(field) ? field == Py_True : py::cast<bool>(py::handle(field));
  }
  at::ScalarType dtype(Py_ssize_t place) const {
    return py::cast<at::ScalarType>(py::handle(at(place)));
  }
  OptionalDtype optional_dtype(Py_ssize_t place) const {
    return is_none(place) ? std::nullopt : OptionalDtype(dtype(place));
  }
  NormKind norm(Py_ssize_t place) const {
    return parse_norm(py::cast<std::string_view>(py::handle(at(place))));
  }

  // Not by pybind11, whose TypeError prints the values of a tensor: that waits for the device.
  const at::Tensor& tensor(Py_ssize_t place, const char* name) const {
    PyObject* const field = at(place);
    TORCH_CHECK_TYPE(THPVariable_Check(field), op_, ": argument '", name, "' must be Tensor, not ",
                     Py_TYPE(field)->tp_name);
    return THPVariable_Unpack(field);
  }
  OptionalTensor optional_tensor(Py_ssize_t place, const char* name) const {
    return is_none(place) ? std::nullopt : OptionalTensor(tensor(place, name));
  }

 private:
  PyObject* tuple_;
  const char* op_;
};

// Options of fused_op/_options.py.
class PythonOptions : public Fields {
 public:
  explicit PythonOptions(py::handle tuple) : Fields(kForward, "options", tuple, kCount) {}

  enum Place : Py_ssize_t {
    kNorm,
    kEps,
    kNormalizedShape,
    kZeroCentered,
    kDropoutP,
    kTraining,
    kOutputDtype,
    kSumDtype,
    kMemoryEfficient,
    kMainGrad,
    kIsChecked,
    kCount
  };

  // Whether all have their usual types: else _arguments.py has to check and convert them first.
  bool are_usual() const {
    const auto is_dtype_or_none = [this](Place place) {
      return is_none(place) || THPDtype_Check(at(place));
    };
    const bool has_eps =
        PyFloat_CheckExact(at(kEps)) || (is_none(kEps) && norm(kNorm) == NormKind::kRmsNorm);
    const bool drops = !PyFloat_CheckExact(at(kDropoutP)) || number(kDropoutP) != 0;
    return has_eps && !drops && PyBool_Check(at(kZeroCentered)) && PyBool_Check(at(kTraining)) &&
           PyBool_Check(at(kMemoryEfficient)) && is_dtype_or_none(kOutputDtype) &&
           is_dtype_or_none(kSumDtype);
  }

  // Whether the input ends in normalized_shape, as far as ints can tell.
  bool fit(const NormTensors& tensors) const {
    PyObject* const shape = at(kNormalizedShape);
    if (shape == Py_None) {
      return true;
    }
    if (!PyTuple_CheckExact(shape) || PyTuple_GET_SIZE(shape) == 0 || !is_plain(tensors) ||
        PyTuple_GET_SIZE(shape) > tensors.input.dim()) {
      return false;
    }
    const Py_ssize_t ndim = PyTuple_GET_SIZE(shape);
    for (Py_ssize_t i = 0; i < ndim; ++i) {
      PyObject* const size = PyTuple_GET_ITEM(shape, i);
      if (!PyLong_CheckExact(size) || PyLong_AsSsize_t(size) != tensors.input.size(i - ndim)) {
        PyErr_Clear();  // of an int that is too large
        return false;
      }
    }
    return true;
  }

  NormOptions unpack(const at::Tensor& input) const {
    NormOptions options;
    options.norm = norm(kNorm);
    if (!is_none(kNormalizedShape)) {
      options.normalized_ndim = py::cast<py::tuple>(py::handle(at(kNormalizedShape))).size();
    }
    options.eps = is_none(kEps) ? machine_eps(input.scalar_type()) : number(kEps);
    options.zero_centered = flag(kZeroCentered);
    options.dropout_p = number(kDropoutP);
    options.output_dtype = optional_dtype(kOutputDtype);
    options.sum_dtype = optional_dtype(kSumDtype);
    return options;
  }

 private:
  static double machine_eps(at::ScalarType dtype) {
    return dtype == at::kDouble ? std::numeric_limits<double>::epsilon()
                                : std::numeric_limits<float>::epsilon();
  }
};

Fields norm_tensor_fields(py::handle tuple, NormKind norm) {
  const bool adds = PyTuple_Check(tuple.ptr()) && PyTuple_GET_SIZE(tuple.ptr()) > 1 &&
                    PyTuple_GET_ITEM(tuple.ptr(), 1) != Py_None;
  return Fields(op_name(norm, adds), "tensors", tuple, 5);
}

NormTensors unpack_norm_tensors(const Fields& fields) {
  return {.input = fields.tensor(0, "input"),
          .residual = fields.optional_tensor(1, "residual"),
          .weight = fields.optional_tensor(2, "weight"),
          .bias = fields.optional_tensor(3, "bias"),
          .rng_state = fields.optional_tensor(4, "rng_state")};
}

BackwardTensors unpack_backward_tensors(py::handle tuple) {
  const Fields fields(kBackward, "tensors", tuple, 7);
  return {.grad_output = fields.tensor(0, "grad_output"),
          .grad_sum = fields.optional_tensor(1, "grad_sum"),
          .x = fields.tensor(2, "x"),
          .weight = fields.optional_tensor(3, "weight"),
          .bias = fields.optional_tensor(4, "bias"),
          .stats = fields.tensor(5, "stats"),
          .rng_state = fields.optional_tensor(6, "rng_state")};
}

BackwardOptions unpack_backward_options(py::handle tuple, std::array<bool, 4> wanted) {
  const Fields fields(kBackward, "options", tuple, 11);
  return {.norm = fields.norm(0),
          .normalized_ndim = py::cast<std::int64_t>(py::handle(fields.at(1))),
          // 2 is eps, which stats hold
          .zero_centered = fields.flag(3),
          .dropout_p = fields.number(4),
          .x_is_output = fields.flag(5),
          .input_dtype = fields.dtype(6),
          .residual_dtype = fields.optional_dtype(7),
          .param_dtype = fields.dtype(8),
          .wanted = wanted};
}

MainGrads unpack_main_grads(py::handle tuple) {
  const Fields fields(kBackward, "main_grads", tuple, 2);
  return {.weight = fields.optional_tensor(0, "main_grad of weight"),
          .bias = fields.optional_tensor(1, "main_grad of bias")};
}

// Results for Python, which gets our reference to each; pybind11 would add one and drop ours, and
// that takes the interpreter lock again. Undefined tensors become None.
py::object to_python(at::Tensor&& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}
template <typename... Tensors>
py::tuple to_python(std::tuple<Tensors...>&& tensors) {
  return std::apply([](Tensors&... each) { return py::make_tuple(to_python(std::move(each))...); },
                    tensors);
}

// The members of enum.Enum("Route", ...), in the order of the C++ one. They live as long as the
// process, and handing one out costs a reference.
constexpr std::array kRouteNames = {"AUTOGRAD", "CHECK", "DISPATCH", "COMPOSITE", "RECORD", "CAST"};
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

// Whether all are Tensor or Parameter, and no mode is on: else __torch_function__ may take the
// call.
bool are_usual(const Fields& tensors) {
  for (Py_ssize_t place = 0; place < 4; ++place) {
    if (!tensors.is_none(place) && !THPVariable_CheckExact(tensors.at(place))) {
      return false;
    }
  }
  return !at::impl::torch_function_mode_enabled();
}

// The outputs, or the Route that the call has to take.
py::object norm(py::handle tensor_tuple, py::handle option_tuple) {
  const PythonOptions options(option_tuple);
  const Fields fields = norm_tensor_fields(tensor_tuple, options.norm(PythonOptions::kNorm));
  const bool is_checked = options.flag(PythonOptions::kIsChecked);
  if (!is_checked && !(are_usual(fields) && options.are_usual())) {
    return to_python(Route::kCheck);
  }
  const NormTensors tensors = unpack_norm_tensors(fields);
  if (!is_checked && !options.fit(tensors)) {
    return to_python(Route::kCheck);
  }
  const NormOptions unpacked = options.unpack(tensors.input);
  auto result = route_norm(tensors, unpacked);
  if (const Route* const route = std::get_if<Route>(&result)) {
    const bool in_cpp = records_in_cpp() && !options.flag(PythonOptions::kMainGrad);
    return *route == Route::kAutograd && in_cpp
               ? to_python(
                     record_norm(tensors, unpacked, options.flag(PythonOptions::kMemoryEfficient)))
               : to_python(*route);
  }
  auto& [output, sum, stats] = std::get<ThreeTensors>(result);
  return to_python({std::move(output), std::move(sum)});
}

py::tuple bound_norm_forward(py::handle tensor_tuple, py::handle option_tuple, bool save_stats) {
  const PythonOptions python_options(option_tuple);
  const NormTensors tensors = unpack_norm_tensors(
      norm_tensor_fields(tensor_tuple, python_options.norm(PythonOptions::kNorm)));
  NormOptions options = python_options.unpack(tensors.input);
  options.save_stats = save_stats;
  return to_python(route_norm_forward(tensors, options));
}

py::tuple bound_norm_backward(py::handle tensors, py::handle options, std::array<bool, 4> wanted) {
  return to_python(route_norm_backward(unpack_backward_tensors(tensors),
                                       unpack_backward_options(options, wanted)));
}

py::tuple bound_norm_backward_into(py::handle tensors, py::handle options,
                                   std::array<bool, 4> wanted, py::handle main_grads) {
  return to_python(route_norm_backward_into(unpack_backward_tensors(tensors),
                                            unpack_backward_options(options, wanted),
                                            unpack_main_grads(main_grads)));
}

void bound_check_main_grads(const at::Tensor& x, std::int64_t normalized_ndim,
                            py::handle main_grad_tuple) {
  const MainGrads main_grads = unpack_main_grads(main_grad_tuple);
  check_main_grads(kBackward, main_grads, main_grads.weight.has_value(),
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
  bind_kernel_tools(m);
  m.def("build_info", &build_info);
}

}  // namespace fused_op
