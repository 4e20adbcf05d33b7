#include <tessera/distributed/checkpoint/manifest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include <tessera/core/error.h>
#include <tessera/distributed/checkpoint/checksum.h>

namespace tessera::distributed {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kFormat = "tessera-checkpoint";
constexpr int kVersion = 1;
constexpr std::string_view kSealBegin = "{\"checksum\": \"";
constexpr std::string_view kSealEnd = "\",";
constexpr size_t kSealBytes = kSealBegin.size() + 16 + kSealEnd.size();
constexpr const char* kDamaged = "; the folder is damaged: load an older checkpoint.";

template <class... Args>
[[noreturn]] void refuse(const std::string& path, const Args&... args) {
  TS_THROW(FormatError, "checkpoint", "'", path, "': ", args...);
}

std::string short_dump(const Json& value) {
  return shown(value.dump(-1, ' ', true, Json::error_handler_t::replace));
}

// A part of the document that knows its place, for errors.
class Field {
 public:
  Field(const Json& value, const std::string& path, std::string place)
      : value_(value), path_(path), place_(std::move(place)) {}

  template <class... Args>
  [[noreturn]] void fail(const Args&... args) const {
    refuse(path_, place_, ": ", args..., kDamaged);
  }

  Field at(const char* name) const {
    if (!value_.is_object()) fail("must be an object; it is ", short_dump(value_));
    const auto found = value_.find(name);
    if (found == value_.end()) fail("the field '", name, "' is missing");
    return Field(*found, path_, place_.empty() ? name : place_ + ", '" + name + "'");
  }
  bool has(const char* name) const { return value_.is_object() && value_.contains(name); }

  const std::string& text() const {
    if (!value_.is_string()) fail("must be a string; it is ", short_dump(value_));
    return value_.get_ref<const std::string&>();
  }
  int64_t number() const {
    if (!value_.is_number_integer() ||
        (value_.is_number_unsigned() && value_.get<uint64_t>() > uint64_t{INT64_MAX}) ||
        value_.get<int64_t>() < 0) {
      fail("must be a whole number from 0 to 2^63 - 1; it is ", short_dump(value_));
    }
    return value_.get<int64_t>();
  }
  uint64_t checksum() const {
    const auto value = parse_checksum(text());
    if (!value) fail("must be 16 hexadecimal digits; it is ", short_dump(value_));
    return *value;
  }
  Shape shape() const {
    if (!value_.is_array() || value_.size() > kMaxDims) {
      fail("must be a list of at most ", kMaxDims, " sizes; it is ", short_dump(value_));
    }
    Shape shape;
    for (const Json& size : value_) shape.push_back(Field(size, path_, place_).number());
    return shape;
  }
  template <class Function>  // function(Field item)
  void each_item(const char* what, Function&& function) const {
    if (!value_.is_array()) fail("must be a list; it is ", short_dump(value_));
    size_t index = 0;
    for (const Json& item : value_) {
      function(Field(item, path_, place_ + ", " + what + " " + std::to_string(index++)));
    }
  }
  template <class Function>  // function(name, Field member)
  void each_member(const char* what, Function&& function) const {
    if (!value_.is_object()) fail("must be an object; it is ", short_dump(value_));
    for (const auto& [name, member] : value_.items()) {
      function(name, Field(member, path_, std::string(what) + " " + shown(name)));
    }
  }

 private:
  const Json& value_;
  const std::string& path_;
  std::string place_;
};

// The document as a tree; of a name that stands twice in an object either value could be meant.
Json parse_json(std::string_view text, const std::string& path) {
  std::vector<std::set<std::string>> names;
  const auto check = [&](int depth, Json::parse_event_t event, Json& parsed) {
    constexpr int kMaxDepth = 16;  // the format has 8
    if (depth > kMaxDepth) refuse(path, "the document nests deeper than ", kMaxDepth, kDamaged);
    if (event == Json::parse_event_t::object_start) {
      names.resize(static_cast<size_t>(depth) + 2);
      names.back().clear();
    } else if (event == Json::parse_event_t::key) {
      const std::string& key = parsed.get_ref<const std::string&>();
      if (!names[static_cast<size_t>(depth)].insert(key).second) {
        refuse(path, "every name stands once in its object; ", shown(key), " is there twice",
               kDamaged);
      }
    }
    return true;
  };
  try {
    return Json::parse(text.begin(), text.end(), check);
  } catch (const Json::exception&) {
    refuse(path, "it is not valid JSON", kDamaged);
  }
}

bool is_digits(std::string_view text) {
  return !text.empty() && text.size() <= 9 &&
         std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}

// "rank-3-0.bin"
bool is_chunk_file(std::string_view name) {
  if (!name.starts_with("rank-") || !name.ends_with(".bin")) return false;
  name = name.substr(5, name.size() - 9);
  const size_t dash = name.find('-');
  return dash != name.npos && is_digits(name.substr(0, dash)) && is_digits(name.substr(dash + 1));
}

// A path that stays in the folder.
bool is_plain_path(std::string_view path) {
  if (path.empty() || path.size() > 4096 || path.front() == '/') return false;
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find('/', begin), path.size());
    const std::string_view part = path.substr(begin, end - begin);
    if (part.empty() || part == "." || part == ".." || part.find('\0') != part.npos) return false;
    begin = end + 1;
  }
  return true;
}

