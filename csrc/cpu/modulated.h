// The modulated norms of a range of rows: core/modulated.h. The rows of an entry go through the
// loops of the norms, with the entry's weight' and bias'. Included only by a level: level.h.
#pragma once

#include "core/modulated.h"
#include "cpu/backward.h"
#include "cpu/elements.h"
#include "cpu/forward.h"
#include "cpu/level.h"

namespace fused_op::cpu::FUSED_OP_CPU_LEVEL {

// Columns converted at a time.
constexpr std::int64_t kEntryCols = 256;

template <typename A>
void read_entry(const ConstRows& of, std::int64_t row, std::int64_t col, std::int64_t count,
                A* to) {
  read_elements(of.data, of.dtype, of.split.offset(row, of.stride) + col, count, to);
}

// weight' and bias' of one entry at a time. Backward does not read bias'.
template <typename A, typename Args>
class EntryParameters {
  static constexpr bool kBias = std::is_same_v<Args, ModulatedForwardArgs>;

 public:
  explicit EntryParameters(const Args& args)
      : args_(args), values_(new A[(kBias ? 2 : 1) * args.cols]) {}

  const A* weight() const { return values_.get(); }
  const A* bias() const { return values_.get() + args_.cols; }

  // Computes them for the entry of a row.
  void take(std::int64_t row) {
    const Modulation& of = args_.modulation;
    A param[kEntryCols];
    for (std::int64_t col = 0; col < args_.cols; col += kEntryCols) {
      const std::int64_t count = std::min(kEntryCols, args_.cols - col);
      A* const __restrict weight = values_.get() + col;
      read_entry(of.scale, row, col, count, weight);
      for (std::int64_t j = 0; j < count; ++j) {
        weight[j] += A(1);
      }
      if constexpr (kBias) {
        take_bias(row, col, count, weight);
      }
      if (args_.weight != nullptr) {
        read_elements(args_.weight, args_.param_dtype, col, count, param);
        for (std::int64_t j = 0; j < count; ++j) {
          weight[j] *= param[j];
        }
      }
    }
  }

 private:
  void take_bias(std::int64_t row, std::int64_t col, std::int64_t count, const A* factor) {
    A* const __restrict bias = values_.get() + args_.cols + col;
    if (args_.modulation.shift.data == nullptr) {
      std::fill_n(bias, count, A(0));
    } else {
      read_entry(args_.modulation.shift, row, col, count, bias);
    }
    if (args_.bias != nullptr) {
      A param[kEntryCols];
      read_elements(args_.bias, args_.param_dtype, col, count, param);
      for (std::int64_t j = 0; j < count; ++j) {
        bias[j] += param[j] * factor[j];
      }
    }
  }

  const Args& args_;
  const std::unique_ptr<A[]> values_;
};

// Calls function(first, last) for the rows of each entry in the range.
template <typename Function>
void for_entries(std::int64_t rows_each, std::int64_t first_row, std::int64_t last_row,
                 const Function& function) {
  for (std::int64_t row = first_row; row < last_row;) {
    const std::int64_t last = std::min(last_row, (row / rows_each + 1) * rows_each);
    function(row, last);
    row = last;
  }
}

// To an RMS norm, a shift is also a bias.
inline NormKind with_bias(NormKind kind) {
  return kind == NormKind::kRmsNorm ? NormKind::kBiasedRmsNorm : kind;
}

// sum = residual + gate · input.
template <typename A>
void add_gated_row(const ModulatedForwardArgs& args, std::int64_t row) {
  A gate[kEntryCols], branch[kEntryCols], sum[kEntryCols];
  for (std::int64_t col = 0; col < args.cols; col += kEntryCols) {
    const std::int64_t count = std::min(kEntryCols, args.cols - col);
    read_entry(args.modulation.gate, row, col, count, gate);
    read_entry(args.input, row, col, count, branch);
    read_entry(args.residual, row, col, count, sum);
    for (std::int64_t j = 0; j < count; ++j) {
      sum[j] += gate[j] * branch[j];
    }
    write_elements(sum, args.sum, args.dtype, row * args.cols + col, count);
  }
}

template <typename A>
void modulated_forward(const ModulatedForwardArgs& args, std::int64_t first_row,
                       std::int64_t last_row) {
  EntryParameters<A, ModulatedForwardArgs> parameters(args);
  NormForwardArgs norm = args;
  norm.kind = with_bias(args.kind);
  norm.param_dtype = kDTypeOf<A>;
  norm.weight = parameters.weight();
  norm.bias = parameters.bias();
  if (args.sum != nullptr) {
    norm.input = {args.sum, args.dtype, args.cols, {}};
    norm.residual = {};
    norm.sum = nullptr;
  }
  for_entries(args.modulation.rows_each, first_row, last_row,
              [&](std::int64_t first, std::int64_t last) {
                parameters.take(first);
                for (std::int64_t row = first; args.sum != nullptr && row < last; ++row) {
                  add_gated_row<A>(args, row);
                }
                forward(norm, first, last);
              });
}

// Backward, in chunks of rows. If a chunk is part of one entry, its sums over rows stay in the
// workspace, [chunks, kEntrySums, cols], until the second step. If it consists of whole entries,
// the gradients of the entries are written at once, and only their contributions to those of weight
// and bias stay in the workspace.
template <typename A>
class ModulatedBackward {
 public:
  ModulatedBackward(const ModulatedBackwardArgs& args, std::int64_t chunks)
      : args_(args),
        chunks_(chunks),
        entries_(args.rows / args.modulation.rows_each),
        wants_gate_(args.grad_gate.data != nullptr),
        wants_params_(args.wants_sums()),
        wants_norm_(wants_params_ || args.grad_scale.data != nullptr ||
                    args.grad_shift.data != nullptr) {}

