#include "autograd.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <vector>

#include "checks.h"
#include "core/kernel_error.h"
#include "routing.h"

namespace fused_op {
namespace {

namespace py = pybind11;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

std::atomic<bool> in_cpp{true};
std::atomic<int> disabled_blocks{0};

constexpr std::size_t kTensors = 5;    // of NormTensors
constexpr std::size_t kArguments = 7;  // of NormNode::forward, not counting its context
constexpr std::int64_t kAbsent = -1;   // stands for an absent dtype

// What backward needs to know about a call, in a form that a node can hold and compiled autograd
// can compare.
struct Recorded {
  BackwardOptions options;
  at::ScalarType output_dtype = at::kFloat;
  double eps = 0;
  std::array<bool, kTensors> given = {};  // for input, residual, weight, bias and rng_state

  void save(AutogradContext& context) const {
    std::vector<std::int64_t> numbers = {
        static_cast<std::int64_t>(options.norm),
        options.normalized_ndim,
        options.zero_centered,
        static_cast<std::int64_t>(options.rounding),
        options.x_is_output,
        number(options.input_dtype),
        options.residual_dtype ? number(*options.residual_dtype) : kAbsent,
        number(options.param_dtype),
        number(output_dtype)};
    numbers.insert(numbers.end(), given.begin(), given.end());
    context.saved_data["numbers"] = std::move(numbers);
    context.saved_data["eps"] = eps;
    context.saved_data["dropout_p"] = options.dropout_p;
  }

  explicit Recorded(AutogradContext& context) {
    const std::vector<std::int64_t> numbers = context.saved_data["numbers"].toIntVector();
    options.norm = static_cast<NormKind>(numbers[0]);
    options.normalized_ndim = numbers[1];
    options.zero_centered = numbers[2] != 0;
    options.rounding = static_cast<Rounding>(numbers[3]);
    options.x_is_output = numbers[4] != 0;
    options.input_dtype = dtype(numbers[5]);
    if (numbers[6] != kAbsent) {
      options.residual_dtype = dtype(numbers[6]);
    }
    options.param_dtype = dtype(numbers[7]);
    output_dtype = dtype(numbers[8]);
    for (std::size_t i = 0; i < kTensors; ++i) {
      given[i] = numbers[9 + i] != 0;
    }
    eps = context.saved_data["eps"].toDouble();
    options.dropout_p = context.saved_data["dropout_p"].toDouble();
  }

  // Computes the same as backward_options() in fused_op/_options.py.
  Recorded(const NormTensors& tensors, const NormOptions& forward, bool x_is_output)
      : output_dtype(forward.output_dtype.value_or(tensors.input.scalar_type())),
        eps(forward.eps),
        given{true, tensors.residual.has_value(), tensors.weight.has_value(),
              tensors.bias.has_value(), tensors.rng_state.has_value()} {
    options.norm = forward.norm;
    options.normalized_ndim = normalized_ndim(tensors, forward);
    options.zero_centered = forward.zero_centered;
    options.rounding = forward.rounding;
    options.dropout_p = forward.dropout_p;
    options.x_is_output = x_is_output;
    options.input_dtype = tensors.input.scalar_type();
    if (tensors.residual) {
      options.residual_dtype = tensors.residual->scalar_type();
    }
    options.param_dtype = given_dtype(tensors.weight, tensors.bias, options.input_dtype);
    // If weight and bias differ in dtype, autograd rounds each gradient to its own.
    if (tensors.bias && tensors.bias->scalar_type() != options.param_dtype) {
      options.param_dtype = stats_dtype(options.input_dtype);
    }
  }

