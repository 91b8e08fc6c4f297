// How a call is spread over the GPU: plain integers, the same for workspace and launch. Host code
// without CUDA or torch, so that every plan can be made, printed and checked on any machine.
//
// Which lane holds an element depends only on the row's length and the element types. The number of
// rows, the device and addresses decide only what leaves the order of sums unchanged: how many rows
// share a CTA, how many warps share the work that one could do, and whether rows move by vectors or
// by words.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/channels_first.h"
#include "core/norm_args.h"
#include "core/post_add_pre.h"
#include "core/quantize.h"
#include "core/variant.h"
#include "cuda/channels_first.h"
#include "cuda/device_info.h"
#include "cuda/group_norm.h"
#include "cuda/group_norm_nhwc.h"

namespace fused_op::cuda {

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// The headers that the kernels of a plan are compiled from.
constexpr const char* kForwardHeader = "cuda/forward_rows.cuh";
constexpr const char* kFlatHeader = "cuda/forward_flat.cuh";
constexpr const char* kForwardClusterHeader = "cuda/forward_cluster.cuh";
constexpr const char* kForwardInTurnHeader = "cuda/forward_in_turn.cuh";
constexpr const char* kForwardStreamedHeader = "cuda/forward_streamed.cuh";
constexpr const char* kQuantizedHeader = "cuda/forward_quantized.cuh";
constexpr const char* kPostAddPreHeader = "cuda/forward_post_add_pre.cuh";
constexpr const char* kQuantizeRowsHeader = "cuda/quantize_rows.cuh";
constexpr const char* kGroupNormForwardHeader = "cuda/forward_group_norm.cuh";
constexpr const char* kGroupNormBackwardHeader = "cuda/backward_group_norm.cuh";
constexpr const char* kNhwcForwardHeader = "cuda/forward_group_norm_nhwc.cuh";
constexpr const char* kNhwcBackwardHeader = "cuda/backward_group_norm_nhwc.cuh";
constexpr const char* kChannelsFirstForwardHeader = "cuda/forward_channels_first.cuh";
constexpr const char* kChannelsFirstBackwardHeader = "cuda/backward_channels_first.cuh";
constexpr const char* kBackwardHeader = "cuda/backward_rows.cuh";
constexpr const char* kFewHeader = "cuda/backward_few.cuh";
constexpr const char* kColumnsHeader = "cuda/backward_columns.cuh";
constexpr const char* kClusterHeader = "cuda/backward_cluster.cuh";
constexpr const char* kPartialsHeader = "cuda/add_partials.cuh";

// What a forward call computes, as types.
struct ForwardSpec {
  NormKind norm;
  bool adds;          // adds a residual to the row
  bool dropout;       // of the input if `adds`, else of the output
  bool split;         // rows at two strides
  bool rounds_first;  // rounds x̂ to the type of the input
  DType input;
  DType residual;
  DType row;  // of the values that are normalised: the input or the sum
  DType parameters;
  DType output;
  const Variant* variant = nullptr;  // null: none; a variant has the other types
};
ForwardSpec spec_of(const NormForwardArgs& args, const Variant* variant = nullptr);

// How the elements of a row are dealt out: in units, each of one pack or two for a lane.
struct Deal {
  int unit;  // elements
  int pack;  // elements: a unit, or half of one
};
Deal deal_of(const ForwardSpec& spec);
// Whether rows are not a whole number of units.
bool by_words(const ForwardSpec& spec, std::int64_t cols);

// The arguments of ForwardTile (forward_tile.cuh), in the same order, and the launch.
struct ForwardPlan {
  int pack;          // elements that a lane takes at a time
  int lanes;         // of a row; 32: as many warps as the row needs
  int vectors;       // packs of a lane
  int ahead;         // packs of parameters in flight
  bool few;          // all rows are on the GPU at once
  int most_threads;  // of a CTA
  int ctas_per_sm;
  int width;  // a constant of the kernel; 0: known at run time
  bool core;  // the kernel is in the core table: its rows fill their lanes

