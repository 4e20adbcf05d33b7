#include <tessera/data/idx.h>

#include <zlib.h>

#include <algorithm>
#include <bit>
#include <climits>
#include <cstring>
#include <memory>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/io/mapped_file.h>

namespace tessera::data {
namespace {

static_assert(std::endian::native == std::endian::little);

// Deflate's best: 258 bytes from a code of two bits, so a stream of n bytes unfolds to at most
// 1032 n (zlib's documentation). A header that promises more is false.
constexpr uint64_t kMaxInflation = 1032;

// Bytes in order, from memory or from a gzip stream.
class Source {
 public:
  Source(std::span<const std::byte> bytes, std::string_view file) : bytes_(bytes), file_(file) {
    compressed_ = member_begins(0);
    if (!compressed_) return;
    stream_ = std::make_unique<z_stream>();
    std::memset(stream_.get(), 0, sizeof(z_stream));
    constexpr int kGzip = 16 + MAX_WBITS;
    TS_CHECK_AS(Error, inflateInit2(stream_.get(), kGzip) == Z_OK, "read_idx",
                "zlib could not start; free some memory.");
    stream_->next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(bytes.data()));
  }
  ~Source() {
    if (stream_) inflateEnd(stream_.get());
  }
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;

  uint64_t max_remaining() const {
    const uint64_t left = bytes_.size() - consumed();
    return compressed_ ? left * kMaxInflation + kMaxInflation : left;
  }

  void read(void* out, uint64_t count, std::string_view what) {
    const uint64_t got = take(out, count);
    TS_CHECK_AS(FormatError, got == count, "read_idx", "'", file_, "' ends inside its ", what, ": ",
                count, " bytes are needed at byte ", position_, ", ", got,
                " are there; get the whole file.");
    position_ += count;
  }

  void expect_end() {
    char extra;
    TS_CHECK_AS(FormatError, take(&extra, 1) == 0, "read_idx", "'", file_,
                "' has bytes after its last element, at byte ", position_,
                "; its sizes do not fit its length; get the right file.");
    TS_CHECK_AS(FormatError, !compressed_ || ended_, "read_idx", "'", file_,
                "' ends before the end mark of its gzip stream; get the whole file.");
    TS_CHECK_AS(FormatError, !compressed_ || consumed() == bytes_.size(), "read_idx", "'", file_,
                "' has bytes after the end of the gzip stream, at byte ", consumed(),
                " of the file; get the right file.");
  }

 private:
  bool member_begins(uint64_t at) const {
    return bytes_.size() - at >= 2 && bytes_[at] == std::byte{0x1F} &&
           bytes_[at + 1] == std::byte{0x8B};
  }

  uint64_t consumed() const {
    return compressed_ ? reinterpret_cast<const std::byte*>(stream_->next_in) - bytes_.data()
                       : position_;
  }

  uint64_t take(void* out, uint64_t count) {
    if (!compressed_) {
      const uint64_t got = std::min<uint64_t>(count, bytes_.size() - position_);
      if (got > 0) std::memcpy(out, bytes_.data() + position_, got);
      return got;
    }
    uint64_t got = 0;
    while (got < count && !ended_) {
      // zlib counts in 32 bits.
      const uint64_t room = std::min<uint64_t>(count - got, UINT_MAX);
      stream_->next_out = static_cast<Bytef*>(out) + got;
      stream_->avail_out = static_cast<uInt>(room);
      const uint64_t left = bytes_.size() - consumed();
      stream_->avail_in = static_cast<uInt>(std::min<uint64_t>(left, UINT_MAX));
      const int result = inflate(stream_.get(), Z_NO_FLUSH);
      got += room - stream_->avail_out;
      if (result == Z_STREAM_END) {
        // Members follow each other, as after `cat a.gz b.gz`: they are one content.
        ended_ = !member_begins(consumed()) || inflateReset(stream_.get()) != Z_OK;
      } else if (result == Z_BUF_ERROR && stream_->avail_in == 0 && left <= UINT_MAX) {
        break;  // the stream ends before its end mark
      } else {
        TS_CHECK_AS(FormatError, result == Z_OK, "read_idx", "'", file_,
                    "' is not a valid gzip stream near byte ", consumed(),
                    " of the file: ", stream_->msg != nullptr ? stream_->msg : "no reason given",
                    "; get the file again.");
        if (left == 0 && stream_->avail_out == room) break;
      }
    }
    return got;
  }

