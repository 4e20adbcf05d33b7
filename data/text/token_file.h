// Long sequences of token ids: in memory, in token files, in raw arrays of u16 as nanoGPT writes.
//
// A token file has a header of 64 bytes, little-endian, and then the ids:
//
//     byte  0  8 bytes  magic "TSTOKENS"
//     byte  8  u32      version, 1
//     byte 12  u32      width of an id in bytes, 2 or 4
//     byte 16  u64      number of ids
//     byte 24  u64      vocabulary size: every id is smaller; 0 if unknown
//     byte 32  u32      CRC-32 (as in gzip) of the ids' bytes
//     byte 36  24 zero bytes
//     byte 60  u32      CRC-32 of bytes 0 to 59
//     byte 64  ids, unsigned
//
// The file is mapped: opening a corpus larger than memory costs nothing, and processes share it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/io/atomic_file.h>
#include <tessera/data/text/tokenizer.h>

namespace tessera::data {

class TokenArray {
 public:
  struct OpenOptions {
    // Reads the whole file once to compare the checksum, about 1 GB/s. Turn it off for a corpus
    // that was verified before.
    bool verify = true;
  };

  TokenArray() = default;  // no ids

  // IoError; FormatError naming file, field, byte offset and remedy: wrong magic, version or width,
  // a count that does not fit the file's length, a checksum that does not match.
  static TokenArray open(const std::string& path) { return open(path, OpenOptions()); }
  static TokenArray open(const std::string& path, const OpenOptions& options);

  // A file that holds nothing but ids of `width` (2 or 4) bytes. FormatError if its length is not a
  // multiple of the width.
  static TokenArray open_raw(const std::string& path, int width = 2);

  // Copies ids; ValueError for a negative one.
  static TokenArray from_ids(std::span<const TokenId> ids, int64_t vocab_size = 0);

  // Over bytes that the caller keeps alive, in the format of a token file.
  static TokenArray parse(std::span<const std::byte> bytes, std::string_view file, bool verify);

  int64_t size() const { return size_; }
  int64_t vocab_size() const { return vocab_size_; }  // 0 if unknown

  // Unchecked. A u32 id of 2^31 or more reads as negative: embeddings refuse it.
  TokenId operator[](int64_t index) const {
    return width_ == 2 ? static_cast<const uint16_t*>(data_)[index]
                       : static_cast<TokenId>(static_cast<const uint32_t*>(data_)[index]);
  }
  // ids [begin, begin + count) as i64. IndexError outside the array; FormatError where somebody has
  // shortened the file meanwhile, whose end is no memory any more (operator[] would end the process).
  void copy(int64_t begin, int64_t count, int64_t* out) const;

  // ids [begin, end) over the same bytes: the parts for training and validation. IndexError.
  TokenArray slice(int64_t begin, int64_t end) const;

 private:
  struct Source;  // the file, where there is one

  std::shared_ptr<const void> owner_;
  const Source* source_ = nullptr;  // in owner_
  const void* data_ = nullptr;
  int64_t size_ = 0;
  int64_t vocab_size_ = 0;
  int width_ = 2;
};

// Writes a token file piece by piece; it appears at commit() (see AtomicFile).
class TokenFileWriter {
 public:
  // Ids of fewer than 65537 different values take 2 bytes, others (and vocab_size 0) take 4.
  TokenFileWriter(const std::string& path, int64_t vocab_size);

  // ValueError for an id outside [0, vocab_size), or negative.
  void append(std::span<const TokenId> ids);
  int64_t size() const { return count_; }
  void commit();

 private:
  AtomicFile file_;
  int64_t vocab_size_;
  int width_;
  int64_t count_ = 0;
  uint32_t checksum_ = 0;
  std::vector<unsigned char> buffer_;
};

void write_token_file(const std::string& path, std::span<const TokenId> ids, int64_t vocab_size);

}  // namespace tessera::data
