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

// The angles as the op layer passes them: one row of `half` numbers per token.
struct AngleTables {
  ConstRows cos;
  const void* sin;  // rows that lie as those of cos, of the same dtype
  int half;
  bool adjacent;
};

// `args` are the arguments of either direction, with their dtypes set.
template <typename Args>
Rotation make_rotation(const AngleTables& angles, std::int64_t heads, bool has_own_weights,
                       bool rounds_xhat, bool rounds_norm, const Args& args) {
  const auto number = static_cast<std::uint32_t>(heads);
  Rotation made;
  made.cos = angles.cos;
  made.sin = angles.cos;
  made.sin.data = angles.sin;
  made.half = angles.half;
  made.adjacent = angles.adjacent;
  // A product with a 32-bit weight has 32 bits, unless it is rounded as the output of a norm.
  made.rounds_norm =
      size_of(args.dtype) == 2 && (rounds_norm || (rounds_xhat && size_of(args.param_dtype) == 2));
  made.rounds_products = made.rounds_norm && made.cos.dtype == args.dtype;
  made.heads = RowSplit(number, 1);
  made.groups = has_own_weights ? static_cast<int>(number) : 1;
  made.group = RowSplit(static_cast<std::uint32_t>(made.groups), 0);
  return made;
}

// Whether every row begins at an address of whole vectors.
inline bool in_vectors(const ConstRows& rows) {
  const auto whole = [&](std::int64_t elements) {
    return elements * size_of(rows.dtype) % kVectorBytes == 0;
  };
  return reinterpret_cast<std::uintptr_t>(rows.data) % kVectorBytes == 0 && whole(rows.stride) &&
         whole(rows.split.outer_stride);
}

// The number of elements in a lane's largest pack. With 16 bits, that is 8, or 4 if a pack of 8
// would reach from one half into the other: handling the pairs of so many elements one by one would
// take too many registers.
inline int largest_pack(const Rotation& rotation, DType input) {
  const int vector = kVectorBytes / size_of(input);
  return vector == 8 && rotation.half % 8 != 0 ? 4 : vector;
}

// Sets whether the pairs and angles of these rows can be read in packs and, if so, whether whole
// rows are rotated, in halves.
inline void set_packs(Rotation& rotation, std::initializer_list<ConstRows> rows,
                      std::int64_t cols) {
  const int pack = largest_pack(rotation, rows.begin()->dtype);
  rotation.in_packs = rotation.half % pack == 0 && cols % pack == 0 && in_vectors(rotation.cos) &&
                      in_vectors(rotation.sin) && std::all_of(rows.begin(), rows.end(), in_vectors);
  rotation.in_halves = rotation.in_packs && !rotation.adjacent && 2 * rotation.half == cols;
}

struct RopeVariant : Variant {
  const Rotation& rotation;
  DType parameters;
  bool rounds;  // round x̂ before the weight

  RopeVariant(const Rotation& of, DType input, DType param_dtype, std::int64_t cols,
              Rounding rounding)
      : Variant(VariantId::kRope, "core/rope.h"),
        rotation(of),
        parameters(param_dtype),
        rounds(rounds_first(rounding, input)) {
    row = input;
    beside.dtype = input;
    widest = kVectorBytes / largest_pack(rotation, input);
    groups = rotation.groups;
    pairs_halves = !rotation.adjacent && 2 * rotation.half == cols;
    for (const bool bit : form()) {
      options = options << 1 | std::uint32_t{bit};
    }
    options = options << 2 | static_cast<std::uint32_t>(rotation.cos.dtype);
  }

  Types types() const override {
    const auto [adjacent, xhat, norm, products, several, packs, halves] = form();
    const std::string x = type(row);
    const std::string names = joined({flag(adjacent), flag(xhat), flag(norm), flag(products),
                                      flag(several), flag(packs), flag(halves)});
    return {"fused_op::Heads" + joined({x, flag(split)}),
            "fused_op::RotatedAffine" + joined({type(parameters), x, type(rotation.cos.dtype),
                                                "fused_op::RopeForm" + names, flag(split)})};
  }

 private:
  // In the order of RopeForm.
  std::array<bool, 7> form() const {
    return {rotation.adjacent,        rounds,     rotation.rounds_norm,
            rotation.rounds_products, groups > 1, rotation.in_packs,
            rotation.in_halves};
  }
};

}  // namespace fused_op
