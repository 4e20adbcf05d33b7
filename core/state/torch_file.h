// Reads files of torch.save (.pt, .pth, .bin) as named tensors, without running their code.
//
//     TorchFile file("pytorch_model.bin");
//     Tensor weight = file.view("encoder.layer.0.weight");  // bytes stay in the mapped file
//     model.load_state_dict(StateDict::from_map(load_torch_file("pytorch_model.bin")));
//
// The container is that of torch since 1.6 and of libtorch's torch::save, a zip of stored entries
// (zip_reader.h) with a pickle of the structure (pickle_reader.h) and the bytes of each storage; or
// the older one, pickles and bytes one after the other. A tensor's name is the keys that lead to
// it, joined by dots: {"model": {"w": T}, "states": [{0: U}]} has model.w and states.0.0. Values
// that are not a tensor, dict, list or tuple (numbers, text, objects of classes) are only listed by
// name. Tensors that tessera lacks (int16, sparse ones, those that a stride of 0 makes far larger
// than the file) are left out, and asking for one throws. Nothing is ever called.
//
// A file is checked completely when it is opened. FormatError: it is damaged, or a tensor reaches
// beyond its storage. UnsupportedError: no tensor can be read, an archive of libtorch before 1.5,
// the tar of torch before 0.2, a big-endian file, more than 64 levels. IoError: the file cannot be
// read.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/tensor/tensor.h>

namespace tessera {

class MappedFile;
struct PickleValue;

struct TorchFileEntry {
  std::string name;
  DType dtype;
  Shape shape;
  Shape strides;       // in elements
  int64_t offset = 0;  // first element in its storage, in elements
  // The container's entry with the bytes. Tensors with the same entry share elements.
  std::string storage;
  bool is_same_as(const TorchFileEntry& other) const {
    return storage == other.storage && dtype == other.dtype && shape == other.shape &&
           strides == other.strides && offset == other.offset;
  }
};

class TorchFile {
 public:
  // Maps the file and reads its structure. Reads no elements.
  explicit TorchFile(const std::string& path);

  // In the order of the structure. A tensor that occurs several times has several names.
  const std::vector<TorchFileEntry>& entries() const { return entries_; }
  // Names of values that are not tensors.
  const std::vector<std::string>& others() const { return others_; }
  // Tensors that cannot be read, by name, with their types ("torch.ShortStorage").
  const std::map<std::string, std::string, std::less<>>& refused() const { return refused_; }
  // Throws ValueError for a name that is not in the file, UnsupportedError for one in refused().
  const TorchFileEntry& entry(std::string_view name) const;

  // A tensor with the file's strides over the mapped bytes, which it keeps alive. Tensors of one
  // storage share their elements as in torch. All views of this object see a write, which does not
  // reach the file (copy on write).
  Tensor view(std::string_view name) const;
  // A contiguous tensor with bytes of its own.
  Tensor load(std::string_view name) const;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
  std::shared_ptr<MappedFile> file_;
  std::map<std::string, std::pair<uint64_t, uint64_t>, std::less<>> storages_;  // bytes of each
  std::vector<TorchFileEntry> entries_;
  std::map<std::string, size_t, std::less<>> positions_;
  void read_zip();
  void read_legacy();
  void take_structure(const PickleValue& root);

  std::vector<std::string> others_;
  std::map<std::string, std::string, std::less<>> refused_;
};

// All tensors of a file, with bytes of their own. Those in refused() are left out with a warning on
// stderr.
std::map<std::string, Tensor> load_torch_file(const std::string& path);

}  // namespace tessera
