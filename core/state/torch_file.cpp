#include <tessera/core/state/torch_file.h>

#include <algorithm>
#include <cstring>

#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/core/io/zip_reader.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/state/pickle_reader.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {
namespace {

using Kind = PickleValue::Kind;
constexpr int kMostLevels = 64;
constexpr int64_t kMostElements = int64_t{1} << 48;  // a stride of 0 makes many of one
constexpr size_t kMostLeaves = size_t{1} << 20;      // shared lists make exponentially many

// Walks the structure and gives every leaf its name.
class TorchLeaves {
 public:
  explicit TorchLeaves(const std::string& path) : path_(path) {}
  void walk(const PickleValue& value, const std::string& name, int level = 0) {
    TS_CHECK_AS(UnsupportedError, level <= kMostLevels, "torch file", "'", path_, "': more than ",
                kMostLevels, " levels of dicts and lists");
    TS_CHECK_AS(UnsupportedError, ++visited_ <= kMostLeaves, "torch file", "'", path_,
                "': more than ", kMostLeaves, " values");
    const auto child = [&](const PickleValue& item, const std::string& key) {
      walk(item, name.empty() ? key : name + "." + key, level + 1);
    };
    if (value.kind == Kind::kDict) {
      for (size_t i = 0; i + 1 < value.items.size(); i += 2) {
        child(*value.items[i + 1], key_of(*value.items[i]));
      }
    } else if (value.kind == Kind::kList || value.kind == Kind::kTuple) {
      for (size_t i = 0; i < value.items.size(); ++i) child(*value.items[i], std::to_string(i));
    } else if (value.kind == Kind::kTensor) {
      tensors.emplace_back(name, &value);
    } else {
      others.push_back(name);
    }
  }
  std::vector<std::pair<std::string, const PickleValue*>> tensors;
  std::vector<std::string> others;

 private:
  std::string key_of(const PickleValue& key) const {
    if (key.kind == Kind::kText) return key.text;
    if (key.kind == Kind::kInt || key.kind == Kind::kBool) return std::to_string(key.integer);
    TS_THROW(UnsupportedError, "torch file", "'", path_,
             "': a dict has a key that is neither a text nor an integer");
  }
  const std::string& path_;
  size_t visited_ = 0;
};

}  // namespace

