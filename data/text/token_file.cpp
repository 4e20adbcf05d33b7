#include <tessera/data/text/token_file.h>

#include <sys/stat.h>
#include <zlib.h>

#include <bit>
#include <cstring>

#include <tessera/core/error.h>
#include <tessera/core/io/mapped_file.h>

namespace tessera::data {
namespace {

static_assert(std::endian::native == std::endian::little, "token files are little-endian");

constexpr char kMagic[8] = {'T', 'S', 'T', 'O', 'K', 'E', 'N', 'S'};
constexpr uint32_t kVersion = 1;

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t width;
  uint64_t count;
  uint64_t vocab_size;
  uint32_t ids_crc;
  unsigned char reserved[24];
  uint32_t header_crc;
};
static_assert(sizeof(Header) == 64 && offsetof(Header, count) == 16 &&
              offsetof(Header, header_crc) == 60);

uint32_t crc_of(const void* data, size_t bytes, uint32_t crc = 0) {
  return static_cast<uint32_t>(crc32_z(crc, static_cast<const Bytef*>(data), bytes));
}

}  // namespace

TokenArray TokenArray::parse(std::span<const std::byte> bytes, std::string_view file, bool verify) {
  constexpr std::string_view kWhere = "TokenArray";
  TS_CHECK_AS(FormatError, bytes.size() >= sizeof(Header), kWhere, "a token file has a header of ",
              sizeof(Header), " bytes; '", file, "' has ", bytes.size(), "; get the whole file.");
  Header header;
  std::memcpy(&header, bytes.data(), sizeof(header));
  TS_CHECK_AS(FormatError, std::memcmp(header.magic, kMagic, sizeof(kMagic)) == 0, kWhere,
              "the magic (byte 0) must be TSTOKENS; '", file,
              "' has other bytes; a file of bare ids is opened with open_raw.");
  TS_CHECK_AS(FormatError, header.version == kVersion, kWhere, "the version (byte 8) must be ",
              kVersion, "; '", file, "' has ", header.version,
              "; write it again with this release.");
  TS_CHECK_AS(FormatError, header.header_crc == crc_of(&header, offsetof(Header, header_crc)),
              kWhere, "the header's checksum (byte 60) of '", file,
              "' does not match its bytes; the header is damaged; write the file again.");
  TS_CHECK_AS(FormatError, header.width == 2 || header.width == 4, kWhere,
              "the width (byte 12) must be 2 or 4; '", file, "' has ", header.width,
              "; write the file again.");
  const uint64_t available = bytes.size() - sizeof(Header);
  TS_CHECK_AS(FormatError,
              header.count == available / header.width && available % header.width == 0, kWhere,
              "the count (byte 16) must fit the file's length; '", file, "' promises ",
              header.count, " ids of ", header.width, " bytes and has ", available,
              " bytes for them; get the whole file.");
  TS_CHECK_AS(FormatError, header.vocab_size <= uint64_t{1} << 31, kWhere,
              "the vocabulary size (byte 24) must be at most 2^31; '", file, "' has ",
              header.vocab_size, "; write the file again.");
  if (verify) {
    TS_CHECK_AS(FormatError, crc_of(bytes.data() + sizeof(Header), available) == header.ids_crc,
                kWhere, "the checksum (byte 32) of '", file,
                "' does not match its ids; the file is damaged; write or copy it again.");
  }
  TokenArray tokens;
  tokens.data_ = bytes.data() + sizeof(Header);
  tokens.size_ = static_cast<int64_t>(header.count);
  tokens.vocab_size_ = static_cast<int64_t>(header.vocab_size);
  tokens.width_ = static_cast<int>(header.width);
  return tokens;
}

struct TokenArray::Source {
  // Windows lie anywhere in the file: read-ahead would fetch what nobody asks for.
  explicit Source(const std::string& path) : file(path, FileAccess::kRandom) {
    ::stat(path.c_str(), &status);
  }
  // A file that was renamed to the path is another one, and the mapped one whole.
  void check_length() const {
    struct ::stat now = {};
    const bool shorter = ::stat(file.path().c_str(), &now) == 0 && now.st_dev == status.st_dev &&
                         now.st_ino == status.st_ino &&
                         static_cast<size_t>(now.st_size) < file.size();
    TS_CHECK_AS(FormatError, !shorter, "TokenArray", "'", file.path(), "' had ", file.size(),
                " bytes when it was opened and has ", now.st_size,
                " now; write files beside the old one and rename them");
  }
  MappedFile file;
  struct ::stat status = {};
};

TokenArray TokenArray::open(const std::string& path, const OpenOptions& options) {
  auto source = std::make_shared<const Source>(path);
  TokenArray tokens = parse(source->file.bytes(), path, options.verify);
  tokens.source_ = source.get();
  tokens.owner_ = std::move(source);
  return tokens;
}

