// WordPiece, which data/text has, with a vocabulary in JSON.
#include <tessera/core/error.h>
#include <tessera/data/text/word_pieces.h>
#include <tessera/data/tokenizer_json/token_model.h>

namespace tessera::data {
namespace {

class WordPieceModel : public TokenModel {
 public:
  explicit WordPieceModel(JsonFields& fields)
      : pieces_(fields.optional_text("continuing_subword_prefix").value_or("##"),
                static_cast<size_t>(fields.number("max_input_chars_per_word", 100))),
        unknown_(fields.optional_text("unk_token").value_or("[UNK]")) {
    vocabulary_.read(fields.at("vocab"), fields.place() + ".vocab");
    for (TokenId id = 0; id < vocabulary_.end(); ++id) {
      if (const std::string* const token = vocabulary_.token(id)) pieces_.add(*token, id);
    }
    unknown_id_ = vocabulary_.find(unknown_);
  }

  void encode(std::string_view piece, std::vector<TokenId>& ids,
              std::vector<ByteSpan>* places) const override {
    std::vector<size_t> ends;
    if (!pieces_.encode(piece, ids, places != nullptr ? &ends : nullptr)) {
      TS_CHECK_AS(FormatError, unknown_id_.has_value(), kPretrained, "the vocabulary lacks '",
                  unknown_, "', its token for what is unknown, and '", piece.substr(0, 60),
                  "' is; get the file again.");
      ids.push_back(*unknown_id_);
      ends.assign(1, piece.size());
    }
    if (places == nullptr) return;
    uint32_t begin = 0;
    for (const size_t end : ends) {
      places->push_back({begin, static_cast<uint32_t>(end)});
      begin = static_cast<uint32_t>(end);
    }
  }

 private:
  WordPieces pieces_;
  std::string unknown_;
  std::optional<TokenId> unknown_id_;
};

}  // namespace

std::unique_ptr<TokenModel> read_word_piece(JsonFields& fields) {
  return std::make_unique<WordPieceModel>(fields);
}

}  // namespace tessera::data
