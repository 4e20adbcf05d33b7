// The table of a zip container whose entries are stored: what torch.save writes.
//
// The central directory decides (APPNOTE.TXT 6.3.10 of PKWARE), with or without zip64. Strict:
// FormatError for a second disk, a directory that does not fill its place, an entry that is
// encrypted, longer or shorter than stored, outside of the file or over another, a name twice or
// other than in the entry's own header. Compressed entries (the source code in libtorch's archives)
// are listed as such, for nothing here unpacks them. Checksums of the
// entries are not looked at: torch may be told not to calculate them, and does not read them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct ZipEntry {
  std::string name;
  uint64_t begin = 0;  // bytes [begin, end) of the file
  uint64_t end = 0;
  bool compressed = false;
};
// By `name` in errors. Linear in the file's directory; no entry's bytes are read.
std::vector<ZipEntry> read_zip_entries(std::span<const std::byte> file, std::string_view name);

}  // namespace tessera
