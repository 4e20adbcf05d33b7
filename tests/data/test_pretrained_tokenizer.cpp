// Tokenizers of tokenizer.json: ids, offsets and texts of the tokenizers package for each family,
// and files that ask for what is not known.
#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/data/text/text.h>
#include <tessera/data/tokenizer_json/pretrained_tokenizer.h>

#include "finished_process.h"
#include "golden_files.h"
#include "message_of.h"
#include "refusals.h"

namespace tessera::data::test_pretrained_tokenizer {
namespace {

using nlohmann::json;
using Ids = std::vector<TokenId>;
using tests::golden_path;

constexpr const char* kFamilies[] = {"bert",     "bert_cased", "clip",   "gemma",   "gpt2",
                                     "gpt_neox", "llama2",     "llama3", "mistral", "phi",
                                     "qwen2",    "roberta",    "t5"};

std::string folder_of(const std::string& family) { return golden_path("tokenizers/" + family); }

json file_of(const std::string& family) {
  return tests::golden_json("tokenizers/" + family + "/tokenizer.json");
}

PretrainedTokenizer parse(const json& file) {
  return PretrainedTokenizer::parse(file.dump(), "tokenizer.json");
}

std::vector<int64_t> flat(const std::vector<TokenOffset>& offsets) {
  std::vector<int64_t> numbers;
  for (const TokenOffset& offset : offsets) {
    numbers.push_back(offset.begin);
    numbers.push_back(offset.end);
  }
  return numbers;
}

class Family : public testing::TestWithParam<const char*> {
 protected:
  const PretrainedTokenizer tokenizer = PretrainedTokenizer::from_pretrained(folder_of(GetParam()));
  const json cases = tests::golden_json(std::string("tokenizers/") + GetParam() + "/cases.json");
};

TEST_P(Family, EncodesAndDecodesAsThePackageDoes) {
  EXPECT_GE(cases["texts"].size(), 50u);
  for (const json& c : cases["texts"]) {
    const auto text = c["text"].get<std::string>();
    const PretrainedEncoding encoding = tokenizer.encode_text(text);
    const auto ids = c["ids"].get<Ids>();
    EXPECT_EQ(encoding.ids, ids) << text;
    EXPECT_EQ(flat(encoding.offsets), c["offsets"].get<std::vector<int64_t>>()) << text;
    const Ids plain = tokenizer.encode_text(text, {.add_special_tokens = false}).ids;
    EXPECT_EQ(plain, c.value("plain", ids)) << text;
    const auto decoded = c["decoded"].get<std::string>();
    EXPECT_EQ(tokenizer.decode(ids), decoded) << text;
    EXPECT_EQ(tokenizer.decode(ids, true), c.value("skipped", decoded)) << text;
  }
}

TEST_P(Family, EncodesWithoutOffsetsWhatItEncodesWithThem) {
  json file = file_of(GetParam());
  file["truncation"] = file["padding"] = nullptr;
  const PretrainedTokenizer whole = parse(file);
  std::string all;
  for (const json& c : cases["texts"]) {
    const auto text = c["text"].get<std::string>();
    all += text + " ";
    const Ids ids = whole.encode_text(text, {.add_special_tokens = false}).ids;
    EXPECT_EQ(whole.encode(text), ids) << text;
    EXPECT_EQ(whole.encode(text), ids) << "with the words in the cache: " << text;
  }
  EXPECT_EQ(whole.encode(all), whole.encode_text(all, {.add_special_tokens = false}).ids);
}

TEST_P(Family, EncodesPairs) {
  for (const json& c : cases["pairs"]) {
    const PretrainedEncoding encoding =
        tokenizer.encode_pair(c["first"].get<std::string>(), c["second"].get<std::string>());
    EXPECT_EQ(encoding.ids, c["ids"].get<Ids>());
    EXPECT_EQ(encoding.type_ids, c["type_ids"].get<Ids>());
    EXPECT_EQ(encoding.special_tokens_mask, c["mask"].get<Ids>());
  }
}

TEST_P(Family, TruncatesAndPadsAtBothEnds) {
  for (const json& c : cases["settings"]) {
    PretrainedEncodeOptions options;
    options.truncation = Truncation{.max_length = c["truncation"]["max_length"],
                                    .left = c["truncation"].value("direction", "") == "left"};
    options.padding = Padding{.to_multiple_of = c["padding"].value("pad_to_multiple_of", 0),
                              .left = c["padding"].value("direction", "") == "left",
                              .id = c["padding"]["pad_id"]};
    if (c["padding"].contains("length")) options.padding->length = c["padding"]["length"];
    const auto texts = c["texts"].get<std::vector<std::string>>();
    const auto batch = tokenizer.encode_batch(texts, {}, options);
    ASSERT_EQ(batch.size(), c["batch"].size());
    for (size_t i = 0; i < batch.size(); ++i) {
      EXPECT_EQ(batch[i].ids, c["batch"][i]["ids"].get<Ids>()) << texts[i];
      EXPECT_EQ(batch[i].attention_mask, c["batch"][i]["mask"].get<Ids>()) << texts[i];
      EXPECT_EQ(batch[i].offsets.size(), batch[i].ids.size());
      EXPECT_EQ(batch[i].type_ids.size(), batch[i].ids.size());
      EXPECT_EQ(batch[i].special_tokens_mask.size(), batch[i].ids.size());
    }
  }
}

TEST_P(Family, ServesSeveralThreads) {
  std::vector<Ids> results(4);
  std::vector<std::thread> threads;
  const std::string text = "The Prince and Pierre, caf\u00e9s of 1812: \u4e2d\u6587 \U0001f600";
  for (Ids& result : results) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) result = tokenizer.encode(text);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Ids& result : results) EXPECT_EQ(result, tokenizer.encode(text));
}

