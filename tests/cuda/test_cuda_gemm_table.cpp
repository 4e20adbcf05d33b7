// The table of algorithms that products of cuBLASLt are kept in, and the choice among candidates:
// both without the library.
#include <gtest/gtest.h>

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/cuda/libraries/gemm_table.h>
#include <tessera/core/error.h>

namespace tessera::gpu::test_cuda_gemm_table {
namespace {

// ---- The table ----------------------------------------------------------------------------------

class GemmTableFile : public testing::Test {
 protected:
  GemmTableFile()
      : folder_(std::filesystem::path(testing::TempDir()) /
                ("tessera_gemm_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(folder_);
  }
  ~GemmTableFile() override { std::filesystem::remove_all(folder_); }
  std::string path() const { return folder_ / "gemm.json"; }
  std::string read() const {
    std::ostringstream text;
    text << std::ifstream(path()).rdbuf();
    return text.str();
  }
  std::filesystem::path folder_;
};

const std::string kBytes("\x00\x01\xfe\xff key", 8);

TEST_F(GemmTableFile, KeepsWhatWasAddedForTheNextProcess) {
  GemmTable first(path());
  EXPECT_EQ(first.size(), 0U);
  EXPECT_FALSE(std::filesystem::exists(path()));
  first.add("one", {kBytes, 12.5});
  GemmTable other(path());
  ASSERT_TRUE(other.find("one").has_value());
  EXPECT_EQ(other.find("one")->bytes, kBytes);
  EXPECT_EQ(other.find("one")->microseconds, 12.5);
  EXPECT_FALSE(other.find("two").has_value());
  // Both write, and neither loses the other's.
  other.add("two", {"b", 2});
  first.add("three", {"c", 3});
  first.add("one", {"a", 1});
  first.write();
  const GemmTable last(path());
  EXPECT_EQ(last.size(), 3U);
  EXPECT_EQ(last.find("one")->bytes, "a");
  EXPECT_EQ(last.find("two")->bytes, "b");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);  // nothing else
}

TEST_F(GemmTableFile, IsWrittenAtMostOnceASecond) {
  double now = 100;
  const auto clock = [&now] { return now; };
  const auto written = [&] { return GemmTable(path()).size(); };
  GemmTable table(path(), clock);
  table.add("0", {"a", 1});
  EXPECT_EQ(written(), 1U);
  for (int i = 1; i < 10; ++i, now += 0.1) {
    table.add(std::to_string(i), {"a", 1});
    table.write_due();
    EXPECT_EQ(table.find(std::to_string(i))->bytes, "a");
    EXPECT_EQ(written(), 1U) << i;
  }
  now = 101;
  {  // another process
    GemmTable other(path());
    other.add("other", {"b", 2});
  }
  table.write_due();
  EXPECT_EQ(written(), 11U);
  now = 103;
  const std::string text = read();
  std::filesystem::remove(path());
  table.write_due();  // nothing waits: it is not written again
  EXPECT_FALSE(std::filesystem::exists(path()));
  std::ofstream(path()) << text;
  table.add("10", {"a", 1});
  EXPECT_EQ(written(), 12U);
  table.add("11", {"a", 1});
  table.write();
  EXPECT_EQ(written(), 13U);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);
}

TEST_F(GemmTableFile, WhatWaitsIsWrittenWhereTheTableEnds) {
  const auto stands_still = [] { return 0.0; };
  {
    GemmTable table(path(), stands_still);
    table.add("1", {"a", 1});
    table.add("2", {"a", 1});
    EXPECT_EQ(GemmTable(path()).size(), 1U);
  }
  EXPECT_EQ(GemmTable(path()).size(), 2U);
}

TEST_F(GemmTableFile, WhatWaitsIsWrittenWhereTheProgramExits) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  constexpr const char* kOurs = "TESSERA_TEST_GEMM_TABLE";
  ::setenv(kOurs, path().c_str(), 0);  // the process of a death test has a folder of its own
  EXPECT_EXIT(
      {
        std::filesystem::remove_all(folder_);
        ::setenv("TESSERA_GEMM_TABLE", std::getenv(kOurs), 1);
        GemmTable* const table = process_gemm_table();
        for (int i = 0; i < 100; ++i) table->add(std::to_string(i), {"a", 1});
        std::exit(0);
      },
      testing::ExitedWithCode(0), "");
  ::unsetenv(kOurs);
  EXPECT_EQ(GemmTable(path()).size(), 100U);
}

