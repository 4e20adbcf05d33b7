#include <tessera/distributed/checkpoint/writer.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <numeric>
#include <queue>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/io/atomic_file.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/checkpoint/checksum.h>

namespace tessera::distributed {
namespace {

constexpr const char* kCheckpointWriter = "checkpoint";
constexpr uint64_t kPage = 4096;  // chunks of at least a page begin at one
constexpr uint64_t kLine = 64;
constexpr size_t kBlock = 1 << 20;  // is checksummed and written while it lies in the cache

int64_t extent_bytes(const Shape& extent, DType dtype) { return numel_of(extent) * size_of(dtype); }

void check(std::span<const SaveItem> items) {
  std::map<std::string_view, const SaveItem*> names;
  for (const SaveItem& item : items) {
    TS_CHECK(!item.name.empty(), kCheckpointWriter, "every tensor has a name; got an empty one.");
    TS_CHECK(item.tensor.defined(), kCheckpointWriter, "tensor ", shown(item.name),
             " is undefined; leave it out.");
    TS_CHECK_DEVICE(!item.tensor.is_meta(), kCheckpointWriter, "tensor ", shown(item.name), " is ",
                    item.tensor, " and has no elements; initialise or load it first.");
    const auto [first, added] = names.try_emplace(item.name, &item);
    if (added) continue;
    const SaveItem& other = *first->second;
    TS_CHECK(!item.replicated && !other.replicated && !intersect(item.box, other.box),
             kCheckpointWriter, "every name stands once; ", shown(item.name), " was given twice.");
    TS_CHECK(item.shape == other.shape && item.tensor.dtype() == other.tensor.dtype(),
             kCheckpointWriter, "the parts of ", shown(item.name), " must be of one tensor; it is ",
             other.tensor.dtype(), other.shape, " and ", item.tensor.dtype(), item.shape, ".");
  }
}

// The rows of an item in chunks of about chunk_bytes.
void cut(std::span<const SaveItem> items, size_t index, int64_t chunk_bytes, int writer,
         std::vector<PlannedChunk>& plan) {
  const SaveItem& item = items[index];
  const Box& box = item.box;
  if (box.dim() == 0 || box.numel() == 0) return plan.push_back({index, box, writer});
  const int64_t rows = box.extent[0];
  const int64_t row_bytes = extent_bytes(box.extent, item.tensor.dtype()) / rows;
  const int64_t step = std::max<int64_t>(1, chunk_bytes / std::max<int64_t>(row_bytes, 1));
  for (int64_t begin = 0; begin < rows; begin += step) {
    plan.push_back({index, box.rows(begin, std::min(begin + step, rows)), writer});
  }
}

// Largest first, each to the rank with the fewest bytes so far.
void deal(std::span<const SaveItem> items, const std::vector<int>& ranks,
          std::vector<PlannedChunk>& plan) {
  if (ranks.size() < 2) return;
  const auto size_of_chunk = [&](size_t i) {
    return extent_bytes(plan[i].box.extent, items[plan[i].item].tensor.dtype());
  };
  std::vector<size_t> order(plan.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::ranges::stable_sort(order, std::greater<>(), size_of_chunk);
  using Load = std::pair<int64_t, int>;  // bytes, rank
  std::priority_queue<Load, std::vector<Load>, std::greater<>> loads;
  for (const int rank : ranks) loads.emplace(0, rank);
  for (const size_t i : order) {
    auto [bytes, writer] = loads.top();
    loads.pop();
    plan[i].writer = writer;
    loads.emplace(bytes + size_of_chunk(i), writer);
  }
}

// One of the rank's files of chunks.
class ChunkFile {
 public:
  ChunkFile(const std::string& folder, std::string name)
      : name_(std::move(name)), file_((std::filesystem::path(folder) / name_).string()) {}

  const std::string& name() const { return name_; }
  uint64_t size() const { return file_.size(); }
  void commit() { file_.commit(); }

  SavedChunk append(const ChunkToWrite& chunk) {
    const auto bytes = static_cast<uint64_t>(chunk.elements.nbytes());
    pad(bytes >= kPage ? kPage : kLine);
    SavedChunk saved{chunk.box, name_, file_.size(), bytes, 0};
    Checksum checksum;
    const auto* next = static_cast<const std::byte*>(chunk.elements.data());
    for (uint64_t left = bytes; left > 0;) {
      const size_t block = static_cast<size_t>(std::min<uint64_t>(left, kBlock));
      checksum.update(next, block);
      file_.write(next, block);
      next += block;
      left -= block;
    }
    saved.checksum = checksum.value();
    return saved;
  }

 private:
  void pad(uint64_t multiple) {
    static constexpr char kZeros[kPage] = {};
    const uint64_t over = file_.size() % multiple;
    if (over != 0) file_.write(kZeros, static_cast<size_t>(multiple - over));
  }

  std::string name_;
  AtomicFile file_;
};

}  // namespace

SaveItem SaveItem::whole(std::string name, const Tensor& tensor) {
  TS_CHECK(tensor.defined(), kCheckpointWriter, "tensor ", shown(name),
           " is undefined; leave it out.");
  check_whole(tensor, kCheckpointWriter);
  return {std::move(name), tensor, tensor.shape(), Box::whole(tensor.shape()), true};
}

SaveItem SaveItem::part(std::string name, const Tensor& tensor, const Shape& shape,
                        const Shape& offset) {
  TS_CHECK(tensor.defined(), kCheckpointWriter, "tensor ", shown(name),
           " is undefined; leave it out.");
  const Box box{offset, tensor.shape()};
  TS_CHECK_SHAPE(lies_within(box, shape), kCheckpointWriter, "the part of ", shown(name), " at ",
                 offset, " must lie within ", shape, "; it is ", tensor, "; give its true offset.");
  return {std::move(name), tensor, shape, box, false};
}

std::vector<PlannedChunk> plan_chunks(std::span<const SaveItem> items, int rank, int ranks,
                                      int64_t chunk_bytes) {
  check(items);
  // By the ranks that hold the same; those of no such list are of all ranks.
  std::map<std::vector<int>, std::vector<PlannedChunk>> plans;
  for (size_t i = 0; i < items.size(); ++i) {
    std::vector<int> holders = items[i].holders;
    if (!items[i].replicated && holders.empty()) holders = {rank};
    cut(items, i, chunk_bytes, rank, plans[holders]);
  }
  std::vector<int> all(static_cast<size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  std::vector<PlannedChunk> result;
  for (auto& [holders, plan] : plans) {
    deal(items, holders.empty() ? all : holders, plan);
    result.insert(result.end(), plan.begin(), plan.end());
  }
  return result;
}

uint64_t fingerprint_of(std::span<const SaveItem> items) {
  Checksum checksum;
  for (const SaveItem& item : items) {
    if (!item.replicated) continue;
    const std::string text = detail::concatenate(item.name, '\0', item.tensor.dtype(), item.shape);
    checksum.update(text.data(), text.size());
  }
  return checksum.value();
}

std::vector<ChunkToWrite> collect_chunks(std::span<const SaveItem> items,
                                         std::span<const PlannedChunk> plan, int rank,
                                         bool snapshot, std::vector<Tensor>& staging) {
  const NoGradGuard no_grad;
  const MemoryCategoryGuard category(MemoryCategory::kStaging);
  std::vector<ChunkToWrite> chunks;
  size_t slot = 0;
  for (const PlannedChunk& planned : plan) {
    if (planned.writer != rank) continue;
    const SaveItem& item = items[planned.item];
    Tensor elements = item.tensor.detach();
    if (planned.box != item.box) {
      elements = raw::narrow(elements, 0, planned.box.offset[0] - item.box.offset[0],
                             planned.box.extent[0]);
    }
    elements = elements.to(kCpu).contiguous();
    // What came from a device or another layout is a copy already.
    if (snapshot && elements.storage() == item.tensor.storage()) {
      if (slot == staging.size()) staging.emplace_back();
      Tensor& kept = staging[slot++];
      if (!kept.defined() || kept.shape() != elements.shape() || kept.dtype() != elements.dtype()) {
        kept = raw::empty(elements.shape(), elements.dtype());
      }
      copy_(kept, elements);
      elements = kept;
    }
    chunks.push_back({item.name, elements, item.shape, planned.box});
  }
  if (snapshot) staging.resize(slot);
  return chunks;
}

std::string record_name(int rank) { return "rank-" + std::to_string(rank) + ".json"; }

void write_rank(const std::string& folder, int rank, int ranks,
                std::span<const ChunkToWrite> chunks, int64_t file_bytes,
                const std::function<void(bool all_chunks)>& between) {
  Manifest record;
  record.ranks = ranks;
  std::unique_ptr<ChunkFile> file;
  int files = 0;
  const auto finish_file = [&] {
    if (!file) return;
    file->commit();
    record.files[file->name()] = {.bytes = file->size()};
    file.reset();
  };
  size_t written = 0;
  for (const ChunkToWrite& chunk : chunks) {
    if (written++ == chunks.size() / 2) between(false);
    SavedTensor& tensor = record.tensors[chunk.name];
    tensor.dtype = chunk.elements.dtype();
    tensor.shape = chunk.shape;
    if (chunk.elements.numel() == 0) continue;
    if (file && static_cast<int64_t>(file->size()) >= file_bytes) finish_file();
    if (!file) {
      file = std::make_unique<ChunkFile>(folder,
                                         detail::concatenate("rank-", rank, "-", files++, ".bin"));
    }
    tensor.chunks.push_back(file->append(chunk));
  }
  if (chunks.empty()) between(false);
  finish_file();
  between(true);
  write_file_atomically((std::filesystem::path(folder) / record_name(rank)).string(),
                        manifest_text(record));
}

}  // namespace tessera::distributed