  void run_chunks(std::int64_t first_chunk, std::int64_t last_chunk) {
    EntryParameters<A, ModulatedBackwardArgs> parameters(args_);
    NormBackwardArgs norm = args_;
    norm.kind = with_bias(args_.kind);
    norm.param_dtype = kDTypeOf<A>;
    norm.weight = parameters.weight();
    norm.bias = nullptr;
    norm.grad_weight = wants_norm_ ? &norm : nullptr;  // only whether it is null is read
    norm.grad_bias = nullptr;
    const std::unique_ptr<A[]> own(is_cut() ? nullptr : new A[kEntrySums * args_.cols]);
    for (std::int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
      A* const waiting = sums_of(chunk);
      if (!is_cut() && wants_params_) {
        std::fill_n(waiting, 2 * args_.cols, A(0));
      }
      const auto [first_row, last_row] = rows_of(chunk);
      for_entries(args_.modulation.rows_each, first_row, last_row,
                  [&](std::int64_t first, std::int64_t last) {
                    A* const sums = is_cut() ? waiting : own.get();
                    parameters.take(first);
                    run_backward(norm, {first, last, false, sums});
                    if (args_.grad_branch.data != nullptr || wants_gate_) {
                      pull_back_gate(first, last, wants_gate_ ? sums + 2 * args_.cols : nullptr);
                    }
                    if (!is_cut()) {
                      leave(first / args_.modulation.rows_each, sums, waiting);
                    }
                  });
    }
  }

  // The second step: adds up what is in the workspace, in order.
  void add_waiting(std::int64_t first_col, std::int64_t last_col) const {
    if (!is_cut()) {
      NormBackwardArgs norm = args_;
      norm.kind = with_bias(args_.kind);
      add_chunks(norm, chunks_, first_col, last_col);
      return;
    }
    for (std::int64_t col = first_col; col < last_col; col += kEntryCols) {
      const std::int64_t count = std::min(kEntryCols, last_col - col);
      A params[2][kEntryCols] = {};
      for (std::int64_t entry = 0; entry < entries_; ++entry) {
        A sums[kEntrySums][kEntryCols];
        for (int s = wants_norm_ ? 0 : 2; s < (wants_gate_ ? 3 : 2); ++s) {
          add_parts(entry, s, col, count, sums[s]);
        }
        leave_columns(entry, col, count, {sums[0], sums[1], sums[2]}, params[0], params[1]);
      }
      write(params[0], {args_.grad_weight, args_.param_dtype}, col, count);
      write(params[1], {args_.grad_bias, args_.param_dtype}, col, count);
    }
  }

 private:
  // Whether each chunk lies within one entry.
  bool is_cut() const { return chunks_ >= entries_; }
  A* sums_of(std::int64_t chunk) const {
    A* const first = static_cast<A*>(args_.workspace);
    return first == nullptr ? first : first + chunk * (is_cut() ? kEntrySums : 2) * args_.cols;
  }
  std::pair<std::int64_t, std::int64_t> rows_of(std::int64_t chunk) const {
    const std::int64_t rows_each = args_.modulation.rows_each;
    if (!is_cut()) {
      return {entries_ * chunk / chunks_ * rows_each, entries_ * (chunk + 1) / chunks_ * rows_each};
    }
    const std::int64_t parts = chunks_ / entries_;
    const std::int64_t first = chunk / parts * rows_each;
    const std::int64_t part = chunk % parts;
    return {first + rows_each * part / parts, first + rows_each * (part + 1) / parts};
  }

  // dbranch = gate · dr for rows of one entry. Adds Σ dr · branch to `sums`, unless null.
  void pull_back_gate(std::int64_t first_row, std::int64_t last_row, A* sums) const {
    A gate[kEntryCols], grad[kEntryCols], branch[kEntryCols];
    std::fill_n(sums, sums == nullptr ? 0 : args_.cols, A(0));
    for (std::int64_t row = first_row; row < last_row; ++row) {
      for (std::int64_t col = 0; col < args_.cols; col += kEntryCols) {
        const std::int64_t count = std::min(kEntryCols, args_.cols - col);
        const std::int64_t at = row * args_.cols + col;
        read_entry(args_.modulation.gate, row, col, count, gate);
        read_entry(args_.branch, row, col, count, branch);
        read_elements(args_.grad_input.data, args_.grad_input.dtype, at, count, grad);
#pragma omp simd
        for (std::int64_t j = 0; j < count; ++j) {
          branch[j] *= grad[j];
          grad[j] *= gate[j];
        }
        write(grad, args_.grad_branch, at, count);
        for (std::int64_t j = 0; sums != nullptr && j < count; ++j) {
          sums[col + j] += branch[j];
        }
      }
    }
  }