TEST_P(Family, TakesBytesThatAreNotUtf8ForReplacementCharacters) {
  for (const std::string bytes : {"\xff", "a\xe4\xb8", "\xed\xa0\x80", "ab\x80\xc3\xa9\xf0\x9f"}) {
    EXPECT_EQ(tokenizer.encode(bytes), tokenizer.encode(replace_invalid_utf8(bytes)));
    EXPECT_EQ(tokenizer.encode_text(bytes).ids,
              tokenizer.encode_text(replace_invalid_utf8(bytes)).ids);
  }
}

INSTANTIATE_TEST_SUITE_P(Pretrained, Family, testing::ValuesIn(kFamilies),
                         [](const auto& info) { return std::string(info.param); });

// ---- Parts by themselves ------------------------------------------------------------------------

TEST(PretrainedTokenizer, EachKindOfPartDoesWhatThePackageDoes) {
  const json components = tests::golden_json("tokenizers/components.json");
  EXPECT_GE(components.size(), 100u);
  for (const json& component : components) {
    SCOPED_TRACE(component["name"].get<std::string>());
    const PretrainedTokenizer tokenizer = parse(component["file"]);
    for (const json& c : component["texts"]) {  // text, ids, offsets
      const auto text = c[0].get<std::string>();
      const PretrainedEncoding encoding = tokenizer.encode_text(text);
      EXPECT_EQ(encoding.ids, c[1].get<Ids>()) << text;
      EXPECT_EQ(flat(encoding.offsets), c[2].get<std::vector<int64_t>>()) << text;
      EXPECT_EQ(tokenizer.encode(text), c[1].get<Ids>()) << text;
    }
    for (const json& c : component["decoded"]) {
      EXPECT_EQ(tokenizer.decode(c[0].get<Ids>()), c[1].get<std::string>()) << c[0];
    }
  }
}

// ---- What is not known --------------------------------------------------------------------------

struct Change {
  const char* family;
  const char* place;  // as JSON pointers write it
  const char* value;
  const char* named;  // in the error
};

template <class E>
void expect_refused(const Change& change) {
  json file = file_of(change.family);
  file[json::json_pointer(change.place)] = json::parse(change.value);
  const std::string message = message_of<E>([&] { parse(file); });
  EXPECT_TRUE(mentions(message, change.named)) << change.place << ": " << message;
  EXPECT_TRUE(mentions(message, "tokenizer.json")) << message;
  EXPECT_LT(message.size(), 1000u);
}

