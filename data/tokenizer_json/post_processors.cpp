#include <tessera/data/tokenizer_json/post_processors.h>

#include <algorithm>
#include <map>
#include <utility>

#include <tessera/core/error.h>

namespace tessera::data {
namespace {

using Parts = std::vector<EncodingPart>;

void append_special(EncodingPart& part, TokenId id, TokenId type_id) {
  part.encoding.ids.push_back(id);
  part.encoding.type_ids.push_back(type_id);
  part.encoding.attention_mask.push_back(1);
  part.encoding.special_tokens_mask.push_back(1);
  part.encoding.offsets.push_back({0, 0});
  part.leading_spaces.push_back(0);
  part.trailing_spaces.push_back(0);
}

void append_part(EncodingPart& to, const EncodingPart& from) {
  const auto append = [](auto& a, const auto& b) { a.insert(a.end(), b.begin(), b.end()); };
  append(to.encoding.ids, from.encoding.ids);
  append(to.encoding.type_ids, from.encoding.type_ids);
  append(to.encoding.attention_mask, from.encoding.attention_mask);
  append(to.encoding.special_tokens_mask, from.encoding.special_tokens_mask);
  append(to.encoding.offsets, from.encoding.offsets);
  append(to.leading_spaces, from.leading_spaces);
  append(to.trailing_spaces, from.trailing_spaces);
}

// Takes the spaces of tokens out of their offsets; the one that add_prefix_space has put before the
// text is in no offset.
void trim_offsets(EncodingPart& part, bool add_prefix_space) {
  for (size_t i = 0; i < part.encoding.offsets.size(); ++i) {
    TokenOffset& offset = part.encoding.offsets[i];
    int64_t leading = part.leading_spaces[i];
    const int64_t trailing = part.trailing_spaces[i];
    if (leading > 0) {
      if ((i == 0 || offset.begin == 0) && add_prefix_space && leading == 1) leading = 0;
      offset.begin = std::min(offset.begin + leading, offset.end);
    }
    if (trailing > 0 && offset.end >= trailing) {
      offset.end = std::max(offset.end - trailing, offset.begin);
    }
  }
}

// ["[SEP]", 102]
TokenId read_pair(JsonFields& fields, const char* name) {
  const Json& value = fields.at(name);
  if (!value.is_array() || value.size() != 2 || !value[0].is_string()) {
    fields.wrong(name, "a token and its id");
  }
  return token_id_of(value[1], fields.place() + "." + name);
}

// [CLS] first [SEP] second [SEP] of BERT; RoBERTa's second text begins with a separator, too.
PostProcessor read_bert(JsonFields& fields, bool roberta) {
  const TokenId separator = read_pair(fields, "sep"), first = read_pair(fields, "cls");
  const bool trims = roberta && fields.flag("trim_offsets");
  const bool add_prefix_space = roberta && fields.flag("add_prefix_space");
  PostProcessor result;
  result.added_single = 2;
  result.added_pair = roberta ? 4 : 3;
  result.trims = trims;
  result.run = [=](Parts& parts, bool add_special_tokens) {
    for (EncodingPart& part : parts) {
      if (trims) trim_offsets(part, add_prefix_space);
      if (roberta) std::fill(part.encoding.type_ids.begin(), part.encoding.type_ids.end(), 0);
    }
    if (!add_special_tokens) return;
    for (size_t i = 0; i < parts.size(); ++i) {
      EncodingPart framed;
      const TokenId type_id = i == 0 || roberta ? 0 : 1;
      if (i == 0) append_special(framed, first, 0);
      if (i > 0 && roberta) append_special(framed, separator, 0);
      append_part(framed, parts[i]);
      append_special(framed, separator, type_id);
      parts[i] = std::move(framed);
    }
  };
  return result;
}

constexpr size_t kMostAdded = 4096;

struct TemplatePiece {
  int sequence = -1;         // 0, 1; -1: special tokens
  std::vector<TokenId> ids;  // theirs
  TokenId type_id = 0;
};
using Template = std::vector<TemplatePiece>;

Template read_template(const Json& list, const std::string& place,
                       const std::map<std::string, std::vector<TokenId>>& specials) {
  Template result;
  for (size_t i = 0; i < list.size(); ++i) {
    JsonFields entry(list[i], place + "[" + std::to_string(i) + "]");
    const bool is_sequence = entry.find("Sequence") != nullptr;
    JsonFields fields = entry.object(is_sequence ? "Sequence" : "SpecialToken");
    entry.finish();
    TemplatePiece piece;
    const std::string id = fields.text("id");
    piece.type_id = static_cast<TokenId>(fields.number("type_id"));
    if (is_sequence) {
      if (id != "A" && id != "B") fields.wrong("id", "A or B");
      piece.sequence = id == "A" ? 0 : 1;
    } else {
      const auto found = specials.find(id);
      TS_CHECK_AS(FormatError, found != specials.end(), kPretrained, fields.place(), " names '", id,
                  "', which special_tokens lacks; get the file again.");
      piece.ids = found->second;
    }
    fields.finish();
    result.push_back(std::move(piece));
  }
  return result;
}

int64_t count_added(const Template& pieces, const std::string& place) {
  int64_t count = 0;
  for (const TemplatePiece& piece : pieces) count += static_cast<int64_t>(piece.ids.size());
  TS_CHECK_AS(FormatError, pieces.size() <= kMostAdded && count <= int64_t{kMostAdded}, kPretrained,
              place, " adds more than ", kMostAdded, " ids to a text; get the file again.");
  return count;
}

PostProcessor read_template_processing(JsonFields& fields) {
  std::map<std::string, std::vector<TokenId>> specials;
  const Json& named = fields.at("special_tokens");
  if (!named.is_object()) fields.wrong("special_tokens", "an object");
  for (const auto& [name, value] : named.items()) {
    JsonFields special(value, fields.place() + ".special_tokens['" + name + "']");
    special.ignore({"id", "tokens"});
    for (const Json& id : special.array("ids")) {
      specials[name].push_back(token_id_of(id, special.place()));
    }
    special.finish();
  }
  const Template single =
      read_template(fields.array("single"), fields.place() + ".single", specials);
  const Template pair = read_template(fields.array("pair"), fields.place() + ".pair", specials);
  for (const TemplatePiece& piece : single) {
    TS_CHECK_AS(FormatError, piece.sequence != 1, kPretrained, fields.place(),
                ".single names a second text; get the file again.");
  }
  PostProcessor result;
  result.added_single = count_added(single, fields.place() + ".single");
  result.added_pair = count_added(pair, fields.place() + ".pair");
  result.run = [=](Parts& parts, bool add_special_tokens) {
    const Template& pieces = parts.size() == 1 ? single : pair;
    Parts out;
    for (const TemplatePiece& piece : pieces) {
      EncodingPart part;
      if (piece.sequence >= 0) {
        TS_CHECK_AS(
            FormatError, static_cast<size_t>(piece.sequence) < parts.size(), kPretrained,
            "a template names a text that an earlier one has left out; get the file again.");
        part = parts[static_cast<size_t>(piece.sequence)];
        std::fill(part.encoding.type_ids.begin(), part.encoding.type_ids.end(), piece.type_id);
      } else if (!add_special_tokens) {
        continue;
      }
      for (const TokenId id : piece.ids) append_special(part, id, piece.type_id);
      out.push_back(std::move(part));
    }
    parts = std::move(out);
  };
  return result;
}

PostProcessor read_sequence(JsonFields& fields) {
  PostProcessor result;
  std::vector<PostProcessor> steps;
  bool templates = false;
  for (const Json& value : fields.array("processors")) {
    const std::string place = fields.place() + ".processors[" + std::to_string(steps.size()) + "]";
    steps.push_back(read_post_processor(value, place));
    const PostProcessor& step = steps.back();
    // It takes one or two texts, and leaves as many parts as it has pieces.
    const bool is_template = value.value("type", "") == "TemplateProcessing";
    if (is_template && templates) fields.refuse("two TemplateProcessing");
    templates |= is_template;
    result.added_single += step.added_single;
    result.added_pair += step.added_pair;
    result.trims |= step.trims;
  }
  result.run = [steps = std::move(steps)](Parts& parts, bool add_special_tokens) {
    for (const PostProcessor& step : steps) step.run(parts, add_special_tokens);
  };
  return result;
}

PostProcessor read_processor_kind(JsonFields& fields) {
  const std::string type = fields.text("type");
  if (type == "TemplateProcessing") return read_template_processing(fields);
  if (type == "BertProcessing") return read_bert(fields, false);
  if (type == "RobertaProcessing") return read_bert(fields, true);
  if (type == "Sequence") return read_sequence(fields);
  if (type == "ByteLevel") {
    PostProcessor result;
    result.trims = fields.flag("trim_offsets");
    const bool add_prefix_space = fields.flag("add_prefix_space");
    fields.ignore({"use_regex"});
    result.run = [trims = result.trims, add_prefix_space](Parts& parts, bool) {
      if (!trims) return;
      for (EncodingPart& part : parts) trim_offsets(part, add_prefix_space);
    };
    return result;
  }
  fields.refuse("the type '" + type + "'");
}

}  // namespace

PostProcessor read_post_processor(const Json& value, const std::string& place) {
  JsonFields fields(value, place);
  PostProcessor result = read_processor_kind(fields);
  fields.finish();
  return result;
}

}  // namespace tessera::data
