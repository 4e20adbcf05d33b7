#include <tessera/data/tokenizer_json/token_model.h>

#include <tessera/core/error.h>

namespace tessera::data {

void Vocabulary::read(const Json& object, const std::string& place) {
  TS_CHECK_AS(FormatError, object.is_object(), kPretrained, place,
              " must be a JSON object from token to id; get the file again.");
  ids_.reserve(object.size());
  for (const auto& [token, id] : object.items()) {
    const TokenId value = token_id_of(id, place, token);
    const std::string* const other = this->token(value);
    TS_CHECK_AS(FormatError, other == nullptr, kPretrained, place, " gives id ", value, " to '",
                *other, "' and '", token, "'; every id must stand once; get the file again.");
    add(token, value);
  }
}

void Vocabulary::add(std::string token, TokenId id) {
  const auto [at, is_new] = ids_.insert_or_assign(std::move(token), id);
  const auto index = static_cast<size_t>(id);
  if (index >= tokens_.size()) tokens_.resize(index + 1, nullptr);
  tokens_[index] = &at->first;
}

bool model_takes_bytes(const Json& value) {
  const auto is_empty = [&](const char* name) {
    const auto found = value.find(name);
    return found == value.end() || found->is_null() ||
           (found->is_string() && found->get_ref<const std::string&>().empty());
  };
  const auto fallback = value.find("byte_fallback");
  return value.is_object() && value.contains("merges") && is_empty("continuing_subword_prefix") &&
         is_empty("end_of_word_suffix") && (fallback == value.end() || *fallback != Json(true));
}

std::unique_ptr<TokenModel> read_model(const Json& value, const std::string& place, bool bytes) {
  JsonFields fields(value, place);
  // Files of the first releases do not say it.
  const std::string type =
      fields.optional_text("type").value_or(value.contains("merges")   ? "BPE"
                                            : value.contains("unk_id") ? "Unigram"
                                                                       : "WordPiece");
  std::unique_ptr<TokenModel> model;
  if (type == "BPE") {
    model = read_bpe(fields, bytes);
  } else if (type == "Unigram") {
    model = read_unigram(fields);
  } else if (type == "WordPiece") {
    model = read_word_piece(fields);
  } else {
    fields.refuse("the type '" + type + "'");
  }
  fields.finish();
  return model;
}

}  // namespace tessera::data