TEST(PretrainedTokenizer, WhatAFileAsksForAndIsNotKnownIsNamed) {
  constexpr Change kChanges[] = {
      {"gpt2", "/version", "\"2.0\"", "2.0"},
      {"gpt2", "/mystery", "1", "mystery"},
      {"gpt2", "/model/type", "\"WordLevel\"", "WordLevel"},
      {"gpt2", "/model/dropout", "0.1", "dropout"},
      {"gpt2", "/model/mystery", "1", "mystery"},
      {"gpt2", "/pre_tokenizer/type", "\"UnicodeScripts\"", "UnicodeScripts"},
      {"gpt2", "/pre_tokenizer/mystery", "1", "mystery"},
      {"gpt2", "/decoder/type", "\"CTC\"", "CTC"},
      {"gpt2", "/post_processor/type", "\"Mystery\"", "Mystery"},
      {"gpt2", "/added_tokens/0/mystery", "1", "mystery"},
      {"llama3", "/pre_tokenizer/pretokenizers/0/behavior", "\"Mystery\"", "Mystery"},
      {"clip", "/normalizer/normalizers/3/type", "\"Uppercase\"", "normalizers[3]"},
      {"bert", "/normalizer/mystery", "true", "mystery"},
      {"gemma", "/truncation/strategy", "\"Mystery\"", "Mystery"},
      {"gemma", "/truncation/direction", "\"Mystery\"", "Mystery"},
      {"qwen2", "/padding/strategy", "\"Mystery\"", "BatchLongest"},
      {"qwen2", "/padding/direction", "\"Mystery\"", "Mystery"},
      {"t5", "/decoder/prepend_scheme", "\"mystery\"", "mystery"},
      {"llama3", "/pre_tokenizer/pretokenizers/0/pattern", R"({"String": ""})", "an empty text"},
  };
  for (const Change& change : kChanges) expect_refused<UnsupportedError>(change);
}

