#include <tessera/core/state/safetensors.h>

#include <algorithm>
#include <bit>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include <tessera/core/factory/factory.h>
#include <tessera/core/io/atomic_file.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/core/tensor/element_guard.h>

namespace tessera {

std::string shown(std::string_view name) {
  std::string text = "'";
  for (const char c : name.substr(0, 100)) text += static_cast<unsigned char>(c) < 32 ? '?' : c;
  return text + (name.size() > 100 ? "...'" : "'");
}

namespace {

static_assert(std::endian::native == std::endian::little, "elements are copied as they are");

constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the reference implementation
constexpr std::string_view kMetadataKey = "__metadata__";

struct FileDType {
  std::string_view name;
  std::optional<DType> dtype;
  uint64_t bytes;  // 0: less than a byte an element, the size is not checked
};
constexpr FileDType kFileDTypes[] = {
    {"F64", kF64, 8},
    {"F32", kF32, 4},
    {"F16", kF16, 2},
    {"BF16", kBF16, 2},
    {"F8_E4M3", kF8E4M3, 1},
    {"F8_E5M2", kF8E5M2, 1},
    {"I64", kI64, 8},
    {"I32", kI32, 4},
    {"U8", kU8, 1},
    {"BOOL", kBool, 1},
    {"I16", std::nullopt, 2},
    {"I8", std::nullopt, 1},
    {"U16", std::nullopt, 2},
    {"U32", std::nullopt, 4},
    {"U64", std::nullopt, 8},
    {"C64", std::nullopt, 8},
    {"F8_E8M0", std::nullopt, 1},
    {"F8_E5M2FNUZ", std::nullopt, 1},
    {"F8_E4M3FNUZ", std::nullopt, 1},
    {"F6_E2M3", std::nullopt, 0},
    {"F6_E3M2", std::nullopt, 0},
    {"F4", std::nullopt, 0},
};

const FileDType* file_dtype(std::string_view name) {
  for (const FileDType& candidate : kFileDTypes) {
    if (candidate.name == name) return &candidate;
  }
  return nullptr;
}
std::string_view file_name_of(DType dtype) {
  for (const FileDType& candidate : kFileDTypes) {
    if (candidate.dtype == dtype) return candidate.name;
  }
  TS_THROW(UnsupportedError, "save_safetensors", "the format has no name for ", dtype);
}

template <class... Args>
[[noreturn]] void refuse(const std::string& path, const Args&... args) {
  TS_THROW(FormatError, "safetensors", "'", path, "': ", args...);
}

// Builds the entries from parser events, so that a hostile header meets the checks while it is
// read: nothing nests deeper than the format does, no key comes twice, no tree is held in memory.
class HeaderReader {
 public:
  using number_integer_t = int64_t;
  using number_unsigned_t = uint64_t;
  using number_float_t = double;
  using string_t = std::string;
  using binary_t = nlohmann::json::binary_t;

  HeaderReader(const std::string& path, std::vector<SafeTensorsEntry>& entries,
               std::map<std::string, std::string>& metadata)
      : path_(path), entries_(entries), metadata_(metadata) {}

  bool null() {
    if (place_ != Place::kTopValue || key_ != kMetadataKey) unexpected("null");
    place_ = Place::kTop;  // none, as serde reads it
    return true;
  }
  bool boolean(bool) { unexpected("a boolean"); }
  bool number_integer(int64_t value) { unexpected(std::to_string(value)); }
  bool number_float(double, const std::string& text) { unexpected("the number " + text); }
  bool binary(binary_t&) { unexpected("binary data"); }

  bool number_unsigned(uint64_t value) {
    if (place_ == Place::kShape) {
      if (value > static_cast<uint64_t>(INT64_MAX)) unexpected(std::to_string(value));
      if (entry_.shape.size() == kMaxDims) {
        refuse(path_, where(), "a tensor has at most ", kMaxDims,
               " dimensions; this one has more.");
      }
      entry_.shape.push_back(static_cast<int64_t>(value));
    } else if (place_ == Place::kOffsets && offsets_ < 2) {
      (offsets_ == 0 ? entry_.begin : entry_.end) = value;
      ++offsets_;
    } else {
      unexpected(std::to_string(value));
    }
    return true;
  }

  bool string(std::string& value) {
    if (place_ == Place::kDType) {
      entry_.dtype_name = std::move(value);
      place_ = Place::kEntry;
    } else if (place_ == Place::kMetadataValue) {
      metadata_[key_] = std::move(value);
      place_ = Place::kMetadata;
    } else {
      unexpected("the string " + shown(value));
    }
    return true;
  }

