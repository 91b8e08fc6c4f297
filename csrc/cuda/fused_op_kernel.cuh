// The kernels, in reading order:
//
//   dependent_launch.cuh      how a kernel waits for those before it
//   memory.cuh                the instructions that read and write words
//   access.cuh, words.cuh     how packs of a row move, by vectors or by words
//   row_sum.cuh               sums over the threads of a row
//   forward_layout.h          constants that plans and kernels of forward share
//   forward_tile.cuh          how forward spreads rows over threads, and their moments
//   forward_halves.cuh        what a lane does with two packs at once, for rotations
//   forward_rows.cuh          forward_kernel
//   forward_post_add_pre.cuh  the same, with a norm and an addition before it
//   flat_span.cuh             which short rows a thread has in a span of memory
//   forward_flat.cuh          forward_flat_kernel: short rows in one span
//   quantize_pack.cuh         how packs of an output become 8 bits: quantized_plan.h
//   forward_quantized.cuh     forward_kernel with an output in 8 bits
//   quantize_rows.cuh         quantize_rows_kernel, for outputs in memory
//   channel_parameters.cuh    weight and bias of a channel of an image
//   channels_first.h          how forward and backward over channels share out pixels and channels
//   forward_channels_tile.cuh how forward reads channels and adds them up
//   forward_channels_first.cuh
//                             channels_first_forward_kernel: norms over the channels of images
//   long_rows.cuh             the parts of a row that is too long for a CTA's registers
//   cluster_exchange.cuh      how the CTAs of a cluster share sums
//   forward_cluster.cuh       forward_cluster_kernel: one row for each cluster
//   forward_in_turn.cuh       forward_in_turn_kernel: many rows for each cluster
//   forward_streamed.cuh      forward_streamed_kernel: rows of any length
//   backward_tile.h           how backward spreads a row over threads
//   staged_rows.cuh           how it reads rows ahead
//   backward_op.cuh           what it computes for one pack
//   backward_halves.cuh       what lanes pass each other, for rotations
//   column_sums.cuh           how the parameter gradients leave its CTAs
//   backward_rows.cuh         backward_kernel
//   backward_few.cuh          backward_few_kernel: few rows
//   backward_long.h           how rows longer than a CTA are cut up
//   backward_columns.cuh      two kernels for them
//   backward_cluster.cuh      one kernel for many of them
//   pixel_exchange.cuh        how threads share what they know of a pixel
//   staged_tile.cuh           how tiles of pixels come into shared memory, and gradients out of it
//   backward_channels_first.cuh
//                             channels_first_backward_kernel
//   group_norm.h              how the kernels of group norms cut up a group
//   group_norm_slots.cuh      how they walk over it
//   forward_group_norm.cuh    group_norm_forward_kernel
//   backward_group_norm.cuh   group_norm_backward_kernel, group_norm_sums_kernel
//   group_norm_nhwc.h, group_norm_nhwc.cuh
//                             the same of images whose channels are neighbours
//   forward_group_norm_nhwc.cuh
//                             group_norm_nhwc_moments_kernel, group_norm_nhwc_channels_kernel,
//                             group_norm_nhwc_forward_kernel
//   backward_group_norm_nhwc.cuh
//                             group_norm_nhwc_sums_kernel, group_norm_nhwc_gradients_kernel,
//                             group_norm_nhwc_backward_kernel
//   add_partials.cuh          add_partials_kernel, the last step of the parameter gradients
//
// Their launches, on the host:
//
//   plan.h                    how a call is spread over the GPU: plan.cpp, plan_*.cpp
//   core_table.h              the kernels compiled with the extension: fused_op_kernel.cu
//   kernels.h                 where all others come from: the package, a cache, or compile.cpp
//   launch.h                  launch_forward.cpp, launch_quantized.cpp, launch_post_add_pre.cpp,
//                             launch_backward.cpp, launch_backward_long.cpp,
//                             launch_channels_first.cpp, launch_group_norm.cpp
//
// The formulas are in core/norm_math.h. Where a row comes from and what happens to it are in
// core/source.h and core/epilogue.h. All torch-free.
#pragma once

#include "cuda/add_partials.cuh"
#include "cuda/backward_channels_first.cuh"
#include "cuda/backward_cluster.cuh"
#include "cuda/backward_columns.cuh"
#include "cuda/backward_few.cuh"
#include "cuda/backward_group_norm.cuh"
#include "cuda/backward_group_norm_nhwc.cuh"
#include "cuda/backward_rows.cuh"
#include "cuda/forward_channels_first.cuh"
#include "cuda/forward_cluster.cuh"
#include "cuda/forward_flat.cuh"
#include "cuda/forward_group_norm.cuh"
#include "cuda/forward_group_norm_nhwc.cuh"
#include "cuda/forward_in_turn.cuh"
#include "cuda/forward_post_add_pre.cuh"
#include "cuda/forward_quantized.cuh"
#include "cuda/forward_rows.cuh"
#include "cuda/forward_streamed.cuh"
#include "cuda/quantize_rows.cuh"
