// Which algorithm runs a product, and what is remembered of the library's answers: with a library
// whose answers the test writes.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <tessera/core/cuda/libraries/gemm_choice.h>
#include <tessera/core/error.h>

namespace tessera::gpu::test_cuda_gemm_choice {
namespace {

using enum GemmAnswer;
using Strings = std::vector<std::string>;

// A library for one product. What happens is noted in `log`.
class ScriptedLibrary final : public GemmCalls {
 public:
  GemmAnswer answer = kDone;                       // of suggestions
  Strings of_key = {"a", "b", "c"}, of_size = {};  // suggested
  std::map<std::string, GemmAnswer> runs = {};     // of algorithms; those that are not here run
  Strings forbidden = {};
  bool is_short_of_memory = false;  // for measuring
  std::optional<size_t> fastest = 0;
  Strings log;

  GemmAnswer suggest(bool key, int most, Strings& algorithms) override {
    log.push_back(key ? "suggest" : "suggest for this size");
    if (answer != kDone) return answer;
    algorithms = key ? of_key : of_size;
    algorithms.resize(std::min(algorithms.size(), static_cast<size_t>(most)));
    return kDone;
  }
  bool allows(const std::string& algorithm) override {
    return std::ranges::find(forbidden, algorithm) == forbidden.end();
  }
  std::optional<FastestCandidate> measure(const Strings& algorithms) override {
    log.push_back("measure " + std::to_string(algorithms.size()));
    if (is_short_of_memory) TS_THROW(OutOfMemory, "test", "no memory");
    return fastest ? std::optional(FastestCandidate{*fastest, 5}) : std::nullopt;
  }
  GemmAnswer run(const std::string& algorithm) override {
    log.push_back(algorithm);
    const auto place = runs.find(algorithm);
    return place == runs.end() ? kDone : place->second;
  }
  [[noreturn]] void fail(const char* what) override { TS_THROW(CudaError, "test", what); }

