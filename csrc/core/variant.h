// What a variant of the norms puts in the place of Plain and Affine, as both backends take it
// beside its arguments, which derive from NormForwardArgs or NormBackwardArgs. The op layer makes
// one for each call. Host code, torch-free.
#pragma once

#include <cstdint>
#include <string>

#include "core/norm_args.h"
#include "core/type_names.h"

namespace fused_op {

// The CPU has loops of its own for each of these (cpu/level.h); the GPU has the structs that
// types() names.
enum class VariantId : int { kGated = 1, kModulated = 2, kRope = 3 };

struct Variant {
  // A kernel's source and epilogue in C++.
  struct Types {
    std::string source;
    std::string epilogue;
  };

  VariantId id;
  std::uint32_t options = 0;     // 16 bits, of which types() and the id are functions
  const char* header;            // where the structs are: "core/gated.h"
  bool split = false;            // whether any rows are at two strides
  int groups = 1;                // of rows that have different parameters: row % groups
  bool shares_entries = false;   // groups are of neighbours: core/modulated.h
  int parameters_of_column = 1;  // that backward holds
  DType row;                     // elements of the row that is normalised
  ConstRows beside;              // rows read beside the input; null: none
  ConstRows entries[2] = {};     // read in packs, too; null: none
  Rows grad_beside = {};         // their gradients, in backward

  Variant(VariantId which, const char* its_header) : id(which), header(its_header) {}
  Variant(const Variant&) = delete;
  Variant& operator=(const Variant&) = delete;

  virtual Types types() const = 0;

  // What tells its kernels from all others'; less than 2^20.
  std::uint32_t key() const { return static_cast<std::uint32_t>(id) << 16 | options; }

 protected:
  ~Variant() = default;
};

}  // namespace fused_op
