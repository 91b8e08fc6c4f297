// Which structs of core/modulate.h take a call of the modulated norms. Host code, torch-free.
#pragma once

#include <string>

#include "core/modulated.h"
#include "core/variant.h"

namespace fused_op {

struct ModulatedVariant : Variant {
  bool forward;
  bool shared;       // entries are parameters: see core/modulate.h
  DType parameters;  // of the kernel's parameters
  DType branch;      // of the rows beside the normalised ones: input and output, or their gradient
  DType entry;
  DType gate;
  bool has_shift;
  bool has_weight;  // or bias
  bool has_bias;
  bool gated;  // forward: of a gated residual; backward: the entry is a gate
  bool sum_arrives = false;

  explicit ModulatedVariant(const ModulatedForwardArgs& args)
      : ModulatedVariant(args, args.output.dtype, reads_as_parameters(args.modulation)) {
    forward = true;
    gated = args.sum != nullptr;
    (shared ? parameters_of_row[0] : beside) = args.modulation.scale;
    (shared ? parameters_of_row[1] : more_beside[0]) = args.modulation.shift;
    more_beside[1] = args.modulation.gate;
    light = shared && size_of(entry) == size_of(row) &&
            (!has_weight || size_of(parameters) == size_of(row));
    add_options();
  }
  explicit ModulatedVariant(const ModulatedBackwardArgs& args)
      : ModulatedVariant(args, args.grad_output.dtype, args.groups > 0) {
    has_shift = false;
    if (!shared) {
      beside = args.modulation.scale;
      grad_beside = args.grad_scale;
      parameters_of_column = has_bias ? 2 : 1;
    } else {
      beside.dtype = args.dtype;
      parameters_of_row[0] = args.modulation.scale;
      shares_entries = true;
      groups = args.groups;
      gated = args.kind == NormKind::kIdentity;
      sum_arrives = args.grad_sum.data != nullptr;
    }
    add_options();
  }

  Types types() const override {
    const std::string x = type(row), y = type(branch), p = type(parameters), z = type(entry);
    const std::string plain = "fused_op::Plain" + joined({x, flag(false)});
    if (!forward && shared) {
      return {sum_arrives ? "fused_op::AddResidual" + joined({x, x, x, flag(false)}) : plain,
              "fused_op::ModulatedEntries" + joined({p, y, z, flag(has_weight), flag(gated)})};
    }
    const std::string options =
        joined({p, y, z, flag(has_shift), flag(shared ? has_weight : has_bias)});
    return {gated ? "fused_op::GatedResidual" + joined({y, x, type(gate)}) : plain,
            (shared ? "fused_op::ModulatedByEntry" : "fused_op::Modulated") + options};
  }

 private:
  // Parameters are read in whole words.
  static bool reads_as_parameters(const Modulation& of) {
    return of.rows_each > 1 && rows_begin_at(of.scale, 4) && rows_begin_at(of.shift, 4);
  }

  template <typename Args>
  ModulatedVariant(const Args& args, DType of_branch, bool shares)
      : Variant(VariantId::kModulated, "core/modulate.h"),
        forward(false),
        shared(shares),
        parameters(args.param_dtype),
        branch(of_branch),
        entry(args.modulation.scale.dtype),
        gate(args.modulation.gate.dtype),
        has_shift(args.modulation.shift.data != nullptr),
        has_weight(args.weight != nullptr || args.bias != nullptr),
        has_bias(args.bias != nullptr),
        gated(false) {
    row = args.dtype;
  }
  void add_options() {
    for (const bool bit : {shared, has_shift, has_weight, has_bias, gated}) {
      options = options << 1 | std::uint32_t{bit};
    }
    options = options << 2 | static_cast<std::uint32_t>(entry);
    options = options << 2 | (gated ? static_cast<std::uint32_t>(gate) : 0u);
  }
};

}  // namespace fused_op