  bool words;        // rows move by words, because of their addresses or their length
  int flat_threads;  // of a row in forward_flat_kernel
  int flat_rows;     // that these take in turn; 0: forward_kernel
  int vector_rows;   // in a vector, which a thread takes at once in registers; 0: it does not
  int threads;       // of a CTA
  std::int64_t ctas;
};

// Where the rows of a call lie, and whether something is stored for each of them.
struct RowPlaces {
  bool aligned;        // each row begins at an address of whole vectors
  bool one_span;       // the rows of the input are contiguous, from a multiple of 16 bytes on
  bool saves = false;  // their statistics are stored
};
RowPlaces places_of(const NormForwardArgs& args, const ForwardSpec& spec);

// Whether the kernel of a call with aligned rows was compiled with the extension.
bool is_core(const ForwardSpec& spec, std::int64_t cols);

// The most columns with which a row fits into the registers of a CTA.
std::int64_t most_forward_cols(const ForwardSpec& spec);

ForwardPlan plan_forward(const ForwardSpec& spec, std::int64_t rows, std::int64_t cols,
                         RowPlaces places, const DeviceInfo& device);

// The header that the kernel is compiled from.
inline const char* header_of(const ForwardPlan& plan) {
  return plan.flat_rows > 0 ? kFlatHeader : kForwardHeader;
}
// C++ names: of the first template argument of a forward kernel, and of the kernel.
std::string op_name(const ForwardSpec& spec, bool words);
std::string kernel_name(const ForwardSpec& spec, const ForwardPlan& plan);
std::string tile_name(const ForwardPlan& plan);  // the second template argument of forward_kernel
// Kernels that quantise: the one that has the rows in registers, and the one that reads them.
std::string quantized_kernel_name(const ForwardSpec& spec, const ForwardPlan& plan,
                                  const QuantizeRule& rule);
std::string quantize_rows_kernel_name(DType output, const QuantizeRule& rule);
// Whether the first of the two takes a call.
bool quantizes_in_registers(const NormForwardArgs& args);

// Two norms with an addition between them: whether one kernel takes them, and with which plan.
// `pre` is the spec of the second norm.
bool meet_in_registers(const PostAddPreForwardArgs& args);
ForwardPlan plan_post_add_pre(const PostAddPreForwardArgs& args, const ForwardSpec& pre,
                              const DeviceInfo& device);
std::string post_add_pre_kernel_name(const ForwardSpec& post, const ForwardSpec& pre,
                                     const ForwardPlan& plan, bool only_sum);

// How longer rows are computed: a cluster holds one row in its registers, a cluster takes several
// in turn, or a CTA reads a row twice.
enum class LongForm : int { kCluster, kInTurn, kStreamed };

// The arguments of LongTile (long_rows.cuh), in the same order, and the launch.
struct LongForwardPlan {
  int pack;
  int vectors;  // packs of a lane in a part
  int parts;    // parts of a warp at a time
  int ahead;
  int most_threads;  // of a CTA
  int ctas_per_sm;
  int row_parts;  // a constant of the kernel; 0: known at run time

