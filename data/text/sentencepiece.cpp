#include <tessera/data/text/sentencepiece.h>

#include <dlfcn.h>

#include <filesystem>
#include <unordered_map>

#include <tessera/core/error.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/data/text/sentencepiece_module.h>

namespace tessera::data {

namespace {

using Functions = SentencePieceFunctions;

constexpr std::string_view kName = "SentencePieceTokenizer";
constexpr std::string_view kSpace = "\xE2\x96\x81";  // U+2581
constexpr const char* kModule = "libtessera_sentencepiece.so";

// The file of this library or program.
std::string own_file() {
  Dl_info here{};
  if (::dladdr(reinterpret_cast<const void*>(&own_file), &here) != 0 && here.dli_fname &&
      here.dli_fname[0] == '/') {
    return here.dli_fname;
  }
  // A program is named as it was called: "tessera", where PATH has it.
  std::error_code ignored;
  return std::filesystem::read_symlink("/proc/self/exe", ignored).string();
}

std::string module_path() {
  for (const std::string& folder : sentencepiece_folders(own_file())) {
    const auto path = std::filesystem::path(folder) / kModule;
    if (std::error_code ignored; std::filesystem::exists(path, ignored)) return path.string();
  }
  return kModule;  // where the loader looks
}

// Loaded at the first call, and kept.
const Functions& functions() {
  static const Functions* const found = [] {
    void* const handle = ::dlopen(module_path().c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND);
    const char* const why = handle ? "" : ::dlerror();
    TS_CHECK_AS(UnsupportedError, handle != nullptr, kName, "cannot load ", kModule, ": ", why,
                "; apt install libsentencepiece-dev, and build and install again");
    const auto get = reinterpret_cast<decltype(&tessera_sentencepiece_functions)>(
        ::dlsym(handle, "tessera_sentencepiece_functions"));
    TS_CHECK_AS(UnsupportedError, get != nullptr, kName, "'", kModule, "' is another library");
    return get();
  }();
  return *found;
}

void set_text(void* target, const char* text, size_t size) {
  static_cast<std::string*>(target)->assign(text, size);
}

// What encode() fills.
struct Encoded {
  std::vector<TokenId>& ids;
  std::string message = {};
};

}  // namespace

struct SentencePieceTokenizer::Model {
  void* model = nullptr;
  std::vector<std::string> pieces;
  std::vector<std::string> bytes;  // of each id
  std::unordered_map<std::string_view, TokenId> ids;

