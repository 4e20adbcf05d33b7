// Pipeline schedules that run: a chain of stages on ranks beside the same chain in one process.
// ctest labels: threads
#include <gtest/gtest.h>

#include <cstring>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/distributed/pipeline/executor.h>

#include "distributed/compared_ranks.h"
#include "message_of.h"

namespace tessera::distributed::test_pipeline_executor {
namespace {

constexpr int64_t kBatch = 3, kWidth = 12;

// h = gelu(h W + b) + h, with targets and a mask that only the last stage reads, and a tensor that
// nobody does.
class ChainStage : public PipelineStage {
 public:
  ChainStage(int stage, int stages, int micro_batches)
      : stage_(stage), stages_(stages), micro_batches_(micro_batches) {
    manual_seed(static_cast<uint64_t>(7 + stage));
    weight = mul(randn({kWidth, kWidth}), 0.3).detach().requires_grad_();
    bias = randn({kWidth}).requires_grad_();
  }

  std::vector<Tensor> forward(int micro, std::span<const Tensor> inputs) override {
    forwards.push_back(micro);
    std::vector<Tensor> now(inputs.begin(), inputs.end());
    if (stage_ == 0) {
      manual_seed(static_cast<uint64_t>(100 + micro));
      const int64_t batch = kBatch + (micro == odd_micro ? 1 : 0);
      now = {randn({batch, kWidth}), randint(0, kWidth, {batch}), rand({batch, kWidth}), Tensor()};
    }
    now[0] = add(gelu(linear(now[0], alive(weight), bias)), now[0]);
    now[3] = mul(now[0], 2.0);
    if (stage_ + 1 < stages_) return now;
    return {div(cross_entropy(mul(now[0], now[2]), now[1]), micro_batches_)};
  }
  void gather() override { calls += "gather "; }
  void release() override { calls += "release "; }
  void reduce() override { calls += "reduce "; }

  Tensor weight, bias;
  std::vector<int> forwards;
  std::string calls;
  int odd_micro = -1;  // whose batch is larger
  // Micro-batches between the begin of their forward and the gradient of their weight, of all
  // stages of a rank that share it.
  std::shared_ptr<int64_t> live = std::make_shared<int64_t>(0),
                           most_live = std::make_shared<int64_t>(0);

 private:
  Tensor alive(const Tensor& x) {
    *most_live = std::max(*most_live, ++*live);
    const std::shared_ptr<void> held(nullptr, [live = live](void*) { --*live; });
    static const Op kAlive{.name = "alive"};
    return differentiable(
        kAlive, {x}, [](Inputs in) { return in[0].clone(); },
        [held](Grads dy, const Saved&) { return dy[0]; });
  }