TorchFile::TorchFile(const std::string& path)
    : path_(path), file_(std::make_shared<MappedFile>(path, FileAccess::kCopyOnWrite)) {
  const std::string_view text = file_->text();
  TS_CHECK_AS(UnsupportedError,
              text.starts_with("PK") || !(text.starts_with("\x80\x02") || text.starts_with("\x80")),
              "torch file", "'", path,
              "' is in the format of torch before 1.6; load it with torch and save it again");
  std::string_view structure;
  std::string prefix;
  const std::vector<ZipEntry> zip = read_zip_entries(file_->bytes(), path);
  for (const ZipEntry& entry : zip) {
    if (!entry.name.ends_with("/data.pkl")) continue;
    TS_CHECK_AS(FormatError, structure.data() == nullptr, "torch file", "'", path,
                "' has two structures");
    prefix = entry.name.substr(0, entry.name.size() - 8);
    structure = text.substr(entry.begin, entry.end - entry.begin);
  }
  TS_CHECK_AS(FormatError, structure.data() != nullptr, "torch file", "'", path,
              "' is a zip without data.pkl; torch.save makes one");
  for (const ZipEntry& entry : zip) {
    if (entry.name == prefix + "byteorder") {
      TS_CHECK_AS(UnsupportedError, text.substr(entry.begin, entry.end - entry.begin) == "little",
                  "torch file", "'", path, "' was written on a big-endian machine");
    }
    if (entry.name.starts_with(prefix + "data/")) {
      storages_[entry.name.substr(prefix.size() + 5)] = {entry.begin, entry.end};
    }
  }
  const Pickle pickle = read_pickle(structure, path);
  TorchLeaves leaves(path_);
  leaves.walk(*pickle.root, "");
  others_ = std::move(leaves.others);
  for (const auto& [name, value] : leaves.tensors) {
    const auto check = [&, &name = name](bool holds, const auto&... parts) {
      TS_CHECK_AS(FormatError, holds, "torch file", "'", path_, "': the tensor '", name, "' ",
                  parts..., "; the file is damaged: get it again");
    };
    const PickleValue& storage = *value->items[0];
    const auto found = storages_.find(storage.text);
    check(found != storages_.end(), "lacks its elements, data/", storage.text);
    const auto bytes = static_cast<int64_t>(found->second.second - found->second.first);
    const int64_t size = size_of(*value->dtype);
    const int64_t stored = storage.dtype ? size_of(*storage.dtype) : 1;
    check(storage.integer <= bytes / stored && storage.integer * stored == bytes, "has ", bytes,
          " bytes for a storage of ", storage.integer, " elements");
    const int64_t held = bytes / size;
    const Shape shape = value->sizes(), strides = value->strides();
    const bool is_empty = std::ranges::find(shape, 0) != shape.end();
    // The last element's place and their number, in steps that cannot overflow unseen.
    int64_t last = value->integer, count = 1;
    for (int d = 0; d < shape.size() && !is_empty; ++d) {
      int64_t step = 0;
      check(!__builtin_mul_overflow(shape[d] - 1, strides[d], &step) &&
                !__builtin_add_overflow(last, step, &last),
            "reaches beyond its storage");
      check(!__builtin_mul_overflow(count, shape[d], &count) && count <= kMostElements,
            "has more elements than any memory");
    }
    check(is_empty || last < held, "reaches beyond its storage: element ", last, " of ", held);
    check(positions_.emplace(name, entries_.size()).second, "is there twice");
    entries_.push_back({name, *value->dtype, shape, strides, value->integer, storage.text});
  }
}

const TorchFileEntry& TorchFile::entry(std::string_view name) const {
  const auto found = positions_.find(name);
  TS_CHECK(found != positions_.end(), "torch file", "'", path_, "' has no tensor '", name, "'");
  return entries_[found->second];
}

Tensor TorchFile::view(std::string_view name) const {
  const TorchFileEntry& found = entry(name);
  const auto [begin, end] = storages_.at(found.storage);
  const int64_t size = size_of(found.dtype), held = static_cast<int64_t>(end - begin) / size;
  if (numel_of(found.shape) == 0) return raw::empty(found.shape, found.dtype);
  // Pages are private and writable (FileAccess::kCopyOnWrite).
  char* data = const_cast<char*>(file_->text().data()) + begin;
  if (found.dtype == kBool) {  // reading another value as bool would be undefined behaviour
    for (int64_t i = 0; i < held; ++i) {
      TS_CHECK_AS(FormatError, static_cast<unsigned char>(data[i]) <= 1, "torch file", "'", path_,
                  "': the tensor '", name,
                  "' has a boolean that is neither 0 nor 1; the file is "
                  "damaged: get it again");
    }
  }
  Tensor whole;
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(size) == 0) {
    whole = raw::from_blob(data, {held}, found.dtype, [file = file_] {});
  } else {
    whole = raw::empty({held}, found.dtype);
    std::memcpy(whole.data(), data, static_cast<size_t>(held * size));
  }
  return raw::as_strided(whole, found.shape, found.strides, found.offset);
}

Tensor TorchFile::load(std::string_view name) const {
  const Tensor mapped = view(name);
  const Tensor copy = raw::empty(mapped.shape(), mapped.dtype());
  kernels::copy_into(copy, mapped);
  return copy;
}

std::map<std::string, Tensor> load_torch_file(const std::string& path) {
  const TorchFile file(path);
  std::map<std::string, Tensor> tensors;
  for (const TorchFileEntry& entry : file.entries()) tensors[entry.name] = file.load(entry.name);
  return tensors;
}

}  // namespace tessera
