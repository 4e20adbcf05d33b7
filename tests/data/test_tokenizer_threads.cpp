// Tokenizers in several threads.
// ctest labels: threads
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include <tessera/data/text/bpe.h>
#include <tessera/data/text/text.h>
#include <tessera/data/text/wordpiece.h>

namespace tessera::data::test_tokenizer_threads {
namespace {

TEST(Tokenizers, SeveralThreadsGiveTheIdsOfOne) {
  const char* folder = std::getenv("TESSERA_DATA_DIR");
  if (folder == nullptr) GTEST_SKIP() << "TESSERA_DATA_DIR is not set: no vocabularies to read";
  const std::string base(folder);
  const BpeTokenizer gpt2 = BpeTokenizer::from_folder(base + "/gpt2");
  const WordPieceTokenizer bert = WordPieceTokenizer::from_file(base + "/bert/vocab.txt");
  const std::string text = read_text(base + "/text/wikitext2-raw-valid.txt").substr(0, 50'000);
  const std::vector<TokenId> expected = gpt2.encode(text), expected_bert = bert.encode(text);
  std::array<std::vector<TokenId>, 4> got, got_bert;
  std::vector<std::thread> threads;
  for (size_t i = 0; i < got.size(); ++i) {
    threads.emplace_back([&, i] {
      for (int repeat = 0; repeat < 3; ++repeat) {
        got[i] = gpt2.encode(text);
        got_bert[i] = bert.encode(text);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (size_t i = 0; i < got.size(); ++i) {
    EXPECT_EQ(got[i], expected);
    EXPECT_EQ(got_bert[i], expected_bert);
  }
}

}  // namespace
}  // namespace tessera::data::test_tokenizer_threads
