// Files of torch.save (.pt, .pth, .bin): named tensors, read without running what is in them.
//
//     TorchFile file("pytorch_model.bin");
//     Tensor weight = file.view("encoder.layer.0.weight");  // bytes stay in the mapped file
//     model.load_state_dict(StateDict::from_map(load_torch_file("pytorch_model.bin")));
//
// The container is that of torch since 1.6, a zip of stored entries (zip_reader.h) with a pickle of
// the structure (pickle_reader.h) and the bytes of each storage, in which libtorch's torch::save
// writes, too; or that of torch before, pickles and bytes one after the other. Of the structure
// every tensor has a name, the keys on the way to it with dots between: {"model": {"w": T},
// "states": [{0: U}]} has model.w and states.0.0. What is no tensor, dict, list or tuple (numbers,
// texts, objects of classes) is listed by name and left out, and so are tensors that tessera cannot
// have (int16, sparse ones, those that a stride of 0 makes far larger than the file), each of which
// is refused when it is asked for. Nothing is ever called.
//
// A file is checked whole when it is opened. FormatError: damaged, or a tensor that reaches beyond
// its storage. UnsupportedError: a file without a tensor that can be read, archives of libtorch
// before 1.5, the tar of torch before 0.2, big-endian files, more than 64 levels. IoError: the file
// cannot be read.
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
  int64_t offset = 0;  // of the first element in its storage
  // The entry of the container with its bytes. Tensors that have it in common share elements.
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

  // In the order of the structure. A tensor that is there several times has several names.
  const std::vector<TorchFileEntry>& entries() const { return entries_; }
  // Names of what is no tensor.
  const std::vector<std::string>& others() const { return others_; }
  // Tensors that are not read, and what they are ("torch.ShortStorage").
  const std::map<std::string, std::string, std::less<>>& refused() const { return refused_; }
  // Throws ValueError for a name that is not in the file, UnsupportedError for one of refused().
  const TorchFileEntry& entry(std::string_view name) const;

  // A tensor over the mapped bytes, with the strides of the file, which it keeps alive. Tensors of
  // one storage share their elements as in torch. Writing works, is seen by all views of this
  // object, and does not reach the file (copy on write).
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

// All tensors of a file, with bytes of their own. Those of refused() are left out, which a line on
// stderr says.
std::map<std::string, Tensor> load_torch_file(const std::string& path);

}  // namespace tessera