// Bytes of a box of elements; nothing where they exceed 2^63.
std::optional<uint64_t> bytes_of(const Shape& extent, DType dtype) {
  int64_t bytes = size_of(dtype);
  bool empty = false;
  for (const int64_t size : extent) {
    empty |= size == 0;
    if (__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes)) return std::nullopt;
  }
  return empty ? 0 : static_cast<uint64_t>(bytes);
}

SavedChunk read_chunk(const Field& field, const SavedTensor& tensor, const Manifest& manifest) {
  SavedChunk chunk;
  std::vector<Shape> corners;
  field.at("box").each_item("part", [&](const Field& part) { corners.push_back(part.shape()); });
  if (corners.size() != 2) field.fail("'box' is an offset and an extent; it has ", corners.size());
  chunk.box = {corners[0], corners[1]};
  if (!lies_within(chunk.box, tensor.shape) || chunk.box.numel() == 0) {
    field.fail("the box at ", corners[0], " of extent ", corners[1],
               " must lie within the tensor's ", tensor.shape, " and hold elements");
  }
  chunk.file = field.at("file").text();
  const auto file = manifest.files.find(chunk.file);
  if (file == manifest.files.end() || !is_chunk_file(chunk.file)) {
    field.fail("'file' must be one of the listed files of chunks; it is ", shown(chunk.file));
  }
  chunk.offset = static_cast<uint64_t>(field.at("offset").number());
  chunk.length = static_cast<uint64_t>(field.at("length").number());
  if (bytes_of(chunk.box.extent, tensor.dtype) != chunk.length) {
    field.fail("'length' must be the bytes of ", tensor.dtype, chunk.box.extent, "; it is ",
               chunk.length);
  }
  if (chunk.offset > file->second.bytes || chunk.length > file->second.bytes - chunk.offset) {
    field.fail("bytes [", chunk.offset, ", +", chunk.length, ") must lie within ",
               shown(chunk.file), " of ", file->second.bytes, " bytes");
  }
  if (chunk.offset % static_cast<uint64_t>(size_of(tensor.dtype)) != 0) {
    field.fail("'offset' must be a multiple of the element's ", size_of(tensor.dtype),
               " bytes; it is ", chunk.offset);
  }
  chunk.checksum = field.at("checksum").checksum();
  return chunk;
}

SavedTensor read_tensor(const Field& field, const Manifest& manifest) {
  SavedTensor tensor;
  const std::string& dtype = field.at("dtype").text();
  const auto known = parse_dtype(dtype);
  if (!known || name_of(*known) != dtype) field.fail("'dtype' ", shown(dtype), " is none");
  tensor.dtype = *known;
  tensor.shape = field.at("shape").shape();
  if (!bytes_of(tensor.shape, tensor.dtype)) {
    field.fail("'shape' ", tensor.shape, " has more than 2^63 bytes");
  }
  field.at("chunks").each_item("chunk", [&](const Field& chunk) {
    tensor.chunks.push_back(read_chunk(chunk, tensor, manifest));
  });
  if (!tensor.shape.empty()) {
    std::ranges::stable_sort(tensor.chunks, {},
                             [](const SavedChunk& chunk) { return chunk.box.offset[0]; });
  }
  return tensor;
}

std::string json_text(std::string_view text) { return Json(text).dump(); }

std::string list_text(const Shape& shape) {
  std::string text = "[";
  for (int d = 0; d < shape.size(); ++d) {
    text += (d > 0 ? ", " : "") + std::to_string(shape[d]);
  }
  return text + "]";
}

// Members of an object, one a line.
template <class Map, class Function>
void append_members(std::string& text, const char* indent, const Map& map, Function&& value_text) {
  text += "{";
  const char* between = "";
  for (const auto& [name, value] : map) {
    text += std::string(between) + "\n" + indent + json_text(name) + ": " + value_text(value);
    between = ",";
  }
  text += "}";
}

}  // namespace

uint64_t Manifest::bytes() const {
  uint64_t bytes = 0;
  for (const auto& [name, file] : files) bytes += file.bytes;
  return bytes;
}

std::string sealed(std::string_view text) {
  return std::string(kSealBegin) + checksum_text(checksum_of(text)) + std::string(kSealEnd) +
         std::string(text);
}

