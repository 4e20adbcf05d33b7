#include <tessera/distributed/mesh/matrix_exchange.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/optim/multi_tensor_copy.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::distributed {
namespace {

const CollectiveOptions kMatrixCall{
    .channel = Channel::kParameter, .tag = "whole matrices", .waits = true};

// The coordinates of each rank of the group that these placements cut over, numbered row by row.
std::vector<std::vector<int>> coordinates_of(const DTensorSpec& spec, int ranks) {
  const std::vector<MeshAxis>& axes = spec.mesh->axes();
  std::vector<std::vector<int>> all;
  for (int r = 0; r < ranks; ++r) {
    std::vector<int>& one = all.emplace_back();
    for (const MeshAxis& axis : axes) one.push_back(spec.mesh->coordinate(axis.name));
    int rest = r;
    for (size_t i = axes.size(); i-- > 0;) {
      if (!is_sharding(spec.placements[i])) continue;
      one[i] = rest % axes[i].size;
      rest /= axes[i].size;
    }
  }
  return all;
}

int64_t elements_in(const std::vector<PartBox>& boxes) {
  int64_t sum = 0;
  for (const PartBox& box : boxes) sum += numel_of(box.extent);
  return sum;
}

// run(place in the part, place in the whole, elements) for each stretch of boxes that lies in one
// piece in both.
template <class Run>
void for_stretches(const std::vector<PartBox>& boxes, const Shape& shape, const Run& run) {
  const Shape strides = contiguous_strides(shape);
  for (const PartBox& box : boxes) {
    int inner = shape.size();  // dimensions from here on lie in one piece
    int64_t numel = 1;
    while (inner > 0) {
      --inner;
      numel *= box.extent[inner];
      if (box.extent[inner] != shape[inner]) break;
    }
    const int64_t count = numel_of(box.extent) / std::max<int64_t>(numel, 1);
    for (int64_t i = 0; i < count; ++i) {
      int64_t at = box.first, place = 0, rest = i;
      for (int d = shape.size() - 1; d >= 0; --d) {
        place += box.offset[d] * strides[d];
        if (d >= inner) continue;
        at += rest % box.extent[d] * box.strides[d];
        place += rest % box.extent[d] * strides[d];
        rest /= box.extent[d];
      }
      run(at, place, numel);
    }
  }
}

char* bytes_at(const Tensor& x, int64_t element) {
  return x.data_as<char>() + element * size_of(x.dtype());
}

void copy_all(const std::vector<kernels::CopySegment>& segments, DType dtype,
              const Device& device) {
  if (!segments.empty()) kernels::copy_segments(segments, dtype, dtype, device);
}

}  // namespace

// see [Note: owners]
MatrixExchange::MatrixExchange(std::vector<DTensorSpec> specs, Group& group)
    : specs_(std::move(specs)), group_(group), owners_(specs_.size(), -1) {
  std::vector<int64_t> loads(static_cast<size_t>(group.size()));
  std::vector<size_t> shared;
  for (size_t i = 0; i < specs_.size(); ++i) {
    std::vector<std::vector<PartBox>>& held = boxes_.emplace_back();
    int holder = 0, holders = 0;
    for (const std::vector<int>& coordinates : coordinates_of(specs_[i], group.size())) {
      held.push_back(specs_[i].boxes_at(coordinates));
      if (held.back().empty()) continue;
      holder = static_cast<int>(held.size()) - 1;
      ++holders;
    }
    cut_.push_back(holders > 1);
    if (holders > 1) {
      shared.push_back(i);
    } else {
      owners_[i] = holder;
      loads[static_cast<size_t>(holder)] += numel_of(specs_[i].shape);
    }
  }
  const auto numel = [&](size_t i) { return numel_of(specs_[i].shape); };
  std::ranges::stable_sort(shared, std::ranges::greater(), numel);
  for (const size_t i : shared) {
    size_t best = 0;
    for (size_t r = 1; r < loads.size(); ++r) {
      const std::pair key{loads[r], -elements_in(boxes_[i][r])};
      if (key < std::pair{loads[best], -elements_in(boxes_[i][best])}) best = r;
    }
    owners_[i] = static_cast<int>(best);
    loads[best] += numel(i);
  }
}

int64_t MatrixExchange::elements_owned_by(int rank) const {
  int64_t sum = 0;
  for (size_t i = 0; i < specs_.size(); ++i) {
    if (owners_[i] == rank) sum += numel_of(specs_[i].shape);
  }
  return sum;
}

int64_t MatrixExchange::cut() const { return std::ranges::count(cut_, uint8_t{1}); }

const std::vector<PartBox>& MatrixExchange::own_boxes(size_t i) const {
  return boxes_[i][static_cast<size_t>(group_.rank())];
}

int MatrixExchange::rounds() const { return cut() > 0 ? 1 : 0; }

int64_t MatrixExchange::gathers() const {
  int64_t sum = 0;
  for (size_t i = 0; i < specs_.size(); ++i) sum += owns(i) ? 0 : elements_in(own_boxes(i));
  return sum;
}