TokenArray TokenArray::open_raw(const std::string& path, int width) {
  TS_CHECK(width == 2 || width == 4, "TokenArray", "the width of a raw id must be 2 or 4; got ",
           width, ".");
  auto source = std::make_shared<const Source>(path);
  const MappedFile* const file = &source->file;
  TS_CHECK_AS(FormatError, file->size() % static_cast<size_t>(width) == 0, "TokenArray",
              "a file of bare ids has a length that is a multiple of ", width, "; '", path,
              "' has ", file->size(), " bytes; check the width or get the whole file.");
  TokenArray tokens;
  tokens.data_ = file->bytes().data();
  tokens.size_ = static_cast<int64_t>(file->size()) / width;
  tokens.width_ = width;
  tokens.source_ = source.get();
  tokens.owner_ = std::move(source);
  return tokens;
}

TokenArray TokenArray::from_ids(std::span<const TokenId> ids, int64_t vocab_size) {
  auto values = std::make_shared<std::vector<uint32_t>>();
  values->reserve(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    TS_CHECK(ids[i] >= 0 && (vocab_size == 0 || ids[i] < vocab_size), "TokenArray",
             "ids must lie in the vocabulary; id ", ids[i], " at position ", i, " with ",
             vocab_size, " ids; check the tokenizer.");
    values->push_back(static_cast<uint32_t>(ids[i]));
  }
  TokenArray tokens;
  tokens.data_ = values->data();
  tokens.size_ = static_cast<int64_t>(values->size());
  tokens.vocab_size_ = vocab_size;
  tokens.width_ = 4;
  tokens.owner_ = std::move(values);
  return tokens;
}

void TokenArray::copy(int64_t begin, int64_t count, int64_t* out) const {
  TS_CHECK_INDEX(begin >= 0 && count >= 0 && begin <= size_ && count <= size_ - begin, "TokenArray",
                 "ids [", begin, ", ", begin, " + ", count, ") are outside the ", size_,
                 " ids that there are.");
  if (source_ != nullptr) source_->check_length();
  if (width_ == 2) {
    const uint16_t* ids = static_cast<const uint16_t*>(data_) + begin;
    for (int64_t i = 0; i < count; ++i) out[i] = ids[i];
  } else {
    const uint32_t* ids = static_cast<const uint32_t*>(data_) + begin;
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<TokenId>(ids[i]);
  }
}

TokenArray TokenArray::slice(int64_t begin, int64_t end) const {
  TS_CHECK_INDEX(begin >= 0 && begin <= end && end <= size_, "TokenArray", "ids [", begin, ", ",
                 end, ") are outside the ", size_, " ids that there are.");
  TokenArray part = *this;
  if (data_ != nullptr) part.data_ = static_cast<const char*>(data_) + begin * width_;
  part.size_ = end - begin;
  return part;
}

TokenFileWriter::TokenFileWriter(const std::string& path, int64_t vocab_size)
    : file_(path), vocab_size_(vocab_size), width_(vocab_size > 0 && vocab_size <= 65536 ? 2 : 4) {
  TS_CHECK(vocab_size >= 0 && vocab_size <= int64_t{1} << 31, "TokenFileWriter",
           "the vocabulary size must be 0 (unknown) to 2^31; got ", vocab_size, ".");
  const Header space = {};
  file_.write(&space, sizeof(space));
}

void TokenFileWriter::append(std::span<const TokenId> ids) {
  buffer_.resize(ids.size() * static_cast<size_t>(width_));
  for (size_t i = 0; i < ids.size(); ++i) {
    TS_CHECK(ids[i] >= 0 && (vocab_size_ == 0 || ids[i] < vocab_size_), "TokenFileWriter",
             "ids must lie in the vocabulary of ", vocab_size_, "; id ", ids[i], " at position ",
             count_ + static_cast<int64_t>(i), " of '", file_.path(), "'; check the tokenizer.");
    std::memcpy(&buffer_[i * static_cast<size_t>(width_)], &ids[i], static_cast<size_t>(width_));
  }
  checksum_ = crc_of(buffer_.data(), buffer_.size(), checksum_);
  file_.write(buffer_.data(), buffer_.size());
  count_ += static_cast<int64_t>(ids.size());
}

void TokenFileWriter::commit() {
  Header header = {};
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kVersion;
  header.width = static_cast<uint32_t>(width_);
  header.count = static_cast<uint64_t>(count_);
  header.vocab_size = static_cast<uint64_t>(vocab_size_);
  header.ids_crc = checksum_;
  header.header_crc = crc_of(&header, offsetof(Header, header_crc));
  file_.overwrite(0, &header, sizeof(header));
  file_.commit();
}

void write_token_file(const std::string& path, std::span<const TokenId> ids, int64_t vocab_size) {
  TokenFileWriter writer(path, vocab_size);
  writer.append(ids);
  writer.commit();
}

}  // namespace tessera::data