  struct Sums {
    const A* weight;  // W
    const A* bias;    // B
    const A* gate;    // read only if there is a gate
  };
  void leave(std::int64_t entry, const A* sums, A* params) const {
    const std::int64_t cols = args_.cols;
    for (std::int64_t col = 0; col < cols; col += kEntryCols) {
      const std::int64_t count = std::min(kEntryCols, cols - col);
      leave_columns(entry, col, count, {sums + col, sums + cols + col, sums + 2 * cols + col},
                    params + col, params + cols + col);
    }
  }
  // Writes the gradients of an entry, and adds its contributions to those of weight and bias.
  void leave_columns(std::int64_t entry, std::int64_t col, std::int64_t count, const Sums& sums,
                     A* weight, A* bias) const {
    const std::int64_t at = entry * args_.cols + col;
    if (wants_gate_) {
      write(sums.gate, args_.grad_gate, at, count);
    }
    if (!wants_norm_) {
      return;
    }
    write(sums.bias, args_.grad_shift, at, count);
    if (args_.grad_scale.data != nullptr) {
      leave_scale(at, col, count, sums);
    }
    if (wants_params_) {
      A factor[kEntryCols];
      read_entry(args_.modulation.scale, entry * args_.modulation.rows_each, col, count, factor);
      for (std::int64_t j = 0; j < count; ++j) {
        factor[j] += A(1);
        weight[j] += factor[j] * sums.weight[j];
        bias[j] += factor[j] * sums.bias[j];
      }
    }
  }
  // dscale = weight · W + bias · B.
  void leave_scale(std::int64_t at, std::int64_t col, std::int64_t count, const Sums& sums) const {
    if (args_.weight == nullptr && args_.bias == nullptr) {
      write(sums.weight, args_.grad_scale, at, count);
      return;
    }
    A scale[kEntryCols], param[kEntryCols];
    std::copy_n(sums.weight, count, scale);
    if (args_.weight != nullptr) {
      read_elements(args_.weight, args_.param_dtype, col, count, param);
      for (std::int64_t j = 0; j < count; ++j) {
        scale[j] *= param[j];
      }
    }
    if (args_.bias != nullptr) {
      read_elements(args_.bias, args_.param_dtype, col, count, param);
      for (std::int64_t j = 0; j < count; ++j) {
        scale[j] += param[j] * sums.bias[j];
      }
    }
    write(scale, args_.grad_scale, at, count);
  }
  void add_parts(std::int64_t entry, std::int64_t sum, std::int64_t col, std::int64_t count,
                 A* to) const {
    const std::int64_t parts = chunks_ / entries_;
    double totals[kEntryCols] = {};
    for (std::int64_t part = 0; part < parts; ++part) {
      const A* const from = sums_of(entry * parts + part) + sum * args_.cols + col;
      for (std::int64_t j = 0; j < count; ++j) {
        totals[j] += static_cast<double>(from[j]);
      }
    }
    for (std::int64_t j = 0; j < count; ++j) {
      to[j] = static_cast<A>(totals[j]);
    }
  }
  static void write(const A* from, const Rows& to, std::int64_t first, std::int64_t count) {
    if (to.data != nullptr) {
      write_elements(from, to.data, to.dtype, first, count);
    }
  }

  const ModulatedBackwardArgs& args_;
  const std::int64_t chunks_;
  const std::int64_t entries_;
  const bool wants_gate_;
  const bool wants_params_;
  const bool wants_norm_;
};

inline void modulated_forward(const ModulatedForwardArgs& args, std::int64_t first_row,
                              std::int64_t last_row) {
  with_accumulators(args.dtype,
                    [&]<typename A>() { modulated_forward<A>(args, first_row, last_row); });
}
inline void modulated_backward(const ModulatedBackwardArgs& args, std::int64_t first_chunk,
                               std::int64_t last_chunk, std::int64_t chunks) {
  with_accumulators(args.dtype, [&]<typename A>() {
    ModulatedBackward<A>(args, chunks).run_chunks(first_chunk, last_chunk);
  });
}
inline void modulated_columns(const ModulatedBackwardArgs& args, std::int64_t first_col,
                              std::int64_t last_col, std::int64_t chunks) {
  with_accumulators(args.dtype, [&]<typename A>() {
    ModulatedBackward<A>(args, chunks).add_waiting(first_col, last_col);
  });
}

}  // namespace fused_op::cpu::FUSED_OP_CPU_LEVEL
