// safetensors: named tensors in one file, the format of the HuggingFace hub.
//
//     SafeTensorsFile file("model.safetensors");
//     Tensor weight = file.view("wte.weight");            // bytes stay in the mapped file
//     std::map<std::string, Tensor> all = load_safetensors("model.safetensors");
//     save_safetensors("copy.safetensors", all, {{"format", "pt"}});
//
// Layout (https://github.com/huggingface/safetensors): a little-endian u64, the length of the
// header; a JSON header {"NAME": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__":
// {string: string}}; the elements, row-major and little-endian, one tensor after the other.
//
// A file is checked completely when it is opened, before anything is allocated: the header has at
// most 100 MB and no duplicate names, shapes match their bytes, and offsets cover the data without
// overlap or gap. Otherwise it throws FormatError, which names file, tensor and remedy; a file that
// cannot be read or written throws IoError.
// cannot be read or written is an IoError.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/tensor/tensor.h>

namespace tessera {

class AtomicFile;
class MappedFile;

struct SafeTensorsEntry {
  std::string name;
  std::string dtype_name;      // as the file spells it: "F32", "BF16", "I64", "F8_E4M3"
  std::optional<DType> dtype;  // absent for types that tessera lacks ("U16", "C64")
  Shape shape;
  uint64_t begin = 0;  // bytes [begin, end) of the data section
  uint64_t end = 0;
};

class SafeTensorsFile {
 public:
  // Maps the file and checks its header. Reads no elements.
  explicit SafeTensorsFile(const std::string& path);

  // Sorted by the position of their elements in the file.
  const std::vector<SafeTensorsEntry>& entries() const { return entries_; }
  // The entries whose dtype tessera has; each of the others gives a warning on stderr.
  std::vector<const SafeTensorsEntry*> readable_entries() const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  bool contains(std::string_view name) const { return find(name) != nullptr; }
  // Throws ValueError for a name that is not in the file.
  const SafeTensorsEntry& entry(std::string_view name) const;

  // A tensor over the mapped bytes, which it keeps alive; no elements are read. Writes do not reach
  // the file (copy on write). A tensor that is misaligned in the file is copied. Throws
  // UnsupportedError if tessera lacks the dtype.
  Tensor view(std::string_view name) const;
  // A tensor with bytes of its own.
  Tensor load(std::string_view name) const;

  const std::string& path() const { return path_; }

 private:
  const SafeTensorsEntry* find(std::string_view name) const;

  std::string path_;
  std::shared_ptr<MappedFile> file_;
  size_t data_begin_ = 0;  // offset of the data section in the file
  std::vector<SafeTensorsEntry> entries_;
  std::map<std::string, size_t, std::less<>> positions_;
  std::map<std::string, std::string> metadata_;
};

// All tensors of a file whose dtype tessera has (readable_entries), with bytes of their own.
std::map<std::string, Tensor> load_safetensors(const std::string& path);

// Writes the file atomically (AtomicFile). Takes CPU tensors of any layout. Elements begin at a
// multiple of 8 bytes, wide dtypes first, then by name: the same tensors give the same bytes.
// Throws ValueError (undefined tensor, name that is not UTF-8), UnsupportedError (a DTensor),
// DeviceError, IoError.
void save_safetensors(const std::string& path, const std::map<std::string, Tensor>& tensors,
                      const std::map<std::string, std::string>& metadata = {});

// Writes a file tensor by tensor, with only one piece of one tensor in memory.
//
//     SafeTensorsWriter writer("merged.safetensors", {{"a", kF32, {2, 3}}, {"b", kI64, {}}});
//     for (const auto& entry : writer.order()) { ...; writer.write(entry.name, data, bytes); }
//     writer.commit();
class SafeTensorsWriter {
 public:
  struct Entry {
    std::string name;
    DType dtype;
    Shape shape;
  };
  // Throws ValueError for a name that is duplicate, reserved or not UTF-8, and IoError.
  SafeTensorsWriter(const std::string& path, std::vector<Entry> entries,
                    const std::map<std::string, std::string>& metadata = {});
  ~SafeTensorsWriter();
  SafeTensorsWriter(const SafeTensorsWriter&) = delete;
  SafeTensorsWriter& operator=(const SafeTensorsWriter&) = delete;

  // The order in which elements must come: wide dtypes first, then by name.
  const std::vector<Entry>& order() const { return order_; }
  // Appends elements of a tensor, row-major. ValueError for another tensor's turn or too many
  // bytes.
  void write(std::string_view name, const void* data, size_t bytes);
  // Makes the file visible. ValueError if elements are missing.
  void commit();

 private:
  void skip_complete();
  std::vector<Entry> order_;
  std::unique_ptr<AtomicFile> file_;
  size_t current_ = 0;    // index into order_
  uint64_t written_ = 0;  // bytes of the current tensor
};

// A name from a file as messages show it: quoted, shortened, without control characters.
std::string shown(std::string_view name);

}  // namespace tessera
