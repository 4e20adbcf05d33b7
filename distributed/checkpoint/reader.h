// Reads a checkpoint folder, whole or any box of any tensor, for any number of ranks.
//
//     CheckpointReader reader("runs/1/checkpoints/checkpoint_12");
//     model.load_state_dict(reader.state_dict("model.0."));
//     Tensor part = reader.read("model.0.wte.weight", {{begin, 0}, {rows, width}});
//
// Opening reads and checks the whole manifest (manifest.h), and that every file exists with its
// size. Files are mapped, so only requested elements are read. A chunk is checked against its
// checksum when it is first used; verify() checks all of them, or this rank's share.
//
// FormatError names the folder's file, the tensor and what to do; IoError where the operating
// system refuses. Depends on core alone. For one thread at a time.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/state/state_dict.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/distributed/checkpoint/manifest.h>

namespace tessera {
class MappedFile;
}

namespace tessera::distributed {

// Whether `folder` has a manifest, intact or not.
bool is_checkpoint(const std::string& folder);

class CheckpointReader {
 public:
  explicit CheckpointReader(const std::string& folder);
  ~CheckpointReader();
  CheckpointReader(CheckpointReader&&) noexcept;
  CheckpointReader& operator=(CheckpointReader&&) noexcept;

  const std::string& folder() const { return folder_; }
  int ranks() const { return manifest_.ranks; }  // that saved it
  const std::map<std::string, std::string>& metadata() const { return manifest_.metadata; }
  const std::map<std::string, SavedTensor>& tensors() const { return manifest_.tensors; }
  const Manifest& manifest() const { return manifest_; }
  bool contains(std::string_view name) const;
  const SavedTensor& tensor(std::string_view name) const;  // ValueError for an unknown name

  // A copy of the tensor, whole or a box of it. ValueError for a box outside the tensor.
  Tensor read(std::string_view name);
  Tensor read(std::string_view name, const Box& box);
  // A tensor over the mapped file, without a copy, if one chunk holds the box contiguously (whole
  // rows). Writing to it does not change the file. Otherwise as read().
  Tensor view(std::string_view name);
  Tensor view(std::string_view name, const Box& box);
  // Views of all tensors whose names begin with `prefix`, by the rest of their names.
  StateDict state_dict(std::string_view prefix = "");

  // Checks every chunk and every other file that was not checked yet; the work is distributed over
  // `parts` by bytes, and this call does the share of `part`.
  void verify(int part = 0, int parts = 1);
  // Declares the other shares as checked elsewhere.
  void assume_verified();

 private:
  const std::byte* bytes_of(const std::string& name, const SavedChunk& chunk, DType dtype);
  std::shared_ptr<MappedFile> file(const std::string& name);

  std::string folder_;
  Manifest manifest_;
  std::map<std::string, std::shared_ptr<MappedFile>, std::less<>> files_;  // those in use
  std::map<const SavedChunk*, bool> verified_;
  bool all_verified_ = false;
};

}  // namespace tessera::distributed