int64_t MatrixExchange::scatters() const {
  int64_t sum = 0;
  for (size_t i = 0; i < specs_.size(); ++i) {
    if (owns(i)) sum += numel_of(specs_[i].shape) - elements_in(own_boxes(i));
  }
  return sum;
}

TensorList MatrixExchange::lent(DType dtype, const Device& device) const {
  const MemoryCategoryGuard category(MemoryCategory::kCommunication);
  std::vector<int64_t> sizes(static_cast<size_t>(group_.size()));
  for (size_t i = 0; i < specs_.size(); ++i) {
    if (!owns(i)) sizes[static_cast<size_t>(owners_[i])] += elements_in(own_boxes(i));
  }
  TensorList memory;
  for (const int64_t size : sizes) memory.push_back(raw::empty({size}, dtype, device));
  return memory;
}

TensorList MatrixExchange::owned(DType dtype, const Device& device) const {
  const MemoryCategoryGuard category(MemoryCategory::kCommunication);
  TensorList memory;
  for (int r = 0; r < group_.size(); ++r) {
    int64_t size = 0;
    for (size_t i = 0; i < specs_.size() && r != group_.rank(); ++i) {
      if (owns(i)) size += elements_in(boxes_[i][static_cast<size_t>(r)]);
    }
    memory.push_back(raw::empty({size}, dtype, device));
  }
  return memory;
}

void MatrixExchange::exchange(const TensorList& received, const TensorList& sent) {
  if (rounds() > 0) group_.all_to_all(received, sent, kMatrixCall).wait();
}

TensorList MatrixExchange::gather(std::span<const Tensor> parts) {
  TensorList wholes(specs_.size());
  if (specs_.empty()) return wholes;
  const DType dtype = parts[0].dtype();
  const Device device = parts[0].device();
  const TensorList sent = lent(dtype, device), received = owned(dtype, device);
  std::vector<kernels::CopySegment> segments;
  std::vector<int64_t> filled(sent.size());
  for (size_t i = 0; i < specs_.size(); ++i) {
    if (owns(i)) continue;
    const auto owner = static_cast<size_t>(owners_[i]);
    segments.push_back({parts[i].data(), bytes_at(sent[owner], filled[owner]), parts[i].numel()});
    filled[owner] += parts[i].numel();
  }
  copy_all(segments, dtype, device);
  exchange(received, sent);
  segments.clear();
  filled.assign(received.size(), 0);
  const MemoryCategoryGuard category(MemoryCategory::kUnsharded);
  for (size_t i = 0; i < specs_.size(); ++i) {
    if (!owns(i)) continue;
    if (!is_cut(i)) {
      wholes[i] = raw::view(parts[i], specs_[i].shape);
      continue;
    }
    wholes[i] = raw::empty(specs_[i].shape, dtype, device);
    for (size_t r = 0; r < received.size(); ++r) {
      const bool own = static_cast<int>(r) == group_.rank();
      const Tensor& from = own ? parts[i] : received[r];
      for_stretches(boxes_[i][r], specs_[i].shape, [&](int64_t at, int64_t place, int64_t numel) {
        segments.push_back(
            {bytes_at(from, own ? at : filled[r] + at), bytes_at(wholes[i], place), numel});
      });
      filled[r] += elements_in(boxes_[i][r]);
    }
  }
  copy_all(segments, dtype, device);
  return wholes;
}

void MatrixExchange::scatter(std::span<const Tensor> wholes, std::span<const Tensor> parts) {
  if (specs_.empty()) return;
  const DType dtype = parts[0].dtype();
  const Device device = parts[0].device();
  const TensorList sent = owned(dtype, device), received = lent(dtype, device);
  std::vector<kernels::CopySegment> segments;
  std::vector<int64_t> filled(sent.size());
  for (size_t i = 0; i < specs_.size(); ++i) {
    if (!owns(i)) continue;
    for (size_t r = 0; r < sent.size(); ++r) {
      const bool own = static_cast<int>(r) == group_.rank();
      const Tensor& to = own ? parts[i] : sent[r];
      for_stretches(boxes_[i][r], specs_[i].shape, [&](int64_t at, int64_t place, int64_t numel) {
        segments.push_back(
            {bytes_at(wholes[i], place), bytes_at(to, own ? at : filled[r] + at), numel});
      });
      filled[r] += elements_in(boxes_[i][r]);
    }
  }
  copy_all(segments, dtype, device);
  exchange(received, sent);
  segments.clear();
  filled.assign(received.size(), 0);
  for (size_t i = 0; i < specs_.size(); ++i) {
    if (!owns(i)) {
      const auto owner = static_cast<size_t>(owners_[i]);
      segments.push_back(
          {bytes_at(received[owner], filled[owner]), parts[i].data(), parts[i].numel()});
      filled[owner] += parts[i].numel();
    }
    parts[i].bump_version();
  }
  copy_all(segments, dtype, device);
}

}  // namespace tessera::distributed
