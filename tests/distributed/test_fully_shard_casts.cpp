// Weights that autocast reads as 16-bit copies alone are cast before they travel: fewer bytes, less
// memory, and the bits of replicas under the same autocast, whatever else happens to be read.
// ctest labels: threads
// ctest ranks: 2
#include <cmath>
#include <functional>
#include <set>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/checkpoint.h>
#include <tessera/autograd/op_observer.h>
#include <tessera/autograd/weight_cache.h>
#include <tessera/nn/norm.h>

#include "distributed/sharded_fixture.h"
#include "thinned.h"

namespace tessera::distributed::test_fully_shard_casts {
namespace {

constexpr int kWidth = 33;  // rows that do not divide

struct Layer : nn::Module<Layer> {
  Layer()
      : norm(add<nn::LayerNorm>("norm", kWidth)),
        linear(add<nn::Linear>("linear", kWidth, kWidth)) {}
  Tensor forward(const Tensor& x) {
    const auto update = [this](const Tensor& h) { return linear(norm(h)); };
    Tensor y = x + (recomputes ? checkpoint(update, x) : update(x));
    if (also) y = also(*this, y);
    return y;
  }
  bool recomputes = false;
  std::function<Tensor(Layer&, const Tensor&)> also;
  nn::LayerNorm& norm;
  nn::Linear& linear;
};
struct Net : nn::Module<Net> {
  Net()
      : in(add<nn::Linear>("in", 8, kWidth)),
        first(add<Layer>("first")),
        second(add<Layer>("second")),
        scale(parameter("scale", tessera::ones({kWidth}))) {}
  Tensor forward(const Tensor& x) {
    Tensor y = in(x);
    if (recomputes) {
      y = checkpoint([this](const Tensor& h) { return first(h); }, y);
    } else {
      y = first(y);
    }
    return second(y) * scale;
  }
  bool recomputes = false;
  nn::Linear& in;
  Layer& first;
  Layer& second;
  const Tensor& scale;
};

struct Trained {
  std::vector<double> losses;
  std::map<std::string, std::vector<float>> values;
  bool operator==(const Trained&) const = default;
};

// What a training does besides, before the step of a number.
using Before = std::function<void(Net&, int step)>;

Trained train(Way way, DType dtype, int rank, const Before& before,
              const std::function<void(DataParallelModel&)>& after = {}) {
  manual_seed(3);
  Net model;
  Mesh mesh(world());
  const auto parallel = shard_in(way, model, mesh);
  optim::SGD optimizer(model.named_parameters(), {.lr = 0.05});
  Trained trained;
  for (int step = 0; step < 5; ++step) {
    if (before) before(model, step);
    Tensor loss;
    {
      const AutocastGuard autocast(dtype);
      loss = loss_of(model, step * world_size() + rank);
    }
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    trained.losses.push_back(loss.item());
  }
  trained.values = whole_values(model);
  if (after) after(*parallel);
  return trained;
}

// The same in all modes as with replicas.
void same_as_replicas(const Before& before) {
  for (const DType dtype : {kBF16, kF16}) {
    for (const int size : tests::thinned({2, 3}, 2)) {
      SCOPED_TRACE(std::string(name_of(dtype)) + " on " + std::to_string(size));
      std::vector<Trained> expected(static_cast<size_t>(size));
      on_ranks(size, [&](int rank) {
        expected[static_cast<size_t>(rank)] = train(Way::kReplicate, dtype, rank, before);
      });
      for (const Way way : {Way::kFully, Way::kFullyKept, Way::kZero3, Way::kZero2}) {
        SCOPED_TRACE(name_of(way));
        on_ranks(size, [&](int rank) {
          EXPECT_EQ(train(way, dtype, rank, before), expected[static_cast<size_t>(rank)]);
        });
      }
    }
  }
}

// The dtypes in which each unit's parameters travelled.
std::map<std::string, std::set<std::string>> dtypes_of(const std::vector<CommRecord>& records) {
  std::map<std::string, std::set<std::string>> dtypes;
  for (const CommRecord& record : records) {
    if (record.channel != Channel::kParameter) continue;
    dtypes[record.tag].insert(std::string(tessera::name_of(record.dtype)));
  }
  return dtypes;
}

TEST(FullyShardCasts, TravelInTheDTypeThatOpsRead) {
  using Expected = std::map<std::string, std::set<std::string>>;
  const Expected stored = {{"unit in", {"f32"}},
                           {"unit first", {"f32"}},
                           {"unit second", {"f32"}},
                           {"the root unit", {"f32"}}};
  // The norm of a layer is read in f32, and its linear layer in 16 bits.
  const Expected cast = {{"unit in", {"bf16"}},
                         {"unit first", {"u8"}},
                         {"unit second", {"u8"}},
                         {"the root unit", {"f32"}}};
  on_ranks(2, [&](int rank) {
    Net model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kZero3, model, mesh);
    const auto step = [&](bool autocasts) {
      const CommTrace::Scope scope(*rank_context().trace);
      memory_stats()->reset_peak();
      Tensor loss;
      {
        const AutocastGuard autocast(kBF16, autocasts);
        loss = loss_of(model, rank);
      }
      loss.backward();
      model.zero_grad();
      return dtypes_of(scope.records());
    };
    EXPECT_EQ(step(true), stored) << "nobody knows yet";
    const int64_t copies = memory_stats()->peak(MemoryCategory::kWeightCache);
    const int64_t wholes = memory_stats()->peak(MemoryCategory::kUnsharded);
    EXPECT_GT(copies, 0);
    EXPECT_EQ(step(true), cast);
    EXPECT_EQ(memory_stats()->peak(MemoryCategory::kWeightCache), 0) << "they are what is gathered";
    EXPECT_LT(memory_stats()->peak(MemoryCategory::kUnsharded), wholes * 6 / 10);
    EXPECT_EQ(step(false), stored) << "without autocast the weights themselves are read";
    EXPECT_EQ(step(true), cast);
    EXPECT_EQ(memory_stats()->current(MemoryCategory::kUnsharded), 0);
    // What is reported is what is sent.
    int64_t sent = 0, reported = 0;
    const CommTrace::Scope scope(*rank_context().trace);
    {
      const NoGradGuard no_grad;
      const AutocastGuard autocast(kBF16);
      loss_of(model, rank);
    }
    for (const CommRecord& record : scope.records()) {
      if (record.channel == Channel::kParameter) sent += record.bytes * 2;
    }
    for (const UnitReport& unit : dynamic_cast<ShardedModel&>(*parallel).report()) {
      reported += unit.whole_bytes;
    }
    EXPECT_EQ(sent, reported);
  });
}

TEST(FullyShardCasts, HaveTheBitsOfReplicas) { same_as_replicas({}); }

TEST(FullyShardCasts, RecomputedCallsReadThem) {
  same_as_replicas([](Net& model, int) { model.recomputes = true; });
}

// What is in the module's places then is what was there in the call.
TEST(FullyShardCasts, PartsOfACallRunAgain) {
  same_as_replicas(
      [](Net& model, int) { model.first.recomputes = model.second.recomputes = true; });
  same_as_replicas([](Net& model, int step) {
    model.first.recomputes = true;
    model.first.linear.requires_grad_(step % 2 == 0);
  });
}

// A call that runs again is entered before its scope of autocast comes back, and needs nothing that
// its backward has not gathered.
TEST(FullyShardCasts, CheckpointedCallsGatherNothingMore) {
  same_as_replicas([](Net& model, int) { model.first.checkpoint_calls(); });
  on_ranks(2, [&](int rank) {
    Net model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kZero3, model, mesh);
    model.first.checkpoint_calls();
    for (int step = 0; step < 4; ++step) {
      const CommTrace::Scope scope(*rank_context().trace);
      Tensor loss;
      {
        const AutocastGuard autocast(kBF16);
        loss = loss_of(model, rank);
      }
      loss.backward();
      const std::vector<std::string> events = unit_events(scope.records());
      for (const char* unit : {"in", "first", "second"}) {
        EXPECT_EQ(std::ranges::count(events, std::string("G unit ") + unit), 2)
            << unit << " in step " << step;
      }
      model.zero_grad();
    }
  });
}