TEST(PretrainedTokenizer, ExpressionsThatMeanOtherThingsToPcre2AreRefused) {
  for (const char* pattern :
       {"a\\b",        "^a",       "a$",  "[a&&b]", "[a[bc]]", "(?<n>a)", "a{1,3}+",
        "a{,3}",       "\\Aa",     "\\1", "(?i)a",  "[\\S]",   "\\p{L",   "\\pL",
        "[[:alpha:]]", "(*VERB)a", "\\K", "a\\",    "\\xff",   "[]a]",    "(?#c)"}) {
    json file = file_of("llama3");
    file["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {{"Regex", pattern}};
    const std::string message = message_of<UnsupportedError>([&] { parse(file); });
    EXPECT_TRUE(mentions(message, "pretokenizers[0].pattern")) << pattern << ": " << message;
  }
  for (const char* pattern : {"a)", "(a", "\\p{Mystery}", "*"}) {
    json file = file_of("llama3");
    file["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {{"Regex", pattern}};
    EXPECT_TRUE(mentions(message_of<ConfigError>([&] { parse(file); }), "pattern")) << pattern;
  }
}

TEST(PretrainedTokenizer, AnExpressionThatRunsAwayEndsInAnError) {
  json file = file_of("llama3");
  file["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {{"Regex", "(a+)+[bc]"}};
  const PretrainedTokenizer tokenizer = parse(file);
  EXPECT_TRUE(mentions(message_of<ConfigError>([&] { tokenizer.encode(std::string(80, 'a')); }),
                       "pretokenizers[0].pattern"));
}

TEST(PretrainedTokenizer, DamagedFilesAreNamedErrors) {
  constexpr Change kChanges[] = {
      {"gpt2", "/model", "[]", "model"},
      {"gpt2", "/model/vocab", "[]", "model.vocab"},
      {"gpt2", "/model/vocab", R"({"a": 0, "b": 0})", "'a' and 'b'"},
      {"gpt2", "/model/vocab/a", "-1", "'a'"},
      {"gpt2", "/model/vocab/a", "20000000", "'a'"},
      {"gpt2", "/model/vocab/a", "\"1\"", "'a'"},
      {"gpt2", "/model/merges/3", "[\"a\", \"mystery\"]", "merges[3]"},
      {"gpt2", "/model/merges/3", "\"a b c\"", "merges[3]"},
      {"gpt2", "/model/merges/3", "7", "merges[3]"},
      {"gpt2", "/added_tokens/0/id", "7", "<|endoftext|>"},
      {"gpt2", "/added_tokens", "{}", "added_tokens must be an array"},
      {"llama2", "/pre_tokenizer",
       R"({"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": true,
           "add_prefix_space": false})",
       "which do not go together"},
      {"gpt2", "/pre_tokenizer/add_prefix_space", "1", "add_prefix_space"},
      {"t5", "/model/unk_id", "100000", "unk_id"},
      {"t5", "/model/vocab/3", "[\"a\"]", "vocab[3]"},
      {"t5", "/normalizer/normalizers/0/precompiled_charsmap", "\"??\"", "normalizers[0]"},
      {"t5", "/normalizer/normalizers/0/precompiled_charsmap", "\"AAAA\"", "normalizers[0]"},
      {"t5", "/normalizer/normalizers/0/precompiled_charsmap", "\"/////w==\"", "normalizers[0]"},
      {"bert", "/post_processor/single/0/SpecialToken/id", "\"[X]\"", "[X]"},
      {"bert", "/post_processor/single/1/Sequence/id", "\"B\"", "single"},
      {"bert_cased", "/post_processor/sep", "[\"[SEP]\"]", "sep"},
  };
  for (const Change& change : kChanges) expect_refused<FormatError>(change);
  const auto refused = [](std::string_view text) {
    return message_of<FormatError>([&] { PretrainedTokenizer::parse(text, "tokenizer.json"); });
  };
  EXPECT_TRUE(mentions(refused("{"), "JSON"));
  EXPECT_TRUE(mentions(refused("[]"), "object"));
  EXPECT_TRUE(mentions(refused("{}"), "model"));
}

TEST(PretrainedTokenizer, FilesThatMakeATextGrowWithoutEndAreNamedErrors) {
  const auto many = [](const json& step) {
    json steps = json::array();
    for (int i = 0; i < 60; ++i) steps.push_back(step);
    return steps;
  };
  const json twice = {{"type", "Replace"}, {"pattern", {{"String", "a"}}}, {"content", "aa"}};
  const std::pair<const char*, json> kChanges[] = {
      {"/normalizer", {{"type", "Sequence"}, {"normalizers", many(twice)}}},
      {"/normalizer", {{"type", "Sequence"}, {"normalizers", many({{"type", "ByteLevel"}})}}},
      {"/pre_tokenizer",
       {{"type", "Sequence"},
        {"pretokenizers",
         many({{"type", "ByteLevel"}, {"add_prefix_space", true}, {"trim_offsets", true}})}}},
      {"/decoder", {{"type", "Sequence"}, {"decoders", many(twice)}}},
  };
  for (const auto& [place, value] : kChanges) {
    json file = file_of("phi");
    file["added_tokens"] = json::array();
    file[json::json_pointer(place)] = value;
    const PretrainedTokenizer tokenizer = parse(file);
    EXPECT_TRUE(mentions(
        message_of<FormatError>([&] { tokenizer.decode(tokenizer.encode("a\xC3\xA9")); }), "bytes"))
        << place;
  }
  expect_refused<FormatError>(
      {"bert_cased", "/padding/pad_to_multiple_of", "2147483647", "padding"});
}

TEST(PretrainedTokenizer, WhatIsFoundOutWhenATextComesIsNamedToo) {
  const auto encode = [](json file) {
    file["model"]["unk_token"] = "[NOWHERE]";
    return [tokenizer = std::make_shared<PretrainedTokenizer>(parse(file))] {
      tokenizer->encode("\u2603");
    };
  };
  const json characters = tests::golden_json("tokenizers/components.json")[0]["file"];
  const auto tokenizer = PretrainedTokenizer::from_pretrained(folder_of("bert"));
  const std::vector<std::string> one = {"a"}, two = {"a", "b"};
  expect_refusals({
      {"the vocabulary lacks '[NOWHERE]'", encode(file_of("bert"))},
      {"the vocabulary lacks '[NOWHERE]'", encode(characters)},
      {"a batch has at least one text", [&] { tokenizer.encode_batch({}); }},
      {"got 1 and 2", [&] { tokenizer.encode_batch(one, two); }},
  });
  EXPECT_EQ(tokenizer.encode_batch(one, one).size(), 1u);
}

TEST(PretrainedTokenizer, IdsWithoutATokenAreAnIndexError) {
  const auto tokenizer = PretrainedTokenizer::from_pretrained(folder_of("t5"));
  const auto size = static_cast<TokenId>(tokenizer.vocab_size());
  for (const TokenId id : {-1, size, 1 << 30}) {
    EXPECT_THROW(tokenizer.decode(Ids{id}), IndexError);
    EXPECT_THROW(tokenizer.token_bytes(id), IndexError);
    EXPECT_EQ(tokenizer.id_to_token(id), std::nullopt);
  }
}

TEST(PretrainedTokenizer, TruncationWithoutRoomIsAValueError) {
  const auto tokenizer = PretrainedTokenizer::from_pretrained(folder_of("bert"));
  const auto options = [](int64_t length, Truncation::Strategy strategy) {
    PretrainedEncodeOptions made;
    made.truncation = Truncation{.max_length = length, .strategy = strategy};
    return made;
  };
  using Strategy = Truncation::Strategy;
  EXPECT_THROW(tokenizer.encode_text("a b", options(1, Strategy::kLongestFirst)), ValueError);
  EXPECT_THROW(tokenizer.encode_text("a b c", options(4, Strategy::kOnlySecond)), ValueError);
  EXPECT_THROW(tokenizer.encode_pair("a", "b c d e", options(5, Strategy::kOnlyFirst)), ValueError);
  EXPECT_EQ(tokenizer.encode_pair("a b", "c d", options(6, Strategy::kOnlySecond)).ids.size(), 6u);
  EXPECT_EQ(tokenizer.encode_text("a b", options(2, Strategy::kLongestFirst)).ids.size(), 2u);
}

// ---- Pieces -------------------------------------------------------------------------------------

// A merge that crosses a space must keep the text from being cut there.
TEST(PretrainedTokenizer, LongPiecesAreCutOnlyWhereNoMergeCanCross) {
  const std::string space = "\xE2\x96\x81";
  const json file = {
      {"model",
       {{"type", "BPE"},
        {"unk_token", "?"},
        {"fuse_unk", true},
        {"vocab",
         {{"?", 0},
          {"a", 1},
          {"b", 2},
          {space, 3},
          {space + "b", 4},
          {"a" + space, 5},
          {"ab", 6},
          {"ab" + space, 7},
          {space + space, 8},
          {"b" + space + "b", 9}}},
        {"merges", json::array({json::array({space, "b"}), json::array({"a", "b"}),
                                json::array({"ab", space}), json::array({"a", space}),
                                json::array({space, space}), json::array({"b", space + "b"})})}}}};
  const PretrainedTokenizer tokenizer = parse(file);
  uint32_t state = 1;
  for (int round = 0; round < 300; ++round) {
    std::string text;
    for (int i = 0; i < 40; ++i) {
      state = state * 1664525 + 1013904223;
      const std::string parts[] = {"a", "b", space, "c", "\xC3\xA9"};
      text += parts[(state >> 16) % 5];
    }
    EXPECT_EQ(tokenizer.encode(text), tokenizer.encode_text(text).ids) << text;
  }
}

TEST(PretrainedTokenizer, LongRunsTakeNoTimeToSpeakOf) {
  for (const char* family : {"gpt2", "llama3", "llama2", "mistral"}) {
    const auto tokenizer = PretrainedTokenizer::from_pretrained(folder_of(family));
    for (const char* part : {" ", "a", "\n", "\xC3\xA9", " a", "\xE2\x96\x81"}) {
      std::string text;
      while (text.size() < 200'000) text += part;
      EXPECT_GT(tokenizer.encode(text).size(), 1000u) << family << " '" << part << "'";
    }
  }
}

TEST(PretrainedTokenizer, WhatTruncationTakesAwayFollowsInStretches) {
  for (const json& c : tests::golden_json("tokenizers/overflow.json")) {
    const json &cut = c["truncation"], &fill = c["padding"];
    const auto strategy = cut.value("strategy", "");
    PretrainedEncodeOptions options;
    options.truncation =
        Truncation{.max_length = cut["max_length"],
                   .strategy = strategy == "only_first"    ? Truncation::Strategy::kOnlyFirst
                               : strategy == "only_second" ? Truncation::Strategy::kOnlySecond
                                                           : Truncation::Strategy::kLongestFirst,
                   .left = cut.value("direction", "") == "left",
                   .stride = cut.value("stride", 0)};
    if (!fill.is_null()) {
      options.padding = Padding{.to_multiple_of = fill.value("pad_to_multiple_of", 0),
                                .left = fill.value("direction", "") == "left",
                                .id = fill["pad_id"]};
      if (fill.contains("length")) options.padding->length = fill["length"];
    }
    SCOPED_TRACE(c.dump());
    json file = file_of(c["family"]);
    file["truncation"] = file["padding"] = nullptr;
    const PretrainedTokenizer tokenizer = parse(file);
    const auto first = c["first"].get<std::string>();
    std::optional<std::string> second;
    if (!c["second"].is_null()) second = c["second"].get<std::string>();
    const auto all = tokenizer.encode_overflowing(first, second, options);
    ASSERT_EQ(all.size(), c["all"].size());
    for (size_t i = 0; i < all.size(); ++i) {
      const json& expected = c["all"][i];
      EXPECT_EQ(all[i].ids, expected["ids"].get<Ids>());
      // The package leaves the types of a template (T5's: all 0) out of what overflows.
      if (c["family"] != "t5") {
        EXPECT_EQ(all[i].type_ids, expected["type_ids"].get<Ids>());
      }
      EXPECT_EQ(all[i].attention_mask, expected["mask"].get<Ids>());
      EXPECT_EQ(flat(all[i].offsets), expected["offsets"].get<std::vector<int64_t>>());
    }
    if (second) continue;
    EXPECT_EQ(all[0].ids, tokenizer.encode_text(first, options).ids);
  }
  json file = file_of("gpt2");
  file["truncation"] = {
      {"max_length", 4}, {"stride", 4}, {"strategy", "LongestFirst"}, {"direction", "Right"}};
  const PretrainedTokenizer tokenizer = parse(file);
  EXPECT_TRUE(mentions(message_of<ValueError>([&] { tokenizer.encode_overflowing("a b c d e f"); }),
                       "stride of 4"));
  file["truncation"]["stride"] = 3;
  const PretrainedTokenizer four = parse(file);
  const std::string text = "1 2 3 4 5 6";
  EXPECT_EQ(four.encode_overflowing(text).size(), four.encode(text).size() - 3)
      << "one new id each";
}

// Of cuts with equal scores the package takes the one that it meets first: with the longest last
// token, since it goes on from the beginning, shortest tokens first.
TEST(PretrainedTokenizer, OfCutsWithEqualScoresThePackagesIsTaken) {
  json file = file_of("t5");
  file["normalizer"] = file["pre_tokenizer"] = file["post_processor"] = nullptr;
  file["added_tokens"] = json::array();
  file["model"] = {
      {"type", "Unigram"}, {"unk_id", 0}, {"byte_fallback", false}, {"vocab", json::array()}};
  for (const auto& [token, score] : std::vector<std::pair<std::string, double>>{{"<unk>", 0},
                                                                                {"a", -1},
                                                                                {"b", -1},
                                                                                {"c", -1},
                                                                                {"ab", -2},
                                                                                {"bc", -2},
                                                                                {"abc", -3},
                                                                                {"ca", -2}}) {
    file["model"]["vocab"].push_back({token, score});
  }
  const PretrainedTokenizer tokenizer = parse(file);
  const json ties = tests::golden_json("tokenizers/ties.json");
  EXPECT_EQ(ties["model"], file["model"]);
  for (const auto& [text, ids] : ties["texts"].items()) {
    EXPECT_EQ(tokenizer.encode(text), ids.get<Ids>()) << text;
  }
}

TEST(PretrainedTokenizer, TokensAreBytesForTextThatIsPrintedAsItIsMade) {
  const auto gpt2 = PretrainedTokenizer::from_pretrained(folder_of("gpt2"));
  EXPECT_EQ(gpt2.token_bytes(*gpt2.token_to_id("\xC4\xA0the")), " the");
  const auto llama = PretrainedTokenizer::from_pretrained(folder_of("llama2"));
  EXPECT_EQ(llama.token_bytes(*llama.token_to_id("\xE2\x96\x81the")), " the");
  EXPECT_EQ(llama.token_bytes(*llama.token_to_id("<0x0A>")), "\n");
  EXPECT_EQ(llama.token_bytes(*llama.token_to_id("<s>")), "<s>");
  EXPECT_EQ(llama.token_to_id("mystery"), std::nullopt);
}

TEST(PretrainedTokenizer, ReadsWhatStandsBesideTheFile) {
  TestFolder folder;
  folder.write("tokenizer.model", "\n");
  EXPECT_TRUE(mentions(
      message_of<UnsupportedError>([&] { PretrainedTokenizer::from_pretrained(folder.path("")); }),
      "save_pretrained"));
  folder.write("tokenizer.json", file_of("gpt2").dump());
  const auto read = [&] { return PretrainedTokenizer::from_pretrained(folder.path("")); };
  EXPECT_EQ(read().end_of_text(), std::nullopt);
  folder.write("special_tokens_map.json",
               R"({"pad_token": {"content": "<pad>"}, "bos_token": "x"})");
  folder.write("tokenizer_config.json",
               R"({"bos_token": "<|endoftext|>", "eos_token": {"content": "<|endoftext|>"},
                   "unk_token": null, "add_bos_token": false, "model_max_length": 1024,
                   "chat_template": "{{ messages }}", "tokenizer_class": "GPT2Tokenizer"})");
  const PretrainedTokenizer tokenizer = read();
  EXPECT_EQ(tokenizer.config().bos_token, "<|endoftext|>");
  EXPECT_EQ(tokenizer.config().pad_token, "<pad>");
  EXPECT_EQ(tokenizer.config().unk_token, std::nullopt);
  EXPECT_EQ(tokenizer.config().add_bos_token, false);
  EXPECT_EQ(tokenizer.config().add_eos_token, std::nullopt);
  EXPECT_EQ(tokenizer.config().model_max_length, 1024);
  EXPECT_EQ(*tokenizer.config().chat_template(), "{{ messages }}");
  EXPECT_EQ(tokenizer.end_of_text(), tokenizer.token_to_id("<|endoftext|>"));
  folder.write("tokenizer_config.json", R"({"model_max_length": 1e30, "chat_template":
      [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]})");
  EXPECT_EQ(read().config().model_max_length, std::nullopt);
  EXPECT_EQ(*read().config().chat_template(), "b");
  EXPECT_EQ(*read().config().chat_template("tool_use"), "a");
  const std::vector<ChatMessage> hello = {{"user", "hi"}};
  EXPECT_EQ(read().apply_chat_template(hello).text, "b");
  EXPECT_EQ(read().apply_chat_template(hello, {.tools = "[]"}).text, "a");
  EXPECT_EQ(read().apply_chat_template(hello, {.chat_template = "tool_use"}).text, "a");
  EXPECT_EQ(read().apply_chat_template(hello, {.chat_template = "{{ pad_token }}"}).text, "<pad>");
  std::filesystem::create_directory(folder.path("additional_chat_templates"));
  folder.write("additional_chat_templates/short.jinja", "s");
  folder.write("chat_template.jinja", "c");
  EXPECT_EQ(*read().config().chat_template(), "c");
  EXPECT_EQ(*read().config().chat_template("short"), "s");
  EXPECT_EQ(read().config().chat_template("tool_use"), nullptr);
  folder.write("tokenizer_config.json", R"({"add_bos_token": "yes"})");
  EXPECT_TRUE(mentions(message_of<FormatError>(read), "add_bos_token"));
  folder.write("tokenizer_config.json", "[]");
  EXPECT_THROW(read(), FormatError);
  EXPECT_THROW(PretrainedTokenizer::from_pretrained(folder.path("none")), IoError);
}

}  // namespace
}  // namespace tessera::data::test_pretrained_tokenizer