TEST_F(GemmTableFile, WithoutAPathItIsInMemory) {
  GemmTable table("");
  table.add("one", {kBytes, 12.5});
  EXPECT_EQ(table.find("one")->bytes, kBytes);
  EXPECT_EQ(GemmTable("").size(), 0U);
}

// Which file it is, by the environment. Names are the folder's.
TEST_F(GemmTableFile, TheEnvironmentSaysWhichOne) {
  const auto path_for = [](std::map<std::string, std::string> variables) -> std::string {
    std::map<std::string, std::optional<std::string>> before;
    for (const char* name : {"TESSERA_GEMM_TABLE", "XDG_CACHE_HOME", "HOME"}) {
      const char* const value = std::getenv(name);
      before[name] = value != nullptr ? std::optional<std::string>(value) : std::nullopt;
      const auto place = variables.find(name);
      place != variables.end() ? ::setenv(name, place->second.c_str(), 1) : ::unsetenv(name);
    }
    const auto table = gemm_table_of_environment();
    for (const auto& [name, value] : before) {
      value ? ::setenv(name.c_str(), value->c_str(), 1) : ::unsetenv(name.c_str());
    }
    return table == nullptr ? "none" : table->path();
  };
  const std::string folder = folder_.string();
  EXPECT_EQ(path_for({{"TESSERA_GEMM_TABLE", path()}, {"HOME", folder}}), path());
  EXPECT_EQ(path_for({{"TESSERA_GEMM_TABLE", ""}, {"HOME", folder}}), "none");
  EXPECT_EQ(path_for({{"HOME", folder}}), folder + "/.cache/tessera/gemm_table.json");
  EXPECT_EQ(path_for({{"XDG_CACHE_HOME", folder + "/x"}, {"HOME", folder}}),
            folder + "/x/tessera/gemm_table.json");
  EXPECT_EQ(path_for({}), "");
  std::ofstream(folder + "/file") << "no folder";
  EXPECT_EQ(path_for({{"HOME", folder + "/file"}}), "");
}

TEST_F(GemmTableFile, ADamagedFileIsNamedAndStays) {
  double now = 0;
  GemmTable table(path(), [&now] { return ++now; });
  table.add("one", {kBytes, 12.5});
  const std::string good = read();
  std::vector<std::string> bad = {"",
                                  "{",
                                  "[]",
                                  "{}",
                                  R"({"format": "other", "entries": {}})",
                                  R"({"format": "tessera gemm table 1"})",
                                  R"({"format": "tessera gemm table 1", "entries": {"k": 1}})",
                                  good.substr(0, good.size() / 2)};
  for (const auto& [from, to] :
       {std::pair("12.5", "-1"), std::pair("12.5", "\"fast\""), std::pair("0001fe", "0001f"),
        std::pair("0001fe", "00g1fe"), std::pair("0001feff206b6579", "")}) {
    std::string changed = good;
    ASSERT_NE(changed.find(from), std::string::npos) << from << " in " << good;
    bad.push_back(changed.replace(changed.find(from), std::string(from).size(), to));
  }
  for (const std::string& text : bad) {
    std::ofstream(path(), std::ios::trunc) << text;
    try {
      GemmTable damaged(path());
      ADD_FAILURE() << "no error for " << text;
    } catch (const FormatError& error) {
      EXPECT_NE(std::string(error.what()).find(path()), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("delete it"), std::string::npos) << error.what();
    }
    EXPECT_THROW(table.add("two", {"b", 2}), FormatError);
    EXPECT_EQ(read(), text);
  }
}

TEST_F(GemmTableFile, WhatCannotBeWrittenIsAnError) {
  GemmTable table(folder_ / "missing" / "gemm.json");
  EXPECT_THROW(table.add("one", {"a", 1}), IoError);
  EXPECT_FALSE(table.find("one").has_value());
  GemmTable other(path());
  EXPECT_THROW(other.add("one", {"", 1}), ValueError);
  EXPECT_THROW(other.add("one", {"a", 0}), ValueError);
}

