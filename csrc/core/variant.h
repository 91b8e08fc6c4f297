// What a variant of the norms puts in place of Plain and Affine. Both backends take it beside the
// arguments of the call, which derive from NormForwardArgs or NormBackwardArgs. The op layer makes
// one for each call. Host code, torch-free.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

#include "core/norm_args.h"
#include "core/type_names.h"

namespace fused_op {

// Whether every row begins at a multiple of `bytes`.
inline bool rows_begin_at(const ConstRows& rows, int bytes) {
  const std::int64_t elements = std::max(bytes / size_of(rows.dtype), 1);
  return reinterpret_cast<std::uintptr_t>(rows.data) % static_cast<std::uintptr_t>(bytes) == 0 &&
         rows.stride % elements == 0 &&
         (rows.split.inner == 0 || rows.split.outer_stride % elements == 0);
}

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
  std::uint32_t options = 0;            // 16 bits; types() and the id follow from them
  const char* header;                   // the header with the structs: "core/gated.h"
  bool split = false;                   // whether any rows lie at two strides
  int groups = 1;                       // of rows with different parameters: row % groups
  bool shares_entries = false;          // groups are neighbouring rows: core/modulated.h
  int parameters_of_column = 1;         // parameters of a column that backward holds
  bool light = false;                   // forward: needs few registers beside the row
  bool pairs_halves = false;            // backward: packs half a row apart belong to one lane
  DType row;                            // the element type of the row that is normalised
  int widest = 0;                       // bytes: packs are no larger than for elements of this size
  ConstRows beside;                     // rows read beside the input; null: none
  ConstRows more_beside[2] = {};        // forward: more of them
  ConstRows parameters_of_row[2] = {};  // parameters that not all rows share, also read in packs
  Rows grad_beside = {};                // gradients of the rows beside, in backward

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
