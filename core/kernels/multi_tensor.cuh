// Tables of many tensors for the kernels that serve them in one launch.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <vector>

#include <tessera/core/cuda/graph.h>
#include <tessera/core/error.h>
#include <tessera/core/factory.h>
#include <tessera/core/kernels/copy.h>
#include <tessera/core/kernels/multi_tensor.h>
#include <tessera/core/kernels/strided.cuh>

namespace tessera::kernels::multi_tensor {

// One block for each chunk of each tensor.
struct Span {
  void* data;
  DType dtype;
};
inline constexpr int kMaxSpans = 6;
struct Row {  // one tensor, or one parameter with what belongs to it
  Span spans[kMaxSpans];
  int64_t numel;
  int64_t first_chunk;
};

// The rows on the device. Queued before the launch that reads them, from memory that CUDA stages.
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
    const auto size = static_cast<int64_t>(rows.size() * sizeof(Row));
    bytes = raw::empty({size}, kU8, device);
    gpu::upload_constants(bytes.data(), device.index, rows.data(), static_cast<size_t>(size));
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
TS_DEVICE Place find_chunk(const Row* rows, int count) {
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

inline Span span_of(const Tensor& x) {
  return x.defined() ? Span{x.data(), x.dtype()} : Span{nullptr, kF32};
}

// The elements of x in the order of param's memory.
inline Tensor in_order_of(const Tensor& x, const Tensor& param, DType dtype) {
  if (x.dtype() == dtype && x.strides() == param.strides()) return x;
  const Tensor result = raw::empty_strided(param.shape(), param.strides(), dtype, param.device());
  copy_into(result, x);
  return result;
}

}  // namespace tessera::kernels::multi_tensor