  bool start_object(size_t) {
    if (place_ == Place::kStart) {
      place_ = Place::kTop;
    } else if (place_ == Place::kTopValue && key_ == kMetadataKey) {
      place_ = Place::kMetadata;
    } else if (place_ == Place::kTopValue) {
      place_ = Place::kEntry;
      entry_ = {};
      entry_.name = key_;
      offsets_ = 0;
      seen_dtype_ = seen_shape_ = seen_offsets_ = false;
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(std::string& key) {
    if (place_ == Place::kTop) {
      if (!names_.emplace(key, 0).second) {
        refuse(path_, "every name stands once in the header; ", shown(key), kTwice);
      }
      key_ = std::move(key);
      place_ = Place::kTopValue;
    } else if (place_ == Place::kMetadata) {
      if (metadata_.contains(key))
        refuse(path_, "every metadata key stands once; ", shown(key), kTwice);
      key_ = std::move(key);
      place_ = Place::kMetadataValue;
    } else if (key == "dtype" || key == "shape" || key == "data_offsets") {
      bool& seen = key == "dtype" ? seen_dtype_ : key == "shape" ? seen_shape_ : seen_offsets_;
      if (seen) refuse(path_, where(), "every field stands once; '", key, "'", kTwice);
      seen = true;
      place_ = key == "dtype"   ? Place::kDType
               : key == "shape" ? Place::kShapeValue
                                : Place::kOffsetsValue;
    } else {
      refuse(path_, where(), "an entry has the fields dtype, shape and data_offsets; got ",
             shown(key), "; write the file again with a current safetensors library.");
    }
    return true;
  }

  bool end_object() {
    if (place_ == Place::kEntry) {
      if (!seen_dtype_ || !seen_shape_ || !seen_offsets_) {
        refuse(path_, where(), "an entry has the fields dtype, shape and data_offsets; '",
               !seen_dtype_   ? "dtype"
               : !seen_shape_ ? "shape"
                              : "data_offsets",
               "' is missing; write the file again.");
      }
      entries_.push_back(std::move(entry_));
      place_ = Place::kTop;
    } else if (place_ == Place::kMetadata) {
      place_ = Place::kTop;
    } else {
      place_ = Place::kEnd;
    }
    return true;
  }

  bool start_array(size_t) {
    if (place_ == Place::kShapeValue) {
      place_ = Place::kShape;
    } else if (place_ == Place::kOffsetsValue) {
      place_ = Place::kOffsets;
    } else {
      unexpected("an array");
    }
    return true;
  }

  bool end_array() {
    if (place_ == Place::kOffsets && offsets_ != 2) {
      refuse(path_, where(), "data_offsets are two numbers, begin and end; got ", offsets_,
             "; write the file again.");
    }
    place_ = Place::kEntry;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) {
    refuse(path_, "the header is not valid JSON at byte ", position + 7,
           "; the file is damaged or no safetensors file: get or write it again.");
  }

 private:
  enum class Place {
    kStart,
    kTop,            // between entries
    kTopValue,       // after the name of an entry
    kEntry,          // between the fields of an entry
    kDType,          // after "dtype"
    kShapeValue,     // after "shape"
    kShape,          // between its numbers
    kOffsetsValue,   // after "data_offsets"
    kOffsets,        // between its numbers
    kMetadata,       // between pairs
    kMetadataValue,  // after a key
    kEnd,
  };
  static constexpr const char* kTwice =
      " is there twice; the file is damaged or hostile: get it again.";

  std::string where() const { return "tensor " + shown(entry_.name) + ": "; }

  [[noreturn]] void unexpected(const std::string& given) {
    const char* expected = nullptr;
    switch (place_) {
      case Place::kStart:
        expected = "the header is an object";
        break;
      case Place::kTopValue:
        expected = "an entry is an object";
        break;
      case Place::kDType:
        expected = "dtype is a string";
        break;
      case Place::kShapeValue:
      case Place::kShape:
        expected = "shape is a list of sizes of at least 0";
        break;
      case Place::kOffsetsValue:
      case Place::kOffsets:
        expected = "data_offsets are two numbers of at least 0";
        break;
      case Place::kMetadataValue:
        expected = "a metadata value is a string";
        break;
      default:
        expected = "an object is expected";
        break;
    }
    const bool in_entry = place_ >= Place::kEntry && place_ <= Place::kOffsets;
    refuse(path_,
           in_entry                  ? where()
           : place_ == Place::kStart ? ""
                                     : shown(key_) + ": ",
           expected, "; got ", given, "; the file is damaged: get or write it again.");
  }

  const std::string& path_;
  std::vector<SafeTensorsEntry>& entries_;
  std::map<std::string, std::string>& metadata_;
  std::map<std::string, int> names_;
  Place place_ = Place::kStart;
  std::string key_;
  SafeTensorsEntry entry_;
  int offsets_ = 0;
  bool seen_dtype_ = false, seen_shape_ = false, seen_offsets_ = false;
};

// Shape, dtype and byte range of one entry fit together.
void check_entry(const std::string& path, SafeTensorsEntry& entry, uint64_t data_bytes) {
  const FileDType* type = file_dtype(entry.dtype_name);
  if (type == nullptr) {
    refuse(path, "tensor ", shown(entry.name), ": dtype ", shown(entry.dtype_name),
           " is none of the format; the file is damaged or newer than this reader.");
  }
  entry.dtype = type->dtype;
  if (entry.begin > entry.end || entry.end > data_bytes) {
    refuse(path, "tensor ", shown(entry.name), ": data_offsets [", entry.begin, ", ", entry.end,
           "] must lie within the ", data_bytes,
           " bytes of data; the file is truncated or damaged: get it again.");
  }
  if (type->bytes == 0) return;
  uint64_t bytes = type->bytes;
  bool overflow = false, empty = false;
  for (int64_t size : entry.shape) {
    if (size == 0) empty = true;
    const uint64_t factor = size == 0 ? 1 : static_cast<uint64_t>(size);
    overflow |= __builtin_mul_overflow(bytes, factor, &bytes) || bytes > INT64_MAX;
  }
  if (empty) bytes = 0;
  if (overflow || bytes != entry.end - entry.begin) {
    refuse(path, "tensor ", shown(entry.name), ": ", entry.dtype_name, entry.shape,
           " does not fill its ", entry.end - entry.begin,
           " bytes; the header is damaged: get the file again.");
  }
}

}  // namespace

SafeTensorsFile::SafeTensorsFile(const std::string& path)
    : path_(path), file_(std::make_shared<MappedFile>(path, FileAccess::kCopyOnWrite)) {
  const std::string_view bytes = file_->text();
  if (bytes.size() < 8) {
    refuse(path, "a file has at least 8 bytes; this one has ", bytes.size(),
           "; it is truncated or no safetensors file: get it again.");
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), 8);
  if (header_bytes > kMaxHeaderBytes) {
    refuse(path, "the header has at most ", kMaxHeaderBytes, " bytes; the file says ", header_bytes,
           "; it is damaged or no safetensors file.");
  }
  if (header_bytes > bytes.size() - 8) {
    refuse(path, "the header of ", header_bytes, " bytes must lie within the file of ",
           bytes.size(), "; the file is truncated: get it again.");
  }
  const std::string_view header = bytes.substr(8, header_bytes);
  if (header.empty() || header.front() != '{') {
    refuse(path, "the header begins with '{'; the file is damaged or no safetensors file.");
  }
  HeaderReader reader(path, entries_, metadata_);
  nlohmann::json::sax_parse(header.begin(), header.end(), &reader);

