#include <tessera/core/state/torch_file.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <optional>
#include <set>

#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/core/io/zip_reader.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/state/pickle_reader.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera {
namespace {

using Kind = PickleValue::Kind;
constexpr int kMostLevels = 64;
constexpr int64_t kMostElements = int64_t{1} << 48;  // a stride of 0 makes many of one
constexpr size_t kMostLeaves = size_t{1} << 20;      // shared lists make exponentially many
// All tensors of a file together, each of them once, need at most this and eight times its size.
constexpr int64_t kSpareBytes = int64_t{64} << 20;

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
    const bool is_object = value.kind == Kind::kObject;
    if (value.kind == Kind::kDict || (is_object && !value.items.empty())) {
      for (size_t i = 0; i + 1 < value.items.size(); i += 2) {
        if (const auto key = key_of(*value.items[i])) {
          child(*value.items[i + 1], *key);
        } else {
          others.push_back(name.empty() ? "?" : name + ".?");
          note(others.back(), "has a key that is neither a text nor a number");
        }
      }
    } else if (value.kind == Kind::kList || value.kind == Kind::kTuple) {
      for (size_t i = 0; i < value.items.size(); ++i) child(*value.items[i], std::to_string(i));
    } else if (value.kind == Kind::kTensor) {
      tensors.emplace_back(name, &value);
    } else if (is_object && value.integer == 1) {
      refused.emplace(name, value.text);
      note(name, "is a tensor of " + value.text);
    } else {
      others.push_back(name);
      if (is_object || value.kind == Kind::kGlobal) note(name, "is made by " + value.text);
    }
  }
  std::vector<std::pair<std::string, const PickleValue*>> tensors;
  std::vector<std::string> others;
  std::map<std::string, std::string, std::less<>> refused;
  std::string first;  // of what cannot be read, and why

 private:
  static std::optional<std::string> key_of(const PickleValue& key) {
    if (key.kind == Kind::kText) return key.text;
    if (key.kind == Kind::kInt || key.kind == Kind::kBool) return std::to_string(key.integer);
    return {};
  }
  void note(const std::string& name, const std::string& what) {
    if (first.empty()) first = shown(name) + " " + what;
  }
  const std::string& path_;
  size_t visited_ = 0;
};

// Where the parts of a file of torch before 1.6 begin: torch/serialization.py, _legacy_load.
constexpr std::string_view kLegacyMagic = "\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19";
constexpr std::pair<std::string_view, int64_t> kForeignStorages[] = {
    {"torch.CharStorage", 1},         {"torch.ShortStorage", 2},
    {"torch.ComplexFloatStorage", 8}, {"torch.ComplexDoubleStorage", 16},
    {"torch.QInt8Storage", 1},        {"torch.QUInt8Storage", 1},
    {"torch.QInt32Storage", 4},       {"torch.QUInt4x2Storage", 1}};

// Bytes of an element of a storage; 0 where nobody knows.
int64_t element_bytes(const PickleValue& storage) {
  if (storage.dtype) return size_of(*storage.dtype);
  if (storage.items.empty()) return 1;  // untyped
  for (const auto& [name, bytes] : kForeignStorages) {
    if (storage.items[0]->text == name) return bytes;
  }
  return 0;
}

bool is_legacy(std::string_view text) {
  return text.starts_with("\x80") && text.substr(0, 40).find(kLegacyMagic) != text.npos;
}

}  // namespace

TorchFile::TorchFile(const std::string& path)
    : path_(path), file_(std::make_shared<MappedFile>(path, FileAccess::kCopyOnWrite)) {
  const std::string_view text = file_->text();
  if (is_legacy(text)) {
    read_legacy();
    return;
  }
  TS_CHECK_AS(UnsupportedError, text.size() < 262 || text.substr(257, 5) != "ustar", "torch file",
              "'", path,
              "' is a tar, as torch before 0.2 wrote; load it with torch and save it again");
  TS_CHECK_AS(UnsupportedError, !text.starts_with("\x80"), "torch file", "'", path,
              "' is a pickle that torch.save did not write; save its tensors with torch.save");
  read_zip();
}

void TorchFile::read_zip() {
  const std::string_view text = file_->text();
  std::string_view structure;
  std::string prefix;
  bool is_old_archive = false;
  const std::vector<ZipEntry> zip = read_zip_entries(file_->bytes(), path_);
  const auto check_stored = [&](const ZipEntry& entry) {
    TS_CHECK_AS(
        UnsupportedError, !entry.compressed, "torch file", "'", path_, "': the entry '", entry.name,
        "' is compressed, which torch.save never does; unpack the file and look what it is");
  };
  for (const ZipEntry& entry : zip) {
    is_old_archive |= entry.name.ends_with("/model.json");
    if (!entry.name.ends_with("/data.pkl")) continue;
    TS_CHECK_AS(FormatError, structure.data() == nullptr, "torch file", "'", path_,
                "' has two structures");
    check_stored(entry);
    prefix = entry.name.substr(0, entry.name.size() - 8);
    structure = text.substr(entry.begin, entry.end - entry.begin);
  }
  TS_CHECK_AS(UnsupportedError, structure.data() != nullptr || !is_old_archive, "torch file", "'",
              path_,
              "' is an archive of libtorch before 1.5; load it with a later one and save it again");
  TS_CHECK_AS(FormatError, structure.data() != nullptr, "torch file", "'", path_,
              "' is a zip without data.pkl; torch.save makes one");
  for (const ZipEntry& entry : zip) {
    if (entry.name == prefix + "byteorder") {
      TS_CHECK_AS(UnsupportedError, text.substr(entry.begin, entry.end - entry.begin) == "little",
                  "torch file", "'", path_, "' was written on a big-endian machine");
    }
    if (entry.name.starts_with(prefix + "data/")) {
      check_stored(entry);
      storages_[entry.name.substr(prefix.size() + 5)] = {entry.begin, entry.end};
    }
  }
  take_structure(*read_pickle(structure, path_).root);
}