// The first backward lets the reads be agreed upon while a call that looks at them is under way.
TEST(FullyShardCasts, ABackwardInsideOfAForwardEndsTheLooking) {
  on_ranks(2, [&](int rank) {
    Net model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kZero3, model, mesh);
    model.second.also = [&model](Layer&, const Tensor& y) {
      model.in(tessera::ones({3, 8})).to(kF32).sum().backward();
      return y;
    };
    for (int step = 0; step < 3; ++step) {
      const AutocastGuard autocast(kBF16);
      const Tensor loss = loss_of(model, rank);
      EXPECT_EQ(Context::current().slot<OpObserverSlot>().observer, nullptr);
      EXPECT_TRUE(std::isfinite(loss.item()));
    }
  });
}

// What was read as a cast alone for some steps: the unit is gathered as it is stored, when it is
// read and from then on.
TEST(FullyShardCasts, AReadOfTheWeightItselfGathersIt) {
  const auto reads = [](Tensor (*read)(const Tensor& weight)) {
    return [read](Net& model, int step) {
      if (step < 2) return;
      model.second.also = [read](Layer& layer, const Tensor& y) {
        return y + read(layer.linear.weight) * 0.1;
      };
    };
  };
  // By ops that autocast passes over, that it has run in f32, and that take what they get.
  same_as_replicas(reads([](const Tensor& weight) { return weight.t().sum(); }));
  same_as_replicas(reads([](const Tensor& weight) { return exp(weight).mean(); }));
  same_as_replicas(reads([](const Tensor& weight) { return cat({weight, weight}, 0).mean(); }));
}

