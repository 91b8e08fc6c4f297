#include "variant_call.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "autograd.h"
#include "call_keys.h"
#include "core/kernel_error.h"
#include "variant_ops.h"

namespace fused_op {
namespace {

namespace py = pybind11;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// --- From Python and back ------------------------------------------------------------------------

bool is_defined(const at::Tensor& tensor) { return tensor.defined(); }

// None for an undefined tensor, so that an op sees an absent argument.
c10::IValue to_ivalue(const at::Tensor& tensor) {
  return tensor.defined() ? c10::IValue(tensor) : c10::IValue();
}

py::object tensor_to_python(at::Tensor tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(tensor)));
}

py::tuple to_tuple(const variable_list& tensors) {
  py::tuple result(tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    result[i] = tensor_to_python(tensors[i]);
  }
  return result;
}

// --- Forward -------------------------------------------------------------------------------------

// A tensor whose gradient is that of an output, in its own dtype and shape. The op does not return
// it, because no op returns what it is given.
struct Passed {
  std::size_t tensor = 0, output = 0;
  at::ScalarType dtype = at::kFloat;
  std::vector<std::int64_t> sizes;

  // The output's gradient itself, where it fits, or one with memory of its own: autograd copies a
  // tensor that it would accumulate twice, but does not see that two share memory.
  at::Tensor gradient(const variable_list& grads) const {
    const at::Tensor& grad = grads[output];
    if (!grad.defined()) {
      const auto other = std::find_if(grads.begin(), grads.end(), is_defined);
      return other->new_zeros(sizes, other->options().dtype(dtype));
    }
    const bool fits = grad.sizes() == sizes;
    return fits ? grad.to(dtype) : grad.to(dtype, false, /*copy=*/true).reshape(sizes);
  }
  py::object to_python() const {
    return py::make_tuple(tensor, output, py::cast(dtype), py::tuple(py::cast(sizes)));
  }
  // Of numbers alone, which compiled autograd can compare.
  c10::IValue to_ivalue() const {
    Stack numbers = {static_cast<std::int64_t>(tensor), static_cast<std::int64_t>(output),
                     static_cast<std::int64_t>(dtype)};
    numbers.insert(numbers.end(), sizes.begin(), sizes.end());
    return c10::ivalue::Tuple::create(std::move(numbers));
  }
  explicit Passed(const c10::IValue& value) {
    const auto& numbers = value.toTupleRef().elements();
    tensor = numbers[0].toInt();
    output = numbers[1].toInt();
    dtype = static_cast<at::ScalarType>(numbers[2].toInt());
    for (std::size_t i = 3; i < numbers.size(); ++i) {
      sizes.push_back(numbers[i].toInt());
    }
  }
  Passed(std::size_t of, std::size_t from, const at::Tensor& given)
      : tensor(of), output(from), dtype(given.scalar_type()), sizes(given.sizes().vec()) {}
};

struct Call {
  const VariantOps* ops = nullptr;
  std::vector<at::Tensor> tensors;  // undefined: absent
  Stack options;
  std::optional<Passed> passed;

  CallKeys keys() const {
    c10::SmallVector<const at::Tensor*, 8> present;
    for (const at::Tensor& tensor : tensors) {
      present.push_back(tensor.defined() ? &tensor : nullptr);
    }
    return CallKeys(present);
  }
  // Whether backward may have to run the op. If not, it needs no tensors.
  bool needs_op() const {
    return std::any_of(ops->differentiated.begin(), ops->differentiated.end(), [&](std::size_t i) {
      return tensors[i].requires_grad() && !(passed && passed->tensor == i);
    });
  }
};

void run(const c10::OperatorHandle& op, Stack& stack, const at::Tensor& rows) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const ReleasedInterpreter released(rows);
  op.callBoxed(stack);
}

// The results of the forward op.
variable_list run_forward(const Call& call, bool save_stats) {
  Stack stack;
  stack.reserve(call.tensors.size() + call.options.size() + 1);
  for (const at::Tensor& tensor : call.tensors) {
    stack.push_back(to_ivalue(tensor));
  }
  for (std::size_t i = 0; i < call.ops->forward_options; ++i) {
    stack.push_back(call.options[i]);
  }
  stack.emplace_back(save_stats);
  run(call.ops->forward, stack, call.tensors[0]);
  variable_list results;
  for (c10::IValue& result : stack) {
    results.push_back(std::move(result).toTensor());
  }
  return results;
}

// --- Backward ------------------------------------------------------------------------------------