  data_begin_ = 8 + header_bytes;
  const uint64_t data_bytes = bytes.size() - data_begin_;
  for (SafeTensorsEntry& entry : entries_) check_entry(path, entry, data_bytes);
  std::sort(entries_.begin(), entries_.end(),
            [](const SafeTensorsEntry& a, const SafeTensorsEntry& b) {
              return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
            });
  uint64_t position = 0;
  for (const SafeTensorsEntry& entry : entries_) {
    if (entry.begin != position) {
      refuse(path, "tensor ", shown(entry.name),
             ": tensors follow each other without overlap or hole; "
             "this one begins at ",
             entry.begin, " and the one before ends at ", position,
             "; the header is damaged or hostile: get the file again.");
    }
    position = entry.end;
  }
  if (position != data_bytes) {
    refuse(path, "the tensors fill the file; they need ", position, " bytes of data and it has ",
           data_bytes, "; the file is damaged: get it again.");
  }
  for (size_t i = 0; i < entries_.size(); ++i) positions_.emplace(entries_[i].name, i);
}

const SafeTensorsEntry* SafeTensorsFile::find(std::string_view name) const {
  const auto found = positions_.find(name);
  return found == positions_.end() ? nullptr : &entries_[found->second];
}

const SafeTensorsEntry& SafeTensorsFile::entry(std::string_view name) const {
  const SafeTensorsEntry* found = find(name);
  TS_CHECK(found != nullptr, "safetensors", "'", path_, "': there is no tensor ", shown(name),
           " among its ", entries_.size(), "; check the name.");
  return *found;
}

std::vector<const SafeTensorsEntry*> SafeTensorsFile::readable_entries() const {
  std::vector<const SafeTensorsEntry*> readable;
  for (const SafeTensorsEntry& entry : entries_) {
    if (entry.dtype) {
      readable.push_back(&entry);
    } else {
      std::fprintf(
          stderr,
          "tessera: '%s': the tensor %s is %s, which tessera does not have: it is left out\n",
          path_.c_str(), shown(entry.name).c_str(), entry.dtype_name.c_str());
    }
  }
  return readable;
}

Tensor SafeTensorsFile::view(std::string_view name) const {
  const SafeTensorsEntry& found = entry(name);
  TS_CHECK_AS(UnsupportedError, found.dtype.has_value(), "safetensors", "'", path_, "': tensor ",
              shown(name), " has dtype ", found.dtype_name,
              ", which tessera does not have; convert it where the file was written.");
  // Pages are private and writable (FileAccess::kCopyOnWrite).
  char* data = const_cast<char*>(file_->text().data()) + data_begin_ + found.begin;
  const uint64_t bytes = found.end - found.begin;
  if (bytes == 0) return raw::empty(found.shape, *found.dtype);
  if (found.dtype == kBool) {  // reading another value as bool would be undefined behaviour
    for (uint64_t i = 0; i < bytes; ++i) {
      if (static_cast<unsigned char>(data[i]) > 1) {
        refuse(path_, "tensor ", shown(name), ": a BOOL element is 0 or 1; element ", i, " is ",
               static_cast<int>(static_cast<unsigned char>(data[i])),
               "; the file is damaged: get it again.");
      }
    }
  }
  if (reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(size_of(*found.dtype)) == 0) {
    return raw::from_blob(data, found.shape, *found.dtype, [file = file_] {});
  }
  Tensor copy = raw::empty(found.shape, *found.dtype);
  std::memcpy(copy.data(), data, bytes);
  return copy;
}

Tensor SafeTensorsFile::load(std::string_view name) const {
  const Tensor mapped = view(name);
  if (!mapped.storage()->is_foreign()) return mapped;
  Tensor copy = raw::empty(mapped.shape(), mapped.dtype());
  std::memcpy(copy.data(), mapped.data(), static_cast<size_t>(mapped.nbytes()));
  return copy;
}

std::map<std::string, Tensor> load_safetensors(const std::string& path) {
  const SafeTensorsFile file(path);
  std::map<std::string, Tensor> tensors;
  for (const SafeTensorsEntry* entry : file.readable_entries()) {
    tensors[entry->name] = file.load(entry->name);
  }
  return tensors;
}

// ---- Writing -----------------------------------------------------------------------------------

namespace {

uint64_t bytes_of(const SafeTensorsWriter::Entry& entry) {
  return static_cast<uint64_t>(checked_numel(entry.shape, "save_safetensors") *
                               size_of(entry.dtype));
}

// Length and header. Text by hand: the order of the entries is that of the elements, and an ordered
// JSON object would search all earlier names for each new one.
std::string header_of(const std::string& path, const std::vector<SafeTensorsWriter::Entry>& entries,
                      const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  uint64_t position = 0;
  try {
    if (!metadata.empty()) {
      text += nlohmann::json(kMetadataKey).dump() + ":" + nlohmann::json(metadata).dump() + ",";
    }
    for (const SafeTensorsWriter::Entry& entry : entries) {
      const uint64_t end = position + bytes_of(entry);
      const nlohmann::json fields = {{"dtype", file_name_of(entry.dtype)},
                                     {"shape", entry.shape.to_vector()},
                                     {"data_offsets", {position, end}}};
      text += nlohmann::json(entry.name).dump() + ":" + fields.dump() + ",";
      position = end;
    }
  } catch (const nlohmann::json::exception&) {
    TS_THROW(ValueError, "save_safetensors", "names and metadata must be valid UTF-8; '", path,
             "' was not written; rename the tensors");
  }
  if (text.back() == ',') text.pop_back();
  text += '}';
  text.resize((text.size() + 7) / 8 * 8, ' ');
  TS_CHECK(text.size() <= kMaxHeaderBytes, "save_safetensors", "the header has at most ",
           kMaxHeaderBytes, " bytes; names and metadata need ", text.size(),
           "; write several files");
  const uint64_t bytes = text.size();
  return std::string(reinterpret_cast<const char*>(&bytes), 8) + text;
}

}  // namespace

SafeTensorsWriter::SafeTensorsWriter(const std::string& path, std::vector<Entry> entries,
                                     const std::map<std::string, std::string>& metadata)
    : order_(std::move(entries)) {
  std::sort(order_.begin(), order_.end(), [](const Entry& a, const Entry& b) {
    const int64_t a_size = size_of(a.dtype), b_size = size_of(b.dtype);
    return a_size != b_size ? a_size > b_size : a.name < b.name;
  });
  std::map<std::string_view, int> names;
  for (const Entry& entry : order_) {
    TS_CHECK(entry.name != kMetadataKey, "save_safetensors", "'", kMetadataKey,
             "' is reserved by the format; name the tensor differently");
    TS_CHECK(names.emplace(entry.name, 0).second, "save_safetensors", "every name stands once; ",
             shown(entry.name), " was given twice");
  }
  const std::string header = header_of(path, order_, metadata);
  file_ = std::make_unique<AtomicFile>(path);
  file_->write(header);
  skip_complete();
}
SafeTensorsWriter::~SafeTensorsWriter() = default;

void SafeTensorsWriter::skip_complete() {
  while (current_ < order_.size() && written_ == bytes_of(order_[current_])) {
    ++current_;
    written_ = 0;
  }
}

void SafeTensorsWriter::write(std::string_view name, const void* data, size_t bytes) {
  if (bytes == 0) return;
  TS_CHECK(current_ < order_.size() && order_[current_].name == name, "save_safetensors",
           "tensors are written in order; the next is ",
           current_ < order_.size() ? shown(order_[current_].name) : "none", ", given ",
           shown(name), "; follow order()");
  const uint64_t left = bytes_of(order_[current_]) - written_;
  TS_CHECK(bytes <= left, "save_safetensors", shown(name), " has ", left, " bytes left; given ",
           bytes, "; give its elements once");
  file_->write(data, bytes);
  written_ += bytes;
  skip_complete();
}

void SafeTensorsWriter::commit() {
  TS_CHECK(current_ == order_.size(), "save_safetensors", "elements of ",
           shown(order_[current_].name), " are missing; write all before commit()");
  file_->commit();
}

namespace {

// Writes the elements in row-major order, whatever the strides.
void write_elements(SafeTensorsWriter& file, const std::string& name, const Tensor& x) {
  if (x.numel() == 0) return;
  if (x.is_contiguous()) return file.write(name, x.data(), static_cast<size_t>(x.nbytes()));
  const size_t element = static_cast<size_t>(size_of(x.dtype()));
  const char* base = static_cast<const char*>(x.data());
  const int last = x.dim() - 1;
  Shape index = Shape::filled(x.dim(), 0);
  std::string row(static_cast<size_t>(x.shape()[last]) * element, '\0');
  for (;;) {
    int64_t offset = 0;
    for (int d = 0; d < last; ++d) offset += index[d] * x.strides()[d];
    for (int64_t i = 0; i < x.shape()[last]; ++i) {
      std::memcpy(row.data() + static_cast<size_t>(i) * element,
                  base + (offset + i * x.strides()[last]) * static_cast<int64_t>(element), element);
    }
    file.write(name, row.data(), row.size());
    int d = last - 1;
    for (; d >= 0 && ++index[d] == x.shape()[d]; --d) index[d] = 0;
    if (d < 0) return;
  }
}

}  // namespace

void save_safetensors(const std::string& path, const std::map<std::string, Tensor>& tensors,
                      const std::map<std::string, std::string>& metadata) {
  std::vector<SafeTensorsWriter::Entry> entries;
  for (const auto& [name, tensor] : tensors) {
    TS_CHECK(tensor.defined(), "save_safetensors", "tensor ", shown(name),
             " is undefined; leave it out");
    TS_CHECK_AS(UnsupportedError, element_guard(tensor) == nullptr, "save_safetensors",
                "writes whole tensors; ", shown(name), " is ", tensor,
                "; take its full_tensor() first, or save a checkpoint of parts");
    TS_CHECK_DEVICE(tensor.device().is_cpu(), "save_safetensors", "expects tensors on the cpu; ",
                    shown(name), " is ", tensor, "; move it there first");
    entries.push_back({name, tensor.dtype(), tensor.shape()});
  }
  SafeTensorsWriter writer(path, std::move(entries), metadata);
  for (const auto& entry : writer.order()) {
    write_elements(writer, entry.name, tensors.at(entry.name));
  }
  writer.commit();
}

}  // namespace tessera
