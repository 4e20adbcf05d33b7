// Tables of many tensors for the kernels that serve them in one launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <vector>

#include <tessera/core/cuda/graph.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/kernels/common/strided.cuh>
#include <tessera/core/kernels/common/vector_lanes.cuh>

namespace tessera::kernels::multi_tensor {

// One block for each chunk of each tensor.
struct Span {
  void* data;
  DType dtype;
  bool vectors;  // data is aligned to them
};
inline constexpr int kMaxSpans = 6;
struct Row {  // one tensor, or one parameter with what belongs to it
  Span spans[kMaxSpans];
  int64_t numel;
  int64_t first_chunk;
};

// Rows on the device. Queued before the launch that reads them, from memory that CUDA stages.
template <class R>
Tensor upload_rows(const std::vector<R>& rows, const Device& device) {
  const auto size = static_cast<int64_t>(rows.size() * sizeof(R));
  const Tensor bytes = raw::empty({size}, kU8, device);
  gpu::upload_constants(bytes.data(), device.index, rows.data(), static_cast<size_t>(size));
  return bytes;
}

struct Table {
  Tensor bytes;
  std::vector<Row> rows;
  int64_t chunks = 0;

  void add(std::initializer_list<Span> spans, int64_t numel) {
    Row row{};
    std::copy(spans.begin(), spans.end(), row.spans);
    row.numel = numel;
    row.first_chunk = chunks;
    chunks += (numel + kMultiTensorChunk - 1) / kMultiTensorChunk;
    if (numel > 0) rows.push_back(row);
  }
  const Row* upload(const Device& device) {
    bytes = upload_rows(rows, device);
    return static_cast<const Row*>(bytes.data());
  }
};

// StepScalars as launches take them.
struct StepSource {
  double values[kNumStepScalars];
  const double *on_device, *gradient_factor, *found, *skipped;  // or null
};
inline StepSource source_of(const char* where, const StepScalars& told, const Device& device) {
  StepSource source{};
  std::copy(told.values, told.values + kNumStepScalars, source.values);
  source.on_device = told.on_device;
  const auto take = [&](const Tensor& x, const char* role) -> const double* {
    if (!x.defined()) return nullptr;
    TS_CHECK_DEVICE(x.device() == device, where, role, " must be on ", device, "; got ", x);
    TS_CHECK_DTYPE(x.dtype() == kF64 && x.numel() == 1, where, role,
                   " must be one f64 element; got ", x);
    return x.data_as<double>();
  };
  source.gradient_factor = take(told.gradient_factor, "gradient_factor");
  source.found = take(told.found, "found");
  source.skipped = take(told.skipped, "skipped");
  return source;
}
// What this step is told. False where it is left out.
TS_DEVICE bool read_scalars(const StepSource& source, double (&scalars)[kNumStepScalars]) {
  TS_UNROLL
  for (int i = 0; i < kNumStepScalars; ++i) {
    scalars[i] = source.on_device != nullptr ? source.on_device[i] : source.values[i];
  }
  if (source.gradient_factor != nullptr) scalars[kGradientScale] *= *source.gradient_factor;
  if (source.skipped != nullptr) scalars[kStep] -= *source.skipped;
  return scalars[kSkipStep] == 0 && (source.found == nullptr || *source.found == 0);
}

struct Place {
  int row;
  int64_t begin, end;
};
// R: numel, and first_chunk in ascending order.
template <class R>
TS_DEVICE Place find_chunk(const R* rows, int count) {
  const int64_t chunk = blockIdx.x;
  int low = 0, high = count - 1;  // the last row that begins at or before the chunk
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (rows[middle].first_chunk <= chunk) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int64_t begin = (chunk - rows[low].first_chunk) * kMultiTensorChunk;
  const int64_t end = begin + kMultiTensorChunk;
  return {low, begin, end < rows[low].numel ? end : rows[low].numel};
}

// ---- Groups: neighbouring elements of one thread, a vector where memory is aligned to it --------

// Of an update: 16 bytes of f32, which all states are and most of what a step moves; a warp's
// vectors of them lie side by side. Of bf16 and f16 it is 8 bytes.
inline constexpr int kSpanGroup = 4;
// Of a kernel that walks over one tensor.
template <class T>
inline constexpr int kGroupOf = 16 / sizeof(T);

inline Span span_of(const Tensor& x) {
  if (!x.defined()) return {nullptr, kF32, false};
  return {x.data(), x.dtype(), is_aligned(x.data())};
}

// visit(i, count): the group of `count` elements from i on. A thread has the same ones with and
// without vectors, so that sums have the same bits. Rolled: an update needs the registers.
template <int kGroup, class Visit>
TS_DEVICE void for_groups(const Place& place, const Visit& visit) {
  TS_ROLLED
  for (int64_t i = place.begin + int64_t{threadIdx.x} * kGroup; i < place.end;
       i += int64_t{blockDim.x} * kGroup) {
    visit(i, static_cast<int>(place.end - i < kGroup ? place.end - i : kGroup));
  }
}

// The elements from i on. Pointers from a table may lead anywhere, as far as the compiler knows.
template <class T>
TS_DEVICE T* elements_of(const Span& span, int64_t i) {
  T* const x = static_cast<T*>(span.data) + i;
#if defined(__CUDACC__)
  size_t address;  // by name, because a cast to global memory and back is taken for none
  asm("cvta.to.global.u64 %0, %1;" : "=l"(address) : "l"(x));
  return static_cast<T*>(__cvta_global_to_generic(address));
#else
  return x;
#endif
}

// The first `count` of a group, zeros behind them; it may be negative, and more than there are.
// Nobody clamps it: ptxas 13.0 takes max(min(count, 2), 0) == 2 for count >= 1
// (scripts/check_ptx.sh, clamp_equal).
template <class T, class C, int kGroup>
TS_DEVICE void load_group_of(const Span& span, int64_t i, int count, C (&values)[kGroup]) {
  const T* const x = elements_of<T>(span, i);
  if (span.vectors && count >= kGroup) {
    unpack(gpu::load_vector<kGroup>(x), values);
  } else {
    TS_UNROLL
    for (int j = 0; j < kGroup; ++j) values[j] = j < count ? load<C>(x[j]) : C(0);
  }
}
template <class T, class C, int kGroup>
TS_DEVICE void store_group_of(const Span& span, int64_t i, int count, const C (&values)[kGroup]) {
  T* const x = elements_of<T>(span, i);
  if (span.vectors && count == kGroup) {
    gpu::store_vector(x, pack<T>(values));
  } else {
    TS_UNROLL
    for (int j = 0; j < kGroup; ++j) {
      if (j < count) x[j] = store<T>(values[j]);
    }
  }
}
// Of a span of any dtype of C's lane.
template <class C>
TS_DEVICE void load_span(const Span& span, int64_t i, int count, C (&values)[kSpanGroup]) {
  with_lane_dtype<C>(span.dtype, [&]<class T>() { load_group_of<T>(span, i, count, values); });
}
template <class C>
TS_DEVICE void store_span(const Span& span, int64_t i, int count, const C (&values)[kSpanGroup]) {
  with_lane_dtype<C>(span.dtype, [&]<class T>() { store_group_of<T>(span, i, count, values); });
}
// A model copy has any floating dtype, beside a parameter of any lane.
template <class C>
TS_DEVICE void store_model_copy(const Span& span, int64_t i, int count,
                                const C (&values)[kSpanGroup]) {
  if (span.data == nullptr) return;
  if (span.dtype == kF64) {
    store_group_of<double>(span, i, count, values);
  } else {
    with_lane_dtype<float>(span.dtype,
                           [&]<class T>() { store_group_of<T>(span, i, count, values); });
  }
}

// The elements of x in the order of param's memory.
inline Tensor in_order_of(const Tensor& x, const Tensor& param, DType dtype) {
  const bool same_layout =
      x.strides() == param.strides() || (x.is_contiguous() && param.is_contiguous());
  if (x.dtype() == dtype && same_layout) return x;
  const Tensor result = raw::empty_strided(param.shape(), param.strides(), dtype, param.device());
  copy_into(result, x);
  return result;
}

}  // namespace tessera::kernels::multi_tensor