// What a node knows about its call.
struct RecordedCall {
  explicit RecordedCall(AutogradContext& context)
      : ops(variant_ops(context.saved_data["variant"].toStringRef())),
        options(context.saved_data["options"].toTupleRef().elements().vec()),
        wanted(ops.tensors.size()) {
    const std::int64_t given = context.saved_data["given"].toInt();
    const c10::IValue& pass = context.saved_data["passed"];
    if (!pass.isNone()) {
      passed.emplace(pass);
    }
    std::size_t edge = 0;
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const bool is_given = (given >> i & 1) != 0;
      edges.push_back(is_given ? std::optional(edge) : std::nullopt);
      wanted[i] = is_given && context.needs_input_grad(edge);
      edge += is_given ? 1 : 0;
    }
  }

  const VariantOps& ops;
  Stack options;
  std::vector<bool> wanted;
  std::vector<std::optional<std::size_t>> edges;  // of each tensor
  std::optional<Passed> passed;

  bool asks_op_for(std::size_t tensor) const {
    return wanted[tensor] && !(passed && passed->tensor == tensor);
  }
  bool asks_op() const {
    return std::any_of(ops.differentiated.begin(), ops.differentiated.end(),
                       [&](std::size_t tensor) { return asks_op_for(tensor); });
  }
};

Stack backward_stack(const RecordedCall& call, const variable_list& grads,
                     const variable_list& saved) {
  Stack stack;
  for (const auto& [kind, place] : call.ops.origins) {
    if (kind == Origin::kGrad) {
      stack.push_back(to_ivalue(grads[place]));
    } else if (kind == Origin::kSaved) {
      stack.push_back(to_ivalue(saved[place]));
    } else if (kind == Origin::kOption) {
      stack.push_back(call.options[place]);
    } else {
      c10::List<bool> wanted;
      for (const std::size_t tensor : call.ops.differentiated) {
        wanted.push_back(call.asks_op_for(tensor));
      }
      stack.emplace_back(std::move(wanted));
    }
  }
  return stack;
}

bool are_plain(const variable_list& grads, const variable_list& saved) {
  c10::SmallVector<const at::Tensor*, 16> present;
  for (const variable_list* const tensors : {&grads, &saved}) {
    for (const at::Tensor& tensor : *tensors) {
      present.push_back(tensor.defined() ? &tensor : nullptr);
    }
  }
  return CallKeys(present).is_plain();
}

// The gradient of each tensor of the call, undefined where it is not wanted; none, if Python has to
// compute them.
std::optional<variable_list> run_backward(const RecordedCall& call, const variable_list& grads,
                                          const variable_list& saved) {
  const bool asks_op = call.asks_op();
  if (asks_op && (at::GradMode::is_enabled() || is_disabled() || !are_plain(grads, saved))) {
    return std::nullopt;
  }
  variable_list found(call.wanted.size());
  if (call.passed && call.wanted[call.passed->tensor]) {
    found[call.passed->tensor] = call.passed->gradient(grads);
  }
  if (!asks_op) {
    return found;
  }
  Stack stack = backward_stack(call, grads, saved);
  try {
    run(call.ops.backward, stack, saved[0]);
  } catch (const KernelError&) {  // Python reports the error and computes the formula
    return std::nullopt;
  }
  const std::vector<std::size_t>& tensors = call.ops.differentiated;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (call.asks_op_for(tensors[i])) {
      found[tensors[i]] = std::move(stack[i]).toTensor();
    }
  }
  return found;
}

variable_list backward_in_python(const RecordedCall& call, const variable_list& grads,
                                 const variable_list& saved) {
  const py::gil_scoped_acquire acquired;
  py::tuple options(call.options.size());
  for (std::size_t i = 0; i < call.options.size(); ++i) {
    options[i] = option_to_python(call.options[i], call.ops.options[i]);
  }
  const py::tuple found =
      py::module_::import("fused_op._variant")
          .attr("run_backward")(call.ops.name, to_tuple(grads), to_tuple(saved), options,
                                py::tuple(py::cast(call.wanted)),
                                call.passed ? call.passed->to_python() : py::none());
  variable_list gradients;
  for (const py::handle each : found) {
    gradients.push_back(each.is_none() ? at::Tensor() : py::cast<at::Tensor>(each));
  }
  return gradients;
}

}  // namespace

