#include <tessera/core/kernels/optim/multi_tensor_copy.h>

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

bool is_converted(DType dtype) { return is_floating(dtype) && !is_fp8(dtype); }
bool is_copied(DType source, DType target) {
  return source == target || (is_converted(source) && is_converted(target));
}

void check(std::span<const Tensor> targets, std::span<const Tensor> sources) {
  TS_CHECK_SHAPE(targets.size() == sources.size(), kName, "needs a source for each target; got ",
                 targets.size(), " targets and ", sources.size(), " sources");
  for (size_t i = 0; i < targets.size(); ++i) {
    const Tensor &target = targets[i], &source = sources[i];
    TS_CHECK_SHAPE(target.shape() == source.shape(), kName, "pair ", i,
                   " must have one shape; got target ", target, " and source ", source);
    TS_CHECK_SHAPE(target.is_contiguous(), kName, "target ", i, " must be contiguous; got ", target,
                   " with strides ", target.strides(), "; copy to it with copy_()");
    TS_CHECK_DTYPE(is_copied(source.dtype(), target.dtype()), kName,
                   "converts among f64, f32, bf16 and f16; pair ", i, " is target ", target,
                   " and source ", source, "; convert the source with to(dtype) first");
    TS_CHECK_DEVICE(
        target.device() == targets[0].device() && source.device() == targets[0].device(), kName,
        "needs all tensors on one device; target 0 is on ", targets[0].device(), ", pair ", i,
        " is target ", target, " and source ", source, "; move one with to(device)");
  }
}

struct CopyPiece {
  const char* from;  // or nullptr
  char* to;
  DType source, target;
  int64_t numel;
  int64_t place;  // elements of the pieces before it
};

// Elements [begin, end) of a piece.
void copy_range(const CopyPiece& piece, int64_t begin, int64_t end) {
  const int64_t source_size = size_of(piece.source), target_size = size_of(piece.target);
  char* const to = piece.to + begin * target_size;
  const int64_t count = end - begin;
  if (piece.from == nullptr) {
    std::memset(to, 0, static_cast<size_t>(count * target_size));
    return;
  }
  const char* const from = piece.from + begin * source_size;
  if (piece.source == piece.target) {
    std::memcpy(to, from, static_cast<size_t>(count * source_size));
    return;
  }
  const Lane lane = lane_of(piece.source);
  const LoadFunction load = TS_SIMD_CALL(load_function, piece.source, lane);
  const StoreFunction store = TS_SIMD_CALL(store_function, lane, piece.target);
  if (is_stored_as(lane, piece.source)) return store(from, to, 1, count);
  if (is_stored_as(lane, piece.target)) return load(from, 1, to, count);
  constexpr int64_t kTile = 1024;  // of lanes: stays in the first-level cache
  alignas(64) char tile[kTile * 8];
  for (int64_t i = 0; i < count; i += kTile) {
    const int64_t n = std::min(kTile, count - i);
    load(from + i * source_size, 1, tile, n);
    store(tile, to + i * target_size, 1, n);
  }
}

// All pieces as one run of elements: a thread's share is the same of one large tensor, of a
// thousand small ones and of both.
class CopyPieces {
 public:
  explicit CopyPieces(size_t count) { pieces_.reserve(count); }
  void add(const void* from, void* to, DType source, DType target, int64_t numel) {
    if (numel == 0) return;
    pieces_.push_back(
        {static_cast<const char*>(from), static_cast<char*>(to), source, target, numel, numel_});
    numel_ += numel;
  }
  void copy() const {
    parallel_for(numel_, kMultiTensorChunk, [this](int64_t first, int64_t last) {
      const auto before = [](int64_t place, const CopyPiece& piece) { return place < piece.place; };
      auto piece = std::upper_bound(pieces_.begin(), pieces_.end(), first, before) - 1;
      for (int64_t place = first; place < last; ++piece) {
        const int64_t end = std::min(piece->numel, last - piece->place);
        copy_range(*piece, place - piece->place, end);
        place = piece->place + end;
      }
    });
  }

 private:
  std::vector<CopyPiece> pieces_;
  int64_t numel_ = 0;
};

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
    CopyPieces pieces(targets.size());
    for (size_t i = 0; i < targets.size(); ++i) {
      pieces.add(dense[i].data(), targets[i].data(), dense[i].dtype(), targets[i].dtype(),
                 targets[i].numel());
    }
    pieces.copy();
  }
  for (const Tensor& target : targets) target.bump_version();
}

void copy_segments(std::span<const CopySegment> segments, DType source, DType target,
                   const Device& device) {
  constexpr const char* kWhere = "copy_segments";
  TS_CHECK_DTYPE(is_copied(source, target), kWhere, "converts among f64, f32, bf16 and f16; got ",
                 source, " to ", target);
  for (size_t i = 0; i < segments.size(); ++i) {
    const CopySegment& segment = segments[i];
    TS_CHECK(segment.numel >= 0, kWhere, "segment ", i, " has ", segment.numel, " elements");
    TS_CHECK(segment.to != nullptr || segment.numel == 0 || device.is_meta(), kWhere, "segment ", i,
             " leads nowhere: its target is a null pointer; give it memory of ", segment.numel,
             " elements of ", target);
  }
  if (device.is_meta()) return;
  if (device.is_cuda()) {
    return on_cuda<kernels::copy_segments>(kWhere, device, segments, source, target, device);
  }
  CopyPieces pieces(segments.size());
  for (const CopySegment& segment : segments) {
    pieces.add(segment.from, segment.to, source, target, segment.numel);
  }
  pieces.copy();
}

}  // namespace tessera::kernels
