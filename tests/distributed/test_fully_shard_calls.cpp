// What sharded training sends, when, and how much of it computation hides.
// ctest labels: threads
// ctest ranks: 2
#include <thread>

#include <tessera/autograd/checkpoint.h>

#include "distributed/fault_backend.h"
#include "distributed/sharded_fixture.h"
#include "message_of.h"

namespace tessera::distributed::test_fully_shard_calls {
namespace {

using Events = std::vector<std::string>;

// Three layers and a weight of the root.
struct Layers : nn::Module<Layers> {
  Layers()
      : l0(add<nn::Linear>("l0", 8, 8)),
        l1(add<nn::Linear>("l1", 8, 8)),
        l2(add<nn::Linear>("l2", 8, 8)),
        scale(parameter("scale", tessera::ones({8}))) {}
  Tensor forward(const Tensor& x) {
    Tensor y = l0(x);
    y = checkpointed ? checkpoint([this](const Tensor& in) { return l1(in); }, y) : l1(y);
    if (twice) y = l1(y);
    if (side) aside = l1(l0(x)).sum();
    return l2(y) * scale;
  }
  bool checkpointed = false, twice = false, side = false;
  Tensor aside;
  nn::Linear& l0;
  nn::Linear& l1;
  nn::Linear& l2;
  const Tensor& scale;
};

// Those of the second step, when the order is known.
Events events_of(Way way, const std::function<void(Layers& model, int rank)>& step,
                 const std::function<void(Layers& model)>& arrange = {}) {
  Events events;
  on_ranks(2, [&](int rank) {
    manual_seed(3);
    Layers model;
    Mesh mesh(world());
    const auto parallel = shard_in(way, model, mesh);
    if (arrange) arrange(model);
    optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
    for (int i = 0; i < 2; ++i) {
      const CommTrace::Scope scope(*rank_context().trace);
      step(model, rank);
      if (keeps_results(rank)) events = unit_events(scope.records());
      optimizer.step();
      optimizer.zero_grad();
    }
  });
  return events;
}
void train_step(Layers& model, int rank) { loss_of(model, rank).backward(); }

const Events kForward{"G the root unit", "G unit l0", "G unit l1", "G unit l2"};
Events operator+(Events first, const Events& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

TEST(FullyShardCalls, BackwardAsksForOneUnitAhead) {
  const Events backward{"G unit l2", "G unit l1", "R unit l2",      "G unit l0",
                        "R unit l1", "R unit l0", "R the root unit"};
  NEEDS_RANKS(2);
  EXPECT_EQ(events_of(Way::kFully, train_step), kForward + backward);
  EXPECT_EQ(events_of(Way::kZero3, train_step), kForward + Events{"G the root unit"} + backward);
  EXPECT_EQ(events_of(Way::kFullyKept, train_step),
            kForward + Events({"R unit l2", "R unit l1", "R unit l0", "R the root unit"}));
  EXPECT_EQ(events_of(Way::kFully,
                      [](Layers& model, int rank) {
                        model.checkpointed = true;
                        train_step(model, rank);
                      }),
            kForward + backward)
      << "with recomputation";
  EXPECT_EQ(events_of(Way::kZero3,
                      [](Layers& model, int rank) {
                        model.checkpointed = true;
                        train_step(model, rank);
                      }),
            kForward + Events{"G the root unit"} + backward)
      << "of a unit whose caller is done";
}

TEST(FullyShardCalls, AModuleThatIsCalledTwiceIsGatheredOnceInBackward) {
  NEEDS_RANKS(2);
  Events events = events_of(Way::kFully, [](Layers& model, int rank) {
    model.twice = true;
    train_step(model, rank);
  });
  std::ranges::sort(events);
  Events wanted{"G the root unit", "G unit l0", "G unit l1", "G unit l1",
                "G unit l2",       "G unit l2", "G unit l1", "G unit l0",
                "R unit l2",       "R unit l1", "R unit l0", "R the root unit"};
  std::ranges::sort(wanted);
  EXPECT_EQ(events, wanted);
}

TEST(FullyShardCalls, WhatABackwardDoesNotUseIsReleasedAtItsEnd) {
  on_ranks(2, [](int rank) {
    manual_seed(3);
    Layers model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kFully, model, mesh);
    model.side = true;
    for (int i = 0; i < 2; ++i) {
      model.zero_grad();
      loss_of(model, rank).backward();
      EXPECT_EQ(memory_stats()->current(MemoryCategory::kUnsharded), 0);
    }
    EXPECT_TRUE(model.l1.weight.grad().defined());
    // The side branch alone: l2 and the root's weight have no part in it.
    model.zero_grad();
    loss_of(model, rank);
    model.aside.backward();
    EXPECT_EQ(memory_stats()->current(MemoryCategory::kUnsharded), 0);
    EXPECT_TRUE(model.l1.weight.grad().defined());
    EXPECT_FALSE(model.l2.weight.grad().defined());
    EXPECT_FALSE(model.scale.grad().defined());
  });
}

TEST(FullyShardCalls, AForwardWithoutGradientsLeavesTheRootGathered) {
  NEEDS_RANKS(2);
  EXPECT_EQ(events_of(Way::kFully,
                      [](Layers& model, int rank) {
                        const NoGradGuard no_grad;
                        loss_of(model, rank);
                        EXPECT_GT(memory_stats()->current(MemoryCategory::kUnsharded), 0);
                        fully_sharded(model).reshard();
                        EXPECT_EQ(memory_stats()->current(MemoryCategory::kUnsharded), 0);
                      }),
            kForward);
}

// Two forwards, then their backwards, one after the other or of the sum.
TEST(FullyShardCalls, ForwardsMayComeBeforeBackwards) {
  Gradients expected;
  in_one_process([&] {
    Layers model;
    for (const int batch : {2, 3, 0, 1}) loss_of(model, batch).backward();
    const NoGradGuard no_grad;
    for (const Tensor& parameter : model.parameters()) mul_(parameter.grad(), 0.5);
    expected = gradients_of(model);
  });
  for (const Way way : {Way::kFully, Way::kFullyKept, Way::kZero3}) {
    on_ranks(2, [&](int rank) {
      manual_seed(3);
      Layers model;
      Mesh mesh(world());
      const auto parallel = shard_in(way, model, mesh);
      const FullyShardedModule root = fully_sharded(model);
      const Tensor first = loss_of(model, rank), second = loss_of(model, 2 + rank);
      root.set_is_last_backward(false);
      second.backward();
      root.set_is_last_backward(true);
      first.backward();
      const auto gradients = whole_gradients(model);
      for (size_t i = 0; i < expected.names.size(); ++i) {
        EXPECT_EQ(gradients.at(expected.names[i]), expected.values[i]) << expected.names[i];
      }
      EXPECT_EQ(memory_stats()->current(MemoryCategory::kUnsharded), 0);
      model.zero_grad();
      (loss_of(model, rank) + loss_of(model, 2 + rank)).backward();
      for (const auto& [name, gradient] : whole_gradients(model)) {
        const auto& wanted = gradients.at(name);
        for (size_t i = 0; i < gradient.size(); ++i) {
          EXPECT_NEAR(gradient[i], wanted[i], 8 * std::numeric_limits<float>::epsilon());
        }
      }
      EXPECT_EQ(memory_stats()->current(MemoryCategory::kUnsharded), 0);
    });
  }
}

struct Counts {
  int64_t gathers = 0, reductions = 0, sums = 0;  // sums: along the replicated axis
  friend bool operator==(const Counts&, const Counts&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Counts& counts) {
    return out << counts.gathers << " " << counts.reductions << " " << counts.sums;
  }
};
Counts counts_of(const std::vector<CommRecord>& records) {
  return {count(records, Operation::kAllGather, Channel::kParameter),
          count(records, Operation::kReduceScatter, Channel::kGradient),
          count(records, Operation::kAllReduce, Channel::kGradient)};
}

// G units, m micro-batches.
TEST(FullyShardCalls, CountsAreThoseOfTheTable) {
  constexpr int kG = 4, kMicro = 3;
  struct Row {
    Way way;
    bool sync, reshard_between;
    Counts expected;
  };
  const Row rows[] = {
      {Way::kZero3, true, true, {2 * kG * kMicro, kG * kMicro, 0}},
      {Way::kFully, true, true, {(2 * kG - 1) * kMicro, kG * kMicro, 0}},
      {Way::kFullyKept, true, true, {kG * kMicro, kG * kMicro, 0}},
      {Way::kFullyKept, true, false, {kG, kG * kMicro, 0}},
      {Way::kFullyKept, false, false, {kG, kG, 0}},
      {Way::kZero3, false, true, {2 * kG * kMicro, kG, 0}},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(name_of(row.way));
    on_ranks(2, [&](int rank) {
      Layers model;
      Mesh mesh(world());
      const auto parallel = shard_in(row.way, model, mesh);
      const FullyShardedModule root = fully_sharded(model);
      for (int step = 0; step < 2; ++step) {
        model.zero_grad();
        const CommTrace::Scope scope(*rank_context().trace);
        for (int k = 0; k < kMicro; ++k) {
          const bool last = k + 1 == kMicro;
          root.set_is_last_backward(last);
          root.set_requires_gradient_sync(row.sync || last);
          root.set_reshard_after_backward(row.reshard_between || last);
          loss_of(model, k * 2 + rank).backward();
        }
        EXPECT_EQ(counts_of(scope.records()), row.expected);
      }
    });
  }
}

// Backwards that are not the last of a step leave sums over the ranks, which the last one divides.
TEST(FullyShardCalls, SumsStayUndividedUntilTheLastBackward) {
  for (const Way way : {Way::kFully, Way::kFullyKept, Way::kZero3}) {
    SCOPED_TRACE(name_of(way));
    on_ranks(2, [&](int rank) {
      const auto gradients_after = [&](std::vector<bool> last) {
        manual_seed(3);
        Layers model;
        Mesh mesh(world());
        const auto parallel = shard_in(way, model, mesh);
        const FullyShardedModule root = fully_sharded(model);
        for (const bool is_last : last) {
          root.set_is_last_backward(is_last);
          loss_of(model, rank).backward();
        }
        return whole_gradients(model);
      };
      const auto one = gradients_after({true}), sum = gradients_after({false});
      const auto both = gradients_after({false, true});
      for (const auto& [name, gradient] : one) {
        for (size_t i = 0; i < gradient.size(); ++i) {
          const double wanted = 2 * gradient[i];
          const double near = 8 * std::numeric_limits<float>::epsilon() * std::abs(wanted) + 1e-9;
          EXPECT_NEAR(sum.at(name)[i], wanted, near) << name;
          EXPECT_NEAR(both.at(name)[i], wanted, near) << name;
        }
      }
    });
  }
}

// Parts among two neighbours of four: backward gathers from them alone.
TEST(FullyShardCalls, NeighboursKeepPartsBetweenForwardAndBackward) {
  Gradients expected;
  in_one_process([&] {
    Layers model;
    expected = accumulate_in_one_process(model, 0, 4, 4);
  });
  on_ranks(4, [&](int rank) {
    manual_seed(3);
    Layers model;
    Mesh mesh(world());
    for (nn::Linear* layer : {&model.l0, &model.l1, &model.l2}) {
      fully_shard(*layer, mesh, {.reshard_after_forward = 2});
    }
    fully_shard(model, mesh);
    optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
    for (int step = 0; step < 2; ++step) {
      const CommTrace::Scope scope(*rank_context().trace);
      const int64_t before = memory_stats()->current(MemoryCategory::kUnsharded);
      const Tensor loss = loss_of(model, rank);
      loss.backward();
      int far = 0, near = 0;
      for (const CommRecord& record : scope.records()) {
        if (record.operation != Operation::kAllGather) continue;
        if (record.channel != Channel::kParameter) continue;
        (record.group_size == 4 ? far : near) += 1;
        EXPECT_EQ(record.phase, record.group_size == 4 ? "forward" : "backward");
      }
      EXPECT_EQ(far, 4);
      EXPECT_EQ(near, 3);
      EXPECT_EQ(memory_stats()->current(MemoryCategory::kUnsharded), before);
      if (step == 0) {
        const auto gradients = whole_gradients(model);
        for (size_t i = 0; i < expected.names.size(); ++i) {
          EXPECT_EQ(gradients.at(expected.names[i]), expected.values[i]) << expected.names[i];
        }
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    {
      const NoGradGuard no_grad;
      loss_of(model, rank);
      fully_sharded(model).reshard();
      EXPECT_EQ(memory_stats()->current(MemoryCategory::kUnsharded), 0);
    }
    for (const int wrong : {1, 3, 4, 8}) {
      Net other;
      EXPECT_THROW(fully_shard(other, mesh, {.reshard_after_forward = wrong}), ConfigError);
    }
  });
}

TEST(FullyShardCalls, AnExplicitReshardIsGatheredAgain) {
  on_ranks(2, [](int rank) {
    Layers model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kFullyKept, model, mesh);
    const CommTrace::Scope scope(*rank_context().trace);
    const Tensor loss = loss_of(model, rank);
    for (nn::ModuleBase* module :
         std::initializer_list<nn::ModuleBase*>{&model, &model.l0, &model.l1, &model.l2}) {
      fully_sharded(*module).reshard();
    }
    loss.backward();
    EXPECT_EQ(counts_of(scope.records()), (Counts{8, 4, 0}));
  });
}

// What the report says is what is sent: counts, and bytes of each call.
TEST(FullyShardCalls, TheReportIsWhatTheTraceShows) {
  constexpr int kMicro = 2;
  for (const Way way : {Way::kZero1, Way::kZero2, Way::kFully, Way::kFullyKept, Way::kZero3}) {
    SCOPED_TRACE(name_of(way));
    for (const int size : {2, 3}) {
      on_ranks(size, [&](int rank) {
        Net model;
        Mesh mesh(world());
        const auto parallel = shard_in(way, model, mesh);
        optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
        const auto step = [&] {
          for (int k = 0; k < kMicro; ++k) {
            StepPlan plan = StepPlan::of(k, kMicro);
            plan.sync_gradients = plan.is_last || parallel->reduces_every_backward();
            parallel->set_plan(plan);
            loss_of(model, k * size + rank).backward();
          }
          optimizer.step();
          optimizer.zero_grad();
        };
        step();
        const CommTrace::Scope scope(*rank_context().trace);
        step();
        const bool gathers_once = way == Way::kZero1 || way == Way::kZero2;
        const int64_t gathered = gathers_once ? 1 : kMicro;
        const int64_t reduced = parallel->reduces_every_backward() ? kMicro : 1;
        int64_t gathers = 0, reductions = 0;
        double gather_bytes = 0, reduction_bytes = 0;
        for (const UnitReport& unit : dynamic_cast<const ShardedModel&>(*parallel).report()) {
          gathers += unit.gathers * gathered;
          reductions += unit.reductions * reduced;
          const double share = static_cast<double>(size - 1) / size;
          const int passes = unit.reshards_after_forward ? 2 : 1;
          gather_bytes += share * static_cast<double>(unit.whole_bytes * passes * gathered);
          reduction_bytes += share * static_cast<double>(unit.reduced_bytes * reduced);
        }
        EXPECT_EQ(counts_of(scope.records()), (Counts{gathers, reductions, 0}));
        double gathered_bytes = 0, reduced_bytes = 0;
        for (const CommRecord& record : scope.records()) {
          if (record.channel == Channel::kParameter) gathered_bytes += record.wire_bytes();
          if (record.channel == Channel::kGradient) reduced_bytes += record.wire_bytes();
        }
        EXPECT_DOUBLE_EQ(gathered_bytes, gather_bytes);
        EXPECT_DOUBLE_EQ(reduced_bytes, reduction_bytes);
      });
    }
  }
}

// What a rank hands to the transport for other ranks, counted there: (N-1)/N of the model for each
// gather and each reduction, whichever mode, and nothing twice.
TEST(FullyShardCalls, BytesThatARankSendsAreThoseOfTheFormula) {
  NEEDS_THREADS;
  constexpr int kMicro = 3, kRanks = 4;
  struct Row {
    Way way;
    int gathers, reductions;  // of the whole model in a step
    int64_t room;             // bytes that each part is rounded up to
  };
  const Row rows[] = {{Way::kZero1, 1, 1, 64},
                      {Way::kZero2, 1, kMicro, 64},
                      {Way::kFullyKept, kMicro, kMicro, 16},
                      {Way::kZero3, 2 * kMicro, kMicro, 16}};
  for (const Row& row : rows) {
    SCOPED_TRACE(name_of(row.way));
    compared_ranks(kRanks,
                   [&](int rank) {
                     Net model;
                     std::vector<int64_t> parts;  // bytes of each parameter's
                     for (const Tensor& parameter : model.parameters()) {
                       parts.push_back(4 * parameter.numel() / kRanks);
                     }
                     Mesh mesh(world());
                     const auto parallel = shard_in(row.way, model, mesh);
                     optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
                     int64_t gathered = 0, reduced = 0, other = 0;
                     for (int step = 0; step < 2; ++step) {
                       gathered = reduced = other = 0;
                       faults().before_start = [&](const Call& call) {
                         if (call.channel == Channel::kControl) return true;
                         int64_t& sum = call.header.operation == Operation::kAllGather ? gathered
                                        : call.header.operation == Operation::kReduceScatter
                                            ? reduced
                                            : other;
                         for (int r = 0; r < kRanks; ++r) {
                           if (r != rank) sum += call.sends[static_cast<size_t>(r)].bytes;
                         }
                         return true;
                       };
                       for (int k = 0; k < kMicro; ++k) {
                         StepPlan plan = StepPlan::of(k, kMicro);
                         plan.sync_gradients = plan.is_last || parallel->reduces_every_backward();
                         parallel->set_plan(plan);
                         loss_of(model, k * kRanks + rank).backward();
                       }
                       optimizer.step();
                       optimizer.zero_grad();
                       faults().before_start = {};
                     }
                     int64_t share = 0;
                     for (const int64_t part : parts) {
                       share += (kRanks - 1) * ((part + row.room - 1) / row.room * row.room);
                     }
                     EXPECT_EQ(gathered, share * row.gathers);
                     EXPECT_EQ(reduced, share * row.reductions);
                     EXPECT_LT(other, 100) << "which parameters were used";
                   },
                   {.decorate = with_faults()});
  }
}

TEST(FullyShardCalls, PrefetchListsReplaceTheNextOne) {
  NEEDS_RANKS(2);
  const auto arrange = [](Layers& model) {
    const auto l0 = fully_sharded(model.l0), l1 = fully_sharded(model.l1),
               l2 = fully_sharded(model.l2);
    fully_sharded(model).set_modules_to_forward_prefetch({l0, l1});
    l0.set_modules_to_forward_prefetch({l1, l2});
    fully_sharded(model).set_modules_to_backward_prefetch({l2, l1});
    l2.set_modules_to_backward_prefetch({l1, l0});
  };
  EXPECT_EQ(events_of(Way::kFully, train_step, arrange),
            kForward + Events({"G unit l2", "G unit l1", "G unit l0", "R unit l2", "R unit l1",
                               "R unit l0", "R the root unit"}));
}

// ---- Calls of a unit's handle ------------------------------------------------------------------

constexpr int64_t kLayerBytes = (8 * 8 + 8) * 4, kScaleBytes = 8 * 4;  // of Layers

int64_t unsharded_bytes() { return memory_stats()->current(MemoryCategory::kUnsharded); }

Gradients gradients_of_two_batches() {
  Gradients expected;
  in_one_process([&] {
    Layers model;
    expected = accumulate_in_one_process(model, 0, 2, 2);
  });
  return expected;
}

void expect_gradients(const nn::ModuleBase& model, const Gradients& expected) {
  const auto gradients = whole_gradients(model);
  ASSERT_EQ(gradients.size(), expected.names.size());
  for (size_t i = 0; i < expected.names.size(); ++i) {
    EXPECT_EQ(gradients.at(expected.names[i]), expected.values[i]) << expected.names[i];
  }
}

TEST(FullyShardCalls, WhatIsKeptAfterForwardMayChangeBetweenSteps) {
  const Gradients expected = gradients_of_two_batches();
  on_ranks(2, [&](int rank) {
    manual_seed(3);
    Layers model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kFully, model, mesh);
    const FullyShardedModule root = fully_sharded(model), l1 = fully_sharded(model.l1);
    const struct {
      std::string says;
      std::function<void()> set;
      int64_t kept;  // bytes between forward and backward
      int gathers;
    } rows[] = {
        {"by root", [] {}, kScaleBytes, 7},
        {"all kept", [&] { root.set_reshard_after_forward(false); }, 3 * kLayerBytes + kScaleBytes,
         4},
        {"none kept", [&] { root.set_reshard_after_forward(true); }, 0, 8},
        {"one kept", [&] { l1.set_reshard_after_forward(false); }, kLayerBytes, 7},
        {"the root alone", [&] { root.set_reshard_after_forward(false, false); },
         kLayerBytes + kScaleBytes, 6},
        {"all but the root",
         [&] {
           root.set_reshard_after_forward(false);
           root.set_reshard_after_forward(true, false);
         },
         3 * kLayerBytes, 5},
    };
    for (const auto& row : rows) {
      SCOPED_TRACE(row.says);
      row.set();
      for (int step = 0; step < 2; ++step) {
        model.zero_grad();
        const CommTrace::Scope scope(*rank_context().trace);
        const Tensor loss = loss_of(model, rank);
        EXPECT_EQ(unsharded_bytes(), row.kept);
        loss.backward();
        EXPECT_EQ(unsharded_bytes(), 0);
        EXPECT_EQ(counts_of(scope.records()), (Counts{row.gathers, 4, 0}));
        expect_gradients(model, expected);
      }
    }
  });
}

// A call afterwards finds the unit gathered, and gathers again what an optimizer wrote meanwhile.
TEST(FullyShardCalls, AUnitMayBeGatheredBeforeItsCall) {
  const Gradients expected = gradients_of_two_batches();
  on_ranks(2, [&](int rank) {
    for (const bool asynchronous : {false, true}) {
      SCOPED_TRACE(asynchronous ? "asynchronous" : "synchronous");
      manual_seed(3);
      Layers model;
      Mesh mesh(world());
      const auto parallel = shard_in(Way::kFully, model, mesh);
      const FullyShardedModule root = fully_sharded(model), l2 = fully_sharded(model.l2);
      for (int step = 0; step < 2; ++step) {
        model.zero_grad();
        const CommTrace::Scope scope(*rank_context().trace);
        l2.unshard(asynchronous);
        EXPECT_EQ(unit_events(scope.records()), Events{"G unit l2"});
        EXPECT_EQ(unsharded_bytes(), kLayerBytes);
        EXPECT_TRUE(is_dtensor(model.l2.weight)) << "parameters stay parts";
        root.unshard(asynchronous);  // itself, and no unit inside
        EXPECT_EQ(unsharded_bytes(), kLayerBytes + kScaleBytes);
        l2.unshard();  // waits for what is under way
        loss_of(model, rank).backward();
        Events events = unit_events(scope.records());
        events.resize(4);
        EXPECT_EQ(events, (Events{"G unit l2", "G the root unit", "G unit l0", "G unit l1"}));
        EXPECT_EQ(counts_of(scope.records()), (Counts{7, 4, 0}));
        EXPECT_EQ(unsharded_bytes(), 0);
        expect_gradients(model, expected);
      }
      l2.unshard(asynchronous);
      l2.reshard();
      EXPECT_EQ(unsharded_bytes(), 0);
    }
  });
}

TEST(FullyShardCalls, AStepBehindAnUnshardIsGatheredAgain) {
  NEEDS_THREADS;
  Gradients expected;
  const auto train = [](Layers& model, const std::function<void()>& before, auto backward) {
    optim::SGD optimizer(model.named_parameters(), {.lr = 0.5});
    backward();
    before();
    optimizer.step();
    optimizer.zero_grad();
    backward();
  };
  in_one_process([&] {
    Layers model;
    train(
        model, [] {}, [&] { expected = accumulate_in_one_process(model, 0, 2, 2); });
  });
  on_ranks(2, [&](int rank) {
    for (const bool asynchronous : {false, true}) {
      manual_seed(3);
      Layers model;
      Mesh mesh(world());
      const auto parallel = shard_in(Way::kFully, model, mesh);
      train(
          model,
          [&] {
            const CommTrace::Scope scope(*rank_context().trace);
            fully_sharded(model.l0).unshard(asynchronous);
            fully_sharded(model.l2).unshard(asynchronous);
            const auto under_way = [](const CommRecord& record) {
              return record.state == CommRecord::State::kQueued;
            };
            while (std::ranges::any_of(scope.records(), under_way)) std::this_thread::yield();
            world().barrier();  // every rank has read what the step writes
          },
          [&] { loss_of(model, rank).backward(); });
      expect_gradients(model, expected);
    }
  });
}

TEST(FullyShardCalls, AnAsynchronousUnshardIsWaitedForWhereItIsUsed) {
  NEEDS_THREADS;
  constexpr double kTravel = 2, kOther = 5;
  compared_ranks(2,
                 [](int rank) {
                   Layers model;
                   Mesh mesh(world());
                   const auto parallel = shard_in(Way::kFully, model, mesh);
                   loss_of(model, rank).backward();
                   model.zero_grad();
                   const auto clock = std::make_shared<VirtualClock>();
                   clock->latency = [](const Call& call) {
                     return call.channel == Channel::kParameter ? kTravel : 0;
                   };
                   use_clock(clock);
                   const FullyShardedModule l1 = fully_sharded(model.l1);
                   l1.unshard();
                   EXPECT_DOUBLE_EQ(clock->now, kTravel);
                   l1.reshard();
                   l1.unshard(true);
                   EXPECT_DOUBLE_EQ(clock->now, kTravel) << "nobody waits";
                   l1.unshard();
                   EXPECT_DOUBLE_EQ(clock->now, 2 * kTravel) << "as a handle's wait() does";
                   l1.reshard();
                   l1.unshard(true);
                   clock->now += kOther;
                   const double before = clock->now;
                   const Tensor y = model.l1(randn({5, 8}));
                   EXPECT_DOUBLE_EQ(clock->now, before) << "it has come meanwhile";
                   use_clock(nullptr);
                 },
                 {.decorate = with_faults()});
}

// Replicas of parts: micro-batches are reduced among the parts, the last one among replicas too.
TEST(FullyShardCalls, ReplicasMayAddUpOnceInAStep) {
  constexpr int kMicro = 3, kUnits = 4;
  Gradients expected;
  in_one_process([&] {
    Layers first;
    manual_seed(3);
    Layers second;
    for (int k = 0; k < kMicro; ++k) {
      for (int r = 0; r < 4; ++r) loss_of(r < 2 ? first : second, 4 * k + r).backward();
    }
    const NoGradGuard no_grad;
    const TensorList sums = first.parameters(), others = second.parameters();
    for (size_t i = 0; i < sums.size(); ++i) {
      add_(sums[i].grad(), others[i].grad());
      mul_(sums[i].grad(), Scalar(0.25));
    }
    expected = gradients_of(first);
  });
  for (const bool says_last : {true, false}) {
    SCOPED_TRACE(says_last ? "with set_is_last_backward" : "alone");
    on_ranks(4, [&](int rank) {
      manual_seed(3);
      Layers model;
      Mesh mesh(world(), {{"dp_replicate", 2}, {"dp_shard", 2}});
      const auto parallel = shard_in(Way::kFully, model, mesh);
      const FullyShardedModule root = fully_sharded(model);
      for (int step = 0; step < 2; ++step) {
        model.zero_grad();
        const CommTrace::Scope scope(*rank_context().trace);
        for (int k = 0; k < kMicro; ++k) {
          const bool last = k + 1 == kMicro;
          if (says_last) root.set_is_last_backward(last);
          root.set_requires_all_reduce(last);
          loss_of(model, 4 * k + rank).backward();
          const int sums = last ? kUnits : 0;
          EXPECT_EQ(counts_of(scope.records()), (Counts{7 * (k + 1), kUnits * (k + 1), sums}));
        }
        expect_gradients(model, expected);
      }
    });
  }
}

// Of several modules in one unit: one gather and one reduction, from the first call to the last,
// whatever their order in the list.
TEST(FullyShardCalls, ModulesOfAListAreOneUnit) {
  const Gradients expected = gradients_of_two_batches();
  for (const bool reversed : {false, true}) {
    for (const bool checkpointed : {false, true}) {
      SCOPED_TRACE(std::string(reversed ? "reversed" : "as they run") +
                   (checkpointed ? ", one runs again" : ""));
      on_ranks(2, [&](int rank) {
        manual_seed(3);
        Layers model;
        model.checkpointed = checkpointed;
        Mesh mesh(world());
        std::vector<nn::ModuleBase*> list{&model.l0, &model.l1};
        if (reversed) std::ranges::reverse(list);
        const FullyShardedModule both = fully_shard(list, mesh);
        fully_shard(model.l2, mesh);
        fully_shard(model, mesh);
        EXPECT_EQ(fully_sharded(model.l0).unit(), both.unit());
        EXPECT_EQ(fully_sharded(model.l1).unit(), both.unit());
        std::vector<int64_t> held;  // when a call begins
        for (nn::Linear* layer : {&model.l0, &model.l1, &model.l2}) {
          layer->register_forward_pre_hook([&](nn::ModuleBase&, nn::TensorRefs) {
            if (current_backward() == 0) held.push_back(unsharded_bytes());
          });
        }
        const std::string name = reversed ? "l1" : "l0";
        const Events forward{"G the root unit", "G unit " + name, "G unit l2"};
        const Events backward{"G unit l2", "G unit " + name, "R unit l2", "R unit " + name,
                              "R the root unit"};
        for (int step = 0; step < 3; ++step) {
          held.clear();
          model.zero_grad();
          const CommTrace::Scope scope(*rank_context().trace);
          const Tensor loss = loss_of(model, rank);
          EXPECT_EQ(unsharded_bytes(), kScaleBytes);
          loss.backward();
          EXPECT_EQ(unit_events(scope.records()), forward + backward);
          EXPECT_EQ(held.back(), kLayerBytes + kScaleBytes) << "both are gone";
          EXPECT_EQ(unsharded_bytes(), 0);
          expect_gradients(model, expected);
        }
      });
    }
  }
}

// ---- Overlap -----------------------------------------------------------------------------------

constexpr double kCompute = 3, kTravel = 2;  // c of a layer's forward, a of a call

// A layer whose forward takes c and whose backward 2 c of the virtual clock, in as many parts as it
// has weights.
template <int kWeights>
struct Slow : nn::Module<Slow<kWeights>> {
  Slow() {
    for (int i = 0; i < kWeights; ++i) {
      weights.push_back(&this->template add<nn::Linear>("w" + std::to_string(i), 8, 8));
    }
  }
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (nn::Linear* weight : weights) {
      if (faults().clock) faults().clock->now += kCompute / kWeights;
      y = (*weight)(y);
      if (!y.requires_grad()) continue;
      register_hook(y, [](const Tensor&) {
        if (faults().clock) faults().clock->now += 2 * kCompute / kWeights;
        return Tensor();
      });
    }
    return y * 1.0;
  }
  std::vector<nn::Linear*> weights;
};
template <int kWeights>
struct SlowLayers : nn::Module<SlowLayers<kWeights>> {
  SlowLayers() {
    for (int i = 0; i < 4; ++i) {
      layers.push_back(&this->template add<Slow<kWeights>>("l" + std::to_string(i)));
    }
  }
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (Slow<kWeights>* layer : layers) y = (*layer)(y);
    return y * 1.0;
  }
  std::vector<Slow<kWeights>*> layers;
};

