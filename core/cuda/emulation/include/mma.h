// The part of CUDA's warp matrices that tessera uses, on the CPU: products of 16 x 16 x 16 tiles of
// f16 and bf16 with sums in f32. Names and meanings are CUDA's (nvcuda::wmma).
//
// All 32 lanes of a warp must call together and with the same arguments; which lane holds which
// element of a tile is scrambled here, as it is open on a GPU. The rules for addresses (32 bytes)
// and distances of rows (multiples of 16 bytes) are checked, and that a tile was loaded or filled
// before it is multiplied. Memory is read and written by each lane for its own elements, so that
// races are seen as everywhere else.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include <tessera/core/half.h>

using __half = tessera::f16;
using __nv_bfloat16 = tessera::bf16;

namespace nvcuda::wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

template <class Use, int kM, int kN, int kK, class T, class Layout = void>
struct fragment {
  static_assert(kM == 16 && kN == 16 && kK == 16, "the emulation has tiles of 16 x 16 x 16");
  static_assert(std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16> ||
                    (std::is_same_v<T, float> && std::is_same_v<Use, accumulator>),
                "the emulation has f16 and bf16 operands and f32 sums");
  static constexpr int num_elements = 8;
  T x[num_elements];
  bool is_set = false;  // of the emulation
};

namespace detail {

namespace emulation = ::tessera::gpu::emulation;

// Which element of the tile (row * 16 + column) is the lane's i-th.
inline int place_of(int lane, int i) { return (lane * 8 + i) * 37 % 256; }

template <class T>
int64_t offset_of(int i, unsigned leading, bool by_columns) {
  const int place = place_of(emulation::this_lane(), i), row = place / 16, column = place % 16;
  return by_columns ? int64_t{column} * leading + row : int64_t{row} * leading + column;
}

template <class F, class T>
void load(F& tile, const T* source, unsigned leading, bool by_columns) {
  emulation::check_tile("load_matrix_sync", source, leading, sizeof(T));
  for (int i = 0; i < F::num_elements; ++i) {
    tile.x[i] = source[offset_of<T>(i, leading, by_columns)];
  }
  tile.is_set = true;
}

// What the lanes of a warp bring to a product.
struct Operands {
  float a[8], b[8], c[8];
  float* d;
};

}  // namespace detail

template <class Use, class T, class Layout>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout>& tile, const T* source,
                      unsigned leading) {
  detail::load(tile, source, leading, std::is_same_v<Layout, col_major>);
}
inline void load_matrix_sync(fragment<accumulator, 16, 16, 16, float>& tile, const float* source,
                             unsigned leading, layout_t layout) {
  detail::load(tile, source, leading, layout == mem_col_major);
}
inline void store_matrix_sync(float* target, const fragment<accumulator, 16, 16, 16, float>& tile,
                              unsigned leading, layout_t layout) {
  detail::emulation::check_tile("store_matrix_sync", target, leading, sizeof(float));
  for (int i = 0; i < tile.num_elements; ++i) {
    target[detail::offset_of<float>(i, leading, layout == mem_col_major)] = tile.x[i];
  }
}

template <class Use, class T, class Layout>
void fill_fragment(fragment<Use, 16, 16, 16, T, Layout>& tile, std::type_identity_t<T> value) {
  for (T& element : tile.x) element = value;
  tile.is_set = true;
}

// d = a b + c; d and c may be one.
template <class T, class LayoutA, class LayoutB>
void mma_sync(fragment<accumulator, 16, 16, 16, float>& d,
              const fragment<matrix_a, 16, 16, 16, T, LayoutA>& a,
              const fragment<matrix_b, 16, 16, 16, T, LayoutB>& b,
              const fragment<accumulator, 16, 16, 16, float>& c) {
  detail::emulation::check_operands(a.is_set && b.is_set && c.is_set);
  detail::Operands own;
  for (int i = 0; i < 8; ++i) {
    own.a[i] = tessera::to_float(a.x[i]);
    own.b[i] = tessera::to_float(b.x[i]);
    own.c[i] = c.x[i];
  }
  own.d = d.x;
  const detail::emulation::Combine multiply = [](void* const* payloads, unsigned) {
    float tiles[3][256];
    for (int lane = 0; lane < 32; ++lane) {
      const auto& of_lane = *static_cast<const detail::Operands*>(payloads[lane]);
      for (int i = 0; i < 8; ++i) {
        const int place = detail::place_of(lane, i);
        tiles[0][place] = of_lane.a[i];
        tiles[1][place] = of_lane.b[i];
        tiles[2][place] = of_lane.c[i];
      }
    }
    detail::emulation::multiply_tiles(tiles[0], tiles[1], tiles[2]);
    for (int lane = 0; lane < 32; ++lane) {
      float* const d = static_cast<const detail::Operands*>(payloads[lane])->d;
      for (int i = 0; i < 8; ++i) d[i] = tiles[2][detail::place_of(lane, i)];
    }
  };
  detail::emulation::warp_collective(0xffffffffu, "mma_sync", &own, multiply, false);
  d.is_set = true;
}

}  // namespace nvcuda::wmma