  LongForm form;
  bool words;
  int cluster;        // CTAs that share a row; 0: streamed
  int cta_parts;      // parts of a row in each CTA; the last CTA has the rest
  int threads;        // of a CTA
  std::int64_t ctas;  // in turn: those of one cluster; the launch multiplies them
  std::int64_t shared_bytes;
};

// For rows longer than most_forward_cols(). None of them lie at two strides.
LongForwardPlan plan_long_forward(const ForwardSpec& spec, std::int64_t rows, std::int64_t cols,
                                  bool aligned, const DeviceInfo& device);
// The same without clusters, for a GPU without room for one.
LongForwardPlan plan_streamed(const ForwardSpec& spec, std::int64_t rows, std::int64_t cols,
                              bool aligned);
// The CTAs of a launch in turn, on a GPU that runs `active` clusters of the largest CTAs at once.
std::int64_t ctas_in_turn(const LongForwardPlan& plan, std::int64_t rows, int active);

const char* header_of(const LongForwardPlan& plan);
std::string kernel_name(const ForwardSpec& spec, const LongForwardPlan& plan);

// What a backward call computes, as types.
struct BackwardSpec {
  NormKind norm;
  bool adds;  // there is a residual: its gradient is wanted, and the gradient of the sum is added
  bool drops_input;   // dropout of the input, before the residual was added
  bool drops_output;  // dropout of the output
  bool recovers;      // recovers x̂ from the output
  bool split;         // rows at two strides
  bool rounds_first;  // rounds x̂ to the type of the input; dx does not change
  DType input;        // of grad_input
  DType residual;     // of grad_residual
  DType row;          // of x, unless it is recovered
  DType parameters;
  DType grad_output;
  const Variant* variant = nullptr;  // as in forward
};
BackwardSpec spec_of(const NormBackwardArgs& args, const Variant* variant = nullptr);
inline bool is_double(const BackwardSpec& spec) { return spec.row == DType::kFloat64; }
inline DType read_as_x(const BackwardSpec& spec) {
  return spec.recovers ? spec.grad_output : spec.variant != nullptr ? spec.input : spec.row;
}
// The number of groups whose rows have parameters of their own.
inline int groups_of(const BackwardSpec& spec) {
  return spec.variant != nullptr ? spec.variant->groups : 1;
}

// How rows move: Vectors of access.cuh, Words and WholeWords of words.cuh.
enum class Move : int { kVectors, kWords, kWholeWords };

// The arguments of BackwardTile (backward_tile.h), in the same order, and the launch.
struct BackwardPlan {
  int pack;
  int lanes;
  int vectors;
  int most_threads;  // of a CTA
  int ctas_per_sm;
  int stages;
  bool keep;
  bool parameters_stay;
  int width;  // a constant of the kernel; 0: known at run time
  bool core;  // the kernel is in the core table: its rows fill their lanes

  Move move;
  int row_threads;
  int side_by_side;        // rows of a CTA
  std::int64_t ctas;       // also the rows of partial sums
  std::int64_t tail_ctas;  // of these, for the rows from tail_row on; 0: there is no tail
  std::int64_t tail_row;
  std::int64_t shared_bytes;
  std::int64_t partials_bytes;  // 0: there is one CTA, and its sums are the gradients
};

// The plan of a call whose rows fit into a CTA; `lanes` is 0 if they do not. wants_sums: parameter
// gradients are wanted. adds_sums: they are added to what is there.
BackwardPlan plan_backward(const BackwardSpec& spec, std::int64_t rows, std::int64_t cols,
                           Move most_aligned, bool wants_sums, bool adds_sums,
                           const DeviceInfo& device);
Move most_aligned(const NormBackwardArgs& args, const BackwardSpec& spec);

// The same for a whole call.
BackwardPlan plan_backward(const NormBackwardArgs& args, const BackwardSpec& spec,
                           const DeviceInfo& device);

std::string kernel_name(const BackwardSpec& spec, const BackwardPlan& plan);

// Few rows that fit into a CTA: some CTAs take rows, the others slabs of columns. plan_backward
// decides which lane holds an element, so a row has the same dx as it would among many. The width
// is not a constant of the kernel.
struct BackwardFewPlan {
  int pack;
  int lanes;
  int vectors;
  bool keep;

  Move move;  // vectors or words
  int row_threads;
  int side_by_side;  // rows of a CTA
  std::int64_t row_ctas;
  std::int64_t slabs;
};

// `lanes` is 0 if there are too many rows, or rows are too long. wants_rows: dx is wanted.
BackwardFewPlan plan_backward_few(const BackwardSpec& spec, std::int64_t rows, std::int64_t cols,
                                  Move most_aligned, bool wants_rows, bool wants_sums,
                                  const DeviceInfo& device);
BackwardFewPlan plan_backward_few(const NormBackwardArgs& args, const BackwardSpec& spec,
                                  const DeviceInfo& device);
std::string kernel_name(const BackwardSpec& spec, const BackwardFewPlan& plan);

// Rows that do not fit into a CTA (backward_long.h). They take two kernels, one after the other, or
// one kernel with clusters if there are many rows.
struct BackwardLongPlan {
  int pack;
  int vectors;  // packs of a unit
  Move move;    // vectors or words
  std::int64_t pieces;
  std::int64_t slabs;   // slabs of columns, in the second kernel
  std::int64_t chunks;  // chunks of rows, in the second kernel; also the rows of partial sums
  std::int64_t row_sums_bytes;
  std::int64_t partials_bytes;  // 0: the sums of the columns are the gradients

