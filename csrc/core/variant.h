// What a variant of the norms puts in place of Plain and Affine. Both backends take it beside the
// arguments of the call, which derive from NormForwardArgs or NormBackwardArgs. The op layer makes
// one for each call. Host code, torch-free.
#pragma once

#include <cstdint>
#include <string>

#include "core/norm_args.h"
#include "core/type_names.h"

namespace fused_op {

// For each of these the CPU has loops of its own (cpu/level.h). The GPU has the structs that
// types() names.
enum class VariantId : int { kGated = 1, kModulated = 2, kRope = 3 };

struct Variant {
  // The C++ names of a kernel's source and epilogue.
  struct Types {
    std::string source;
    std::string epilogue;
  };

  VariantId id;
  std::uint32_t options = 0;     // 16 bits; types() and the id follow from them
  const char* header;            // the header with the structs: "core/gated.h"
  bool split = false;            // whether any rows lie at two strides
  int groups = 1;                // of rows with different parameters: row % groups
  bool shares_entries = false;   // groups are neighbouring rows: core/modulated.h
  int parameters_of_column = 1;  // parameters of a column that backward holds
  DType row;                     // the element type of the row that is normalised
  ConstRows beside;              // rows read beside the input; null: none
  int widest = 0;                // bytes: packs are no larger than for elements of this size
  ConstRows entries[2] = {};     // read in packs, too; null: none
  Rows grad_beside = {};         // their gradients, in backward

  Variant(VariantId which, const char* its_header) : id(which), header(its_header) {}
  Variant(const Variant&) = delete;
  Variant& operator=(const Variant&) = delete;

  virtual Types types() const = 0;

  // Tells the kernels of this variant from all others. Less than 2^20.
  std::uint32_t key() const { return static_cast<std::uint32_t>(id) << 16 | options; }

 protected:
  ~Variant() = default;
};

}  // namespace fused_op