  Model() = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;
  ~Model() {
    if (model != nullptr) functions().close(model);
  }
  void read_pieces() {
    const int size = functions().size(model);
    pieces.resize(static_cast<size_t>(size));
    for (int id = 0; id < size; ++id) {
      std::string& piece = pieces[static_cast<size_t>(id)];
      functions().piece(model, id, set_text, &piece);
      bytes.push_back(bytes_of(piece, functions().kind(model, id)));
      ids.emplace(piece, id);
    }
  }
  static std::string bytes_of(std::string piece, Functions::Kind kind) {
    if (kind == Functions::kControl || kind == Functions::kUnknown) return piece;
    if (kind == Functions::kByte) {  // <0x0A>
      return std::string(1, static_cast<char>(std::stoi(piece.substr(3, 2), nullptr, 16)));
    }
    for (size_t at = 0; (at = piece.find(kSpace, at)) != std::string::npos; ++at) {
      piece.replace(at, kSpace.size(), " ");
    }
    return piece;
  }
  void check(TokenId id) const {
    TS_CHECK_AS(IndexError, id >= 0 && static_cast<size_t>(id) < bytes.size(), kName, "id ", id,
                " is outside [0, ", bytes.size(), ")");
  }
  static std::optional<TokenId> if_there(int id) {
    return id < 0 ? std::nullopt : std::optional<TokenId>(id);
  }
};

// What is installed is found from bin/ and from lib/, wherever the prefix is.
std::vector<std::string> sentencepiece_folders(const std::string& own) {
  std::vector<std::string> folders;
  const std::filesystem::path folder = std::filesystem::path(own).parent_path();
  if (!folder.empty()) {
    folders.push_back(folder.string());
    folders.push_back((folder / ".." / TESSERA_LIBDIR).lexically_normal().string());
  }
  folders.emplace_back(TESSERA_INSTALL_DIR);
  folders.emplace_back(TESSERA_BUILD_DIR);
  return folders;
}

bool has_sentencepiece() { return TESSERA_WITH_SENTENCEPIECE != 0; }

SentencePieceTokenizer::SentencePieceTokenizer(std::unique_ptr<Model> model)
    : model_(std::move(model)) {}
SentencePieceTokenizer::SentencePieceTokenizer(SentencePieceTokenizer&&) noexcept = default;
SentencePieceTokenizer& SentencePieceTokenizer::operator=(SentencePieceTokenizer&&) noexcept =
    default;
SentencePieceTokenizer::~SentencePieceTokenizer() = default;

SentencePieceTokenizer SentencePieceTokenizer::from_file(const std::string& path) {
  TS_CHECK_AS(UnsupportedError, has_sentencepiece(), kName, "'", path,
              "' cannot be read: tessera was built without SentencePiece; apt install "
              "libsentencepiece-dev, and configure and build again");
  const MappedFile file(path);
  auto model = std::make_unique<Model>();
  std::string message;
  model->model = functions().open(file.text().data(), file.text().size(), set_text, &message);
  TS_CHECK_AS(FormatError, model->model != nullptr, kName, "'", path,
              "' is no SentencePiece model: ", message);
  model->read_pieces();
  return SentencePieceTokenizer(std::move(model));
}

int64_t SentencePieceTokenizer::vocab_size() const {
  return static_cast<int64_t>(model_->bytes.size());
}

void SentencePieceTokenizer::encode(std::string_view text, std::vector<TokenId>& ids) const {
  Encoded encoded{ids};
  const auto append = [](void* target, const int* found, size_t count) {
    std::vector<TokenId>& to = static_cast<Encoded*>(target)->ids;
    reserve_more(to, count);
    to.insert(to.end(), found, found + count);
  };
  const auto fail = [](void* target, const char* message, size_t size) {
    static_cast<Encoded*>(target)->message.assign(message, size);
  };
  const bool done =
      functions().encode(model_->model, text.data(), text.size(), append, fail, &encoded);
  TS_CHECK(done, kName, "cannot encode a text: ", encoded.message);
}

std::string SentencePieceTokenizer::decode(std::span<const TokenId> ids) const {
  for (const TokenId id : ids) model_->check(id);
  std::string text;
  const bool done = functions().decode(model_->model, ids.data(), ids.size(), set_text, &text);
  TS_CHECK(done, kName, "cannot decode ids: ", text);
  return text;
}

std::string_view SentencePieceTokenizer::token_bytes(TokenId id) const {
  model_->check(id);
  return model_->bytes[static_cast<size_t>(id)];
}
std::optional<TokenId> SentencePieceTokenizer::end_of_text() const {
  return Model::if_there(functions().eos(model_->model));
}
std::optional<TokenId> SentencePieceTokenizer::bos_id() const {
  return Model::if_there(functions().bos(model_->model));
}
std::optional<TokenId> SentencePieceTokenizer::pad_id() const {
  return Model::if_there(functions().pad(model_->model));
}
std::optional<TokenId> SentencePieceTokenizer::unk_id() const {
  return Model::if_there(functions().unk(model_->model));
}

std::optional<TokenId> SentencePieceTokenizer::token_to_id(std::string_view piece) const {
  const auto found = model_->ids.find(piece);
  return found == model_->ids.end() ? std::nullopt : std::optional<TokenId>(found->second);
}

std::optional<std::string> SentencePieceTokenizer::id_to_token(TokenId id) const {
  if (id < 0 || id >= vocab_size()) return std::nullopt;
  return model_->pieces[static_cast<size_t>(id)];
}

}  // namespace tessera::data