// ---- Of cards -----------------------------------------------------------------------------------

// The products of GPT-2 124M as they are asked for, at the card's release of the library.
TEST(ShippedTables, HaveTheProductsOfAStepOnCardsThatWereMeasured) {
  alignas(256) static char memory[256];
  const auto matrix = [&](bool transposed, int64_t leading) {
    return GemmMatrix{kBF16, transposed, leading, 0, memory};
  };
  GemmProblem forward{.M = 65536, .N = 3072, .K = 768};
  forward.a = matrix(false, 768);
  forward.b = matrix(true, 768);
  forward.d = forward.aux = matrix(false, 3072);
  forward.epilogue = GemmEpilogue::kGeluBias;
  forward.bias = memory;
  forward.bias_dtype = kBF16;
  GemmProblem weight{.M = 3072, .N = 768, .K = 65536};
  weight.a = matrix(true, 3072);
  weight.b = weight.d = matrix(false, 768);
  const std::string card = "cublasLt 130100, NVIDIA H200, driver 13000, 128 MiB: ";
  for (const GemmProblem& p : {forward, weight}) {
    const auto entry = find_shipped(card + key_of(p));
    ASSERT_TRUE(entry.has_value()) << key_of(p);
    EXPECT_EQ(entry->bytes.size(), 64U);
  }
  EXPECT_EQ(find_shipped(card + "fused? " + key_of(forward))->bytes, "fused");
  forward.N += 8;
  EXPECT_FALSE(find_shipped(card + key_of(forward)).has_value());
  EXPECT_FALSE(find_shipped("cublasLt 130100, NVIDIA H100: " + key_of(weight)).has_value());
  EXPECT_GT(shipped_gemm_texts().size(), 0U);
}

// ---- The choice ---------------------------------------------------------------------------------

TEST(GemmChoice, TheLowestMedianWinsAndTheFirstTurnDoesNotCount) {
  // Candidate 1 is slow at first and once later; candidate 2 is fast once by luck.
  const std::vector<std::vector<double>> times = {
      {9, 10, 10, 10, 10, 10}, {99, 8, 8, 50, 8, 8}, {1, 9, 1, 9, 9, 9}};
  std::vector<size_t> turns(3, 0), order;
  const auto best = fastest_candidate(3, 5, [&](size_t i) -> std::optional<double> {
    order.push_back(i);
    return times[i].at(turns[i]++);
  });
  ASSERT_TRUE(best.has_value());
  EXPECT_EQ(best->index, 1U);
  EXPECT_EQ(best->microseconds, 8);
  EXPECT_EQ(order.size(), 18U);
  EXPECT_EQ((std::vector<size_t>(order.begin(), order.begin() + 4)),
            (std::vector<size_t>{0, 1, 2, 0}));  // in turn: what drifts meets all alike
}

TEST(GemmChoice, ATremorDoesNotBeatTheLibrarysFirstSuggestion) {
  const auto best = [](std::vector<double> times) {
    return fastest_candidate(times.size(), 3, [&](size_t i) { return std::optional(times[i]); });
  };
  EXPECT_EQ(best({100, 99.5, 99.2})->index, 0U);
  EXPECT_EQ(best({100, 98})->index, 1U);
}

TEST(GemmChoice, WhatDoesNotRunIsLeftOut) {
  int calls = 0;
  const auto best = fastest_candidate(3, 3, [&](size_t i) -> std::optional<double> {
    if (i == 0) return {};
    if (i == 1) {
      ++calls;
      return calls < 2 ? std::optional(1.0) : std::nullopt;  // fails in a later turn
    }
    return 5;
  });
  ASSERT_TRUE(best.has_value());
  EXPECT_EQ(best->index, 2U);
  const auto none = [](size_t) -> std::optional<double> {
    return std::numeric_limits<double>::quiet_NaN();
  };
  EXPECT_FALSE(fastest_candidate(2, 3, none).has_value());
  EXPECT_FALSE(fastest_candidate(0, 3, none).has_value());
}

}  // namespace
}  // namespace tessera::gpu::test_cuda_gemm_table
