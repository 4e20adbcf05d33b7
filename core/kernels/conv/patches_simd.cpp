#include <tessera/core/kernels/conv/patches.h>
#include <tessera/core/macros.h>

namespace tessera::kernels::TS_SIMD {
namespace {

// Outputs [begin, end) of one dimension whose element of the kernel, `offset` from the patch's
// first, lies inside of `size` inputs.
struct Inside {
  int64_t begin, end;
};
TS_HD Inside inside(int64_t outputs, int64_t size, int64_t stride, int64_t offset) {
  const int64_t begin = offset < 0 ? (-offset + stride - 1) / stride : 0;
  const int64_t room = size - 1 - offset;
  int64_t end = room < 0 ? 0 : room / stride + 1;
  if (end > outputs) end = outputs;
  return {begin < end ? begin : end, end};
}

// Rows of an output are short: what is left of whole vectors is covered by one that overlaps.
template <class Part>
TS_HD void copy_parts(const char* source, char* target, int64_t bytes) {
  constexpr int64_t kPart = sizeof(Part);
  for (int64_t i = 0; i + kPart < bytes; i += kPart)
    __builtin_memcpy(target + i, source + i, kPart);
  __builtin_memcpy(target + bytes - kPart, source + bytes - kPart, kPart);
}

TS_HD void copy_run(const void* source, void* target, int64_t bytes) {
  typedef char Long __attribute__((vector_size(32)));
  typedef char Short __attribute__((vector_size(16)));
  const char* from = static_cast<const char*>(source);
  char* to = static_cast<char*>(target);
  if (bytes >= 32) return copy_parts<Long>(from, to, bytes);
  if (bytes >= 16) return copy_parts<Short>(from, to, bytes);
  if (bytes >= 8) return copy_parts<int64_t>(from, to, bytes);
  if (bytes >= 4) return copy_parts<int32_t>(from, to, bytes);
  if (bytes >= 2) return copy_parts<int16_t>(from, to, bytes);
}

template <class T>
void unfold(const ConvSizes& n, const T* x, T* columns, int64_t row_stride) {
  const ConvGeometry& g = n.geometry;
  const int64_t channels = n.C / n.G;
  for (int64_t c = 0; c < channels; ++c, x += n.H * n.W) {
    for (int64_t kh = 0; kh < n.KH; ++kh) {
      const int64_t h0 = kh * g.dilation[0] - g.padding[0];
      const Inside rows = inside(n.OH, n.H, g.stride[0], h0);
      for (int64_t kw = 0; kw < n.KW; ++kw, columns += row_stride) {
        const int64_t w0 = kw * g.dilation[1] - g.padding[1];
        const Inside run = inside(n.OW, n.W, g.stride[1], w0);
        for (int64_t i = 0; i < rows.begin * n.OW; ++i) columns[i] = T(0);
        for (int64_t i = rows.end * n.OW; i < n.OH * n.OW; ++i) columns[i] = T(0);
        for (int64_t oh = rows.begin; oh < rows.end; ++oh) {
          T* TS_RESTRICT target = columns + oh * n.OW;
          const T* TS_RESTRICT source = x + (oh * g.stride[0] + h0) * n.W + w0;
          for (int64_t i = 0; i < run.begin; ++i) target[i] = T(0);
          for (int64_t i = run.end; i < n.OW; ++i) target[i] = T(0);
          if (g.stride[1] == 1) {
            copy_run(source + run.begin, target + run.begin,
                     (run.end - run.begin) * static_cast<int64_t>(sizeof(T)));
          } else {
            for (int64_t i = run.begin; i < run.end; ++i) target[i] = source[i * g.stride[1]];
          }
        }
      }
    }
  }
}

template <class A>
void fold(const ConvSizes& n, const A* columns, A* x) {
  const ConvGeometry& g = n.geometry;
  const int64_t channels = n.C / n.G;
  for (int64_t i = 0; i < channels * n.H * n.W; ++i) x[i] = A(0);
  for (int64_t c = 0; c < channels; ++c, x += n.H * n.W) {
    for (int64_t kh = 0; kh < n.KH; ++kh) {
      const int64_t h0 = kh * g.dilation[0] - g.padding[0];
      const Inside rows = inside(n.OH, n.H, g.stride[0], h0);
      for (int64_t kw = 0; kw < n.KW; ++kw, columns += n.OH * n.OW) {
        const int64_t w0 = kw * g.dilation[1] - g.padding[1];
        const Inside run = inside(n.OW, n.W, g.stride[1], w0);
        for (int64_t oh = rows.begin; oh < rows.end; ++oh) {
          const A* TS_RESTRICT source = columns + oh * n.OW;
          A* TS_RESTRICT target = x + (oh * g.stride[0] + h0) * n.W + w0;
          if (g.stride[1] == 1) {
            for (int64_t i = run.begin; i < run.end; ++i) target[i] += source[i];
          } else {
            for (int64_t i = run.begin; i < run.end; ++i) target[i * g.stride[1]] += source[i];
          }
        }
      }
    }
  }
}

}  // namespace

void unfold_patches(const ConvSizes& n, int64_t element_bytes, const void* x, void* columns,
                    int64_t row_stride) {
  if (element_bytes == 2) {
    unfold(n, static_cast<const uint16_t*>(x), static_cast<uint16_t*>(columns), row_stride);
  } else if (element_bytes == 4) {
    unfold(n, static_cast<const uint32_t*>(x), static_cast<uint32_t*>(columns), row_stride);
  } else {
    unfold(n, static_cast<const uint64_t*>(x), static_cast<uint64_t*>(columns), row_stride);
  }
}

void fold_patches(const ConvSizes& n, const float* columns, float* x) { fold(n, columns, x); }
void fold_patches(const ConvSizes& n, const double* columns, double* x) { fold(n, columns, x); }

}  // namespace tessera::kernels::TS_SIMD