  Strings take_log() { return std::exchange(log, {}); }
};

// Knowledge that keeps what was measured in `kept`.
GemmKnowledge keeping(std::vector<GemmAlgorithm>& kept) {
  return {.find = [] { return std::optional<GemmAlgorithm>(); },
          .keep = [&kept](const GemmAlgorithm& fastest) { kept.push_back(fastest); }};
}

TEST(GemmChoice, WithoutATableTheFirstSuggestionRunsAndIsRemembered) {
  ScriptedLibrary library;
  GemmChoice choice;
  EXPECT_TRUE(run_chosen(choice, {}, library));
  EXPECT_TRUE(run_chosen(choice, {}, library));
  EXPECT_EQ(library.take_log(), (Strings{"suggest", "a", "a"}));
}

TEST(GemmChoice, WhatRefusesAProductLeavesItToTheNext) {
  for (const GemmAnswer refusal : {kNotSupported, kInvalid}) {
    ScriptedLibrary library;
    library.runs = {{"a", refusal}};
    GemmChoice choice;
    EXPECT_TRUE(run_chosen(choice, {}, library));
    EXPECT_EQ(library.take_log(), (Strings{"suggest", "a", "b"}));
    library.runs.clear();  // another size of the key: the order stays, and with it the bits
    EXPECT_TRUE(run_chosen(choice, {}, library));
    EXPECT_EQ(library.take_log(), (Strings{"a"}));
  }
}

TEST(GemmChoice, WhereNoAlgorithmOfTheKeyTakesASizeTheLibraryIsAskedForThatOne) {
  ScriptedLibrary library;
  library.of_key = {"a"};
  library.of_size = {"d", "e"};
  library.runs = {{"a", kNotSupported}, {"d", kNotSupported}};
  GemmChoice choice;
  EXPECT_TRUE(run_chosen(choice, {}, library));
  EXPECT_EQ(library.take_log(), (Strings{"suggest", "a", "suggest for this size", "d", "e"}));
  library.of_size = {};
  EXPECT_FALSE(run_chosen(choice, {}, library));
  library.runs.clear();  // said of that size, not of the key
  EXPECT_TRUE(run_chosen(choice, {}, library));
}

// Of all statuses of the library only that there is no such product is remembered.
TEST(GemmChoice, OnlyThatThereIsNoSuchProductIsRemembered) {
  for (int status = 1; status <= 20; ++status) {
    ScriptedLibrary library;
    library.answer = gemm_answer(status);
    GemmChoice choice;
    if (status == 15 || status == 8) {  // not supported; not on this architecture
      EXPECT_FALSE(run_chosen(choice, {}, library)) << status;
      library.answer = kDone;
      EXPECT_FALSE(run_chosen(choice, {}, library)) << status;
      EXPECT_EQ(library.take_log(), (Strings{"suggest"})) << status;
    } else {
      for (int again = 0; again < 3; ++again) {
        EXPECT_THROW(run_chosen(choice, {}, library), CudaError) << status;
      }
      library.answer = kDone;
      EXPECT_TRUE(run_chosen(choice, {}, library)) << status;
      EXPECT_EQ(library.take_log(), (Strings{"suggest", "suggest", "suggest", "suggest", "a"}));
    }
  }
  EXPECT_EQ(gemm_answer(0), kDone);
}

TEST(GemmChoice, AProductThatFailsIsAnErrorAndNotTakenForUnserved) {
  ScriptedLibrary library;
  library.runs = {{"a", kFailed}};
  GemmChoice choice;
  EXPECT_THROW(run_chosen(choice, {}, library), CudaError);
  EXPECT_EQ(library.take_log(), (Strings{"suggest", "a"}));  // the others are no remedy
  library.runs.clear();
  EXPECT_TRUE(run_chosen(choice, {}, library));
  // What all of them refuse as invalid is no product that the library lacks either.
  library.runs = {{"a", kInvalid}, {"b", kNotSupported}, {"c", kNotSupported}};
  EXPECT_THROW(run_chosen(choice, {}, library), CudaError);
}

TEST(GemmChoice, WhatWasMeasuredIsKeptAndTheOthersStandBehindIt) {
  ScriptedLibrary library;
  library.fastest = 2;
  std::vector<GemmAlgorithm> kept;
  GemmChoice choice;
  for (int i = 0; i < 2; ++i) EXPECT_TRUE(run_chosen(choice, keeping(kept), library));
  EXPECT_EQ(library.take_log(), (Strings{"suggest", "measure 3", "c", "c"}));
  ASSERT_EQ(kept.size(), 1U);
  EXPECT_EQ(kept[0].bytes, "c");
  EXPECT_EQ(kept[0].microseconds, 5);
  library.runs = {{"c", kNotSupported}};
  EXPECT_TRUE(run_chosen(choice, keeping(kept), library));
  EXPECT_EQ(library.take_log(), (Strings{"c", "a"}));
}

TEST(GemmChoice, WithoutMemoryToMeasureTheFirstRunsAndMeasuringIsTriedAgain) {
  ScriptedLibrary library;
  library.is_short_of_memory = true;
  library.fastest = 1;
  std::vector<GemmAlgorithm> kept;
  GemmChoice choice;
  int measured = 0;
  for (int i = 0; i < 100; ++i) {
    EXPECT_TRUE(run_chosen(choice, keeping(kept), library));
    const Strings log = library.take_log();
    EXPECT_EQ(log.back(), "a");
    measured += static_cast<int>(std::ranges::count(log, "measure 3"));
  }
  EXPECT_EQ(measured, 7);  // the 1st, 2nd, 4th ... 64th: attempts that fail cost time
  EXPECT_TRUE(kept.empty());
  library.is_short_of_memory = false;
  for (int i = 100; i < 128; ++i) EXPECT_TRUE(run_chosen(choice, keeping(kept), library));
  EXPECT_EQ(library.take_log().back(), "b");
  EXPECT_EQ(kept.size(), 1U);
}

TEST(GemmChoice, WhereNoCandidateCouldBeMeasuredNothingIsRemembered) {
  ScriptedLibrary library;
  library.fastest = std::nullopt;
  std::vector<GemmAlgorithm> kept;
  GemmChoice choice;
  EXPECT_TRUE(run_chosen(choice, keeping(kept), library));
  EXPECT_FALSE(choice.settled);
  library.fastest = 1;
  EXPECT_TRUE(run_chosen(choice, keeping(kept), library));
  EXPECT_EQ(library.take_log().back(), "b");
  EXPECT_TRUE(choice.settled);
}

TEST(GemmChoice, AnAlgorithmOfTheTableRunsWithoutAskingUnlessItIsForbidden) {
  std::vector<GemmAlgorithm> kept;
  GemmKnowledge knowledge = keeping(kept);
  knowledge.find = [] { return std::optional(GemmAlgorithm{"t", 3}); };
  ScriptedLibrary library;
  GemmChoice choice;
  EXPECT_TRUE(run_chosen(choice, knowledge, library));
  EXPECT_EQ(library.take_log(), (Strings{"t"}));
  library.of_size = {"d"};  // the table is of another build
  library.runs = {{"t", kNotSupported}};
  EXPECT_TRUE(run_chosen(choice, knowledge, library));
  EXPECT_EQ(library.take_log(), (Strings{"t", "suggest for this size", "d"}));
  library.forbidden = {"t"};
  GemmChoice other;
  EXPECT_TRUE(run_chosen(other, knowledge, library));
  EXPECT_EQ(library.take_log(), (Strings{"suggest", "measure 3", "a"}));
  EXPECT_EQ(kept.size(), 1U);
}

}  // namespace
}  // namespace tessera::gpu::test_cuda_gemm_choice