std::string_view unsealed(std::string_view text, const std::string& path) {
  const auto checksum =
      text.size() < kSealBytes ? std::nullopt : parse_checksum(text.substr(kSealBegin.size(), 16));
  if (!checksum || !text.starts_with(kSealBegin) ||
      text.substr(kSealBegin.size() + 16, kSealEnd.size()) != kSealEnd) {
    refuse(path, "it begins with its checksum, ", kSealBegin, "..., and this file does not",
           kDamaged);
  }
  const std::string_view rest = text.substr(kSealBytes);
  if (checksum_of(rest) != *checksum) {
    refuse(path, "its checksum must be that of its text; it says ", checksum_text(*checksum),
           " and its ", rest.size(), " bytes have ", checksum_text(checksum_of(rest)), kDamaged);
  }
  return rest;
}

std::string manifest_text(const Manifest& manifest) {
  std::string text = "\n\"checkpoint\": {\n  \"format\": " + json_text(kFormat) +
                     ", \"version\": " + std::to_string(kVersion) +
                     ", \"ranks\": " + std::to_string(manifest.ranks) + ",\n  \"metadata\": ";
  try {
    append_members(text, "    ", manifest.metadata,
                   [](const std::string& value) { return json_text(value); });
    text += ",\n  \"files\": ";
    append_members(text, "    ", manifest.files, [](const SavedFile& file) {
      std::string entry = "{\"bytes\": " + std::to_string(file.bytes);
      if (file.checksum) entry += ", \"checksum\": " + json_text(checksum_text(*file.checksum));
      return entry + "}";
    });
    text += ",\n  \"tensors\": ";
    append_members(text, "    ", manifest.tensors, [](const SavedTensor& tensor) {
      std::string entry = "{\"dtype\": " + json_text(name_of(tensor.dtype)) +
                          ", \"shape\": " + list_text(tensor.shape) + ", \"chunks\": [";
      const char* between = "";
      for (const SavedChunk& chunk : tensor.chunks) {
        entry += std::string(between) + "\n      {\"box\": [" + list_text(chunk.box.offset) + ", " +
                 list_text(chunk.box.extent) + "], \"file\": " + json_text(chunk.file) +
                 ", \"offset\": " + std::to_string(chunk.offset) +
                 ", \"length\": " + std::to_string(chunk.length) +
                 ", \"checksum\": " + json_text(checksum_text(chunk.checksum)) + "}";
        between = ",";
      }
      return entry + "]}";
    });
  } catch (const Json::exception&) {
    TS_THROW(ValueError, "checkpoint",
             "names and metadata must be valid UTF-8; rename what is saved.");
  }
  return sealed(text + "}}\n");
}

Manifest parse_manifest(std::string_view text, const std::string& path, bool complete) {
  // The seal's opening brace is the document's.
  const Json document = parse_json("{" + std::string(unsealed(text, path)), path);
  const Field root = Field(document, path, "").at("checkpoint");
  const std::string& format = root.at("format").text();
  if (format != kFormat) root.fail("'format' must be ", kFormat, "; it is ", shown(format));
  const int64_t version = root.at("version").number();
  if (version != kVersion) {
    refuse(path, "this reader knows version ", kVersion, " of the format; the folder has ", version,
           "; read it with the tessera that wrote it, or a newer one.");
  }
  Manifest manifest;
  const int64_t ranks = root.at("ranks").number();
  if (ranks < 1 || ranks > 10'000'000) root.fail("'ranks' must be at least 1; it is ", ranks);
  manifest.ranks = static_cast<int>(ranks);
  root.at("metadata").each_member("metadata", [&](const std::string& name, const Field& value) {
    manifest.metadata.emplace(name, value.text());
  });
  root.at("files").each_member("file", [&](const std::string& name, const Field& value) {
    if (!is_plain_path(name) || name == kManifestName) {
      value.fail("a file's name is a path inside the folder");
    }
    SavedFile file{.bytes = static_cast<uint64_t>(value.at("bytes").number())};
    if (!is_chunk_file(name)) file.checksum = value.at("checksum").checksum();
    manifest.files.emplace(name, file);
  });
  root.at("tensors").each_member("tensor", [&](const std::string& name, const Field& value) {
    manifest.tensors.emplace(name, read_tensor(value, manifest));
  });
  if (complete) check_tiling(manifest, path);
  return manifest;
}

void check_tiling(const Manifest& manifest, const std::string& path) {
  std::vector<Box> boxes;
  for (const auto& [name, tensor] : manifest.tensors) {
    boxes.clear();
    for (const SavedChunk& chunk : tensor.chunks) boxes.push_back(chunk.box);
    if (const auto problem = tiling_problem(tensor.shape, boxes)) {
      refuse(path, "tensor ", shown(name), ": the parts of ", tensor.dtype, tensor.shape,
             " must hold every element once: ", *problem, kDamaged);
    }
  }
}

}  // namespace tessera::distributed