// Autograd shows this node as CppNode<fused_op::VariantNode>.
class VariantNode : public torch::autograd::Function<VariantNode> {
 public:
  // `given` are the tensors of the call that are there.
  static variable_list forward(AutogradContext* context, at::TensorList /*given*/,
                               const Call& call) {
    const VariantOps& ops = *call.ops;
    const bool saves = call.needs_op();
    variable_list results = run_forward(call, /*save_stats=*/saves);
    variable_list saved(ops.saved.size());
    const std::size_t tensors = call.tensors.size();
    for (std::size_t i = 0; saves && i < saved.size(); ++i) {
      const std::size_t from = ops.saved[i];
      saved[i] = from < tensors ? call.tensors[from] : results[from - tensors];
    }
    context->save_for_backward(std::move(saved));
    std::int64_t present = 0;
    for (std::size_t i = 0; i < call.tensors.size(); ++i) {
      present |= static_cast<std::int64_t>(call.tensors[i].defined()) << i;
    }
    context->saved_data["variant"] = ops.name;
    context->saved_data["options"] = c10::ivalue::Tuple::create(call.options);
    context->saved_data["given"] = present;
    context->saved_data["passed"] = call.passed ? call.passed->to_ivalue() : c10::IValue();
    context->set_materialize_grads(false);
    results.pop_back();  // the statistics
    return results;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const RecordedCall call(*context);
    const auto is_there = [](const auto& edge) { return edge.has_value(); };
    const auto given = std::count_if(call.edges.begin(), call.edges.end(), is_there);
    variable_list results(given + 1);  // of each argument of forward
    if (std::none_of(grads.begin(), grads.end(), is_defined)) {
      return results;
    }
    const variable_list saved = context->get_saved_variables();
    std::optional<variable_list> found = run_backward(call, grads, saved);
    if (!found) {
      found = backward_in_python(call, grads, saved);
    }
    for (std::size_t i = 0; i < found->size(); ++i) {
      if (call.edges[i]) {
        results[*call.edges[i]] = std::move((*found)[i]);
      }
    }
    return results;
  }
};

// --- The class -----------------------------------------------------------------------------------

namespace {

// The tensors of a call; none, if an argument is of another type, which Python reports.
std::optional<std::vector<at::Tensor>> unpack_tensors(const py::tuple& given) {
  std::vector<at::Tensor> tensors;
  for (const py::handle each : given) {
    if (!each.is_none() && !THPVariable_Check(each.ptr())) {
      return std::nullopt;
    }
    tensors.push_back(each.is_none() ? at::Tensor() : THPVariable_Unpack(each.ptr()));
  }
  return tensors;
}

// The outputs, one or several. None, if the call is not one of plain tensors.
py::object call_variant(const VariantOps& ops, const py::tuple& tensors, const py::tuple& options,
                        std::optional<std::pair<std::size_t, std::size_t>> passed) {
  std::optional<std::vector<at::Tensor>> unpacked = unpack_tensors(tensors);
  if (is_disabled() || !unpacked) {
    return py::none();
  }
  Call call{&ops, std::move(*unpacked), {}, {}};
  const CallKeys keys = call.keys();
  if (!keys.is_plain() || (keys.needs_grad() && (!records_in_cpp() || ops.has_views))) {
    return py::none();
  }
  TORCH_CHECK(call.tensors.size() == ops.tensors.size() && options.size() == ops.options.size(),
              ops.name, ": not the arguments of its ops");
  try {
    for (std::size_t i = 0; i < options.size(); ++i) {
      call.options.push_back(option_to_ivalue(PyTuple_GET_ITEM(options.ptr(), i), ops.options[i]));
    }
  } catch (const py::cast_error&) {  // the dispatcher's error names the argument
    return py::none();
  }
  variable_list results;
  if (keys.needs_grad()) {
    if (passed) {
      call.passed.emplace(passed->first, passed->second, call.tensors[passed->first]);
    }
    variable_list given;
    for (const at::Tensor& tensor : call.tensors) {
      if (tensor.defined()) {
        given.push_back(tensor);
      }
    }
    results = VariantNode::apply(at::TensorList(given), std::as_const(call));
  } else {
    results = run_forward(call, /*save_stats=*/false);
    results.pop_back();
  }
  return results.size() == 1 ? tensor_to_python(std::move(results[0]))
                             : py::object(to_tuple(results));
}

}  // namespace

void bind_variant_call(py::module_& m) {
  py::class_<VariantOps>(m, "VariantOps").def("call", &call_variant);
  m.def("_variant", &variant_ops, py::return_value_policy::reference);
}

}  // namespace fused_op
