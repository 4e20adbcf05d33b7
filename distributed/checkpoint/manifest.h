// The table of contents of a checkpoint folder, as text.
//
//     step-12/
//       rank-0-0.bin, rank-0-1.bin, rank-1-0.bin...   elements: row-major, little-endian chunks
//       rank-0.json, rank-1.json...                   the record of each rank: what it wrote
//       manifest.json                                 all records joined; without it nothing stands
//
//     {"checksum": "4d8f0c...",
//      "checkpoint": {
//        "format": "tessera-checkpoint", "version": 1, "ranks": 2, "metadata": {"iteration": "12"},
//        "files": {"rank-0-0.bin": {"bytes": 8388608},
//                  "notes.json": {"bytes": 7, "checksum": "..."}},
//        "tensors": {
//          "model.0.fc.weight": {"dtype": "f32", "shape": [4, 3], "chunks": [
//            {"box": [[0, 0], [2, 3]], "file": "rank-0-0.bin", "offset": 0, "length": 24,
//             "checksum": "..."}, ...]}}}}
//
// The first checksum is that of the bytes after it; a chunk's is that of its elements. A box is
// offset and extent in the tensor. Chunks of 4 KiB and more begin at multiples of 4 KiB, so that
// they can be mapped and read past the page cache; smaller ones lie close, at multiples of 64.
//
// Reading trusts nothing: every field is checked. Names are plain, numbers are in range and do not
// overflow, boxes lie in their tensor and tile it, chunks lie in their file.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/dtype.h>
#include <tessera/core/shape.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/distributed/mesh/box.h>

namespace tessera::distributed {

inline constexpr std::string_view kManifestName = "manifest.json";

struct SavedChunk {
  Box box;
  std::string file;
  uint64_t offset = 0;  // bytes
  uint64_t length = 0;
  uint64_t checksum = 0;
};
struct SavedTensor {
  DType dtype = kF32;
  Shape shape;
  std::vector<SavedChunk> chunks;  // by their first row

  uint64_t bytes() const {
    return static_cast<uint64_t>(numel_of(shape)) * static_cast<uint64_t>(size_of(dtype));
  }
};
struct SavedFile {
  uint64_t bytes = 0;
  std::optional<uint64_t> checksum = {};  // of a whole file that holds no chunks
};

struct Manifest {
  int ranks = 1;  // that saved it
  std::map<std::string, std::string> metadata;
  std::map<std::string, SavedFile> files;  // by their path in the folder
  std::map<std::string, SavedTensor> tensors;

  uint64_t bytes() const;  // of all files
};

// Throws ValueError for a name or metadata that is not UTF-8.
std::string manifest_text(const Manifest& manifest);
// Errors name `path`. FormatError for text that manifest_text does not write. `complete`: for a
// whole checkpoint, in which every tensor is tiled, not for one rank's record.
Manifest parse_manifest(std::string_view text, const std::string& path, bool complete = true);

// FormatError unless the chunks of every tensor tile it.
void check_tiling(const Manifest& manifest, const std::string& path);

// Adds a checksum in front of a text, as both kinds of files have it; and checks and removes it.
// FormatError.
std::string sealed(std::string_view text);
std::string_view unsealed(std::string_view text, const std::string& path);

}  // namespace tessera::distributed
