#include "python_arguments.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <limits>
#include <string_view>
#include <utility>

#include "checks.h"
#include "routing.h"

namespace fused_op {
namespace {

namespace py = pybind11;

constexpr const char* kForward = "fused_op::norm_forward";
constexpr const char* kBackward = "fused_op::norm_backward";

// A tuple of fused_op/_options.py. Fields are addressed by position and borrowed from it.
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
  Rounding rounding(Py_ssize_t place) const {
    return parse_rounding(py::cast<std::string_view>(py::handle(at(place))));
  }

  // Not left to pybind11: its TypeError prints the values of a tensor, and that waits for the
  // device.
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
    kRounding,
    kDropoutP,
    kTraining,
    kOutDtype,
    kResidualDtype,
    kMemoryEfficient,
    kMainGrad,
    kIsChecked,
    kCount
  };

  NormKind norm() const { return Fields::norm(kNorm); }
  bool are_checked() const { return flag(kIsChecked); }

  // Whether all options except normalized_shape have their usual types and values.
  bool are_usual() const {
    const auto is_dtype_or_none = [this](Place place) {
      return is_none(place) || THPDtype_Check(at(place));
    };
    if (!PyBool_Check(at(kZeroCentered)) || !PyBool_Check(at(kTraining)) ||
        !PyBool_Check(at(kMemoryEfficient)) || !is_dtype_or_none(kOutDtype) ||
        !is_dtype_or_none(kResidualDtype) || !PyFloat_CheckExact(at(kDropoutP)) ||
        !is_rounding(at(kRounding))) {
      return false;
    }
    const double p = number(kDropoutP);
    const bool has_eps = is_number(at(kEps)) || (is_none(kEps) && norm() == NormKind::kRmsNorm);
    return has_eps && (p == 0 || (p > 0 && p <= 1 && !flag(kMemoryEfficient)));
  }

  // Whether the input ends in normalized_shape.
  bool fit(const NormTensors& tensors) const {
    PyObject* const shape = at(kNormalizedShape);
    const at::Tensor& input = tensors.input;
    if (shape == Py_None) {
      return true;
    }
    if (!is_plain(tensors) || input.dim() == 0) {
      return false;
    }
    if (!PyTuple_Check(shape) && !PyList_Check(shape)) {
      return is_size(shape, input.size(-1));
    }
    const Py_ssize_t ndim = PySequence_Fast_GET_SIZE(shape);
    bool fits = ndim > 0 && ndim <= input.dim();
    for (Py_ssize_t i = 0; fits && i < ndim; ++i) {
      fits = is_size(PySequence_Fast_GET_ITEM(shape, i), input.size(i - ndim));
    }
    return fits;
  }

  // Whether Python has to draw a mask first, or to set dropout_p to 0 outside of training.
  bool wait_for_dropout(const NormTensors& tensors) const {
    return number(kDropoutP) != 0 && !(flag(kTraining) && tensors.rng_state);
  }

  NormCall call(NormTensors&& tensors) const {
    const NormOptions options = unpack(tensors.input);
    return {std::move(tensors), options, flag(kMemoryEfficient), flag(kMainGrad)};
  }

 private:
  NormOptions unpack(const at::Tensor& input) const {
    NormOptions options;
    options.norm = norm();
    if (!is_none(kNormalizedShape)) {
      const py::handle shape = at(kNormalizedShape);
      options.normalized_ndim =
          PyLong_Check(shape.ptr()) ? 1 : static_cast<std::int64_t>(py::len(shape));
    }
    options.eps = is_none(kEps) ? machine_eps(input.scalar_type()) : number(kEps);
    options.zero_centered = flag(kZeroCentered);
    options.rounding = rounding(kRounding);
    options.dropout_p = number(kDropoutP);
    options.output_dtype = optional_dtype(kOutDtype);
    options.sum_dtype = optional_dtype(kResidualDtype);
    return options;
  }

  static bool is_number(PyObject* object) {
    int overflow = 0;
    if (PyLong_CheckExact(object)) {
      PyLong_AsLongLongAndOverflow(object, &overflow);
      return overflow == 0;
    }
    return PyFloat_CheckExact(object);
  }