TEST(FullyShardCasts, WeightsReadInBothWaysTravelAsTheyAre) {
  same_as_replicas([](Net& model, int) {
    model.second.also = [](Layer& layer, const Tensor& y) {
      return y + layer.linear.weight.t().sum() * 0.1;
    };
  });
}

// A read that no cast serves costs one gather once, and none where it was there from the begin.
TEST(FullyShardCasts, AWeightThatIsReadItselfIsGatheredOnce) {
  for (const int from : {0, 2}) {
    on_ranks(2, [&](int rank) {
      Net model;
      Mesh mesh(world());
      const auto parallel = shard_in(Way::kZero3, model, mesh);
      for (int step = 0; step < 4; ++step) {
        if (step == from) {
          model.second.also = [](Layer& layer, const Tensor& y) {
            return y + layer.linear.weight.t().sum() * 0.1;
          };
        }
        const CommTrace::Scope scope(*rank_context().trace);
        {
          const AutocastGuard autocast(kBF16);
          loss_of(model, rank).backward();
        }
        const std::vector<std::string> events = unit_events(scope.records());
        EXPECT_EQ(std::ranges::count(events, "G unit second"), step > 0 && step == from ? 3 : 2);
        if (step > from) {
          // Its bias alone travels as a cast.
          EXPECT_EQ(dtypes_of(scope.records()).at("unit second"), (std::set<std::string>{"u8"}));
        }
      }
    });
  }
}

// Kept from one step to the next: new values are other casts, and who saved the old ones is told.
TEST(FullyShardCasts, KeptCastsFollowTheWeights) {
  on_ranks(2, [](int rank) {
    std::vector<std::vector<double>> losses;
    for (const bool kept : {false, true}) {
      manual_seed(3);
      Net model;
      Mesh mesh(world());
      const auto parallel = shard_in(Way::kFullyKept, model, mesh);
      fully_sharded(model).set_reshard_after_backward(!kept);
      optim::SGD optimizer(model.named_parameters(), {.lr = 0.05});
      losses.emplace_back();
      const AutocastGuard autocast(kBF16);
      for (int step = 0; step < 4; ++step) {
        const Tensor loss = loss_of(model, rank);
        loss.backward();
        losses.back().push_back(loss.item());
        optimizer.step();
        optimizer.zero_grad();
      }
      const Tensor old = loss_of(model, rank);
      loss_of(model, rank).backward();
      optimizer.step();
      loss_of(model, rank);
      EXPECT_THROW(old.backward(), AutogradError);
    }
    EXPECT_EQ(losses[0], losses[1]);
  });
}

TEST(FullyShardCasts, OtherDTypesAndNoneComeBetween) {
  same_as_replicas([](Net& model, int step) {
    const Tensor x = ones({3, 8});
    {
      const NoGradGuard no_grad;
      const Tensor y = model(x);
      EXPECT_EQ(y.dtype(), kF32);
    }
    if (step < 2) return;
    const AutocastGuard autocast(step % 2 == 0 ? kF16 : kBF16);
    const Tensor loss = model(x).to(kF32).sum() * 1e-3;
    loss.backward();
    model.zero_grad();
  });
}

// Two graphs at once, the older of which was made before the ranks knew.
TEST(FullyShardCasts, GraphsOfBothKindsRunTheirBackward) {
  same_as_replicas([](Net& model, int step) {
    if (step > 1) return;
    const Tensor x = ones({3, 8});
    const AutocastGuard autocast(kBF16);
    const Tensor one = model(x).to(kF32).sum() * 1e-3, two = model(x * 2.0).to(kF32).sum() * 1e-3;
    two.backward();
    model.zero_grad();
    one.backward();
    model.zero_grad();
  });
}

