// One loop, unchanged, as one process, `tessera launch -n 2` and -n 4, in f32, bf16 and fp16, with
// accumulation 1 and 4: configuration alone tells them apart. TESSERA_COMMAND starts the ranks.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <sstream>

#include <tessera/accelerate/launch/process.h>
#include <tessera/core/parallel.h>

#include "accelerate/one_loop.h"
#include "finished_process.h"

namespace tessera::one_loop::test_one_loop {
namespace {

struct Case {
  std::string model, precision;
  int64_t accumulation, batch_size;
  auto operator<=>(const Case&) const = default;
};
using Runs = std::map<Case, std::vector<double>>;

// Every case in one job: starting ranks takes longer than training.
Runs run_as(int ranks, const std::vector<Case>& cases) {
  TestFolder folder;
  std::vector<std::string> command = {TESSERA_COMMAND,          "launch",          "-n",
                                      std::to_string(ranks),    "--threads",       "1",
                                      TESSERA_ONE_LOOP_PROGRAM, folder.path("out")};
  for (size_t i = 0; i < cases.size(); ++i) {
    const std::string settings =
        folder.write(std::to_string(i) + ".json", R"({"mixed_precision": ")" + cases[i].precision +
                                                      R"(", "gradient_accumulation_steps": )" +
                                                      std::to_string(cases[i].accumulation) + "}");
    command.push_back(cases[i].model + ":" + std::to_string(cases[i].batch_size) + ":" + settings);
  }
  const FinishedProcess job = run_process(command, {{"TESSERA_COMPARE_TRACES", "1"}});
  EXPECT_EQ(job.code(), 0) << job;
  Runs runs;
  std::istringstream lines(folder.read("out"));
  std::string line;
  for (const Case& each : cases) {
    EXPECT_TRUE(std::getline(lines, line)) << job;
    std::istringstream numbers(line);
    for (double value; numbers >> value;) runs[each].push_back(value);
    EXPECT_FALSE(runs[each].empty()) << job;
  }
  return runs;
}

// What N ranks with m micro-batches each compute, by hand: a rank adds up its gradients, these are
// added in the order of the ranks, and the sum is multiplied once.
std::vector<double> by_hand(int64_t ranks, int64_t micros, int64_t batch_size) {
  set_num_threads(1);
  manual_seed(7);
  const auto [x, y] = all_samples();
  Net model;
  optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
  const int64_t batches = kSamples / batch_size;
  for (int64_t window = 0; window < kEpochs * batches; window += ranks * micros) {
    std::vector<TensorList> sums;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      for (int64_t micro = 0; micro < micros; ++micro) {
        const int64_t begin = (window + micro * ranks + rank) % batches * batch_size;
        loss_of(model(x.narrow(0, begin, batch_size)), y.narrow(0, begin, batch_size)).backward();
      }
      sums.emplace_back();
      for (const Tensor& parameter : model.parameters()) {
        sums.back().push_back(parameter.grad().clone());
      }
      optimizer.zero_grad();
    }
    const NoGradGuard no_grad;
    const TensorList parameters = model.parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      Tensor sum = sums[0][i];
      for (size_t rank = 1; rank < sums.size(); ++rank) sum = sum + sums[rank][i];
      parameters[i].set_grad(sum * (1.0 / static_cast<double>(ranks * micros)));
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  std::vector<double> values;
  for (const auto& each : values_of(model)) values.insert(values.end(), each.begin(), each.end());
  return values;
}

class OneLoop : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    std::vector<Case> alone = {{"net", "no", 2, 4}, {"net", "no", 4, 4}};
    for (const int64_t accumulation : {1, 4}) {
      for (const int64_t batch_size : {8, 16, 32}) {
        alone.push_back({"line", "no", accumulation, batch_size});
      }
    }
    one_ = run_as(1, alone);
    std::vector<Case> together = {{"net", "no", 1, 4}, {"net", "no", 4, 4}};
    for (const std::string precision : {"no", "bf16", "fp16"}) {
      for (const int64_t accumulation : {1, 4}) {
        together.push_back({"line", precision, accumulation, 8});
      }
    }
    if (!why_no_mpi().empty()) return;
    for (const int ranks : {2, 4}) many_[ranks] = run_as(ranks, together);
  }
  void SetUp() override { SKIP_WITHOUT_MPI(); }
  static Runs one_;
  static std::map<int, Runs> many_;
};
Runs OneLoop::one_;
std::map<int, Runs> OneLoop::many_;

TEST_F(OneLoop, RanksHaveTheBitsOfOneProcessThatAccumulatesAsManyMicroBatches) {
  for (const auto& [ranks, runs] : many_) {
    EXPECT_EQ(runs.at({"net", "no", 1, 4}), one_.at({"net", "no", ranks, 4})) << ranks;
  }
}

TEST_F(OneLoop, RanksThatAccumulateHaveTheBitsOfTheSameSumsByHand) {
  for (const auto& [ranks, runs] : many_) {
    EXPECT_EQ(runs.at({"net", "no", 1, 4}), by_hand(ranks, 1, 4)) << ranks;
    EXPECT_EQ(runs.at({"net", "no", 4, 4}), by_hand(ranks, 4, 4)) << ranks;
  }
}

TEST_F(OneLoop, SCR10And11EveryPrecisionIsThatOfOneProcessWithAllBatchesTogether) {
  for (const auto& [ranks, runs] : many_) {
    for (const int64_t accumulation : {1, 4}) {
      const auto& expected = one_.at({"line", "no", accumulation, 8 * ranks});
      EXPECT_GT(expected[1], 1);  // it has learned
      for (const std::string precision : {"no", "bf16", "fp16"}) {
        const auto& got = runs.at({"line", precision, accumulation, 8});
        ASSERT_EQ(got.size(), 2u);
        for (size_t i = 0; i < 2; ++i) {
          EXPECT_NEAR(got[i], expected[i], 1e-6 + 1e-6 * std::abs(expected[i]))
              << ranks << " ranks, " << precision << ", accumulation " << accumulation;
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::one_loop::test_one_loop
