// The kernels, in reading order:
//
//   row_access.cuh     how packs of a row are read and written
//   row_tile.h         how a row is laid over threads, and which row length gets which layout
//   row_sum.cuh        sums over the threads of a row
//   forward.cuh        norm_forward_kernel; norm_forward_streamed_kernel for rows of any length
//   backward.cuh       norm_backward_kernel, sum_partials_kernel
//   backward_long.cuh  two kernels for the longest rows
//   launch.cuh         the launchers of one dtype pair, instantiated by launch_*.cu
//
// The formulas are in core/norm_math.h, what a row is made of in core/row_source.h. All torch-free.
#pragma once

#include "cuda/backward.cuh"
#include "cuda/backward_long.cuh"
#include "cuda/forward.cuh"
