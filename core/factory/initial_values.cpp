#include <tessera/core/factory/initial_values.h>

#include <algorithm>
#include <utility>
#include <vector>

#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/core/tensor/meta_storage.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {
namespace {

struct RememberedFill {
  int64_t begin, end;  // elements of the storage; of a part: of the whole
  int64_t first;       // what `write` calls element `begin`
  DType dtype;         // that it was done in
  FillRange write;
};

struct FillRecord : TensorSlot {
  std::vector<RememberedFill> fills;  // the first one first
  // What had been written when the last fill was remembered.
  std::shared_ptr<VersionCounter> counter;
  uint32_t version = 0;
  bool of_part = false;

  bool is_current(uint32_t writes_since = 0) const {
    return counter->value.load(std::memory_order_relaxed) == version + writes_since;
  }
};

// None before the first fill.
FillRecord* record_of(const Tensor& x) {
  const std::shared_ptr<TensorSlot>* const slot = meta_slot(x.storage());
  return slot == nullptr ? nullptr : static_cast<FillRecord*>(slot->get());
}

int64_t elements_of_whole(const Tensor& x) {
  if (const TensorPlacement* part = tensor_placement(x)) return numel_of(part->whole_shape());
  return x.storage()->bytes() / size_of(x.dtype());
}

// The first elements [begin, end) of [0, numel) that no fill has written; empty where all are.
std::pair<int64_t, int64_t> gap_in(const std::vector<RememberedFill>& fills, int64_t numel) {
  std::vector<std::pair<int64_t, int64_t>> ranges;
  for (const RememberedFill& fill : fills) ranges.emplace_back(fill.begin, fill.end);
  std::sort(ranges.begin(), ranges.end());
  int64_t known = 0;
  for (const auto& [begin, end] : ranges) {
    if (begin > known) return {known, begin};
    known = std::max(known, end);
  }
  return {known, std::max(known, numel)};
}

// visit(begin, end, first) for the runs of neighbouring elements, row by row, that a box of a
// row-major tensor is made of, and which element of the part's memory each begins with.
template <class Visit>
void visit_runs(const Shape& whole, const PartBox& box, const Visit& visit) {
  const Shape& extent = box.extent;
  if (numel_of(extent) == 0) return;
  int inner = std::max(0, extent.size() - 1);  // the first dimension that lies within a run
  while (inner > 0 && extent[inner] == whole[inner]) --inner;
  const Shape strides = contiguous_strides(whole);
  int64_t length = 1, runs = 1, corner = 0;
  for (int d = 0; d < extent.size(); ++d) {
    (d < inner ? runs : length) *= extent[d];
    corner += box.offset[d] * strides[d];
  }
  for (int64_t run = 0; run < runs; ++run) {
    int64_t begin = corner, first = box.first, rest = run;
    for (int d = inner - 1; d >= 0; --d) {
      begin += rest % extent[d] * strides[d];
      first += rest % extent[d] * box.strides[d];
      rest /= extent[d];
    }
    visit(begin, begin + length, first);
  }
}

// Elements [begin, end) of a fill into `piece`.
void write_range(const RememberedFill& fill, int64_t begin, const Tensor& piece) {
  const int64_t first = fill.first + begin - fill.begin;
  if (piece.dtype() == fill.dtype) return fill.write(piece, first);
  const int64_t most = (int64_t{1} << 20) / size_of(fill.dtype);
  for (int64_t done = 0; done < piece.numel(); done += most) {
    const int64_t count = std::min(most, piece.numel() - done);
    const Tensor unrounded = raw::empty({count}, fill.dtype, piece.device());
    fill.write(unrounded, first + done);
    kernels::copy_into(raw::narrow(piece, 0, done, count), unrounded);
  }
}

}  // namespace

