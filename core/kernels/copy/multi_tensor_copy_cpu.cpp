#include <tessera/core/kernels/copy/multi_tensor_copy.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/copy/copy_loops.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/parallel.h>

namespace tessera::kernels {
namespace {

constexpr const char* kName = "multi_tensor_copy";

bool is_converted(DType dtype) { return is_floating(dtype) && !is_float8(dtype); }

void check(std::span<const Tensor> targets, std::span<const Tensor> sources) {
  TS_CHECK_SHAPE(targets.size() == sources.size(), kName, "needs a source for each target; got ",
                 targets.size(), " targets and ", sources.size(), " sources");
  for (size_t i = 0; i < targets.size(); ++i) {
    const Tensor &target = targets[i], &source = sources[i];
    TS_CHECK_SHAPE(target.shape() == source.shape(), kName, "pair ", i,
                   " must have one shape; got target ", target, " and source ", source);
    TS_CHECK_SHAPE(target.is_contiguous(), kName, "target ", i, " must be contiguous; got ", target,
                   " with strides ", target.strides(), "; copy to it with copy_()");
    TS_CHECK_DTYPE(target.dtype() == source.dtype() ||
                       (is_converted(target.dtype()) && is_converted(source.dtype())),
                   kName, "converts among f64, f32, bf16 and f16; pair ", i, " is target ", target,
                   " and source ", source, "; convert the source with to(dtype) first");
    TS_CHECK_DEVICE(
        target.device() == targets[0].device() && source.device() == targets[0].device(), kName,
        "needs all tensors on one device; target 0 is on ", targets[0].device(), ", pair ", i,
        " is target ", target, " and source ", source, "; move one with to(device)");
  }
}

struct Pair {
  const char* from;
  char* to;
  DType source, target;
  int64_t numel, first_chunk;
};

// Elements [begin, end) of a pair.
void copy_range(const Pair& pair, int64_t begin, int64_t end) {
  const int64_t source_size = size_of(pair.source), target_size = size_of(pair.target);
  const char* const from = pair.from + begin * source_size;
  char* const to = pair.to + begin * target_size;
  const int64_t count = end - begin;
  if (pair.source == pair.target) {
    std::memcpy(to, from, static_cast<size_t>(count * source_size));
    return;
  }
  const Lane lane = lane_of(pair.source);
  const LoadFunction load = TS_SIMD_CALL(load_function, pair.source, lane);
  const StoreFunction store = TS_SIMD_CALL(store_function, lane, pair.target);
  if (is_stored_as(lane, pair.source)) return store(from, to, 1, count);
  if (is_stored_as(lane, pair.target)) return load(from, 1, to, count);
  constexpr int64_t kTile = 1024;  // of lanes: stays in the first-level cache
  alignas(64) char tile[kTile * 8];
  for (int64_t i = 0; i < count; i += kTile) {
    const int64_t n = std::min(kTile, count - i);
    load(from + i * source_size, 1, tile, n);
    store(tile, to + i * target_size, 1, n);
  }
}

}  // namespace

void multi_tensor_copy(std::span<const Tensor> targets, std::span<const Tensor> sources) {
  check(targets, sources);
  if (targets.empty() || targets[0].is_meta()) return;
  std::vector<Tensor> dense;
  dense.reserve(sources.size());
  for (const Tensor& source : sources) dense.push_back(contiguous(source));
  const Device& device = targets[0].device();
  if (device.is_cuda()) {
    on_cuda<kernels::multi_tensor_copy>(kName, device, targets, std::span<const Tensor>(dense));
  } else {
    std::vector<Pair> pairs;
    int64_t chunks = 0;
    for (size_t i = 0; i < targets.size(); ++i) {
      const int64_t numel = targets[i].numel();
      if (numel == 0) continue;
      pairs.push_back({static_cast<const char*>(dense[i].data()),
                       static_cast<char*>(targets[i].data()), dense[i].dtype(), targets[i].dtype(),
                       numel, chunks});
      chunks += (numel + kMultiTensorChunk - 1) / kMultiTensorChunk;
    }
    parallel_for(chunks, 1, [&](int64_t first, int64_t last) {
      const auto after = [](int64_t chunk, const Pair& pair) { return chunk < pair.first_chunk; };
      auto pair = std::upper_bound(pairs.begin(), pairs.end(), first, after) - 1;
      for (int64_t chunk = first; chunk < last; ++chunk) {
        const int64_t begin = (chunk - pair->first_chunk) * kMultiTensorChunk;
        const int64_t end = std::min(pair->numel, begin + kMultiTensorChunk);
        copy_range(*pair, begin, end);
        if (end == pair->numel) ++pair;
      }
    });
  }
  for (const Tensor& target : targets) target.bump_version();
}

}  // namespace tessera::kernels