  int cluster;  // CTAs of a cluster; 0: no clusters
  int stages;   // rows in flight, in the kernel with clusters
  std::int64_t cluster_shared_bytes;
  std::int64_t clusters;  // at most; also the rows of partial sums
  std::int64_t cluster_partials_bytes;

  // Row sums, then partial sums. A launch that finds no room for a cluster uses the two kernels
  // instead.
  std::int64_t workspace_bytes() const {
    return row_sums_bytes +
           (partials_bytes > cluster_partials_bytes ? partials_bytes : cluster_partials_bytes);
  }
};

BackwardLongPlan plan_backward_long(const BackwardSpec& spec, std::int64_t rows, std::int64_t cols,
                                    Move most_aligned, bool wants_sums, bool adds_sums,
                                    const DeviceInfo& device);
BackwardLongPlan plan_backward_long(const NormBackwardArgs& args, const BackwardSpec& spec,
                                    const DeviceInfo& device);
// The spec of the kernel of row sums. They are the same, whatever is done with dx.
BackwardSpec row_sums_spec(const BackwardSpec& spec);
std::string row_sums_kernel_name(const BackwardSpec& spec, const BackwardLongPlan& plan);
std::string columns_kernel_name(const BackwardSpec& spec, const BackwardLongPlan& plan);
std::string cluster_kernel_name(const BackwardSpec& spec, const BackwardLongPlan& plan);

// Bytes of so many rows of partial sums; 0 if they are not needed, because a single one is the
// gradient.
std::int64_t partials_bytes(const BackwardSpec& spec, std::int64_t parts, std::int64_t cols,
                            bool wants_sums, bool adds_sums);
// BackwardOp in the names of kernels.
std::string op_name(const BackwardSpec& spec, Move move);
// Whether the rows fit into a CTA, as plan_backward decides.
bool fits_cta(const NormBackwardArgs& args, const BackwardSpec& spec, const DeviceInfo& device);
// Norms over channels.
ChannelsFirstPlan plan_channels_first(const ChannelsFirstForwardArgs& args,
                                      const DeviceInfo& device);
ChannelsFirstBackwardPlan plan_channels_first(const ChannelsFirstBackwardArgs& args,
                                              const DeviceInfo& device);
std::string kernel_name(const ChannelsFirstForwardArgs& args, const ChannelsFirstPlan& plan);
std::string kernel_name(const ChannelsFirstBackwardArgs& args,
                        const ChannelsFirstBackwardPlan& plan);

// Group norms. `tensors`: how many the kernel reads. With most_cluster = 1, for GPUs, and parts of
// GPUs, without room for clusters.
GroupNormPlan plan_group_norm(const GroupNormArgs& args, int tensors, const DeviceInfo& device,
                              int most_cluster = 8);
std::int64_t group_norm_workspace_bytes(const GroupNormForwardArgs& args);
std::int64_t group_norm_workspace_bytes(const GroupNormBackwardArgs& args);
std::string group_norm_kernel_name(const GroupNormArgs& args, const GroupNormPlan& plan,
                                   bool forward);
std::string group_norm_sums_kernel_name(const GroupNormArgs& args);

// Those of images whose channels are neighbours. There is none if a group is too wide for a CTA, or
// if packs would be smaller than asynchronous copies are.
std::optional<GroupNormNhwcPlan> plan_group_norm_nhwc(const GroupNormArgs& args);
std::string nhwc_kernel_name(const std::string& what, DType dtype, int pack, bool silu);
std::string nhwc_kernel_name(const std::string& what, DType dtype);  // of one that reads no image

// The kernel that adds partial sums.
std::string partials_kernel_name(const BackwardSpec& spec);

}  // namespace fused_op::cuda
