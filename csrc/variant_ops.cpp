#include "variant_ops.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <map>
#include <utility>

namespace fused_op {
namespace {

namespace py = pybind11;

c10::OperatorHandle find_op(const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(("fused_op::" + name).c_str(), "");
}

bool is_tensor(const c10::Argument& argument) {
  return argument.type()->isSubtypeOf(*c10::OptionalType::ofTensor());
}

// The kind of a type, or of what an optional one holds.
c10::TypeKind kind_of(const c10::TypePtr& type) {
  const auto* const optional = type->castRaw<c10::OptionalType>();
  return (optional != nullptr ? optional->getElementType() : type)->kind();
}

// names.size(), if it is not there.
std::size_t place_in(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) - names.begin();
}

}  // namespace

VariantOps::VariantOps(std::string given)
    : name(std::move(given)),
      forward(find_op(name + "_forward")),
      backward(find_op(name + "_backward")) {
  const auto& arguments = forward.schema().arguments();
  for (const c10::Argument& argument : arguments) {
    if (is_tensor(argument)) {
      tensors.push_back(argument.name());
    } else if (&argument != &arguments.back()) {
      options.push_back(argument);
    }
  }
  forward_options = options.size();
  for (const c10::Argument& result : forward.schema().returns()) {
    results.push_back(result.name());
  }
  for (const c10::Argument& argument : backward.schema().arguments()) {
    origins.push_back(origin_of(argument));
  }
  for (const c10::Argument& result : backward.schema().returns()) {
    differentiated.push_back(place_in(tensors, result.name().substr(kGrad.size())));
  }
}

Origin VariantOps::origin_of(const c10::Argument& argument) {
  const std::string& of = argument.name();
  if (of == "wanted") {
    return {Origin::kWanted};
  }
  if (of.starts_with(kGrad)) {
    const std::size_t place = place_in(results, of.substr(kGrad.size()));
    has_views = has_views || place == results.size();
    return {Origin::kGrad, place};
  }
  if (is_tensor(argument)) {
    const std::size_t tensor = place_in(tensors, of);
    const bool is_result = tensor == tensors.size();
    saved.push_back(is_result ? tensor + place_in(results, of) : tensor);
    return {Origin::kSaved, saved.size() - 1};
  }
  std::size_t place = 0;
  while (place < options.size() && options[place].name() != of) {
    ++place;
  }
  if (place == options.size()) {  // of backward alone
    options.push_back(argument);
  }
  return {Origin::kOption, place};
}

const VariantOps& variant_ops(const std::string& name) {
  static auto& all = *new std::map<std::string, VariantOps>;  // NOLINT
  return all.try_emplace(name, name).first->second;
}

c10::IValue option_to_ivalue(PyObject* value, const c10::Argument& argument) {
  if (value == Py_None) {
    return {};
  }
  if (THPDtype_Check(value)) {
    return static_cast<std::int64_t>(reinterpret_cast<THPDtype*>(value)->scalar_type);
  }
  switch (kind_of(argument.type())) {
    case c10::TypeKind::FloatType:
      return py::cast<double>(py::handle(value));
    case c10::TypeKind::BoolType:
      return py::cast<bool>(py::handle(value));
    case c10::TypeKind::IntType:
      return py::cast<std::int64_t>(py::handle(value));
    default:
      return py::cast<std::string>(py::handle(value));
  }
}

py::object option_to_python(const c10::IValue& value, const c10::Argument& argument) {
  if (value.isNone()) {
    return py::none();
  }
  switch (kind_of(argument.real_type())) {
    case c10::TypeKind::ScalarTypeType:
      return py::cast(static_cast<at::ScalarType>(value.toInt()));
    case c10::TypeKind::FloatType:
      return py::float_(value.toDouble());
    case c10::TypeKind::BoolType:
      return py::bool_(value.toBool());
    case c10::TypeKind::IntType:
      return py::int_(value.toInt());
    default:
      return py::str(value.toStringRef());
  }
}

}  // namespace fused_op