void detail::remember_fill(const Tensor& x, FillRange fill) {
  if (!x.is_contiguous()) return;
  std::shared_ptr<TensorSlot>* const slot = meta_slot(x.storage());
  if (slot == nullptr) return;
  if (*slot == nullptr) {
    *slot = std::make_shared<FillRecord>();
  } else {
    FillRecord& old = *record_of(x);
    const bool seen = old.is_current(old.counter == x.impl()->version ? 1 : 0);
    if (!seen || old.of_part) old.fills.clear();
  }
  FillRecord& record = *record_of(x);
  const int64_t begin = x.offset(), end = begin + x.numel();
  std::erase_if(record.fills,
                [&](const RememberedFill& old) { return begin <= old.begin && old.end <= end; });
  if (begin < end) record.fills.push_back({begin, end, 0, x.dtype(), std::move(fill)});
  record.counter = x.impl()->version;
  record.version = x.version();
}

void pass_initial_values(const Tensor& from, const Tensor& to) {
  if (!from.is_meta() || !to.is_meta() || from.storage() == to.storage()) return;
  const FillRecord* const known = record_of(from);
  std::shared_ptr<TensorSlot>* const slot = meta_slot(to.storage());
  if (to.offset() != 0 || to.nbytes() != to.storage()->bytes()) return;
  if (known == nullptr || slot == nullptr || !known->is_current() || !from.is_contiguous()) {
    return;
  }
  // What is known of a part is known of the whole, and so of its other parts.
  const TensorPlacement *const part = tensor_placement(from), *const other = tensor_placement(to);
  if (part != nullptr && (other == nullptr || other->whole_shape() != part->whole_shape())) return;
  auto record = std::make_shared<FillRecord>();
  const int64_t begin = part == nullptr ? from.offset() : 0;
  const int64_t numel = part == nullptr ? from.numel() : elements_of_whole(from);
  for (RememberedFill fill : known->fills) {
    // Twice converted is not once converted.
    if (to.dtype() != from.dtype() && fill.dtype != from.dtype()) continue;
    const int64_t cut = std::max<int64_t>(0, begin - fill.begin);
    fill.begin += cut - begin;
    fill.first += cut;
    fill.end = std::min(fill.end - begin, numel);
    if (fill.begin < fill.end) record->fills.push_back(std::move(fill));
  }
  record->counter = to.impl()->version;
  record->version = to.version();
  record->of_part = other != nullptr;
  *slot = std::move(record);
}

std::string unknown_initial_values(const Tensor& x) {
  const FillRecord* const record = record_of(x);
  const auto written_by = [](const VersionCounter& counter) {
    const char* const writer = counter.writer.load(std::memory_order_relaxed);
    return std::string(writer == nullptr ? "something" : writer);
  };
  if (record == nullptr) {
    return x.version() == 0 ? "nothing has filled it"
                            : "it was written by " + written_by(*x.impl()->version);
  }
  if (!record->is_current()) {
    return "it was written by " + written_by(*record->counter) + " after its initial values";
  }
  const auto [begin, end] = gap_in(record->fills, elements_of_whole(x));
  if (begin == end) return {};
  return "nothing that is known has filled elements [" + std::to_string(begin) + ", " +
         std::to_string(end) + ")";
}

void write_initial_values(const Tensor& x, const Tensor& elements) {
  const FillRecord* const record = record_of(x);
  TS_CHECK(record != nullptr, "initial values", "those of ", x, " are not known");
  const auto write = [&](int64_t begin, int64_t end, int64_t first) {  // of `elements`
    for (const RememberedFill& fill : record->fills) {
      const int64_t from = std::max(begin, fill.begin), to = std::min(end, fill.end);
      if (from >= to) continue;
      write_range(fill, from, raw::narrow(elements, 0, first + from - begin, to - from));
    }
  };
  if (const TensorPlacement* part = tensor_placement(x)) {
    const PlaceInWhole place = part->place();
    for (const PartBox& box : place.boxes) visit_runs(place.whole, box, write);
  } else {
    write(0, elements.numel(), 0);
  }
}

}  // namespace tessera
