// How the GPU reads and writes packs of a row: access policies as core/pack.h describes them. The
// launcher picks one per call; both give element j of a row to the same lane, so results agree bit
// for bit. Torch-free.
#pragma once

#include "core/pack.h"

namespace fused_op::cuda {

// Every row begins at a multiple of 16 bytes and is a whole number of packs long: a pack is wholly
// inside or wholly outside, and moves in one instruction.
struct VectorAccess {
  static constexpr bool kWholePacks = true;

  template <int N, typename T, typename Col>
  __device__ __forceinline__ static Pack<T, N> load(const T* row, Col col, Col width) {
    return col < width ? *reinterpret_cast<const Pack<T, N>*>(row + col) : Pack<T, N>{};
  }
  template <int N, typename T, typename Col>
  __device__ __forceinline__ static Pack<T, N> load_or(const T* row, Col col, Col width,
                                                       float absent) {
    if (row != nullptr) {
      return load<N>(row, col, width);
    }
    T values[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      values[j] = static_cast<T>(absent);
    }
    return as_pack(values);
  }
  template <typename T, int N, typename Col>
  __device__ __forceinline__ static void store(T* row, Col col, Col width, const Pack<T, N>& pack) {
    if (col < width) {
      *reinterpret_cast<Pack<T, N>*>(row + col) = pack;
    }
  }
};

// Rows of any length at any element-aligned address.
struct ElementAccess {
  static constexpr bool kWholePacks = false;

  template <int N, typename T, typename Col>
  __device__ __forceinline__ static Pack<T, N> load_or(const T* row, Col col, Col width,
                                                       float absent) {
    T values[N];
#pragma unroll
    for (int j = 0; j < N; ++j) {
      values[j] = row != nullptr && col + j < width ? row[col + j] : static_cast<T>(absent);
    }
    return as_pack(values);
  }
  template <int N, typename T, typename Col>
  __device__ __forceinline__ static Pack<T, N> load(const T* row, Col col, Col width) {
    return load_or<N>(row, col, width, 0);
  }
  template <typename T, int N, typename Col>
  __device__ __forceinline__ static void store(T* row, Col col, Col width, const Pack<T, N>& pack) {
    T values[N];
    memcpy(values, pack.words, sizeof(pack.words));
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (col + j < width) {
        row[col + j] = values[j];
      }
    }
  }
};

}  // namespace fused_op::cuda