  static bool is_rounding(PyObject* object) {
    return PyUnicode_CheckExact(object) &&
           (PyUnicode_CompareWithASCIIString(object, "once") == 0 ||
            PyUnicode_CompareWithASCIIString(object, "before_weight") == 0);
  }

  static bool is_size(PyObject* object, std::int64_t size) {
    if (!PyLong_CheckExact(object)) {
      return false;
    }
    int overflow = 0;
    return PyLong_AsLongLongAndOverflow(object, &overflow) == size && overflow == 0;
  }

  static double machine_eps(at::ScalarType dtype) {
    return dtype == at::kDouble ? std::numeric_limits<double>::epsilon()
                                : std::numeric_limits<float>::epsilon();
  }
};

// The tensors of a forward: input, residual, weight, bias, rng_state.
class PythonTensors : public Fields {
 public:
  PythonTensors(py::handle tuple, NormKind norm)
      : Fields(op_name(norm, adds_residual(tuple)), "tensors", tuple, 5) {}

  // Whether all are tensors without a __torch_function__ to consult, and no mode is on.
  bool are_usual() const {
    using State = at::impl::TorchFunctionDisabledState;
    const bool asks_subclasses =
        at::impl::PythonTorchFunctionTLS::get_disabled_state() == State::ENABLED;
    for (Py_ssize_t place = 0; place < 4; ++place) {
      PyObject* const field = at(place);
      if (field != Py_None && !THPVariable_CheckExact(field) &&
          (asks_subclasses || !THPVariable_Check(field))) {
        return false;
      }
    }
    return !at::impl::torch_function_mode_enabled();
  }

  NormTensors unpack() const {
    return {.input = tensor(0, "input"),
            .residual = optional_tensor(1, "residual"),
            .weight = optional_tensor(2, "weight"),
            .bias = optional_tensor(3, "bias"),
            .rng_state = optional_tensor(4, "rng_state")};
  }

 private:
  static bool adds_residual(py::handle tuple) {
    return PyTuple_Check(tuple.ptr()) && PyTuple_GET_SIZE(tuple.ptr()) > 1 &&
           PyTuple_GET_ITEM(tuple.ptr(), 1) != Py_None;
  }
};

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
  const Fields fields(kBackward, "options", tuple, 12);
  return {.norm = fields.norm(0),
          .normalized_ndim = py::cast<std::int64_t>(py::handle(fields.at(1))),
          .zero_centered = fields.flag(3),  // the field before it is eps, which is in stats
          .rounding = fields.rounding(4),
          .dropout_p = fields.number(5),
          .x_is_output = fields.flag(6),
          .input_dtype = fields.dtype(7),
          .residual_dtype = fields.optional_dtype(8),
          .param_dtype = fields.dtype(9),  // the other two are for Python
          .wanted = wanted};
}

}  // namespace

NormCall unpack(py::handle tensor_tuple, py::handle option_tuple) {
  const PythonOptions options(option_tuple);
  NormTensors tensors = PythonTensors(tensor_tuple, options.norm()).unpack();
  return options.call(std::move(tensors));
}

std::variant<NormCall, Route> unpack_usual(py::handle tensor_tuple, py::handle option_tuple) {
  const PythonOptions options(option_tuple);
  const PythonTensors python_tensors(tensor_tuple, options.norm());
  const bool are_checked = options.are_checked();
  if (!are_checked && !(python_tensors.are_usual() && options.are_usual())) {
    return Route::kCheck;
  }
  NormTensors tensors = python_tensors.unpack();
  if (!are_checked && !options.fit(tensors)) {
    return Route::kCheck;
  }
  if (!are_checked && options.wait_for_dropout(tensors)) {
    return Route::kDropout;
  }
  return options.call(std::move(tensors));
}

BackwardCall unpack_backward(py::handle tensors, py::handle options, std::array<bool, 4> wanted) {
  return {unpack_backward_tensors(tensors), unpack_backward_options(options, wanted)};
}

MainGrads unpack_main_grads(py::handle tuple) {
  const Fields fields(kBackward, "main_grads", tuple, 2);
  return {.weight = fields.optional_tensor(0, "main_grad of weight"),
          .bias = fields.optional_tensor(1, "main_grad of bias")};
}

}  // namespace fused_op