TEST(FullyShardCasts, ScopesAndHandlesGatherTheWeightsThemselves) {
  on_ranks(2, [](int rank) {
    manual_seed(3);
    Net model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kFullyKept, model, mesh);
    const auto values = whole_values(model);
    for (int step = 0; step < 2; ++step) {
      const AutocastGuard autocast(kBF16);
      loss_of(model, rank).backward();
    }
    {
      const NoGradGuard no_grad;
      const AutocastGuard autocast(kBF16);
      loss_of(model, rank);  // casts are there
    }
    {
      const auto scope = full_parameters(model, {.writes = true});
      EXPECT_EQ(model.first.linear.weight.to_vector<float>(), values.at("first.linear.weight"));
      const NoGradGuard no_grad;
      mul_(model.first.linear.weight, 2.0);
    }
    auto doubled = values.at("first.linear.weight");
    for (float& value : doubled) value *= 2;
    EXPECT_EQ(whole_values(model).at("first.linear.weight"), doubled);
  });
}

// Parts of casts among two neighbours of four, which backward gathers.
TEST(FullyShardCasts, NeighboursKeepParts) {
  Trained expected;
  for (const bool near : {false, true}) {
    on_ranks(4, [&](int rank) {
      manual_seed(3);
      Net model;
      Mesh mesh(world());
      FullyShardOptions options;
      if (near) options.reshard_after_forward = 2;
      for (nn::ModuleBase* unit :
           std::initializer_list<nn::ModuleBase*>{&model.in, &model.first, &model.second, &model}) {
        fully_shard(*unit, mesh, options);
      }
      optim::SGD optimizer(model.named_parameters(), {.lr = 0.05});
      Trained trained;
      for (int step = 0; step < 4; ++step) {
        const CommTrace::Scope scope(*rank_context().trace);
        const AutocastGuard autocast(kBF16);
        const Tensor loss = loss_of(model, step);
        if (step == 2) {
          const NoGradGuard no_grad;
          const AutocastGuard off(kBF16, false);
          EXPECT_EQ(model(ones({3, 8})).dtype(), kF32);
        }
        loss.backward();
        optimizer.step();
        optimizer.zero_grad();
        trained.losses.push_back(loss.item());
        for (const CommRecord& record : scope.records()) {
          if (record.tag != "unit in" || record.channel != Channel::kParameter || step == 2)
            continue;
          EXPECT_EQ(record.dtype, step == 0 ? kF32 : kBF16);
          EXPECT_EQ(record.group_size, near && record.phase == "backward" ? 2 : 4);
        }
      }
      trained.values = whole_values(model);
      if (rank == 0 && !near) expected = trained;
      world().barrier();
      EXPECT_EQ(trained, expected);
    });
  }
}

// A unit that a rank leaves out travels as the others have read it.
struct Expert : nn::Module<Expert> {
  Expert() : first(add<Layer>("first")), second(add<Layer>("second")) {}
  Tensor forward(const Tensor& x) {
    const Tensor y = first(x);
    return (skips ? fully_sharded(second).touch(y) : second(y)) * 1.0;
  }
  bool skips = false;
  Layer& first;
  Layer& second;
};
TEST(FullyShardCasts, ARankThatLeavesAUnitOutAgrees) {
  on_ranks(2, [](int rank) {
    Expert model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kZero3, model, mesh);
    for (int step = 0; step < 3; ++step) {
      model.skips = (rank + step) % 2 == 0;
      const CommTrace::Scope scope(*rank_context().trace);
      const AutocastGuard autocast(kBF16);
      const Tensor y = model(ones({5, kWidth}));
      y.sum().backward();
      const auto dtypes = dtypes_of(scope.records());
      EXPECT_EQ(dtypes.at("unit second").contains("u8"), step > 0);
    }
  });
}

// A write is seen as it is without casts.
TEST(FullyShardCasts, AWriteInAForwardIsAnError) {
  on_ranks(2, [](int rank) {
    Net model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kZero3, model, mesh);
    const AutocastGuard autocast(kBF16);
    for (int step = 0; step < 2; ++step) loss_of(model, rank).backward();
    model.second.also = [](Layer& layer, const Tensor& y) {
      const NoGradGuard no_grad;
      mul_(layer.linear.weight, 2.0);
      return y;
    };
    EXPECT_THROW(loss_of(model, rank), AutogradError);
    model.second.also = {};
    model.zero_grad();
    loss_of(model, rank).backward();
  });
}

}  // namespace
}  // namespace tessera::distributed::test_fully_shard_casts