  const int stage_, stages_, micro_batches_;
};

struct Run {
  std::vector<Tensor> losses;
  std::vector<Tensor> gradients;  // weight and bias of each stage
};

Run in_one_process(int stages, int micro_batches, int steps) {
  std::vector<ChainStage> chain;
  for (int stage = 0; stage < stages; ++stage) chain.emplace_back(stage, stages, micro_batches);
  Run run;
  for (int step = 0; step < steps; ++step) {
    for (int micro = 0; micro < micro_batches; ++micro) {
      std::vector<Tensor> now;
      for (ChainStage& stage : chain) now = stage.forward(micro, now);
      now[0].backward();
      if (step + 1 == steps) run.losses.push_back(now[0].detach());
    }
  }
  for (const ChainStage& stage : chain) {
    run.gradients.push_back(stage.weight.grad());
    run.gradients.push_back(stage.bias.grad());
  }
  return run;
}

void expect_same_bits(const Tensor& a, const Tensor& b, const std::string& what) {
  ASSERT_TRUE(a.defined() && b.defined() && a.shape() == b.shape()) << what;
  EXPECT_EQ(std::memcmp(a.data(), b.data(), static_cast<size_t>(a.nbytes())), 0) << what;
}

std::vector<std::unique_ptr<ChainStage>> stages_of(const PipelineTable& schedule, int rank) {
  std::vector<std::unique_ptr<ChainStage>> own;
  for (int stage = rank; stage < schedule.stages; stage += schedule.ranks()) {
    own.push_back(std::make_unique<ChainStage>(stage, schedule.stages, schedule.micro_batches));
  }
  return own;
}
std::vector<PipelineStage*> pointers(const std::vector<std::unique_ptr<ChainStage>>& own) {
  std::vector<PipelineStage*> all;
  for (const auto& stage : own) all.push_back(stage.get());
  return all;
}

// What a row says of the messages of one queue, as the trace of its group has them.
std::vector<std::string> messages_of(const std::vector<Action>& row, bool backwards) {
  std::vector<std::string> messages;
  for (const Action& action : row) {
    if (!action.is_message() || action.backwards != backwards) continue;
    const int tensors = backwards ? 2 : action.micro == 0 ? 5 : 4;  // the first with a header
    for (int i = 0; i < tensors; ++i) {
      messages.push_back(std::string(action.act == Act::kSend ? "send " : "recv ") +
                         (backwards ? "gradient" : "output") + ", micro-batch " +
                         std::to_string(action.micro));
    }
  }
  return messages;
}
std::vector<std::string> messages_of(const std::vector<CommRecord>& records, const Group& group) {
  std::vector<std::string> messages;
  for (const CommRecord& record : records) {
    if (record.group != group.name() || !is_message(record.operation)) continue;
    messages.push_back(std::string(name_of(record.operation)) + " " + record.tag);
  }
  return messages;
}

void expect_as_in_one_process(const PipelineTable& schedule, int steps = 2) {
  const Run expected = in_one_process(schedule.stages, schedule.micro_batches, steps);
  compared_ranks(schedule.ranks(), [&](int rank) {
    const auto outputs = world().split(0), gradients = world().split(0);
    const auto own = stages_of(schedule, rank);
    PipelineExecutor pipeline(schedule, pointers(own), {*outputs, *gradients});
    std::vector<Tensor> losses;
    for (int step = 0; step < steps; ++step) {
      const CommTrace::Scope scope(*rank_context().trace);
      losses = pipeline.step();
      const std::vector<Action>& row = schedule.rows[static_cast<size_t>(rank)];
      EXPECT_EQ(pipeline.trace(), row);
      EXPECT_EQ(messages_of(scope.records(), *outputs), messages_of(row, false));
      EXPECT_EQ(messages_of(scope.records(), *gradients), messages_of(row, true));
    }
    const bool last = (schedule.stages - 1) % schedule.ranks() == rank;
    ASSERT_EQ(losses.size(), last ? expected.losses.size() : 0);
    for (size_t i = 0; i < losses.size(); ++i) {
      expect_same_bits(losses[i], expected.losses[i], "loss " + std::to_string(i));
    }
    for (size_t i = 0; i < own.size(); ++i) {
      const size_t stage = static_cast<size_t>(rank) + i * schedule.rows.size();
      const std::string name = "stage " + std::to_string(stage);
      expect_same_bits(own[i]->weight.grad(), expected.gradients[2 * stage], name);
      expect_same_bits(own[i]->bias.grad(), expected.gradients[2 * stage + 1], name);
      std::string calls;
      for (int step = 0; step < steps; ++step) calls += "gather release reduce ";
      EXPECT_EQ(own[i]->calls, calls);
    }
  });
}

TEST(PipelineExecutor, GradientsAndLossesHaveTheBitsOfOneProcess) {
  for (const int ranks : {1, 2, 4}) {
    for (const int micro_batches : {1, 2, 3, 6}) {
      for (const PipelineSchedule kind : {PipelineSchedule::kGPipe, PipelineSchedule::kOneFOneB,
                                          PipelineSchedule::kZeroBubbleH1}) {
        expect_as_in_one_process(make_schedule(kind, ranks, 1, micro_batches));
      }
      for (const int stages_per_rank : {2, 3}) {
        expect_as_in_one_process(
            make_schedule(PipelineSchedule::kOneFOneB, ranks, stages_per_rank, micro_batches));
      }
    }
  }
}

// With the gradients of weights behind all else, or right behind those of inputs.
PipelineTable in_halves(PipelineTable schedule, bool at_the_end) {
  for (auto& row : schedule.rows) {
    std::vector<Action> halves, last;
    for (Action action : row) {
      halves.push_back(action);
      if (action.act != Act::kBackward) continue;
      halves.back().act = Act::kInputGradient;
      action.act = Act::kWeightGradient;
      (at_the_end ? last : halves).push_back(action);
    }
    halves.insert(halves.end(), last.begin(), last.end());
    row = halves;
  }
  return schedule;
}

TEST(PipelineExecutor, AnyScheduleRunsInHalves) {
  for (const bool at_the_end : {false, true}) {
    expect_as_in_one_process(lower(in_halves(one_f_one_b(3, 5), at_the_end)));
    expect_as_in_one_process(lower(in_halves(gpipe(2, 3), at_the_end)));
    for (const int ranks : {1, 2, 4}) {
      expect_as_in_one_process(lower(in_halves(interleaved_1f1b(ranks, 2, 5), at_the_end)));
    }
  }
}

TEST(PipelineExecutor, AsManyActivationsAreAliveAsInTheSimulatedRun) {
  std::vector<PipelineTable> tables;
  for (const int micro_batches : {1, 3, 6}) {
    for (const PipelineSchedule kind :
         {PipelineSchedule::kGPipe, PipelineSchedule::kOneFOneB, PipelineSchedule::kZeroBubbleH1}) {
      tables.push_back(make_schedule(kind, 3, 1, micro_batches));
    }
    tables.push_back(make_schedule(PipelineSchedule::kOneFOneB, 3, 2, micro_batches));
    tables.push_back(lower(in_halves(interleaved_1f1b(3, 2, micro_batches), true)));
  }
  for (const PipelineTable& schedule : tables) {
    const Timing timing = simulate(schedule);
    compared_ranks(schedule.ranks(), [&](int rank) {
      const auto outputs = world().split(0), gradients = world().split(0);
      const auto own = stages_of(schedule, rank);
      for (const auto& stage : own) {
        stage->live = own[0]->live, stage->most_live = own[0]->most_live;
      }
      PipelineExecutor pipeline(schedule, pointers(own), {*outputs, *gradients});
      pipeline.step();
      EXPECT_EQ(*own[0]->most_live, timing.live_activations[static_cast<size_t>(rank)]);
      EXPECT_EQ(*own[0]->live, 0);
    });
  }
}

TEST(PipelineExecutor, ReceivesMayBeIssuedLateOrFarAhead) {
  for (const int ahead : {0, 3}) {
    expect_as_in_one_process(lower(interleaved_1f1b(4, 2, 5), {.ahead = ahead}), 1);
    expect_as_in_one_process(lower(one_f_one_b(2, 1), {.ahead = ahead}), 1);
  }
}

TEST(PipelineExecutor, WhatDoesNotFitIsAnError) {
  compared_ranks(2, [&](int rank) {
    const auto outputs = world().split(0), gradients = world().split(0), half = world().split(rank);
    const PipelineTable schedule = lower(one_f_one_b(2, 2));
    const auto own = stages_of(schedule, rank);
    const auto make = [&](const PipelineTable& table, std::vector<PipelineStage*> stages,
                          Group& first, Group& second) {
      PipelineExecutor(table, std::move(stages), {first, second});
    };
    EXPECT_NO_THROW(make(schedule, pointers(own), *outputs, *gradients));
    EXPECT_THROW(make(one_f_one_b(2, 2), pointers(own), *outputs, *gradients), ValueError);
    EXPECT_THROW(make(lower(one_f_one_b(3, 2)), pointers(own), *outputs, *gradients), ValueError);
    EXPECT_THROW(make(schedule, {}, *outputs, *gradients), ValueError);
    EXPECT_THROW(make(schedule, pointers(own), *outputs, *outputs), ValueError);
    EXPECT_THROW(make(schedule, pointers(own), *outputs, *half), ValueError);
    PipelineTable damaged = schedule;
    std::swap(damaged.rows[1].front(), damaged.rows[1].back());
    EXPECT_THROW(make(damaged, pointers(own), *outputs, *gradients), ScheduleError);
  });
}

TEST(PipelineExecutor, AFailureInAHalfNamesItAndTheNextStepRuns) {
  const std::string message = message_of<ValueError>([] {
    failing_ranks("one of them throws", 1, [&](int) {
      const auto outputs = world().split(0), gradients = world().split(0);
      const PipelineTable schedule = lower(zero_bubble_h1(1, 3));
      const auto own = stages_of(schedule, 0);
      PipelineExecutor pipeline(schedule, pointers(own), {*outputs, *gradients});
      int calls = 0;
      const HookHandle handle = register_hook(own[0]->weight, [&](const Tensor& gradient) {
        TS_CHECK(++calls != 2, "hook", "the second one fails");
        return gradient;
      });
      EXPECT_THROW(pipeline.step(), ValueError);
      EXPECT_EQ(*own[0]->live, 0);
      EXPECT_EQ(pipeline.step().size(), 3);
      calls = 1;
      pipeline.step();
    });
  });
  EXPECT_TRUE(mentions(message, "pipeline, rank 0, ")) << message;
  EXPECT_TRUE(
      mentions(message, std::string(name_of(Act::kWeightGradient)) + " of stage 0, micro-batch 0"))
      << message;
}

TEST(PipelineExecutor, ABatchOfAnotherShapeIsAnErrorThatNamesIt) {
  const std::string message = message_of<ShapeError>([] {
    failing_ranks("one of them throws", 2, [&](int rank) {
      const auto outputs = world().split(0), gradients = world().split(0);
      const PipelineTable schedule = lower(one_f_one_b(2, 4));
      const auto own = stages_of(schedule, rank);
      own[0]->odd_micro = 2;
      PipelineExecutor(schedule, pointers(own), {*outputs, *gradients}).step();
    });
  });
  EXPECT_TRUE(mentions(message, "stage 0 returns for micro-batch 2 other shapes")) << message;
}

}  // namespace
}  // namespace tessera::distributed::test_pipeline_executor
