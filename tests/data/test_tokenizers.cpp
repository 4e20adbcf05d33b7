// Tokenizers: every published vector, whole files, streams, hostile vocabularies.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/core/io/atomic_file.h>
#include <tessera/data/text/bpe.h>
#include <tessera/data/text/text.h>
#include <tessera/data/text/wordpiece.h>

namespace tessera::data::test_tokenizers {
namespace {

using nlohmann::json;

const char* data_folder() { return std::getenv("TESSERA_DATA_DIR"); }

#define REQUIRE_VOCABULARIES()                                                          \
  if (data_folder() == nullptr) {                                                       \
    GTEST_SKIP() << "TESSERA_DATA_DIR is not set: no vocabularies and vectors to read"; \
  }

std::string data_path(const std::string& name) { return std::string(data_folder()) + "/" + name; }

const BpeTokenizer& gpt2() {
  static const BpeTokenizer tokenizer =
      BpeTokenizer::from_files(data_path("gpt2/encoder.json"), data_path("gpt2/vocab.bpe"));
  return tokenizer;
}

const WordPieceTokenizer& bert() {
  static const WordPieceTokenizer tokenizer =
      WordPieceTokenizer::from_file(data_path("bert/vocab.txt"));
  return tokenizer;
}

using Ids = std::vector<TokenId>;

Ids parse_ids(std::string_view text) {
  Ids ids;
  TokenId value = 0;
  bool in_number = false;
  for (const char c : std::string(text) + " ") {
    if (c >= '0' && c <= '9') {
      value = value * 10 + (c - '0');
      in_number = true;
    } else if (in_number) {
      ids.push_back(value);
      value = 0;
      in_number = false;
    }
  }
  return ids;
}

struct Case {
  std::string text;
  Ids ids;
};

// "CASE\n__ggml_vocab_test__\n" for each case beside one line of ids.
std::vector<Case> read_llamacpp(const std::string& name) {
  const std::string texts = read_text(data_path("vectors/" + name + ".inp"));
  const std::string ids = read_text(data_path("vectors/" + name + ".out"));
  constexpr std::string_view kEnd = "\n__ggml_vocab_test__\n";
  std::vector<Case> cases;
  size_t start = 0;
  for (const std::string_view line : split_lines(ids)) {
    const size_t end = texts.find(kEnd, start);
    EXPECT_NE(end, texts.npos);
    cases.push_back({texts.substr(start, end - start), parse_ids(line)});
    start = end + kEnd.size();
  }
  EXPECT_EQ(start, texts.size());
  return cases;
}

TEST(Gpt2, ReproducesTheVectorsOfTransformersJs) {
  REQUIRE_VOCABULARIES();
  const json cases = json::parse(read_text(data_path("vectors/transformersjs-gpt2.json")));
  ASSERT_EQ(cases.size(), 26u);
  for (const json& c : cases) {
    const auto text = c["text"].get<std::string>();
    const Ids ids = gpt2().encode(text);
    EXPECT_EQ(ids, c["ids"].get<Ids>()) << c["name"];
    EXPECT_EQ(gpt2().decode(ids), text) << c["name"];
    EXPECT_EQ(clean_up_spaces(gpt2().decode_text(ids)), c["decoded"].get<std::string>())
        << c["name"];
  }
}

TEST(Gpt2, ReproducesTheVectorsOfLlamaCpp) {
  REQUIRE_VOCABULARIES();
  const std::vector<Case> cases = read_llamacpp("llamacpp-gpt2");
  ASSERT_EQ(cases.size(), 46u);
  for (const Case& c : cases) {
    EXPECT_EQ(gpt2().encode(c.text), c.ids) << c.text;
    EXPECT_EQ(gpt2().decode(c.ids), c.text);
  }
}

TEST(Gpt2, ReproducesTheTestPlansOfGptTokenizer) {
  REQUIRE_VOCABULARIES();
  const std::string plans = read_text(data_path("vectors/gpt-tokenizer-testplans.txt"));
  constexpr std::string_view kName = "EncodingName: ", kSample = "\nSample: ",
                             kEncoded = "\nEncoded: [";
  int checked = 0, cases = 0;
  for (size_t start = plans.find(kName); start != plans.npos; ++cases) {
    const size_t sample = plans.find(kSample, start);
    size_t next = plans.find(std::string("\n\n") + std::string(kName), sample);
    const size_t encoded = plans.rfind(kEncoded, next);
    ASSERT_NE(encoded, plans.npos);
    const std::string name = plans.substr(start + kName.size(), sample - start - kName.size());
    if (name == "r50k_base") {
      const std::string text =
          plans.substr(sample + kSample.size(), encoded - sample - kSample.size());
      const Ids ids = parse_ids(std::string_view(plans).substr(
          encoded + kEncoded.size(), std::min(next, plans.size()) - encoded - kEncoded.size()));
      EXPECT_EQ(gpt2().encode(text), ids) << text;
      EXPECT_EQ(gpt2().decode(ids), text);
      ++checked;
    }
    start = next == plans.npos ? next : next + 2;
  }
  EXPECT_EQ(cases, 313);
  EXPECT_EQ(checked, 64);
}

TEST(Gpt2, ReproducesThePromptsOfGgml) {
  REQUIRE_VOCABULARIES();
  const std::string prompts = read_text(data_path("vectors/ggml-gpt2-prompts.txt"));
  const std::vector<std::string_view> lines = split_lines(prompts);
  ASSERT_EQ(lines.size(), 100u);
  for (const std::string_view line : lines) {
    const size_t arrow = line.rfind(" => ");
    ASSERT_NE(arrow, line.npos);
    const std::string_view text = line.substr(0, arrow);
    const Ids ids = parse_ids(line.substr(arrow + 4));
    EXPECT_EQ(gpt2().encode(text), ids) << line;
    EXPECT_EQ(gpt2().decode(ids), text);
  }
}

TEST(Gpt2, WholeFilesHaveThePublishedTokenCountsAndComeBack) {
  REQUIRE_VOCABULARIES();
  const std::pair<const char*, size_t> files[] = {
      {"text/tinyshakespeare.txt", 338025},     {"text/war-and-peace.txt", 921558},
      {"text/wikitext2-raw-valid.txt", 249887}, {"text/wikitext2-raw-test.txt", 286221},
      {"text/wikitext2-valid.txt", 258659},     {"text/wikitext2-test.txt", 295877}};
  for (const auto& [name, count] : files) {
    const std::string text = read_text(data_path(name));
    const Ids ids = gpt2().encode(text);
    EXPECT_EQ(ids.size(), count) << name;
    EXPECT_TRUE(gpt2().decode(ids) == text) << name;
  }
  // nanoGPT's counts for the first 90 % and the rest (data/shakespeare/readme.md).
  const std::string text = read_text(data_path("text/tinyshakespeare.txt"));
  const size_t cut = text.size() * 9 / 10;
  EXPECT_EQ(gpt2().encode(text.substr(0, cut)).size(), 301966u);
  EXPECT_EQ(gpt2().encode(text.substr(cut)).size(), 36059u);
}

TEST(Gpt2, LongWordsGiveTheSameIdsAsTheSameWordInAShortOne) {
  REQUIRE_VOCABULARIES();
  // 47 and 49 bytes take different merge algorithms; a text of many such words must agree with the
  // concatenation of what a plain quadratic search finds.
  std::mt19937 random(7);
  for (int trial = 0; trial < 200; ++trial) {
    std::string word;
    const size_t length = 30 + random() % 60;
    while (word.size() < length) word += static_cast<char>('a' + random() % (trial % 2 ? 3 : 26));
    // Reference: merge the pair of lowest rank, leftmost first. Ranks are the order of ids.
    std::vector<std::string> parts;
    for (const char c : word) parts.emplace_back(1, c);
    for (;;) {
      std::optional<TokenId> best;
      size_t at = 0;
      for (size_t i = 0; i + 1 < parts.size(); ++i) {
        const std::optional<TokenId> id = gpt2().find(parts[i] + parts[i + 1]);
        if (id && (!best || *id < *best)) {
          best = id;
          at = i;
        }
      }
      if (!best) break;
      parts[at] += parts[at + 1];
      parts.erase(parts.begin() + static_cast<ptrdiff_t>(at) + 1);
    }
    Ids expected;
    for (const std::string& part : parts) expected.push_back(*gpt2().find(part));
    EXPECT_EQ(gpt2().encode(word), expected) << word;
  }
}

TEST(Gpt2, AMegabyteWithoutSpacesIsNotQuadratic) {
  REQUIRE_VOCABULARIES();
  const std::string text(1 << 20, 'a');
  EXPECT_EQ(gpt2().decode(gpt2().encode(text)), text);
  std::string mixed;
  std::mt19937 random(1);
  while (mixed.size() < (1 << 20)) mixed += static_cast<char>('a' + random() % 26);
  EXPECT_EQ(gpt2().decode(gpt2().encode(mixed)), mixed);
}

TEST(Gpt2, AnyBytesComeBack) {
  REQUIRE_VOCABULARIES();
  std::mt19937 random(3);
  for (int trial = 0; trial < 500; ++trial) {
    std::string bytes;
    const size_t length = random() % 200;
    while (bytes.size() < length) {
      bytes +=
          static_cast<char>(trial % 2 ? random() % 256 : " \t\nab1'\xC3\xA9\xF0"[random() % 10]);
    }
    EXPECT_EQ(gpt2().decode(gpt2().encode(bytes)), bytes);
    std::string joined;
    for (const std::string_view piece : split_gpt2(bytes)) {
      EXPECT_FALSE(piece.empty());
      joined += piece;
    }
    EXPECT_EQ(joined, bytes);
  }
}

TEST(Gpt2, CutsTextAsThePatternSays) {
  using Pieces = std::vector<std::string_view>;
  EXPECT_EQ(split_gpt2("I'll don't 'S"), (Pieces{"I", "'ll", " don", "'t", " '", "S"}));
  EXPECT_EQ(split_gpt2("a  b\n\n c \n"), (Pieces{"a", " ", " b", "\n\n", " c", " \n"}));
  EXPECT_EQ(split_gpt2("x\t\ty"), (Pieces{"x", "\t", "\t", "y"}));
  EXPECT_EQ(split_gpt2("a\xC2\xA0\xC2\xA0z"), (Pieces{"a", "\xC2\xA0", "\xC2\xA0", "z"}));
  EXPECT_EQ(split_gpt2("2\xC2\xB2 \xE2\x85\xA7!"), (Pieces{"2\xC2\xB2", " \xE2\x85\xA7", "!"}));
  EXPECT_EQ(split_gpt2(" "), (Pieces{" "}));
  EXPECT_EQ(split_gpt2("'"), (Pieces{"'"}));
  EXPECT_EQ(split_gpt2("'r"), (Pieces{"'", "r"}));
  EXPECT_TRUE(split_gpt2("").empty());
}

TEST(Gpt2, SpecialTokensAreTextUnlessAskedFor) {
  REQUIRE_VOCABULARIES();
  const auto parsing = BpeTokenizer::from_files(
      data_path("gpt2/encoder.json"), data_path("gpt2/vocab.bpe"), {.parse_special_tokens = true});
  const std::string text = "a<|endoftext|> b<|endoftext|>";
  EXPECT_EQ(parsing.encode(text), (Ids{64, 50256, 275, 50256}));
  EXPECT_EQ(parsing.decode(Ids{64, 50256, 275, 50256}), text);
  const Ids plain = gpt2().encode(text);
  EXPECT_EQ(std::count(plain.begin(), plain.end(), 50256), 0);
  EXPECT_EQ(gpt2().decode(plain), text);
  EXPECT_EQ(gpt2().end_of_text(), 50256);
  EXPECT_EQ(gpt2().vocab_size(), 50257);
}

TEST(Gpt2, AStreamOfTokensPrintsWholeCharactersOnly) {
  REQUIRE_VOCABULARIES();
  const std::string text = "na\xC3\xAFve \xF0\x9F\x8C\x8D\xE7\x94\x9F\xE6\xB4\xBB";
  Utf8Stream stream;
  std::string printed;
  for (const TokenId id : gpt2().encode(text)) {
    const std::string part = stream.push(gpt2().token_bytes(id));
    EXPECT_FALSE(find_invalid_utf8(part).has_value());
    EXPECT_EQ(part.find("\xEF\xBF\xBD"), part.npos);
    printed += part;
  }
  EXPECT_EQ(printed + stream.finish(), text);
}

TEST(Gpt2, DecodingHalfACharacterGivesItsBytesOrAReplacement) {
  REQUIRE_VOCABULARIES();
  const Ids ids = gpt2().encode("\xF0\x9F\x8C\x8D");
  const Ids half(ids.begin(), ids.end() - 1);
  EXPECT_TRUE(std::string("\xF0\x9F\x8C\x8D").starts_with(gpt2().decode(half)));
  EXPECT_EQ(gpt2().decode_text(half), "\xEF\xBF\xBD");
}

TEST(Gpt2, IdsOutsideTheVocabularyAreRefused) {
  REQUIRE_VOCABULARIES();
  EXPECT_THROW(gpt2().decode(Ids{50257}), IndexError);
  EXPECT_THROW(gpt2().decode(Ids{-1}), IndexError);
  EXPECT_THROW(gpt2().token_bytes(50257), IndexError);
}

// A byte-level vocabulary of the 256 bytes and what is added to it.
std::string byte_vocabulary(const std::vector<std::string>& more = {},
                            const std::string& tail = "") {
  std::string out = "{";
  int next = 256, id = 0;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
    std::string token;
    append_utf8(static_cast<char32_t>(printable ? byte : next++), token);
    out += (id > 0 ? "," : "") + json(token).dump() + ":" + std::to_string(id);
    ++id;
  }
  for (const std::string& token : more)
    out += "," + json(token).dump() + ":" + std::to_string(id++);
  return out + tail + "}";
}

std::string bpe_error(const std::string& vocabulary, const std::string& merges,
                      const BpeOptions& options = {.special_tokens = {}}) {
  try {
    BpeTokenizer::parse(vocabulary, "v.json", merges, "m.txt", options);
  } catch (const FormatError& error) {
    return error.what();
  }
  return "";
}

TEST(BpeFiles, ASmallVocabularyWorks) {
  const auto tokenizer = BpeTokenizer::parse(
      byte_vocabulary({"ab", "abc", "<end>"}), "v.json", "#version: 0.2\na b\r\n\nab c\n", "m.txt",
      {.special_tokens = {"<end>"}, .parse_special_tokens = true});
  EXPECT_EQ(tokenizer.vocab_size(), 259);
  EXPECT_EQ(tokenizer.encode("abcab<end>b"), (Ids{257, 256, 258, 'b'}));
  EXPECT_EQ(tokenizer.end_of_text(), 258);
}

TEST(BpeFiles, DamagedOnesAreFormatErrorsThatNameFileAndPlace) {
  const std::string good = byte_vocabulary({"ab"});
  EXPECT_EQ(bpe_error(good, "a b\n"), "");
  const struct {
    std::string vocabulary, merges, expected;
  } cases[] = {
      {"", "", "v.json"},
      {"{\"a\": 1", "", "byte offset"},
      {"[1, 2]", "", "an array"},
      {"7", "", "a number"},
      {"{\"a\": [0]}", "", "an array for token 'a'"},
      {"{\"a\": 0.5}", "", "a fraction"},
      {"{\"a\": 1e400}", "", "v.json"},
      {"{\"a\": 18446744073709551615}", "", "id 9223372036854775807"},
      {"{\"a\": -1}", "", "id -1"},
      {"{\"a\": 5}", "", "id 5"},
      {"{\"a\": 0, \"b\": 0}", "", "gives id 0 to 'a' and 'b'"},
      {"{\"a\": 0, \"a\": 1}", "", "'a' twice"},
      {"{\"a\": 0}", "", "none for byte"},
      {"{\"a b\": 0}", "", "'a b' (id 0)"},
      {"{}", "", "none for byte"},
      {good, "a\n", "line 1"},
      {good, "a b c\n", "line 1"},
      {good, "a b\na b\n", "line 2 repeats"},
      {good, "b c\n", "needs 'bc'"},
      {good, "zz b\n", "needs 'zz"},
      {good, std::string("a \0b\n", 5), "line 1"},
  };
  for (const auto& c : cases) {
    const std::string message = bpe_error(c.vocabulary, c.merges);
    EXPECT_NE(message.find(c.expected), message.npos)
        << c.vocabulary.substr(0, 40) << " | " << c.merges << " | " << message;
  }
  EXPECT_NE(bpe_error(good, "a b\n", {.special_tokens = {"<end>"}}).find("lacks '<end>'"),
            std::string::npos);
  EXPECT_THROW(BpeTokenizer::from_files("/none/v.json", "/none/m.txt"), IoError);
  EXPECT_THROW(BpeTokenizer::from_folder("/none"), IoError);
}

TEST(BpeFiles, IdsAreThoseBelowTheNumberOfTokens) {
  const auto with_id = [](int id) { return byte_vocabulary({}, ",\"ab\":" + std::to_string(id)); };
  EXPECT_EQ(bpe_error(with_id(256), ""), "");
  EXPECT_NE(bpe_error(with_id(255), "").find("gives id 255 to"), std::string::npos);
  EXPECT_NE(bpe_error(with_id(257), "").find("has id 257 for 'ab' among 257"), std::string::npos);
  EXPECT_NE(bpe_error(with_id(-1), "").find("id -1"), std::string::npos);
  const auto tokenizer = BpeTokenizer::parse(with_id(256), "v", "a b", "m", {.special_tokens = {}});
  EXPECT_EQ(tokenizer.vocab_size(), 257);
  EXPECT_EQ(tokenizer.token_bytes(0), std::string_view("\0", 1));
  EXPECT_EQ(tokenizer.token_bytes(255), "\xFF");
  EXPECT_EQ(tokenizer.token_bytes(256), "ab");
  EXPECT_THROW(tokenizer.token_bytes(257), IndexError);
  EXPECT_THROW(tokenizer.token_bytes(-1), IndexError);
}

// The table of merges grows at 8, 16 and 32 of them, and is half full before it does.
TEST(BpeFiles, EveryRuleOfAMergeListIsFoundAndNoOther) {
  const auto pair_of = [](size_t i) {
    return std::string{static_cast<char>('a' + i / 7), static_cast<char>('A' + i % 7)};
  };
  for (const size_t rules : {0, 1, 7, 8, 9, 15, 16, 17, 31, 32, 33}) {
    std::vector<std::string> tokens;
    std::string merges;
    for (size_t i = 0; i < rules; ++i) {
      tokens.push_back(pair_of(i));
      merges += std::string{pair_of(i)[0], ' ', pair_of(i)[1], '\n'};
    }
    const auto tokenizer =
        BpeTokenizer::parse(byte_vocabulary(tokens), "v", merges, "m", {.special_tokens = {}});
    for (size_t i = 0; i < 35; ++i) {
      const Ids expected =
          i < rules ? Ids{static_cast<TokenId>(256 + i)} : Ids{pair_of(i)[0], pair_of(i)[1]};
      EXPECT_EQ(tokenizer.encode(pair_of(i)), expected) << rules << " rules, " << i;
    }
  }
}

// Words of up to 16 bytes that become up to 3 ids are remembered, those of up to 48 bytes are
// merged by another algorithm than longer ones.
TEST(BpeFiles, RunsOfEveryLengthAreMergedFromTheLeft) {
  const auto tokenizer =
      BpeTokenizer::parse(byte_vocabulary({"aa", "aaaa", "aaaaaaaa"}), "v",
                          "a a\naa aa\naaaa aaaa\n", "m", {.special_tokens = {}});
  for (size_t length = 1; length <= 130; ++length) {
    Ids expected(length / 8, 258);
    if (length % 8 >= 4) expected.push_back(257);
    if (length % 4 >= 2) expected.push_back(256);
    if (length % 2 == 1) expected.push_back('a');
    const std::string run(length, 'a');
    EXPECT_EQ(tokenizer.encode(run), expected) << length;
    EXPECT_EQ(tokenizer.encode(run), expected) << length << ", remembered";
    expected.insert(expected.end(), 20, '!');
    EXPECT_EQ(tokenizer.encode(run + std::string(20, '!')), expected)
        << length << ", not at the end";
  }
}

TEST(BpeFiles, RememberedWordsThatDifferInTheirLastByteDiffer) {
  const std::string letters = "abcdefghijklmnopqrstuvw";
  std::vector<std::string> tokens;  // every beginning of `letters` is one token
  std::string merges;
  for (size_t i = 1; i < letters.size(); ++i) {
    tokens.push_back(letters.substr(0, i + 1));
    merges += letters.substr(0, i) + " " + letters[i] + "\n";
  }
  const auto tokenizer =
      BpeTokenizer::parse(byte_vocabulary(tokens), "v", merges, "m", {.special_tokens = {}});
  const auto beginning = [](size_t length) {
    return length == 1 ? TokenId{'a'} : static_cast<TokenId>(256 + length - 2);
  };
  for (const char* rest : {"", "!!!!!!!!!!!!!!!!"}) {  // what may be read behind the word
    const Ids end(std::string(rest).size(), '!');
    for (const char* pass : {"new", "remembered"}) {
      for (size_t length = 1; length < letters.size(); ++length) {
        const std::string word = letters.substr(0, length);
        for (const std::string last : {"", "X", "Y"}) {
          Ids expected = {beginning(length)};
          if (!last.empty()) expected.push_back(last[0]);
          expected.insert(expected.end(), end.begin(), end.end());
          EXPECT_EQ(tokenizer.encode(word + last + rest), expected) << word + last << ", " << pass;
        }
      }
    }
  }
}

TEST(Bert, ReproducesTheVectorsOfTransformersJs) {
  REQUIRE_VOCABULARIES();
  const json cases = json::parse(read_text(data_path("vectors/transformersjs-bert-uncased.json")));
  ASSERT_EQ(cases.size(), 30u);
  for (const json& c : cases) {
    const auto text = c["text"].get<std::string>();
    const bool pair = c.contains("text_pair");
    const Encoding encoding = pair ? bert().encode_pair(text, c["text_pair"].get<std::string>())
                                   : bert().encode_text(text);
    EXPECT_EQ(encoding.ids, c["ids"].get<Ids>()) << c["name"];
    EXPECT_EQ(bert().decode(encoding.ids), c["decoded"].get<std::string>()) << c["name"];
    std::vector<std::string> tokens;
    for (const TokenId id : encoding.ids) {
      if (id != bert().first_id() && id != bert().separator_id()) {
        tokens.emplace_back(bert().token_bytes(id));
      }
    }
    EXPECT_EQ(tokens, c["tokens"].get<std::vector<std::string>>()) << c["name"];
  }
}

TEST(Bert, ReproducesTheVectorsOfLlamaCpp) {
  REQUIRE_VOCABULARIES();
  const std::vector<Case> cases = read_llamacpp("llamacpp-bert");
  ASSERT_EQ(cases.size(), 46u);
  for (const Case& c : cases) EXPECT_EQ(bert().encode(c.text), c.ids) << c.text;
}

TEST(Bert, PairsHaveTypesAndAMask) {
  REQUIRE_VOCABULARIES();
  const Encoding pair = bert().encode_pair("hello there", "world", {.pad_to = 8});
  EXPECT_EQ(pair.ids, (Ids{101, 7592, 2045, 102, 2088, 102, 0, 0}));
  EXPECT_EQ(pair.type_ids, (Ids{0, 0, 0, 0, 1, 1, 0, 0}));
  EXPECT_EQ(pair.attention_mask, (Ids{1, 1, 1, 1, 1, 1, 0, 0}));
}

TEST(Bert, TruncationTakesFromTheLongerText) {
  REQUIRE_VOCABULARIES();
  const std::string five = "one two three four five", two = "six seven";
  const auto lengths = [&](const std::string& a, const std::string& b, int64_t limit) {
    const Encoding e = bert().encode_pair(a, b, {.max_length = limit});
    EXPECT_LE(e.ids.size(), static_cast<size_t>(limit));
    const auto second = std::count(e.type_ids.begin(), e.type_ids.end(), 1) - 1;
    return std::pair<int64_t, int64_t>(static_cast<int64_t>(e.ids.size()) - 3 - second, second);
  };
  using P = std::pair<int64_t, int64_t>;
  EXPECT_EQ(lengths(five, two, 10), P(5, 2));
  EXPECT_EQ(lengths(five, two, 8), P(3, 2));
  EXPECT_EQ(lengths(two, five, 8), P(2, 3));
  EXPECT_EQ(lengths(five, two, 6), P(2, 1));
  EXPECT_EQ(lengths(five, five, 8), P(2, 3));
  EXPECT_EQ(lengths(five, two, 3), P(0, 0));
  EXPECT_EQ(bert().encode_text(five, {.max_length = 4}).ids.size(), 4u);
  EXPECT_THROW(bert().encode_pair(five, two, {.max_length = 2}), ValueError);
  EXPECT_THROW(bert().encode_text(five, {.max_length = -1}), ValueError);
}

TEST(Bert, ABatchIsPaddedToItsLongestSequence) {
  REQUIRE_VOCABULARIES();
  const std::vector<std::string> texts = {"hello", "hello there world"};
  const EncodingBatch batch = bert().encode_batch(texts);
  EXPECT_EQ(batch.ids.shape(), (Shape{2, 5}));
  EXPECT_EQ(batch.ids.to_vector<int64_t>(),
            (std::vector<int64_t>{101, 7592, 102, 0, 0, 101, 7592, 2045, 2088, 102}));
  EXPECT_EQ(batch.attention_mask.to_vector<int64_t>(),
            (std::vector<int64_t>{1, 1, 1, 0, 0, 1, 1, 1, 1, 1}));
  EXPECT_THROW(bert().encode_batch({}), ValueError);
  EXPECT_THROW(bert().encode_batch(texts, std::span(texts).first(1)), ValueError);
}

TEST(Bert, SpecialTokensAndDecodingOptions) {
  REQUIRE_VOCABULARIES();
  const auto parsing =
      WordPieceTokenizer::from_file(data_path("bert/vocab.txt"), {.parse_special_tokens = true});
  EXPECT_EQ(parsing.encode("a [MASK] day"), (Ids{1037, 103, 2154}));
  EXPECT_EQ(bert().encode("[MASK]").size(), 3u);
  EXPECT_EQ(bert().decode(Ids{101, 2088, 1012, 102}, {.skip_special_tokens = true}), "world.");
  EXPECT_EQ(bert().decode(Ids{2088, 1012}, {.clean_up_spaces = false}), "world .");
  EXPECT_THROW(bert().decode(Ids{30522}), IndexError);
}

TEST(Bert, WordsOfMoreThanAHundredCharactersAreUnknown) {
  REQUIRE_VOCABULARIES();
  EXPECT_NE(bert().encode(std::string(100, 'a')), Ids{100});
  EXPECT_EQ(bert().encode(std::string(101, 'a')), Ids{100});
  std::string accents;  // 100 characters, 200 bytes before they are lowered to 100
  for (int i = 0; i < 100; ++i) accents += "\xC3\xA9";
  EXPECT_NE(bert().encode(accents), Ids{100});
}

TEST(Bert, AnyBytesAreAccepted) {
  REQUIRE_VOCABULARIES();
  std::mt19937 random(11);
  for (int trial = 0; trial < 500; ++trial) {
    std::string bytes;
    const size_t length = random() % 100;
    while (bytes.size() < length) bytes += static_cast<char>(random() % 256);
    for (const TokenId id : bert().encode(bytes)) {
      EXPECT_GE(id, 0);
      EXPECT_LT(id, bert().vocab_size());
    }
  }
}

TEST(WordPieceFiles, DamagedOnesAreFormatErrorsThatNameFileAndLine) {
  const std::string good = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\n##b\n";
  EXPECT_EQ(WordPieceTokenizer::parse(good, "v.txt").encode("ab abb Z"), (Ids{5, 6, 5, 6, 6, 1}));
  const struct {
    std::string vocabulary, expected;
  } cases[] = {{"", "lacks '[PAD]'"},
               {good + "a\n", "line 8 repeats 'a'"},
               {good + "\nb\n", "line 8 is empty"},
               {good + "\xFF\n", "line 8 column 1"},
               {"[PAD]\n[UNK]\n[CLS]\n[SEP]\n", "lacks '[MASK]'"}};
  for (const auto& c : cases) {
    try {
      WordPieceTokenizer::parse(c.vocabulary, "v.txt");
      ADD_FAILURE() << c.expected;
    } catch (const FormatError& error) {
      EXPECT_NE(std::string(error.what()).find(c.expected), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("v.txt"), std::string::npos) << error.what();
    }
  }
}

const std::string kPieces = "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n";

TEST(WordPieceFiles, TheLastIdIsThereAndTheOneBehindIsNot) {
  for (const char* end : {"", "\n", "\r\n"}) {
    const auto tokenizer = WordPieceTokenizer::parse(kPieces + "a" + end, "v.txt");
    EXPECT_EQ(tokenizer.vocab_size(), 6);
    EXPECT_EQ(tokenizer.token_bytes(0), "[PAD]");
    EXPECT_EQ(tokenizer.token_bytes(5), "a");
    EXPECT_EQ(tokenizer.decode(Ids{5}), "a");
    EXPECT_THROW(tokenizer.token_bytes(6), IndexError);
    EXPECT_THROW(tokenizer.decode(Ids{6}), IndexError);
    EXPECT_THROW(tokenizer.token_bytes(-1), IndexError);
  }
}

TEST(WordPieceFiles, TheLongestPiecesAreFound) {
  // The longest beginning is longer than all else, the longest continuation than the others.
  const auto tokenizer =
      WordPieceTokenizer::parse(kPieces + "a\nabcdefghijkl\n##i\n##abcdefghi\n", "v.txt");
  EXPECT_EQ(tokenizer.encode("abcdefghijkl"), Ids{6});
  EXPECT_EQ(tokenizer.encode("abcdefghijkli"), (Ids{6, 7}));
  EXPECT_EQ(tokenizer.encode("abcdefghijklabcdefghi"), (Ids{6, 8}));
  EXPECT_EQ(tokenizer.encode("abcdefghijklabcdefghii"), (Ids{6, 8, 7}));
  EXPECT_EQ(tokenizer.encode("aabcdefghi"), (Ids{5, 8}));
  EXPECT_EQ(tokenizer.encode("abcdefghijk"), Ids{1});
  EXPECT_EQ(tokenizer.encode("abcdefghijklabcdefgh"), Ids{1});
}

// A folder of transformers, whose tokenizer_config.json says what BertTokenizer does.
TEST(WordPieceFiles, AFolderSaysWhetherLettersAreLowered) {
  const std::filesystem::path folder =
      std::filesystem::path(testing::TempDir()) / ("tessera_wordpiece_" + std::to_string(getpid()));
  std::filesystem::create_directories(folder);
  const auto write = [&](const char* name, const std::string& text) {
    std::ofstream(folder / name) << text;
  };
  write("vocab.txt", kPieces + "hello\nHello\n\xC3\xA9\ne\n");
  const auto encoded = [&](const std::string& config, const std::string& whole = "") {
    std::filesystem::remove(folder / "tokenizer_config.json");
    std::filesystem::remove(folder / "tokenizer.json");
    if (!config.empty()) write("tokenizer_config.json", config);
    if (!whole.empty()) write("tokenizer.json", whole);
    return WordPieceTokenizer::from_pretrained(folder.string()).encode("Hello \xC3\xA9");
  };
  const Ids lowered = {5, 8}, kept = {6, 7};
  const std::string cased = R"({"normalizer": {"type": "BertNormalizer", "lowercase": false}})";
  EXPECT_EQ(encoded(""), lowered);
  EXPECT_EQ(encoded("{}"), lowered);
  EXPECT_EQ(encoded(R"({"do_lower_case": true, "strip_accents": null})"), lowered);
  EXPECT_EQ(encoded(R"({"do_lower_case": false})"), kept);
  EXPECT_EQ(encoded(R"({"do_lower_case": false, "strip_accents": false})"), kept);
  EXPECT_EQ(encoded("", cased), kept);
  EXPECT_EQ(encoded(R"({"do_lower_case": true})", cased), lowered);
  EXPECT_EQ(encoded(R"({"do_lower_case": false, "unk_token": {"content": "Hello"}})"), kept);
  for (const char* other :
       {R"({"strip_accents": false})", R"({"do_lower_case": false, "strip_accents": true})",
        R"({"tokenize_chinese_chars": false})", R"({"do_basic_tokenize": false})"}) {
    EXPECT_THROW(encoded(other), UnsupportedError) << other;
  }
  for (const char* wrong : {R"({"do_lower_case": "no"})", "[]", "{"}) {
    EXPECT_THROW(encoded(wrong), FormatError) << wrong;
  }
  EXPECT_THROW(encoded(std::string(100'000, '[')), FormatError);
  EXPECT_THROW(encoded(R"({"unk_token": "[NONE]"})"), FormatError);
  std::filesystem::remove_all(folder);
}

TEST(WordPieceFiles, WordsOfAsManyCharactersAsAllowedAreCutAndLongerOnesUnknown) {
  const std::string vocabulary = kPieces + "a\n##a\n\xC3\xA9\n##\xC3\xA9\n";
  for (const int64_t limit : {1, 2, 3, 100}) {
    const auto tokenizer = WordPieceTokenizer::parse(
        vocabulary, "v.txt", {.lower_case = false, .max_word_characters = limit});
    for (const int64_t length : {limit - 1, limit, limit + 1}) {
      for (const std::string character : {"a", "\xC3\xA9"}) {  // of one byte, and of two
        std::string word;
        for (int64_t i = 0; i < length; ++i) word += character;
        const TokenId first = character == "a" ? 5 : 7;
        Ids expected(static_cast<size_t>(length), first + 1);
        if (length > 0) expected[0] = first;
        if (length > limit) expected = {1};
        EXPECT_EQ(tokenizer.encode(word), expected) << word << ", at most " << limit;
      }
    }
  }
  EXPECT_THROW(WordPieceTokenizer::parse(vocabulary, "v.txt", {.max_word_characters = 0}),
               ValueError);
}

TEST(WordPieceFiles, SequencesAreCutAndPaddedToTheTokenThatIsAskedFor) {
  const auto tokenizer = WordPieceTokenizer::parse(kPieces + "a\nb\n", "v.txt");
  EXPECT_THROW(tokenizer.encode_text("a a a", {.max_length = 1}), ValueError);
  const Ids whole = {2, 5, 5, 5, 3};
  for (int64_t length = 2; length <= 7; ++length) {
    Ids cut = {2};
    cut.insert(cut.end(), static_cast<size_t>(std::min<int64_t>(length - 2, 3)), 5);
    cut.push_back(3);
    EXPECT_EQ(tokenizer.encode_text("a a a", {.max_length = length}).ids, cut) << length;
    Ids padded = whole;
    padded.resize(std::max(whole.size(), static_cast<size_t>(length)));
    const Encoding encoding = tokenizer.encode_text("a a a", {.pad_to = length});
    EXPECT_EQ(encoding.ids, padded) << length;
    EXPECT_EQ(std::count(encoding.attention_mask.begin(), encoding.attention_mask.end(), 1), 5);
    EXPECT_EQ(encoding.type_ids.size(), padded.size());
  }
  EXPECT_THROW(tokenizer.encode_pair("a a a", "b", {.max_length = 2}), ValueError);
  const std::vector<Ids> pairs = {{2, 3, 3},          {2, 5, 3, 3},          {2, 5, 3, 6, 3},
                                  {2, 5, 5, 3, 6, 3}, {2, 5, 5, 5, 3, 6, 3}, {2, 5, 5, 5, 3, 6, 3}};
  for (size_t i = 0; i < pairs.size(); ++i) {
    const auto length = static_cast<int64_t>(i) + 3;
    EXPECT_EQ(tokenizer.encode_pair("a a a", "b", {.max_length = length}).ids, pairs[i]) << length;
  }
}

TEST(Bytes, EveryByteIsItsId) {
  const ByteTokenizer bytes;
  EXPECT_EQ(bytes.encode("a\xFF"), (Ids{97, 255}));
  EXPECT_EQ(bytes.decode(Ids{97, 255}), "a\xFF");
  EXPECT_EQ(bytes.decode_text(Ids{97, 255}), "a\xEF\xBF\xBD");
  EXPECT_EQ(bytes.vocab_size(), 256);
  EXPECT_THROW(bytes.decode(Ids{256}), IndexError);
  EXPECT_THROW(bytes.decode(Ids{-1}), IndexError);
}

TEST(Utf8Streams, KeepBeginningsAndReplaceWhatCannotBeText) {
  Utf8Stream stream;
  EXPECT_EQ(stream.push("a\xE2"), "a");
  EXPECT_EQ(stream.push("\x82"), "");
  EXPECT_EQ(stream.push("\xAC"), "\xE2\x82\xAC");
  EXPECT_EQ(stream.push("\xFFz"), "\xEF\xBF\xBDz");
  EXPECT_EQ(stream.push("\xE2\x41"),
            "\xEF\xBF\xBD"
            "A");
  EXPECT_EQ(stream.push("\xF0\x9F"), "");
  EXPECT_EQ(stream.finish(), "\xEF\xBF\xBD");
  EXPECT_EQ(stream.finish(), "");
}

}  // namespace
}  // namespace tessera::data::test_tokenizers
