#include <tessera/data/tokenizer_json/truncation.h>

#include <algorithm>

#include <tessera/core/error.h>

namespace tessera::data {
namespace {

// Of a file: longer than models' contexts.
constexpr int64_t kMostPadding = int64_t{1} << 22;

int64_t length_of(const EncodingPart& part) {
  return static_cast<int64_t>(part.encoding.ids.size());
}

// Ids [begin, end) of a part.
EncodingPart stretch(const EncodingPart& part, int64_t begin, int64_t end) {
  EncodingPart result;
  const auto cut = [&](const auto& from, auto& to) {
    to.assign(from.begin() + begin, from.begin() + end);
  };
  cut(part.encoding.ids, result.encoding.ids);
  cut(part.encoding.type_ids, result.encoding.type_ids);
  cut(part.encoding.attention_mask, result.encoding.attention_mask);
  cut(part.encoding.special_tokens_mask, result.encoding.special_tokens_mask);
  cut(part.encoding.offsets, result.encoding.offsets);
  cut(part.leading_spaces, result.leading_spaces);
  cut(part.trailing_spaces, result.trailing_spaces);
  return result;
}

void pad(PretrainedEncoding& encoding, size_t length, const Padding& how) {
  if (encoding.ids.size() >= length) return;
  const size_t more = length - encoding.ids.size();
  const auto fill = [&](auto& values, auto value) {
    values.insert(how.left ? values.begin() : values.end(), more, value);
  };
  fill(encoding.ids, how.id);
  fill(encoding.type_ids, how.type_id);
  fill(encoding.attention_mask, TokenId{0});
  fill(encoding.special_tokens_mask, TokenId{1});
  fill(encoding.offsets, TokenOffset{});
}

}  // namespace

Truncation read_truncation(JsonFields fields) {
  Truncation result;
  result.max_length = fields.number("max_length");
  const std::string strategy = fields.optional_text("strategy").value_or("LongestFirst");
  const std::string direction = fields.optional_text("direction").value_or("Right");
  if (strategy == "OnlyFirst") {
    result.strategy = Truncation::Strategy::kOnlyFirst;
  } else if (strategy == "OnlySecond") {
    result.strategy = Truncation::Strategy::kOnlySecond;
  } else if (strategy != "LongestFirst") {
    fields.refuse("the strategy '" + strategy + "'");
  }
  if (direction != "Right" && direction != "Left") {
    fields.refuse("the direction '" + direction + "'");
  }
  result.left = direction == "Left";
  result.stride = fields.number("stride", 0);
  fields.finish();
  return result;
}

Padding read_padding(JsonFields fields) {
  Padding result;
  const Json& strategy = fields.at("strategy");
  if (strategy.is_object()) {
    JsonFields fixed = fields.object("strategy");
    result.length = fixed.number("Fixed");
    fixed.finish();
  } else if (strategy != Json("BatchLongest")) {
    fields.refuse("another strategy than BatchLongest and Fixed");
  }
  const std::string direction = fields.text("direction");
  if (direction != "Right" && direction != "Left") {
    fields.refuse("the direction '" + direction + "'");
  }
  result.left = direction == "Left";
  result.to_multiple_of = fields.number("pad_to_multiple_of", 0);
  for (const int64_t length : {result.length.value_or(0), result.to_multiple_of}) {
    TS_CHECK_AS(FormatError, length <= kMostPadding, kPretrained, fields.place(), " asks for ",
                length, " ids; at most ", kMostPadding, " are padded to; get the file again.");
  }
  result.id = static_cast<TokenId>(fields.number("pad_id"));
  result.type_id = static_cast<TokenId>(fields.number("pad_type_id"));
  fields.ignore({"pad_token"});
  fields.finish();
  return result;
}

void truncate(EncodingPart& part, int64_t length, bool left) {
  const int64_t size = length_of(part);
  if (length < size) part = left ? stretch(part, size - length, size) : stretch(part, 0, length);
}

std::vector<EncodingPart> stretches_of(const EncodingPart& part, int64_t length, int64_t stride,
                                       bool left) {
  const int64_t size = length_of(part);
  if (length >= size) return {part};
  if (length == 0) return {stretch(part, 0, 0), part};
  TS_CHECK(stride >= 0 && stride < length, kPretrained, "a stride of ", stride,
           " must be less than the ", length,
           " ids of a text that max_length leaves beside special tokens; lower it.");
  std::vector<EncodingPart> all;
  for (int64_t moved = 0;; moved += length - stride) {
    const int64_t begin = left ? std::max<int64_t>(size - moved - length, 0) : moved;
    const int64_t end = left ? size - moved : std::min(moved + length, size);
    all.push_back(stretch(part, begin, end));
    if (left ? begin == 0 : end == size) return all;
  }
}

std::vector<int64_t> kept_lengths(const std::vector<EncodingPart>& parts, const Truncation& how,
                                  int64_t added) {
  TS_CHECK(how.max_length >= added, kPretrained, "max_length must leave room for ", added,
           " special tokens; got ", how.max_length, "; raise it.");
  const int64_t room = how.max_length - added;
  std::vector<int64_t> lengths;
  int64_t total = 0;
  for (const EncodingPart& part : parts) total += lengths.emplace_back(length_of(part));
  if (room == 0) return std::vector<int64_t>(parts.size(), 0);
  if (total <= room) return lengths;
  if (how.strategy != Truncation::Strategy::kLongestFirst) {
    const bool first = how.strategy == Truncation::Strategy::kOnlyFirst;
    TS_CHECK(first || parts.size() == 2, kPretrained,
             "the strategy shortens the second text, and there is none; truncate the first.");
    int64_t& length = lengths[first ? 0 : 1];
    TS_CHECK(length > total - room, kPretrained, "max_length ", how.max_length,
             " leaves no room for the ", first ? "first" : "second",
             " text, which alone may be shortened; raise it.");
    length -= total - room;
    return lengths;
  }
  if (parts.size() == 1) return {room};
  // The longer one loses until both are equal, then they share; an odd id goes to the one that was
  // longer, to the second of two equals.
  const bool first_is_shorter = lengths[0] <= lengths[1];
  int64_t& shorter = lengths[first_is_shorter ? 0 : 1];
  int64_t& longer = lengths[first_is_shorter ? 1 : 0];
  shorter = std::min(shorter, room / 2);
  longer = room - shorter;
  return lengths;
}

void pad_all(std::span<PretrainedEncoding> encodings, std::span<const PretrainedEncoding> for_all,
             const Padding& how) {
  size_t length = static_cast<size_t>(how.length.value_or(0));
  if (!how.length) {
    for (const PretrainedEncoding& encoding : for_all) {
      length = std::max(length, encoding.ids.size());
    }
  }
  if (how.to_multiple_of > 0) {
    const auto unit = static_cast<size_t>(how.to_multiple_of);
    length = (length + unit - 1) / unit * unit;
  }
  for (PretrainedEncoding& encoding : encodings) pad(encoding, length, how);
}

}  // namespace tessera::data