  std::span<const std::byte> bytes_;
  std::string_view file_;
  bool compressed_ = false, ended_ = false;
  std::unique_ptr<z_stream> stream_;
  uint64_t position_ = 0;  // of the uncompressed bytes
};

struct ElementType {
  DType dtype;
  int width;  // bytes in the file
};

ElementType element_type(unsigned char code, std::string_view file) {
  switch (code) {
    case 0x08:
      return {kU8, 1};
    case 0x09:
      return {kI32, 1};
    case 0x0B:
      return {kI32, 2};
    case 0x0C:
      return {kI32, 4};
    case 0x0D:
      return {kF32, 4};
    case 0x0E:
      return {kF64, 8};
    default:
      TS_THROW(FormatError, "read_idx",
               "the element type (byte 2) must be 8, 9, 11, 12, 13 or 14; '", file, "' has ",
               static_cast<int>(code), "; is it an IDX file?");
  }
}

// Unsigned integer of big-endian bytes, in place.
template <class Bits>
void swap_bytes(void* data, int64_t count) {
  auto* bytes = static_cast<unsigned char*>(data);
  for (int64_t i = 0; i < count; ++i, bytes += sizeof(Bits)) {
    Bits value;
    std::memcpy(&value, bytes, sizeof(value));
    if constexpr (sizeof(Bits) == 4) value = __builtin_bswap32(value);
    if constexpr (sizeof(Bits) == 8) value = __builtin_bswap64(value);
    std::memcpy(bytes, &value, sizeof(value));
  }
}

}  // namespace

Tensor parse_idx(std::span<const std::byte> bytes, std::string_view file) {
  Source source(bytes, file);
  unsigned char magic[4];
  source.read(magic, sizeof(magic), "header");
  TS_CHECK_AS(FormatError, magic[0] == 0 && magic[1] == 0, "read_idx",
              "an IDX file starts with two zero bytes; '", file, "' starts with ",
              static_cast<int>(magic[0]), ", ", static_cast<int>(magic[1]), "; is it an IDX file?");
  const ElementType type = element_type(magic[2], file);
  const int dims = magic[3];
  TS_CHECK_AS(FormatError, dims >= 1 && dims <= kMaxDims, "read_idx",
              "the number of dimensions (byte 3) must be 1 to ", kMaxDims, "; '", file, "' has ",
              dims, "; is it an IDX file?");
  // The product is compared after each factor: it cannot overflow, and no size is believed that
  // the file could not hold. Beside a size of 0 the others are bounded too: strides must fit.
  Shape shape;
  uint64_t count = 1, extent = 1;
  for (int i = 0; i < dims; ++i) {
    unsigned char size[4];
    source.read(size, sizeof(size), "header");
    const uint64_t value = uint64_t{size[0]} << 24 | size[1] << 16 | size[2] << 8 | size[3];
    shape.push_back(static_cast<int64_t>(value));
    count *= value;
    TS_CHECK_AS(FormatError, count <= source.max_remaining() / type.width, "read_idx", "'", file,
                "' promises ", shape, " elements of ", type.width,
                " bytes, more than the file can hold; get the whole file.");
    TS_CHECK_AS(FormatError,
                !__builtin_mul_overflow(extent, std::max<uint64_t>(value, 1), &extent) &&
                    extent <= uint64_t{1} << 60,
                "read_idx", "'", file, "' has sizes ", shape,
                ", more than can be addressed; get the file again.");
  }
  Tensor out = raw::empty(shape, type.dtype);
  const int64_t numel = static_cast<int64_t>(count);
  if (type.dtype == kI32 && type.width < 4) {
    std::vector<unsigned char> narrow(count * type.width);
    source.read(narrow.data(), narrow.size(), "elements");
    auto* values = out.data_as<int32_t>();
    for (int64_t i = 0; i < numel; ++i) {
      const unsigned char* element = &narrow[static_cast<size_t>(i * type.width)];
      values[i] = type.width == 1 ? static_cast<int8_t>(element[0])
                                  : static_cast<int16_t>(element[0] << 8 | element[1]);
    }
  } else if (count > 0) {
    source.read(out.data(), count * type.width, "elements");
    if (type.width == 4) swap_bytes<uint32_t>(out.data(), numel);
    if (type.width == 8) swap_bytes<uint64_t>(out.data(), numel);
  }
  source.expect_end();
  return out;
}

Tensor read_idx(const std::string& path) {
  const MappedFile file(path, FileAccess::kSequential);
  return parse_idx(file.bytes(), path);
}

}  // namespace tessera::data
