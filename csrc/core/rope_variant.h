// Which structs of core/rope.h take a call of the RMS norm with rotary embedding. Host code,
// torch-free.
#pragma once

#include <algorithm>
#include <array>
#include <initializer_list>
#include <string>

#include "core/rope.h"
#include "core/variant.h"

namespace fused_op {

// Angles as the op layer finds them: rows of `half` numbers for tokens in turn.
struct AngleTables {
  ConstRows cos;
  ConstRows sin;
  int half;
  bool adjacent;
};

// `args`: of either direction, with its dtypes.
template <typename Args>
Rotation make_rotation(const AngleTables& angles, std::int64_t heads, bool has_own_weights,
                       bool rounds_xhat, bool rounds_norm, const Args& args) {
  const auto number = static_cast<std::uint32_t>(heads);
  Rotation made;
  made.cos = angles.cos;
  made.sin = angles.sin;
  made.half = angles.half;
  made.adjacent = angles.adjacent;
  // A product with a weight of 32 bits has as many, unless it is a norm's output.
  made.rounds_norm =
      size_of(args.dtype) == 2 && (rounds_norm || (rounds_xhat && size_of(args.param_dtype) == 2));
  made.rounds_products = made.rounds_norm && made.cos.dtype == args.dtype;
  made.heads = RowSplit(number, 1);
  made.groups = has_own_weights ? static_cast<int>(number) : 1;
  made.group = RowSplit(static_cast<std::uint32_t>(made.groups), 0);
  return made;
}

// Whether every row begins where vectors do.
inline bool in_vectors(const ConstRows& rows) {
  const auto whole = [&](std::int64_t elements) {
    return elements * size_of(rows.dtype) % kVectorBytes == 0;
  };
  return reinterpret_cast<std::uintptr_t>(rows.data) % kVectorBytes == 0 && whole(rows.stride) &&
         whole(rows.split.outer_stride);
}

// Elements of a lane's largest pack. Of 16 bits there are 8, or 4 where 8 would reach from one half
// into the other: the pairs of so many elements, each by itself, would take too many registers.
inline int largest_pack(const Rotation& rotation, DType input) {
  const int vector = kVectorBytes / size_of(input);
  return vector == 8 && rotation.half % 8 != 0 ? 4 : vector;
}

// Whether pairs and angles of these rows can be read in packs.
inline bool in_packs(const Rotation& rotation, std::initializer_list<ConstRows> rows,
                     std::int64_t cols) {
  const int pack = largest_pack(rotation, rows.begin()->dtype);
  return rotation.half % pack == 0 && cols % pack == 0 && in_vectors(rotation.cos) &&
         in_vectors(rotation.sin) && std::all_of(rows.begin(), rows.end(), in_vectors);
}

struct RopeVariant : Variant {
  const Rotation& rotation;
  DType parameters;
  bool rounds;  // x̂, before the weight

  RopeVariant(const Rotation& of, DType input, DType param_dtype, Rounding rounding)
      : Variant(VariantId::kRope, "core/rope.h"),
        rotation(of),
        parameters(param_dtype),
        rounds(rounds_first(rounding, input)) {
    row = input;
    // Nothing is read beside the row, but a dtype of 32 bits halves the packs.
    beside.dtype = largest_pack(rotation, input) == 4 ? DType::kFloat32 : input;
    groups = rotation.groups;
    for (const bool bit : form()) {
      options = options << 1 | std::uint32_t{bit};
    }
    options = options << 2 | static_cast<std::uint32_t>(rotation.cos.dtype);
  }

  Types types() const override {
    const auto [adjacent, xhat, norm, products, several, packs] = form();
    const std::string x = type(row);
    const std::string names = joined(
        {flag(adjacent), flag(xhat), flag(norm), flag(products), flag(several), flag(packs)});
    return {"fused_op::Heads" + joined({x, flag(split)}),
            "fused_op::RotatedAffine" + joined({type(parameters), x, type(rotation.cos.dtype),
                                                "fused_op::RopeForm" + names, flag(split)})};
  }

 private:
  // In the order of RopeForm.
  std::array<bool, 6> form() const {
    return {rotation.adjacent,        rounds,     rotation.rounds_norm,
            rotation.rounds_products, groups > 1, rotation.in_packs};
  }
};

}  // namespace fused_op
