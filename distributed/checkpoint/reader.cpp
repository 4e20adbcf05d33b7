#include <tessera/distributed/checkpoint/reader.h>

#include <algorithm>
#include <cstring>
#include <filesystem>

#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/distributed/checkpoint/checksum.h>

namespace tessera::distributed {
namespace {

namespace fs = std::filesystem;

constexpr const char* kCheckpointReader = "checkpoint";

std::string path_in(const std::string& folder, std::string_view name) {
  return (fs::path(folder) / name).string();
}

Manifest read_manifest(const std::string& folder) {
  std::error_code error;
  const fs::file_status status = fs::status(folder, error);
  TS_CHECK_AS(IoError, fs::exists(status), kCheckpointReader, "there is no folder '", folder,
              "'; check the path.");
  TS_CHECK_AS(FormatError, fs::is_directory(status), kCheckpointReader, "'", folder,
              "' is a file; give the folder of a checkpoint.");
  const std::string path = path_in(folder, kManifestName);
  TS_CHECK_AS(FormatError, fs::exists(path, error), kCheckpointReader, "'", folder, "' has no ",
              kManifestName, ": it is no checkpoint, or one that was not finished; load another.");
  const MappedFile file(path, FileAccess::kSequential);
  return parse_manifest(file.text(), path);
}

// Whether the part is one run of elements in a row-major piece: all dimensions after the first that
// has more than one element are whole.
bool is_run(const Box& part, const Box& piece) {
  int d = 0;
  while (d < part.dim() && part.extent[d] == 1) ++d;
  for (++d; d < part.dim(); ++d) {
    if (part.extent[d] != piece.extent[d]) return false;
  }
  return true;
}

int64_t position_in(const Box& part, const Box& piece) {
  const Shape strides = contiguous_strides(piece.extent);
  int64_t position = 0;
  for (int d = 0; d < part.dim(); ++d) position += (part.offset[d] - piece.offset[d]) * strides[d];
  return position;
}

}  // namespace

bool is_checkpoint(const std::string& folder) {
  std::error_code error;
  return fs::is_regular_file(path_in(folder, kManifestName), error);
}

CheckpointReader::CheckpointReader(const std::string& folder)
    : folder_(folder), manifest_(read_manifest(folder)) {
  for (const auto& [name, file] : manifest_.files) {
    const std::string path = path_in(folder, name);
    std::error_code error;
    const bool regular = fs::is_regular_file(path, error);
    TS_CHECK_AS(FormatError, regular, kCheckpointReader, "'", path,
                "' must be a file, as the manifest says; it is missing",
                "; the folder is damaged: load an older checkpoint.");
    const uint64_t bytes = fs::file_size(path, error);
    TS_CHECK_AS(FormatError, !error && bytes == file.bytes, kCheckpointReader, "'", path,
                "' must have ", file.bytes, " bytes; it has ", error ? 0 : bytes,
                "; the folder is damaged: load an older checkpoint.");
  }
}
CheckpointReader::~CheckpointReader() = default;
// The keys of verified_ are nodes of the manifest's map, which stay where they are.
CheckpointReader::CheckpointReader(CheckpointReader&&) noexcept = default;
CheckpointReader& CheckpointReader::operator=(CheckpointReader&&) noexcept = default;

bool CheckpointReader::contains(std::string_view name) const {
  return manifest_.tensors.contains(std::string(name));
}

const SavedTensor& CheckpointReader::tensor(std::string_view name) const {
  const auto found = manifest_.tensors.find(std::string(name));
  TS_CHECK(found != manifest_.tensors.end(), kCheckpointReader, "'", folder_,
           "': there is no tensor ", shown(name), " among its ", manifest_.tensors.size(),
           "; check the name.");
  return found->second;
}

std::shared_ptr<MappedFile> CheckpointReader::file(const std::string& name) {
  std::shared_ptr<MappedFile>& mapped = files_[name];
  if (!mapped) {
    const std::string path = path_in(folder_, name);
    mapped = std::make_shared<MappedFile>(path, FileAccess::kCopyOnWrite);
    const uint64_t bytes = manifest_.files.at(name).bytes;
    if (mapped->size() != bytes) {  // since it was opened
      const size_t size = mapped->size();
      mapped.reset();
      TS_THROW(FormatError, kCheckpointReader, "'", path, "' must have ", bytes, " bytes; it has ",
               size, "; another program writes to it: stop that.");
    }
  }
  return mapped;
}

const std::byte* CheckpointReader::bytes_of(const std::string& name, const SavedChunk& chunk,
                                            DType dtype) {
  const std::byte* data = file(chunk.file)->bytes().data() + chunk.offset;
  if (all_verified_) return data;
  bool& verified = verified_[&chunk];
  if (verified) return data;
  const uint64_t checksum = checksum_of(data, chunk.length);
  TS_CHECK_AS(FormatError, checksum == chunk.checksum, kCheckpointReader, "'",
              path_in(folder_, chunk.file), "': tensor ", shown(name), " ", chunk.box, " at byte ",
              chunk.offset, ": the checksum must be ", checksum_text(chunk.checksum),
              "; the bytes have ", checksum_text(checksum),
              "; the file is damaged: load an older checkpoint.");
  if (dtype == kBool) {  // reading another value as bool would be undefined behaviour
    const bool valid = std::all_of(data, data + chunk.length,
                                   [](std::byte value) { return value <= std::byte{1}; });
    TS_CHECK_AS(FormatError, valid, kCheckpointReader, "'", path_in(folder_, chunk.file),
                "': tensor ", shown(name), ": a bool is 0 or 1, and there is another value",
                "; the file is damaged: load an older checkpoint.");
  }
  verified = true;
  return data;
}

Tensor CheckpointReader::read(std::string_view name) {
  return read(name, Box::whole(tensor(name).shape));
}

Tensor CheckpointReader::read(std::string_view name, const Box& box) {
  const SavedTensor& saved = tensor(name);
  TS_CHECK(lies_within(box, saved.shape), kCheckpointReader, "the box at ", box.offset,
           " of extent ", box.extent, " must lie within ", shown(name), ", ", saved.dtype,
           saved.shape, "; ask for a part of it.");
  const Tensor result = raw::empty(box.extent, saved.dtype);
  if (result.numel() == 0) return result;
  // Chunks are sorted by their first row: those that begin behind the box are not looked at.
  const auto end = saved.shape.empty()
                       ? saved.chunks.end()
                       : std::ranges::partition_point(saved.chunks, [&](const SavedChunk& chunk) {
                           return chunk.box.offset[0] < box.end(0);
                         });
  for (auto chunk = saved.chunks.begin(); chunk != end; ++chunk) {
    const auto part = intersect(chunk->box, box);
    if (!part) continue;
    copy_part(*part, bytes_of(std::string(name), *chunk, saved.dtype), chunk->box,
              static_cast<std::byte*>(result.data()), box,
              static_cast<size_t>(size_of(saved.dtype)));
  }
  return result;
}

Tensor CheckpointReader::view(std::string_view name) {
  return view(name, Box::whole(tensor(name).shape));
}

Tensor CheckpointReader::view(std::string_view name, const Box& box) {
  const SavedTensor& saved = tensor(name);
  if (lies_within(box, saved.shape) && box.numel() > 0) {
    for (const SavedChunk& chunk : saved.chunks) {
      if (intersect(chunk.box, box) != box) continue;
      if (!is_run(box, chunk.box)) break;
      const std::byte* data = bytes_of(std::string(name), chunk, saved.dtype) +
                              position_in(box, chunk.box) * size_of(saved.dtype);
      // Pages are private and writable (FileAccess::kCopyOnWrite).
      return raw::from_blob(const_cast<std::byte*>(data), box.extent, saved.dtype,
                            [file = file(chunk.file)] {});
    }
  }
  return read(name, box);
}

StateDict CheckpointReader::state_dict(std::string_view prefix) {
  StateDict state;
  for (auto entry = manifest_.tensors.lower_bound(std::string(prefix));
       entry != manifest_.tensors.end() && entry->first.starts_with(prefix); ++entry) {
    state.set(std::string_view(entry->first).substr(prefix.size()), view(entry->first));
  }
  return state;
}

void CheckpointReader::verify(int part, int parts) {
  TS_CHECK(parts >= 1 && part >= 0 && part < parts, kCheckpointReader,
           "verify takes part 0 to parts - 1; got ", part, " of ", parts, ".");
  // By bytes: whoever has the middle of a chunk in its share of all bytes checks it.
  const double share = static_cast<double>(manifest_.bytes()) / parts;
  double position = 0;
  const auto is_mine = [&](uint64_t bytes) {
    const double middle = position + static_cast<double>(bytes) / 2;
    position += static_cast<double>(bytes);
    const int owner = share > 0 ? static_cast<int>(std::min(middle / share, parts - 1.0)) : 0;
    return owner == part;
  };
  for (const auto& [name, tensor] : manifest_.tensors) {
    for (const SavedChunk& chunk : tensor.chunks) {
      if (is_mine(chunk.length)) bytes_of(name, chunk, tensor.dtype);
    }
  }
  for (const auto& [name, saved] : manifest_.files) {
    if (!saved.checksum || !is_mine(saved.bytes)) continue;
    const MappedFile mapped(path_in(folder_, name), FileAccess::kSequential);
    TS_CHECK_AS(FormatError, checksum_of(mapped.text()) == *saved.checksum, kCheckpointReader, "'",
                mapped.path(), "': the checksum must be ", checksum_text(*saved.checksum),
                "; the bytes have ", checksum_text(checksum_of(mapped.text())),
                "; the file is damaged: load an older checkpoint.");
  }
  if (parts == 1) all_verified_ = true;
}

void CheckpointReader::assume_verified() { all_verified_ = true; }

}  // namespace tessera::distributed
