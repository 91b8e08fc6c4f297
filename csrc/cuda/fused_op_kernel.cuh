// The kernels, in reading order:
//
//   dependent_launch.cuh how a kernel is launched, and waits for those before it
//   memory.cuh           the instructions by which words are read and written
//   row_access.cuh       how packs of a row are read and written
//   word_access.cuh      the same by words, for the backward of odd rows
//   row_tile.h           how a row is laid over threads, and which row length gets which layout
//   row_sum.cuh          sums over the threads of a row
//   flexible.cuh         rows whose dtypes, and whether elements are dropped, are known at run time
//   forward.cuh          norm_forward_kernel
//   forward_flat.cuh     rows no longer than a vector
//   forward_short.cuh    rows of a few vectors
//   forward_words.cuh    rows that are no whole number of vectors
//   cluster_exchange.cuh how the CTAs of a cluster share sums
//   device_info.h        what the launchers know of a GPU
//   cluster_layout.h     how long rows are laid over clusters
//   forward_long.cuh     rows of any length
//   forward_parts.cuh    many long rows, in registers
//   forward_pipelined.cuh many long rows, in turn
//   backward_stage.cuh   how backward reads rows ahead
//   backward.cuh         norm_backward_kernel
//   backward_few.cuh     few rows
//   backward_long.cuh    two kernels for the longest rows
//   backward_cluster.cuh one for them where clusters are
//   sum_partials.cuh     the last step of the parameter gradients
//
// Those that are compiled at their first use, from a plan (plan.h), by first_use.cpp:
//
//   access.cuh           how packs of a row move, by vectors or by words
//   forward_rows.cuh     forward_kernel
//   backward_tile.h      how backward lays a row over threads
//   staged_rows.cuh      how it reads rows ahead
//   backward_rows.cuh    backward_kernel
//   add_partials.cuh     the last step of the parameter gradients
//
// The launchers:
//
//   launch.cuh           what they share
//   launch_forward.cuh   those of one dtype pair, instantiated by launch_*.cu
//   launch_backward.cuh
//
// The formulas are in core/norm_math.h, what a row is made of in core/row_source.h. All torch-free.
#pragma once

#include "cuda/backward.cuh"
#include "cuda/backward_cluster.cuh"
#include "cuda/backward_few.cuh"
#include "cuda/backward_long.cuh"
#include "cuda/forward.cuh"
#include "cuda/forward_flat.cuh"
#include "cuda/forward_long.cuh"
#include "cuda/forward_parts.cuh"
#include "cuda/forward_pipelined.cuh"
#include "cuda/forward_short.cuh"
#include "cuda/forward_words.cuh"
#include "cuda/sum_partials.cuh"
