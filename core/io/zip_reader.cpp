#include <tessera/core/io/zip_reader.h>

#include <algorithm>
#include <cstring>
#include <set>

#include <tessera/core/error.h>

namespace tessera {
namespace {

constexpr uint32_t kZipEntry = 0x04034b50, kZipDirectory = 0x02014b50, kZipEnd = 0x06054b50,
                   kZip64End = 0x06064b50, kZip64Locator = 0x07064b50;
constexpr uint32_t kIn64 = 0xFFFFFFFF;  // the number stands in a field of zip64
constexpr uint64_t kEndBytes = 22, kLocatorBytes = 20, kEnd64Bytes = 56;

// Little-endian numbers out of bytes whose bounds it checks.
class ZipBytes {
 public:
  ZipBytes(std::span<const std::byte> bytes, std::string_view name) : bytes_(bytes), name_(name) {}

  template <class... Parts>
  void check(bool holds, const Parts&... parts) const {
    TS_CHECK_AS(FormatError, holds, "zip", "'", name_, "': ", parts...,
                "; the file is damaged or no file of torch.save: get it again");
  }
  uint64_t size() const { return bytes_.size(); }
  // The same in the name of the file, for a part of it.
  ZipBytes part(uint64_t at, uint64_t count) const {
    check(at <= size() && count <= size() - at, count, " bytes at ", at, " reach beyond the end");
    return {bytes_.subspan(at, count), name_};
  }
  template <class T>
  T number(uint64_t at) const {
    check(at <= size() && sizeof(T) <= size() - at, "a field at ", at, " reaches beyond the end");
    T value;
    std::memcpy(&value, bytes_.data() + at, sizeof value);
    return value;
  }
  uint16_t u16(uint64_t at) const { return number<uint16_t>(at); }
  uint32_t u32(uint64_t at) const { return number<uint32_t>(at); }
  uint64_t u64(uint64_t at) const { return number<uint64_t>(at); }
  std::string_view text() const {
    return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()};
  }

 private:
  std::span<const std::byte> bytes_;
  std::string_view name_;
};

struct ZipTable {
  uint64_t begin, size, count;  // of the central directory
  uint64_t after;               // where what follows it begins
};

// The last 22 bytes and a comment of any length behind them.
uint64_t find_zip_end(const ZipBytes& file) {
  file.check(file.size() >= kEndBytes, "is shorter than a zip container");
  const uint64_t last = file.size() - kEndBytes;
  for (uint64_t back = 0; back <= std::min<uint64_t>(last, 0xFFFF); ++back) {
    const uint64_t at = last - back;
    if (file.u32(at) == kZipEnd && file.u16(at + 20) == back) return at;
  }
  file.check(false, "has no directory of a zip container");
  return 0;
}

ZipTable find_zip_table(const ZipBytes& file) {
  const uint64_t end = find_zip_end(file);
  file.check(file.u16(end + 4) == 0 || file.u16(end + 4) == 0xFFFF, "is one of several parts");
  ZipTable table{file.u32(end + 16), file.u32(end + 12), file.u16(end + 10), end};
  file.check(file.u16(end + 8) == file.u16(end + 10), "is one of several parts");
  const bool in_64 = table.begin == kIn64 || table.size == kIn64 || table.count == 0xFFFF;
  if (end >= kLocatorBytes && file.u32(end - kLocatorBytes) == kZip64Locator) {
    const uint64_t at = file.u64(end - kLocatorBytes + 8);
    const ZipBytes end64 = file.part(at, kEnd64Bytes);
    file.check(end64.u32(0) == kZip64End && end64.u64(24) == end64.u64(32),
               "has a locator that leads to no directory");
    table = {end64.u64(48), end64.u64(40), end64.u64(32), at};
  } else {
    file.check(!in_64, "lacks the directory's place");
  }
  file.check(table.begin <= table.after && table.size == table.after - table.begin,
             "its directory of ", table.size, " bytes at ", table.begin, " does not end at ",
             table.after);
  return table;
}

struct ZipRecord {
  std::string name;
  uint64_t header, size;
  uint64_t bytes;  // of the record itself
  bool compressed;
};

ZipRecord read_zip_record(const ZipBytes& directory, uint64_t at) {
  directory.check(directory.u32(at) == kZipDirectory, "entry at ", at, " of its directory is none");
  const uint64_t name_bytes = directory.u16(at + 28), extra_bytes = directory.u16(at + 30),
                 comment = directory.u16(at + 32);
  ZipRecord record{std::string(directory.part(at + 46, name_bytes).text()), directory.u32(at + 42),
                   directory.u32(at + 24), 46 + name_bytes + extra_bytes + comment,
                   directory.u16(at + 10) != 0};
  directory.part(at, record.bytes);
  const auto check = [&](bool holds, const char* what) {
    directory.check(holds, "the entry '", record.name, "' ", what);
  };
  check((directory.u16(at + 8) & 1) == 0, "is encrypted");
  uint64_t packed = directory.u32(at + 20);
  const ZipBytes extra = directory.part(at + 46 + name_bytes, extra_bytes);
  for (uint64_t field = 0; field < extra_bytes;) {
    const uint64_t length = extra.u16(field + 2);
    const ZipBytes value = extra.part(field + 4, length);
    if (extra.u16(field) == 1) {  // zip64: those numbers alone that did not fit, in this order
      uint64_t next = 0;
      for (uint64_t* number : {&record.size, &packed, &record.header}) {
        if (*number == kIn64) *number = value.u64(next), next += 8;
      }
    }
    field += 4 + length;
  }
  if (record.compressed) record.size = packed;
  check(packed == record.size, "is stored in another number of bytes than it has");
  return record;
}

}  // namespace

std::vector<ZipEntry> read_zip_entries(std::span<const std::byte> bytes, std::string_view name) {
  const ZipBytes file(bytes, name);
  const ZipTable table = find_zip_table(file);
  const ZipBytes directory = file.part(table.begin, table.size);
  std::vector<ZipEntry> entries;
  std::vector<std::pair<uint64_t, uint64_t>> taken;  // headers with their bytes
  std::set<std::string_view> names;
  uint64_t at = 0;
  for (uint64_t i = 0; i < table.count; ++i) {
    ZipRecord record = read_zip_record(directory, at);
    at += record.bytes;
    file.check(record.header < table.begin, "the entry '", record.name, "' begins beyond its data");
    file.check(file.u32(record.header) == kZipEntry, "the entry '", record.name,
               "' has no header of its own");
    const uint64_t name_bytes = file.u16(record.header + 26);
    const uint64_t begin = record.header + 30 + name_bytes + file.u16(record.header + 28);
    file.check(begin <= table.begin && record.size <= table.begin - begin, "the entry '",
               record.name, "' reaches beyond its data");
    file.check(file.part(record.header + 30, name_bytes).text() == record.name, "the entry '",
               record.name, "' has another name in its own header");
    taken.emplace_back(record.header, begin + record.size);
    entries.push_back({std::move(record.name), begin, begin + record.size, record.compressed});
  }
  file.check(at == directory.size(), "its directory holds more than its entries");
  for (const ZipEntry& entry : entries) {
    file.check(names.insert(entry.name).second, "the entry '", entry.name, "' is there twice");
  }
  std::ranges::sort(taken);
  for (size_t i = 1; i < taken.size(); ++i) {
    file.check(taken[i].first >= taken[i - 1].second, "two entries share bytes at ",
               taken[i].first);
  }
  return entries;
}

}  // namespace tessera
