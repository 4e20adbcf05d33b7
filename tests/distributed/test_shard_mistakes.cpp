// Mistakes of programs that shard: a typed error on every rank that says what to do, at once, and
// the model trains on as if nothing had been.
// ctest labels: threads
#include <functional>
#include <string>

#include <tessera/core/error.h>

#include "distributed/sharded_fixture.h"
#include "message_of.h"

namespace tessera::distributed::test_shard_mistakes {
namespace {

struct Mistake {
  const char* what;
  std::function<void(Net& model, Mesh& mesh)> make;
  const char* says;
};

// The same gradients as a model that was left in peace, on every rank.
void expect_trains_on(Net& model, int rank, int size) {
  std::map<std::string, std::vector<float>> expected;
  in_one_process([&] {
    Net plain;
    accumulate_in_one_process(plain, 0, size, size);
    expected = whole_gradients(plain);
  });
  model.zero_grad();
  loss_of(model, rank).backward();
  EXPECT_EQ(whole_gradients(model), expected);
}

// Of a model that is sharded by its children and its root.
TEST(ShardMistakes, ASecondShardingIsRefusedAndTheFirstGoesOn) {
  const std::string again =
      "belongs to the root unit already, which was sharded before; shard inner "
      "modules first";
  const Mistake in_units[] = {
      {"the root", [](Net& m, Mesh& mesh) { fully_shard(m, mesh); }, "has a unit already"},
      {"a child", [](Net& m, Mesh& mesh) { fully_shard(m.first, mesh); }, "has a unit already"},
      {"zero", [](Net& m, Mesh& mesh) { zero(m, mesh); }, "'Net' is sharded already"},
      {"zero of a child", [](Net& m, Mesh& mesh) { zero(m.first, mesh); },
       "'Linear' is sharded already"},
  };
  const Mistake in_one[] = {
      {"the root", [](Net& m, Mesh& mesh) { fully_shard(m, mesh); }, "has a unit already"},
      {"a child", [](Net& m, Mesh& mesh) { fully_shard(m.first, mesh); }, again.c_str()},
      {"zero", [](Net& m, Mesh& mesh) { zero(m, mesh, {.stage = 2}); }, "'Net' is sharded already"},
  };
  const auto expect_refused = [](const Mistake& mistake, Way way, bool units) {
    SCOPED_TRACE(std::string(mistake.what) + " of " + name_of(way));
    compared_ranks(2, [&](int rank) {
      manual_seed(3);
      Net model;
      Mesh mesh(world());
      std::unique_ptr<DataParallelModel> parallel;
      if (units) {
        parallel = shard_in(way, model, mesh);
      } else if (way == Way::kFully) {
        fully_shard(model, mesh);
      } else {
        parallel = std::make_unique<ShardedModel>(zero(model, mesh, {.stage = 2}));
      }
      for (const bool called : {false, true}) {
        if (called) expect_trains_on(model, rank, 2);
        const std::string message = message_of<ConfigError>([&] { mistake.make(model, mesh); });
        EXPECT_NE(message.find(mistake.says), std::string::npos) << message;
      }
      expect_trains_on(model, rank, 2);
    });
  };
  for (const Mistake& mistake : in_units) {
    expect_refused(mistake, Way::kFully, true);
    expect_refused(mistake, Way::kZero3, true);
  }
  for (const Mistake& mistake : in_one) {
    expect_refused(mistake, Way::kFully, false);
    expect_refused(mistake, Way::kZero2, false);
  }
}

// Before anything was cut: the model is a plain one still, and can be cut.
TEST(ShardMistakes, WhatCannotBeCutIsLeftWhole) {
  const Mistake mistakes[] = {
      {"listed twice",
       [](Net& m, Mesh& mesh) {
         fully_shard(std::vector<nn::ModuleBase*>{&m.first, &m.second, &m.first}, mesh);
       },
       "'first' (Linear) is listed twice"},
      {"inside of another",
       [](Net& m, Mesh& mesh) {
         fully_shard(std::vector<nn::ModuleBase*>{&m, &m.second}, mesh);
       },
       "'second' lies inside of ''; list the outer one alone"},
      {"three axes",
       [](Net& m, Mesh&) {
         Mesh three(world(), {{"a", 2}, {"b", 2}, {"c", 1}});
         fully_shard(m, three);
       },
       "takes a mesh of one axis, or of two"},
      {"zero of two axes",
       [](Net& m, Mesh&) {
         Mesh two(world(), {{"a", 2}, {"b", 2}});
         zero(m, two);
       },
       "takes a mesh of one axis"},
      {"replicas without shards",
       [](Net& m, Mesh&) {
         Mesh flat(world(), {{"a", 4}, {"b", 1}});
         fully_shard(m, flat);
       },
       "replicate() trains whole copies"},
      {"a stage that is none", [](Net& m, Mesh& mesh) { zero(m, mesh, {.stage = 3}); },
       "stage 3, which shards parameters too, is fully_shard()"},
      {"a module that is not there",
       [](Net& m, Mesh& mesh) {
         fully_shard(std::vector<nn::ModuleBase*>{&m.first, nullptr}, mesh);
       },
       "a null pointer for one of 2 modules"},
      {"ignored that is not there",
       [](Net& m, Mesh& mesh) { fully_shard(m, mesh, {.ignored = {"fourth"}}); },
       "the ignored 'fourth'"},
      {"neighbours that do not divide",
       [](Net& m, Mesh& mesh) { fully_shard(m, mesh, {.reshard_after_forward = 3}); },
       "divides the 4 ranks"},
      {"units inside of what zero takes",
       [](Net& m, Mesh& mesh) {
         fully_shard(m.first, mesh);
         zero(m, mesh);
       },
       "unit first of 'Net' is sharded already by fully_shard()"},
      {"a model that is replicated",
       [](Net& m, Mesh& mesh) {
         const Replica replica = replicate(m, mesh);
         fully_shard(m, mesh);
       },
       "'first.weight' belongs to a Replica"},
      {"a replicated model under zero",
       [](Net& m, Mesh& mesh) {
         const Replica replica = replicate(m, mesh);
         zero(m, mesh);
       },
       "'first.weight' belongs to a Replica"},
  };
  for (const Mistake& mistake : mistakes) {
    SCOPED_TRACE(mistake.what);
    compared_ranks(4, [&](int rank) {
      manual_seed(3);
      Net model;
      Mesh mesh(world());
      const std::string message = message_of<ConfigError>([&] { mistake.make(model, mesh); });
      EXPECT_NE(message.find(mistake.says), std::string::npos) << message;
      fully_shard(model, mesh);
      EXPECT_TRUE(is_dtensor(model.first.weight));
      expect_trains_on(model, rank, 4);
    });
  }
}

TEST(ShardMistakes, OptionsThatDifferAmongRanksAreNamedOnAllOfThem) {
  struct Case {
    std::function<ZeroOptions(bool other)> options;
    const char* says;
  };
  const Case cases[] = {
      {[](bool other) { return ZeroOptions{.stage = other ? 2 : 1}; }, "stage 2"},
      {[](bool other) { return ZeroOptions{.bucket_bytes = other ? 100 : 6000}; },
       "bucket_bytes 100"},
      {[](bool other) {
         return ZeroOptions{.average = other ? GradientAverage::kNone : GradientAverage::kRanks};
       },
       "average none"},
      {[](bool other) { return ZeroOptions{.init_sync = !other}; }, "init_sync 0"},
      {[](bool other) { return ZeroOptions{.broadcast_buffers = !other}; }, "broadcast_buffers 0"},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.says);
    compared_ranks(3, [&](int rank) {
      manual_seed(3);
      Net model;
      Mesh mesh(world());
      const std::string message =
          message_of<DistributedError>([&] { zero(model, mesh, one.options(rank == 1)); });
      EXPECT_NE(message.find("all ranks must take the same options; those of rank 1 are"),
                std::string::npos)
          << message;
      EXPECT_NE(message.find(one.says), std::string::npos) << message;
      const ShardedModel parallel = zero(model, mesh, one.options(false));
      expect_trains_on(model, rank, 3);
    });
  }
}

TEST(ShardMistakes, OptionsOfUnitsThatDifferAreNamedToo) {
  struct Case {
    FullyShardOptions other;
    const char* says;
  };
  const Case cases[] = {
      {{.reshard_after_forward = false}, "reshard_after_forward false"},
      {{.reshard_after_forward = 2}, "reshard_after_forward 2"},
      {{.init_sync = false}, "init_sync 0"},
      {{.mixed_precision = {.param_dtype = kBF16}}, "param_dtype bf16"},
      {{.mixed_precision = {.reduce_dtype = kF16}}, "reduce_dtype f16"},
      {{.gradient_dtype = kF64}, "gradient_dtype f64"},
      {{.average = GradientAverage::kNone}, "average none"},
      {{.broadcast_buffers = true}, "broadcast_buffers 1"},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(one.says);
    compared_ranks(4, [&](int rank) {
      manual_seed(3);
      Net model;
      Mesh mesh(world());
      const std::string message = message_of<DistributedError>(
          [&] { fully_shard(model, mesh, rank == 1 ? one.other : FullyShardOptions{}); });
      EXPECT_NE(message.find("all ranks must take the same options; those of rank 1 are"),
                std::string::npos)
          << message;
      EXPECT_NE(message.find(one.says), std::string::npos) << message;
      fully_shard(model, mesh);
      expect_trains_on(model, rank, 4);
    });
  }
}

// Ranks that cut other things, or hold other things.
TEST(ShardMistakes, ModelsThatDifferAreNamedOnAllRanks) {
  compared_ranks(3, [](int rank) {
    manual_seed(3);
    Net model;
    Mesh mesh(world());
    const std::string message = message_of<DistributedError>(
        [&] { fully_shard(rank == 1 ? model.second : model.first, mesh); });
    EXPECT_NE(message.find("parameter 0 of rank 1 is 'second.weight'"), std::string::npos)
        << message;
    fully_shard(model.first, mesh);
    fully_shard(model, mesh);
    expect_trains_on(model, rank, 3);
  });
}

// Whatever state does not fit leaves values and states as they were.
TEST(ShardMistakes, AnotherModelsStateIsRefusedAndNothingIsLost) {
  for (const Way way : {Way::kZero1, Way::kZero2, Way::kFully, Way::kZero3}) {
    SCOPED_TRACE(name_of(way));
    compared_ranks(3, [&](int rank) {
      manual_seed(3);
      Net model;
      Mesh mesh(world());
      const auto parallel = shard_in(way, model, mesh);
      StateDict other = Odd().state_dict(), shapes;
      for (const auto& [name, tensor] : Net().state_dict()) shapes.set(name, zeros({3}));
      optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
      optim::AdamW foreign(Odd().named_parameters(), {.lr = 1e-2});
      const auto before = whole_values(model);
      for (const StateDict& state : {other, shapes}) {
        EXPECT_THROW(model.load_state_dict(state), ValueError);
      }
      EXPECT_THROW(optimizer.load_state_dict(foreign.state_dict()), Error);
      EXPECT_EQ(whole_values(model), before);
      expect_trains_on(model, rank, 3);
    });
  }
}

// What a program puts in a parameter's place, or gives it for data, is not put aside in silence.
TEST(ShardMistakes, ParametersThatAreReplacedAreNamed) {
  for (const Way way : {Way::kFully, Way::kZero3}) {
    compared_ranks(2, [&](int rank) {
      manual_seed(3);
      Net model;
      Mesh mesh(world());
      const auto parallel = shard_in(way, model, mesh);
      expect_trains_on(model, rank, 2);

      const auto [name, place] = model.first.parameter_places()[0];
      const Tensor shard = *place;
      *place = tessera::ones(model.first.weight.shape());
      const std::string replaced = message_of<UnsupportedError>([&] { loss_of(model, rank); });
      EXPECT_NE(replaced.find("unit first: 'first.weight' was replaced by"), std::string::npos)
          << replaced;
      *place = shard;
      expect_trains_on(model, rank, 2);

      const Tensor part = shard.detach();
      Tensor(shard).set_data(tessera::ones({7, 3}));
      const std::string given = message_of<ShapeError>([&] { loss_of(model, rank); });
      EXPECT_NE(given.find("unit first: 'first.weight' was given data of [7, 3]"),
                std::string::npos)
          << given;
    });
  }
}

// A parameter that no rank reduces would be trained by each rank alone.
TEST(ShardMistakes, ModulesThatComeOrGoAfterwardsAreNamed) {
  for (const Way way : {Way::kReplicate, Way::kZero1, Way::kZero2, Way::kFully, Way::kZero3}) {
    compared_ranks(2, [&](int rank) {
      SCOPED_TRACE(name_of(way));
      manual_seed(3);
      Net model;
      Mesh mesh(world());
      const auto parallel = shard_in(way, model, mesh);
      for (const bool trained_before : {false, true}) {
        SCOPED_TRACE(trained_before);
        if (trained_before) expect_trains_on(model, rank, 2);
        model.adopt("late", std::make_unique<nn::Linear>(3, 2));
        for (int i = 0; i < 2; ++i) {
          const std::string came = message_of<ConfigError>([&] { loss_of(model, rank); });
          EXPECT_NE(came.find("'late.weight' came to the model after its ranks agreed"),
                    std::string::npos)
              << came;
        }
        {  // as it changes nothing where nothing is trained
          const NoGradGuard no_grad;
          loss_of(model, rank);
        }
        model.submodule("late").requires_grad_(false);
        model.zero_grad();
        loss_of(model, rank).backward();
        model.submodule("late").requires_grad_(true);
        message_of<ConfigError>([&] { loss_of(model, rank); });
        model.release("late");

        if (way == Way::kReplicate) continue;  // keeps the parameters; they count as unused
        auto taken = model.release("first");
        for (int i = 0; i < 2; ++i) {
          const std::string left = message_of<ConfigError>([&] { loss_of(model, rank); });
          EXPECT_NE(left.find("' has left the model since it was sharded"), std::string::npos)
              << left;
        }
        model.adopt("first", std::move(taken));
        expect_trains_on(model, rank, 2);
      }
    });
  }
}

TEST(ShardMistakes, AConversionAfterwardsSaysWhatToDo) {
  for (const Way way : {Way::kZero1, Way::kFully}) {
    compared_ranks(2, [&](int rank) {
      manual_seed(3);
      Net model;
      Mesh mesh(world());
      const auto parallel = shard_in(way, model, mesh);
      const std::string refused = message_of<UnsupportedError>([&] { model.to(kBF16); });
      EXPECT_NE(refused.find("call it before the model is sharded"), std::string::npos) << refused;
      expect_trains_on(model, rank, 2);
    });
  }
}

TEST(ShardMistakes, AMeshThatGoesBeforeItsModelIsNamed) {
  for (const Way way : {Way::kZero1, Way::kZero2, Way::kFully}) {
    compared_ranks(2, [&](int rank) {
      SCOPED_TRACE(name_of(way));
      manual_seed(3);
      Net model;
      auto mesh = std::make_unique<Mesh>(world());
      const auto parallel = shard_in(way, model, *mesh);
      expect_trains_on(model, rank, 2);
      mesh = nullptr;
      const std::string gone = message_of<UnsupportedError>([&] { loss_of(model, rank); });
      EXPECT_NE(gone.find("the mesh whose ranks hold the model's parameters is gone"),
                std::string::npos)
          << gone;
    });
  }
}

TEST(ShardMistakes, ModulesThatComeBetweenShardingAndTheFirstCallAreNamed) {
  compared_ranks(2, [&](int rank) {
    manual_seed(3);
    Net model;
    Mesh mesh(world());
    fully_shard(model.first, mesh);
    fully_shard(model, mesh);
    model.first.share_parameter("scale", tessera::ones({7}));
    const std::string came = message_of<ConfigError>([&] { loss_of(model, rank); });
    EXPECT_NE(came.find("'first.scale' came to the model"), std::string::npos) << came;
  });
}

}  // namespace
}  // namespace tessera::distributed::test_shard_mistakes
