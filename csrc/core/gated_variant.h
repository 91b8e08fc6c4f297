// Which structs of core/gated.h take a call of the gated RMS norm. Host code, torch-free.
#pragma once

#include <string>

#include "core/gated.h"
#include "core/variant.h"

namespace fused_op {

// The structs of core/gated.h that take the call.
struct GatedVariant : Variant {
  DType input;
  DType parameters;
  bool sigmoid;
  bool gate_first;
  bool rounds;

  GatedVariant(const Gate& gate, DType input_dtype, DType param_dtype, Rounding rounding)
      : Variant(VariantId::kGated, "core/gated.h"),
        input(input_dtype),
        parameters(param_dtype),
        sigmoid(gate.sigmoid),
        gate_first(gate.first),
        rounds(rounds_first(rounding, input_dtype)) {
    groups = gate.groups;
    beside = gate.rows;
    row = gate_first && input != DType::kFloat64 ? DType::kFloat32 : input;
    for (const bool bit : {sigmoid, gate_first, rounds, groups > 1}) {
      options = options << 1 | std::uint32_t{bit};
    }
    options = options << 2 | static_cast<std::uint32_t>(beside.dtype);
  }

  Types types() const override {
    const std::string x = type(input), w = type(parameters), z = type(beside.dtype);
    if (gate_first) {
      const std::string affine = "fused_op::GroupAffine" + joined({w, x, flag(groups > 1)});
      return {"fused_op::GatedInput" + joined({x, z, flag(sigmoid), flag(rounds), flag(split)}),
              rounds ? "fused_op::RoundsFirst" + joined({affine, x}) : affine};
    }
    return {"fused_op::Plain" + joined({x, flag(split)}),
            "fused_op::GatedAffine" +
                joined({w, x, z, flag(sigmoid), flag(rounds), flag(groups > 1), flag(split)})};
  }
};

}  // namespace fused_op
