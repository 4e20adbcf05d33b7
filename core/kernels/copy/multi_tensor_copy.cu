#include <tessera/core/kernels/copy/multi_tensor_copy.h>

#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/optim/multi_tensor.cuh>

namespace tessera::kernels {
namespace {

using namespace multi_tensor;

constexpr int kBlock = 256;

// Elements [begin, end) from S to T, rounded by way of C.
template <class S, class T, class C>
TS_DEVICE void copy_chunk(const Span& source, const Span& target, const Place& place) {
  if (source.vectors && target.vectors) {
    constexpr int kGroup = 16 / static_cast<int>(sizeof(S) < sizeof(T) ? sizeof(S) : sizeof(T));
    for_groups<kGroup>(place, [&](int64_t i, int count) {
      C values[kGroup];
      load_group_of<S>(source, i, count, values);
      store_group_of<T>(target, i, count, values);
    });
    return;
  }
  const S* const from = elements_of<S>(source, 0);
  T* const to = elements_of<T>(target, 0);
  for (int64_t i = place.begin + threadIdx.x; i < place.end; i += blockDim.x) {
    to[i] = store<T>(load<C>(from[i]));
  }
}
// The same of one dtype: bits, which no conversion touches.
template <class Word>
TS_DEVICE void move_chunk(const Span& source, const Span& target, const Place& place) {
  const Word* const from = elements_of<Word>(source, 0);
  Word* const to = elements_of<Word>(target, 0);
  if (source.vectors && target.vectors) {
    constexpr int kGroup = kGroupOf<Word>;
    for_groups<kGroup>(place, [&](int64_t i, int count) {
      if (count == kGroup) {
        gpu::store_vector(to + i, gpu::load_vector<kGroup>(from + i));
      } else {
        for (int j = 0; j < count; ++j) to[i + j] = from[i + j];
      }
    });
    return;
  }
  for (int64_t i = place.begin + threadIdx.x; i < place.end; i += blockDim.x) to[i] = from[i];
}

template <class F>
TS_DEVICE void with_floating(DType dtype, const F& f) {
  if (dtype == kF64) {
    f.template operator()<double>();
  } else {
    with_lane_dtype<float>(dtype, f);
  }
}

__global__ void __launch_bounds__(kBlock) copy_kernel(const Row* rows, int count) {
  const Place place = find_chunk(rows, count);
  const Span source = rows[place.row].spans[0], target = rows[place.row].spans[1];
  if (source.dtype == target.dtype) {
    switch (size_of(source.dtype)) {
      case 8:
        return move_chunk<uint64_t>(source, target, place);
      case 4:
        return move_chunk<uint32_t>(source, target, place);
      case 2:
        return move_chunk<uint16_t>(source, target, place);
      default:
        return move_chunk<uint8_t>(source, target, place);
    }
  }
  with_floating(source.dtype, [&]<class S>() {
    with_floating(target.dtype, [&]<class T>() {
      if constexpr (!std::is_same_v<S, T>) copy_chunk<S, T, Compute<S>>(source, target, place);
    });
  });
}

void multi_tensor_copy_cuda(std::span<const Tensor> targets, std::span<const Tensor> sources) {
  Table table;
  for (size_t i = 0; i < targets.size(); ++i) {
    table.add({span_of(sources[i]), span_of(targets[i])}, targets[i].numel());
  }
  if (table.rows.empty()) return;
  const Row* const rows = table.upload(targets[0].device());
  gpu::launch(
      {.name = "multi_tensor_copy", .grid = static_cast<unsigned>(table.chunks), .block = kBlock},
      copy_kernel, rows, static_cast<int>(table.rows.size()));
}

}  // namespace

void register_multi_tensor_copy() { cuda_kernel<multi_tensor_copy> = multi_tensor_copy_cuda; }

}  // namespace tessera::kernels