template <int kWeights>
void hides_all_but_the_ends() {
  compared_ranks(2,
                 [](int rank) {
                   SlowLayers<kWeights> model;
                   Mesh mesh(world());
                   const auto parallel = shard_in(Way::kFully, model, mesh);
                   optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
                   const auto step = [&] {
                     const Tensor loss = loss_of(model, rank);
                     const double middle = faults().clock ? faults().clock->now : 0;
                     loss.backward();
                     optimizer.step();
                     optimizer.zero_grad();
                     return middle;
                   };
                   step();
                   const auto clock = std::make_shared<VirtualClock>();
                   clock->latency = [](const Call& call) {
                     return call.channel == Channel::kControl ? 0 : kTravel;
                   };
                   use_clock(clock);
                   const CommTrace::Scope scope(*rank_context().trace);
                   const double forward = step();
                   EXPECT_DOUBLE_EQ(forward, kTravel + 4 * kCompute);
                   EXPECT_DOUBLE_EQ(clock->now - forward, kTravel + 4 * 2 * kCompute + kTravel);
                   int exposed_gathers = 0, exposed_reductions = 0;
                   for (const CommRecord& record : scope.records()) {
                     const bool exposed = record.wait_end > record.wait_begin;
                     if (record.channel == Channel::kParameter) exposed_gathers += exposed;
                     if (record.channel == Channel::kGradient) exposed_reductions += exposed;
                   }
                   EXPECT_EQ(exposed_gathers, 2)
                       << "the first of forward and the first of backward";
                   EXPECT_EQ(exposed_reductions, 1) << "the last";
                   use_clock(nullptr);
                 },
                 {.decorate = with_faults()});
}

TEST(FullyShardCalls, ComputationHidesAllButTheFirstGatherAndTheLastReduction) {
  NEEDS_THREADS;
  hides_all_but_the_ends<1>();
}

// The reduction hides behind the first part of a layer's backward, the gather behind the others.
TEST(FullyShardCalls, SoItDoesWhereOneUnitBesideHasMemory) {
  NEEDS_THREADS;
  hides_all_but_the_ends<2>();
}

}  // namespace
}  // namespace tessera::distributed::test_fully_shard_calls
