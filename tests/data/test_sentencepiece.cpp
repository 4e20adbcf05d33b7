// SentencePiece's files: ids and texts of the sentencepiece package.
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/data/text/sentencepiece.h>
#include <tessera/data/text/sentencepiece_module.h>

#include "golden_files.h"
#include "message_of.h"
#include "refusals.h"

namespace tessera::data::test_sentencepiece {
namespace {

using nlohmann::json;
using Ids = std::vector<TokenId>;

std::string path_of(const std::string& kind) {
  return tests::golden_path("sentencepiece/" + kind + ".model");
}

class SentencePiece : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!has_sentencepiece()) GTEST_SKIP() << "this build has no SentencePiece";
  }
  static SentencePieceTokenizer tokenizer() {
    return SentencePieceTokenizer::from_file(path_of(GetParam()));
  }
  static json cases() {
    return tests::golden_json(std::string("sentencepiece/") + GetParam() + ".json");
  }
};

TEST_P(SentencePiece, EncodesAndDecodesAsThePackageDoes) {
  const SentencePieceTokenizer one = tokenizer();
  const json expected = cases();
  EXPECT_GE(expected["texts"].size(), 50u);
  for (const json& c : expected["texts"]) {
    const auto text = c["text"].get<std::string>();
    EXPECT_EQ(one.encode(text), c["ids"].get<Ids>()) << text;
    EXPECT_EQ(one.decode(c["ids"].get<Ids>()), c["decoded"].get<std::string>()) << text;
  }
  EXPECT_EQ(one.decode(expected["controls"]["ids"].get<Ids>()),
            expected["controls"]["decoded"].get<std::string>());
}

TEST_P(SentencePiece, KnowsItsPieces) {
  const SentencePieceTokenizer one = tokenizer();
  const json expected = cases();
  const auto pieces = expected["pieces"].get<std::vector<std::string>>();
  ASSERT_EQ(one.vocab_size(), static_cast<int64_t>(pieces.size()));
  for (size_t i = 0; i < pieces.size(); ++i) {
    EXPECT_EQ(one.id_to_token(static_cast<TokenId>(i)), pieces[i]);
    EXPECT_EQ(one.token_to_id(pieces[i]), static_cast<TokenId>(i)) << pieces[i];
  }
  const auto special = [&](const char* name) {
    const int id = expected["special"][name];
    return id < 0 ? std::nullopt : std::optional<TokenId>(id);
  };
  EXPECT_EQ(one.bos_id(), special("bos"));
  EXPECT_EQ(one.end_of_text(), special("eos"));
  EXPECT_EQ(one.pad_id(), special("pad"));
  EXPECT_EQ(one.unk_id(), special("unk"));
  EXPECT_EQ(one.token_to_id("no such piece"), std::nullopt);
  EXPECT_EQ(one.id_to_token(-1), std::nullopt);
  EXPECT_THROW(one.token_bytes(static_cast<TokenId>(pieces.size())), IndexError);
  EXPECT_THROW(one.decode(Ids{-1}), IndexError);
}

INSTANTIATE_TEST_SUITE_P(Kinds, SentencePiece, testing::Values("bpe", "unigram"),
                         [](const auto& info) { return std::string(info.param); });

TEST(SentencePieceFiles, BytesOfTokensMakeTheText) {
  if (!has_sentencepiece()) GTEST_SKIP() << "this build has no SentencePiece";
  const auto bpe = SentencePieceTokenizer::from_file(path_of("bpe"));
  // What is no piece falls to bytes; the space in front is the model's own.
  const std::string text = "To be,\n or <mask> \xE4\xB8\xAD 12";
  std::string bytes;
  for (const TokenId id : bpe.encode(text)) bytes += bpe.token_bytes(id);
  EXPECT_EQ(bytes, " " + text);
  EXPECT_EQ(bpe.token_bytes(*bpe.token_to_id("<s>")), "<s>");
}

TEST(SentencePieceFiles, ThreadsShareATokenizer) {
  if (!has_sentencepiece()) GTEST_SKIP() << "this build has no SentencePiece";
  const auto one = SentencePieceTokenizer::from_file(path_of("unigram"));
  const std::string text = "What is the city but the people?";
  const Ids expected = one.encode(text);
  std::vector<Ids> got(4);
  std::vector<std::thread> threads;
  for (Ids& ids : got) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) ids = one.encode(text);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Ids& ids : got) EXPECT_EQ(ids, expected);
}

TEST(SentencePieceModule, IsLookedForBesideWhatAsksFirst) {
  const std::vector<std::string> known = sentencepiece_folders("");
  ASSERT_EQ(known.size(), 2u);  // as installed by default, as built
  for (const std::string& folder : known) EXPECT_EQ(folder[0], '/');
  EXPECT_EQ(std::filesystem::exists(known[1] + "/libtessera_sentencepiece.so"),
            has_sentencepiece());
  EXPECT_EQ(sentencepiece_folders("tessera"), known);
  const std::vector<std::string> folders = sentencepiece_folders("/opt/one/bin/tessera");
  ASSERT_EQ(folders.size(), 4u);
  EXPECT_EQ(folders[0], "/opt/one/bin");
  EXPECT_TRUE(folders[1].starts_with("/opt/one/lib")) << folders[1];
  EXPECT_EQ(std::vector(folders.begin() + 2, folders.end()), known);
}

TEST(SentencePieceFiles, OtherFilesAreRefused) {
  const std::string other = tests::golden_path("sentencepiece/bpe.json");
  if (!has_sentencepiece()) {
    const auto message =
        message_of<UnsupportedError>([&] { SentencePieceTokenizer::from_file(path_of("bpe")); });
    EXPECT_TRUE(mentions(message, "apt install libsentencepiece-dev")) << message;
    return;
  }
  const auto message = message_of<FormatError>([&] { SentencePieceTokenizer::from_file(other); });
  EXPECT_TRUE(mentions(message, "bpe.json")) << message;
  EXPECT_THROW(SentencePieceTokenizer::from_file("/nowhere.model"), IoError);
}

}  // namespace
}  // namespace tessera::data::test_sentencepiece
