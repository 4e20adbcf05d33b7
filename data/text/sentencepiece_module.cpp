#include <tessera/data/text/sentencepiece_module.h>

#include <sentencepiece_processor.h>

#include <string>
#include <string_view>
#include <vector>

namespace {

using sentencepiece::SentencePieceProcessor;
using Functions = tessera::data::SentencePieceFunctions;

const SentencePieceProcessor& of(const void* model) {
  return *static_cast<const SentencePieceProcessor*>(model);
}

// Gives on what went wrong; true: nothing did.
bool tell(const sentencepiece::util::Status& status, Functions::Text message, void* target) {
  if (status.ok()) return true;
  const std::string text = status.ToString();
  message(target, text.data(), text.size());
  return false;
}

void* open_model(const char* bytes, size_t size, Functions::Text message, void* target) {
  auto* const model = new SentencePieceProcessor;
  if (tell(model->LoadFromSerializedProto(std::string_view(bytes, size)), message, target)) {
    return model;
  }
  delete model;
  return nullptr;
}
void close_model(void* model) { delete static_cast<SentencePieceProcessor*>(model); }

void piece(const void* model, int id, Functions::Text text, void* target) {
  const std::string& found = of(model).IdToPiece(id);
  text(target, found.data(), found.size());
}

Functions::Kind kind(const void* model, int id) {
  if (of(model).IsUnknown(id)) return Functions::kUnknown;
  if (of(model).IsControl(id)) return Functions::kControl;
  return of(model).IsByte(id) ? Functions::kByte : Functions::kNormal;
}

bool encode(const void* model, const char* text, size_t size, Functions::Ids ids,
            Functions::Text message, void* target) {
  std::vector<int> found;
  if (!tell(of(model).Encode(std::string_view(text, size), &found), message, target)) return false;
  ids(target, found.data(), found.size());
  return true;
}

bool decode(const void* model, const int* ids, size_t count, Functions::Text text, void* target) {
  std::string found;
  if (!tell(of(model).Decode(std::vector<int>(ids, ids + count), &found), text, target)) {
    return false;
  }
  text(target, found.data(), found.size());
  return true;
}

}  // namespace

const Functions* tessera_sentencepiece_functions() {
  static const Functions functions{
      .open = open_model,
      .close = close_model,
      .size = [](const void* model) { return of(model).GetPieceSize(); },
      .piece = piece,
      .kind = kind,
      .unk = [](const void* model) { return of(model).unk_id(); },
      .bos = [](const void* model) { return of(model).bos_id(); },
      .eos = [](const void* model) { return of(model).eos_id(); },
      .pad = [](const void* model) { return of(model).pad_id(); },
      .encode = encode,
      .decode = decode};
  return &functions;
}