 private:
  static std::int64_t number(at::ScalarType dtype) { return static_cast<std::int64_t>(dtype); }
  static at::ScalarType dtype(std::int64_t number) { return static_cast<at::ScalarType>(number); }
};

at::Tensor defined_or(const OptionalTensor& tensor) { return tensor.value_or(at::Tensor()); }
OptionalTensor optional(const at::Tensor& tensor) {
  return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
}

// Below: calls into Python, for gradients that need more than a kernel.

py::object wrap(const at::Tensor& tensor) {  // None, if undefined
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}
py::object wrap(const OptionalTensor& tensor) { return wrap(defined_or(tensor)); }
py::object wrap(at::ScalarType dtype) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
}

FourTensors backward_in_python(const BackwardTensors& tensors, const Recorded& recorded) {
  const py::gil_scoped_acquire acquired;
  const BackwardOptions& options = recorded.options;
  const py::tuple given = py::make_tuple(wrap(tensors.grad_output), wrap(tensors.grad_sum),
                                         wrap(tensors.x), wrap(tensors.weight), wrap(tensors.bias),
                                         wrap(tensors.stats), wrap(tensors.rng_state));
  const py::object python_options =
      py::module_::import("fused_op._options")
          .attr("BackwardOptions")(
              name_of(options.norm), options.normalized_ndim, recorded.eps, options.zero_centered,
              name_of(options.rounding), options.dropout_p, options.x_is_output,
              wrap(options.input_dtype),
              options.residual_dtype ? wrap(*options.residual_dtype) : py::none(),
              wrap(options.param_dtype), wrap(recorded.output_dtype), /*main_grad=*/false);
  const py::tuple wanted =
      py::make_tuple(options.wanted[0], options.wanted[1], options.wanted[2], options.wanted[3]);
  const py::tuple found = py::module_::import("fused_op._routes")
                              .attr("run_backward")(given, python_options, wanted, py::none());
  const auto gradient = [&](std::size_t i) {
    return found[i].is_none() ? at::Tensor() : py::cast<at::Tensor>(found[i]);
  };
  return {gradient(0), gradient(1), gradient(2), gradient(3)};
}

FourTensors backward(const BackwardTensors& tensors, const Recorded& recorded) {
  if (!at::GradMode::is_enabled() && !is_disabled() && is_plain(tensors)) {
    try {
      return route_norm_backward(tensors, recorded.options);
    } catch (const KernelError&) {  // Python reports the error and computes the formula
    }
  }
  return backward_in_python(tensors, recorded);
}

}  // namespace

// Autograd shows this node as CppNode<fused_op::NormNode>.
class NormNode : public torch::autograd::Function<NormNode> {
 public:
  static variable_list forward(AutogradContext* context, const at::Tensor& input,
                               const OptionalTensor& residual, const OptionalTensor& weight,
                               const OptionalTensor& bias, const OptionalTensor& rng_state,
                               const NormOptions& options, bool memory_efficient) {
    const NormTensors tensors{input, residual, weight, bias, rng_state};
    auto [output, sum, stats] = route_norm_forward(tensors, options);
    const at::Tensor& x = memory_efficient ? output : residual ? sum : input;
    context->save_for_backward({x, defined_or(weight),
                                memory_efficient ? defined_or(bias) : at::Tensor(), stats,
                                defined_or(rng_state)});
    Recorded(tensors, options, memory_efficient).save(*context);
    context->set_materialize_grads(false);
    return residual ? variable_list{output, sum} : variable_list{output};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    Recorded recorded(*context);
    variable_list results(kArguments);
    std::array<bool, 4>& wanted = recorded.options.wanted;
    std::size_t edge = 0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      wanted[i] = recorded.given[i] && context->needs_input_grad(edge);
      edge += recorded.given[i] ? 1 : 0;
    }
    const at::Tensor& grad_sum = grads.size() > 1 ? grads[1] : grads[0];
    const bool shared = shares_gradient(recorded.options);
    if (!grads[0].defined() && shared) {  // only the sum was used
      results[0] = wanted[0] ? grad_sum : at::Tensor();
      results[1] = wanted[1] ? grad_sum : at::Tensor();
      return results;
    }
    const variable_list saved = context->get_saved_variables();
    const at::Tensor grad_output =
        grads[0].defined()
            ? grads[0]
            : at::zeros_like(saved[0], saved[0].options().dtype(recorded.output_dtype));
    auto [grad_input, grad_residual, grad_weight, grad_bias] = fused_op::backward(
        {grad_output, grads.size() > 1 ? optional(grad_sum) : std::nullopt, saved[0],
         optional(saved[1]), optional(saved[2]), saved[3], optional(saved[4])},
        recorded);
    // Return one tensor for both, as torch.add does. Autograd copies it where it would be stored
    // twice.
    results[1] = wanted[1] ? (shared ? grad_input : grad_residual) : at::Tensor();
    results[0] = wanted[0] ? grad_input : at::Tensor();
    results[2] = wanted[2] ? grad_weight : at::Tensor();
    results[3] = wanted[3] ? grad_bias : at::Tensor();
    return results;
  }
};

Outputs record_norm(const NormTensors& tensors, const NormOptions& options, bool memory_efficient) {
  NormOptions saving = options;
  saving.save_stats = true;
  variable_list outputs =
      NormNode::apply(tensors.input, tensors.residual, tensors.weight, tensors.bias,
                      tensors.rng_state, saving, memory_efficient);
  return {std::move(outputs[0]), outputs.size() > 1 ? std::move(outputs[1]) : at::Tensor()};
}

bool records_in_cpp() { return in_cpp.load(std::memory_order_relaxed); }
void record_in_cpp(bool value) { in_cpp.store(value); }
void open_disabled_block() { ++disabled_blocks; }
void close_disabled_block() { --disabled_blocks; }
bool is_disabled() { return disabled_blocks.load() != 0; }

}  // namespace fused_op