// Pickles of a magic number, the protocol's version, the machine, the structure and the storages'
// keys; then each storage, as its number of elements and its bytes.
void TorchFile::read_legacy() {
  const std::string_view text = file_->text();
  std::string_view rest = text;
  const auto check = [&](bool holds, const auto&... parts) {
    TS_CHECK_AS(FormatError, holds, "torch file", "'", path_, "' ", parts...,
                "; the file is damaged: get it again");
  };
  for (int i = 0; i < 2; ++i) take_pickle(rest, path_);
  const Pickle machine = take_pickle(rest, path_);
  const auto& fields = machine.root->items;
  for (size_t i = 0; machine.root->kind == Kind::kDict && i + 1 < fields.size(); i += 2) {
    if (fields[i]->text != "little_endian") continue;
    TS_CHECK_AS(UnsupportedError, fields[i + 1]->integer == 1, "torch file", "'", path_,
                "' was written on a big-endian machine");
  }
  const Pickle structure = take_pickle(rest, path_);
  const Pickle keys = take_pickle(rest, path_);
  check(keys.root->kind == Kind::kList, "has no list of its storages");
  std::map<std::string_view, const PickleValue*> known;
  for (const PickleValue& value : structure.values) {
    if (value.kind == Kind::kStorage) known.emplace(value.text, &value);
  }
  for (const PickleValue* key : keys.root->items) {
    const auto storage = known.find(key->text);
    check(key->kind == Kind::kText && storage != known.end(), "has a storage that is of no tensor");
    const int64_t size = element_bytes(*storage->second), count = storage->second->integer;
    TS_CHECK_AS(UnsupportedError, size > 0, "torch file", "'", path_, "' has a storage of ",
                storage->second->items[0]->text, ", behind which nothing is found");
    uint64_t stored = 0;
    check(rest.size() >= sizeof stored, "ends before its storages do");
    std::memcpy(&stored, rest.data(), sizeof stored);
    rest.remove_prefix(sizeof stored);
    check(stored == static_cast<uint64_t>(count) &&
              stored <= rest.size() / static_cast<uint64_t>(size),
          "has a storage of ", stored, " elements that does not fit");
    const uint64_t begin = text.size() - rest.size(), bytes = stored * static_cast<uint64_t>(size);
    check(storages_.emplace(key->text, std::pair(begin, begin + bytes)).second,
          "has a storage twice");
    rest.remove_prefix(bytes);
  }
  check(rest.empty(), "goes on behind its end");
  take_structure(*structure.root);
}

void TorchFile::take_structure(const PickleValue& root) {
  TorchLeaves leaves(path_);
  leaves.walk(root, "");
  others_ = std::move(leaves.others);
  refused_ = std::move(leaves.refused);
  std::set<std::string> distinct;
  int64_t budget = kSpareBytes + 8 * static_cast<int64_t>(file_->text().size());
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
    check(!positions_.contains(name) && !refused_.contains(name), "is there twice");
    TorchFileEntry entry{name, *value->dtype, shape, strides, value->integer, storage.text};
    const std::string geometry =
        detail::concatenate(storage.text, ' ', entry.dtype, shape, strides, ' ', entry.offset);
    if (!is_empty && distinct.insert(geometry).second) {  // a tied one costs nothing more
      if (count * size > budget) {
        distinct.erase(geometry);
        refused_.emplace(name, detail::concatenate(count * size, " bytes that repeat ", bytes));
        continue;
      }
      budget -= count * size;
    }
    positions_.emplace(name, entries_.size());
    entries_.push_back(std::move(entry));
  }
  TS_CHECK_AS(UnsupportedError, !entries_.empty() || leaves.first.empty(), "torch file", "'", path_,
              "' has no tensor that can be read: ", leaves.first,
              ", and only tensors, dicts, lists, tuples, numbers and texts are read; save the "
              "state_dict() alone");
}

const TorchFileEntry& TorchFile::entry(std::string_view name) const {
  const auto found = positions_.find(name);
  const auto refused = refused_.find(name);
  TS_CHECK_AS(UnsupportedError, refused == refused_.end(), "torch file", "'", path_,
              "': the tensor ", shown(name), " is of ", refused->second,
              ", which is not read here; convert it with torch and save it again");
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
  for (const auto& [name, what] : file.refused()) {
    std::fprintf(stderr, "tessera: '%s': the tensor %s is of %s and left out\n", path.c_str(),
                 shown(name).c_str(), what.c_str());
  }
  return tensors;
}

}  // namespace tessera
