// What sharded parameters are outside of calls, in them, and after mistakes; and the models that
// are not the usual ones: frozen, tied, skipped, empty parts.
// ctest labels: threads
// ctest ranks: 2
#include <tessera/core/tensor/raw_views.h>
#include <tessera/nn/embedding.h>

#include "distributed/sharded_fixture.h"
#include "message_of.h"

namespace tessera::distributed::test_fully_shard_states {
namespace {

// Its forward shows what its parameters are, and does what a test wants.
struct Probe : nn::Module<Probe> {
  Probe() : weight(parameter("weight", tessera::ones({8, 8}))) {}
  Tensor forward(const Tensor& x) {
    if (inside) inside(weight);
    // Backward reads the weight for the first product when its gradient, of the second, has come.
    const Tensor in = with_detached ? matmul(x, detach(weight)) : x;
    return matmul(in, weight.t());
  }
  std::function<void(const Tensor& weight)> inside;
  bool with_detached = false;
  const Tensor& weight;
};
struct Probes : nn::Module<Probes> {
  Probes() : first(add<Probe>("first")), second(add<Probe>("second")) {}
  Tensor forward(const Tensor& x) {
    Tensor y = first(x);
    if (!skips_second) y = second(y);
    return y * 1.0;
  }
  bool skips_second = false;
  Probe& first;
  Probe& second;
};

TEST(FullyShardStates, ParametersArePartsOutsideOfCallsAndWholeInside) {
  on_ranks(2, [](int rank) {
    Probes model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kFully, model, mesh);
    const Tensor shard = model.first.weight;
    int seen = 0;
    model.first.inside = [&](const Tensor& weight) {
      EXPECT_FALSE(is_dtensor(weight));
      EXPECT_EQ(weight.shape(), (Shape{8, 8}));
      EXPECT_TRUE(weight.is_leaf());
      EXPECT_FALSE(weight.is(shard));
      ++seen;
    };
    const auto is_sharded = [&] {
      for (const auto& [name, tensor] : model.named_parameters()) {
        EXPECT_TRUE(is_dtensor(tensor)) << name;
        EXPECT_EQ(tensor.shape(), (Shape{4, 8}));
        EXPECT_EQ(placements_of(tensor), Placements{Shard(0)});
      }
      EXPECT_TRUE(model.first.weight.is(shard)) << "the object of before";
    };
    is_sharded();
    const Tensor loss = loss_of(model, rank);
    is_sharded();
    loss.backward();
    is_sharded();
    EXPECT_EQ(seen, 1);
    EXPECT_TRUE(is_dtensor(shard.grad()));
    EXPECT_EQ(global_shape(shard.grad()), (Shape{8, 8}));
  });
}

TEST(FullyShardStates, AReleasedParameterIsAnErrorThatNamesIt) {
  on_ranks(2, [](int rank) {
    Probes model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kFully, model, mesh);
    Tensor kept, view, plain_view;
    model.first.inside = [&](const Tensor& weight) {
      kept = weight;
      view = weight.t();
      plain_view = raw::alias(weight);
    };
    const Tensor loss = loss_of(model, rank);
    for (const Tensor& read : {kept, view, plain_view}) {
      for (const std::string& message :
           {message_of([&] { read.sum(); }), message_of([&] { (void)read.to_vector(); })}) {
        EXPECT_NE(message.find("'first.weight'"), std::string::npos) << message;
        EXPECT_NE(message.find("unit first"), std::string::npos) << message;
      }
    }
    loss.backward();
    EXPECT_THROW(kept.sum(), UnsupportedError);
  });
}

TEST(FullyShardStates, AGraphThatLeftItsCallOnTheSideCannotReadWhatIsReleased) {
  on_ranks(2, [](int) {
    Probes model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kFully, model, mesh);
    const Tensor x = full({2, 8}, 1.0);
    x.set_requires_grad();
    Tensor outside;
    // Its result leaves the call beside the outputs, so that no hook tells when it is needed.
    model.first.inside = [&](const Tensor& weight) { outside = matmul(x, weight).sum(); };
    model(full({2, 8}, 1.0));
    const std::string message = message_of<AutogradError>([&] { outside.backward(); });
    EXPECT_NE(message.find("'first.weight' of unit first"), std::string::npos) << message;
  });
}

TEST(FullyShardStates, AWriteToAGatheredParameterIsAnError) {
  on_ranks(2, [](int rank) {
    Probes model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kFully, model, mesh);
    const auto before = whole_values(model);
    model.first.inside = [](const Tensor& weight) {
      const NoGradGuard no_grad;
      mul_(weight, Scalar(2.0));
    };
    const std::string message = message_of<AutogradError>([&] { loss_of(model, rank); });
    EXPECT_NE(message.find("'first.weight' was written"), std::string::npos) << message;
    model.first.inside = {};
    loss_of(model, rank).backward();
    EXPECT_EQ(whole_values(model), before);
    {
      const auto scope = full_parameters(model, {.writes = true});
      const NoGradGuard no_grad;
      mul_(model.first.weight, Scalar(2.0));
    }
    EXPECT_EQ(whole_values(model).at("first.weight"), std::vector<float>(64, 2.0f));
    EXPECT_THROW(
        {
          const auto scope = full_parameters(model);
          const NoGradGuard no_grad;
          mul_(model.first.weight, Scalar(2.0));
        },
        AutogradError);
  });
}

TEST(FullyShardStates, AStepBetweenForwardAndBackwardIsRefused) {
  for (const Way way : {Way::kZero1, Way::kZero2, Way::kFully, Way::kFullyKept}) {
    for (const int size : {1, 2}) {
      on_ranks(size, [&](int rank) {
        Probes model;
        Mesh mesh(world());
        const auto parallel = shard_in(way, model, mesh);
        optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
        loss_of(model, rank).backward();
        const Tensor loss = loss_of(model, rank);
        optimizer.step();
        EXPECT_THROW(loss.backward(), AutogradError) << name_of(way);
        optimizer.zero_grad();
        loss_of(model, rank).backward();
        EXPECT_TRUE(model.first.weight.grad().defined());
      });
    }
  }
}

// A weight that is read in backward and of which no gradient comes there.
TEST(FullyShardStates, AUnitStaysUntilBackwardHasPassedItsInputs) {
  on_ranks(2, [](int rank) {
    Probes model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kZero3, model, mesh);
    model.second.with_detached = true;
    for (int i = 0; i < 2; ++i) EXPECT_NO_THROW(loss_of(model, rank).backward());
  });
}

// ---- Exceptions --------------------------------------------------------------------------------

TEST(FullyShardStates, TheStepAfterAnExceptionIsAsIfNothingHadBeen) {
  for (const Way way : {Way::kZero1, Way::kZero2, Way::kFully, Way::kFullyKept, Way::kZero3}) {
    std::map<std::string, std::vector<float>> expected;
    // Nowhere, in the forward of a unit, in a backward, in one that reduces nothing.
    for (const int fails : {0, 1, 2, 3}) {
      if (fails == 3 && way == Way::kZero2) continue;
      SCOPED_TRACE(std::string(name_of(way)) + " " + std::to_string(fails));
      on_ranks(2, [&](int rank) {
        manual_seed(3);
        Odd model;
        Mesh mesh(world());
        const auto parallel = shard_in(way, model, mesh);
        loss_of(model, 4 + rank).backward();
        model.zero_grad();
        if (fails == 1) {
          model.in_the_middle = [](const Tensor&) -> Tensor { TS_THROW(ValueError, "here", "x"); };
          EXPECT_THROW(loss_of(model, rank), ValueError);
        } else if (fails >= 2) {
          StepPlan plan;
          plan.sync_gradients = fails == 2;
          parallel->set_plan(plan);
          model.in_the_middle = [](const Tensor& h) {
            const Tensor y = h * 1.0;
            register_hook(y, [](const Tensor&) -> Tensor { TS_THROW(ValueError, "here", "x"); });
            return y;
          };
          EXPECT_THROW(loss_of(model, rank).backward(), ValueError);
        }
        model.in_the_middle = {};
        parallel->set_plan({});
        for (const auto& [name, tensor] : model.named_parameters()) EXPECT_TRUE(is_dtensor(tensor));
        model.zero_grad();
        loss_of(model, rank).backward();
        const auto gradients = whole_gradients(model);
        if (fails == 0 && keeps_results(rank)) expected = gradients;
        world().barrier();
        EXPECT_EQ(gradients, expected);
      });
    }
  }
}

// Of one rank alone: the others are told, at the latest when it calls the model again.
TEST(FullyShardStates, ARankThatThrewTellsTheOthers) {
  NEEDS_THREADS;
  for (const bool told : {true, false}) {
    failing_ranks("one of them throws", 2, [&](int rank) {
      manual_seed(3);
      Odd model;
      Mesh mesh(world());
      const auto parallel = shard_in(Way::kFully, model, mesh);
      if (rank == 1) {
        model.in_the_middle = [](const Tensor& h) {
          const Tensor y = h * 1.0;
          register_hook(y, [](const Tensor&) -> Tensor { TS_THROW(ValueError, "here", "x"); });
          return y;
        };
        EXPECT_THROW(loss_of(model, rank).backward(), ValueError);
        if (told) parallel->pass().fail_backward();
        model.in_the_middle = {};
      } else {
        const std::string message =
            message_of<DistributedError>([&] { loss_of(model, rank).backward(); });
        EXPECT_NE(message.find("rank 1"), std::string::npos) << message;
      }
      model.zero_grad();
      loss_of(model, rank).backward();
      EXPECT_TRUE(model.first.weight.grad().defined());
    });
  }
}

// After a good step rank 1 goes astray, and both are told in the next.
void expect_both_told(const char* reason, const std::function<void(Probes& model)>& go_astray) {
  std::atomic<int> told{0};
  EXPECT_THROW(failing_ranks(reason, 2,
                             [&](int rank) {
                               Probes model;
                               Mesh mesh(world());
                               const auto parallel = shard_in(Way::kFully, model, mesh);
                               loss_of(model, rank).backward();
                               if (rank == 1) go_astray(model);
                               try {
                                 loss_of(model, rank).backward();
                               } catch (const DistributedError&) {
                                 ++told;
                                 throw;
                               }
                             }),
               DistributedError);
  EXPECT_EQ(told, 2);
}

TEST(FullyShardStates, AUnitThatOneRankLeavesOutIsAnErrorOnEveryRank) {
  NEEDS_THREADS;
  expect_both_told("one leaves out a unit", [](Probes& model) { model.skips_second = true; });
}

TEST(FullyShardStates, ARankWhoseForwardThrewAndGoesOnIsAnErrorOnEveryRank) {
  NEEDS_THREADS;
  expect_both_told("one does not come to the end of its forward", [](Probes& model) {
    model.second.inside = [](const Tensor&) { TS_THROW(ValueError, "here", "fails"); };
    EXPECT_THROW(loss_of(model, 1), ValueError);
    model.second.inside = {};
  });
}

struct Touching : nn::Module<Touching> {
  Touching() : first(add<Probe>("first")), second(add<Probe>("second")) {}
  Tensor forward(const Tensor& x) {
    const Tensor y = first(x);
    return (skips ? fully_sharded(second).touch(y) : second(y)) * 1.0;
  }
  bool skips = false;
  Probe& first;
  Probe& second;
};

TEST(FullyShardStates, ATouchedUnitTakesPartWithZeros) {
  Gradients expected;
  {
    Context context;
    const ContextGuard guard(context);
    set_num_threads(1);
    Touching model;
    loss_of(model, 0).backward();
    {
      const Tensor x = randn({5, 8}, {}, RandomStream{7, 1});
      const Tensor y = model.first(x) * 1.0;
      (y * y).mean().backward();
    }
    const NoGradGuard no_grad;
    for (const Tensor& parameter : model.parameters()) mul_(parameter.grad(), 0.5);
    expected = gradients_of(model);
  }
  on_ranks(2, [&](int rank) {
    Touching model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kZero3, model, mesh);
    model.skips = rank == 1;
    loss_of(model, rank).backward();
    const auto gradients = whole_gradients(model);
    for (size_t i = 0; i < expected.names.size(); ++i) {
      EXPECT_EQ(gradients.at(expected.names[i]), expected.values[i]);
    }
    EXPECT_THROW((void)fully_sharded(model.second).touch(full({2, 8}, 1.0)), UnsupportedError);
  });
}

// ---- Unused, frozen, tied, ignored, empty ------------------------------------------------------

struct Branches : nn::Module<Branches> {
  Branches() : body(add<nn::Linear>("body", 8, 8)) {
    for (const char* name : {"always", "sometimes", "never"}) parameter(name, tessera::ones({8}));
  }
  Tensor forward(const Tensor& x) {
    Tensor y = body(x) * get_parameter("always");
    if (uses) y = y * get_parameter("sometimes");
    return y;
  }
  bool uses = true;
  nn::Linear& body;
};

TEST(FullyShardStates, UnusedParametersHaveNoGradientWhereNoRankUsesThem) {
  for (const Way way : {Way::kReplicate, Way::kZero1, Way::kZero2, Way::kFully, Way::kFullyKept}) {
    SCOPED_TRACE(name_of(way));
    Gradients expected;
    in_one_process([&] {
      Branches model;
      loss_of(model, 0).backward();
      model.uses = false;
      loss_of(model, 1).backward();
      const NoGradGuard no_grad;
      for (const Tensor& parameter : model.parameters()) {
        if (parameter.grad().defined()) mul_(parameter.grad(), 0.5);
      }
      expected = gradients_of(model);
    });
    on_ranks(2, [&](int rank) {
      manual_seed(3);
      Branches model;
      Mesh mesh(world());
      const auto parallel = shard_in(way, model, mesh);
      model.uses = rank == 0;
      loss_of(model, rank).backward();
      EXPECT_FALSE(model.get_parameter("never").grad().defined());
      const auto gradients = whole_gradients(model);
      EXPECT_EQ(gradients.size(), 4u);
      for (const auto& [name, gradient] : gradients) {
        const auto at = std::ranges::find(expected.names, name) - expected.names.begin();
        EXPECT_EQ(gradient, expected.values[static_cast<size_t>(at)]) << name;
      }
    });
  }
}

// A frozen base with a trained adapter beside each layer, and a frozen layer in between.
struct Adapted : nn::Module<Adapted> {
  Adapted()
      : base(add<nn::Linear>("base", 8, 8)),
        down(add<nn::Linear>("down", 8, 2)),
        up(add<nn::Linear>("up", 2, 8)) {}
  Tensor forward(const Tensor& x) { return base(x) + up(down(x)); }
  nn::Linear& base;
  nn::Linear& down;
  nn::Linear& up;
};
struct AdaptedModel : nn::Module<AdaptedModel> {
  AdaptedModel()
      : first(add<Adapted>("first")),
        frozen(add<nn::Linear>("frozen", 8, 8)),
        second(add<Adapted>("second")) {
    for (const auto& [name, tensor] : named_parameters()) {
      const bool adapter =
          name.find(".up") != std::string::npos || name.find(".down") != std::string::npos;
      if (!adapter) tensor.set_requires_grad(false);
    }
  }
  Tensor forward(const Tensor& x) { return second(relu(frozen(relu(first(x))))); }
  Adapted& first;
  nn::Linear& frozen;
  Adapted& second;
};

TEST(FullyShardStates, FrozenParametersAreGatheredAndNotReduced) {
  Gradients expected;
  in_one_process([&] {
    AdaptedModel model;
    expected = accumulate_in_one_process(model, 0, 2, 2);
  });
  for (const Way way : {Way::kZero1, Way::kZero2, Way::kFully, Way::kZero3}) {
    SCOPED_TRACE(name_of(way));
    on_ranks(2, [&](int rank) {
      manual_seed(3);
      AdaptedModel model;
      Mesh mesh(world());
      const auto parallel = shard_in(way, model, mesh);
      const CommTrace::Scope scope(*rank_context().trace);
      loss_of(model, rank).backward();
      int64_t reduced = 0;
      for (const CommRecord& record : scope.records()) {
        if (record.channel != Channel::kGradient) continue;
        EXPECT_EQ(record.tag.find("frozen"), std::string::npos);
        reduced += record.count;
      }
      // Of the adapters alone: two of 2 x 8 + 2 + 8 x 2 + 8, which are 8 + 4 + 8 + 4 on a rank.
      EXPECT_GE(reduced, 2 * 42);
      if (way == Way::kFully) {
        EXPECT_EQ(count(scope.records(), Operation::kReduceScatter), 2);
        EXPECT_EQ(reduced, 2 * 2 * 24);
      }
      for (const auto& [name, gradient] : whole_gradients(model)) {
        const auto at = std::ranges::find(expected.names, name) - expected.names.begin();
        EXPECT_EQ(gradient, expected.values[static_cast<size_t>(at)]) << name;
      }
    });
  }
}

TEST(FullyShardStates, AFrozenUnitIsReleasedWhenBackwardHasPassedIt) {
  on_ranks(2, [](int rank) {
    AdaptedModel model;
    Mesh mesh(world());
    for (nn::ModuleBase* module :
         std::initializer_list<nn::ModuleBase*>{&model.first, &model.frozen, &model.second}) {
      fully_shard(*module, mesh);
    }
    fully_shard(model, mesh);
    Tensor frozen;
    const HookHandle kept = model.frozen.register_forward_hook(
        [&](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs) { frozen = model.frozen.weight; });
    const HookHandle watch = model.first.register_forward_hook(
        [&](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs outputs) {
          register_hook(*outputs[0], [&](const Tensor&) {
            EXPECT_THROW(frozen.sum(), UnsupportedError) << "released in its backward, not later";
            return Tensor();
          });
        });
    loss_of(model, rank).backward();
    EXPECT_TRUE(frozen.defined());
  });
}

// What is trained of a unit stands behind what is frozen, and what is trained before lies in units
// inside of it. Inputs require no grad.
struct FrozenHead : nn::Module<FrozenHead> {
  FrozenHead()
      : body(add<nn::Linear>("body", 8, 8)),
        head(add<nn::Linear>("head", 8, 8)),
        down(add<nn::Linear>("down", 8, 2)),
        up(add<nn::Linear>("up", 2, 8)),
        scale(parameter("scale", tessera::ones({8}))) {
    head.requires_grad_(false);
  }
  Tensor forward(const Tensor& x) {
    const Tensor h = relu(body(x));
    const Tensor y = head(h);  // before the adapter, so that its backward comes after
    return (y + up(down(h))) * scale;
  }
  nn::Linear& body;
  nn::Linear& head;
  nn::Linear& down;
  nn::Linear& up;
  const Tensor& scale;
};
struct Outer : nn::Module<Outer> {
  Outer() : inside(add<FrozenHead>("inside")), last(add<nn::Linear>("last", 8, 4)) {}
  Tensor forward(const Tensor& x) { return last(inside(x)); }
  FrozenHead& inside;
  nn::Linear& last;
};

TEST(FullyShardStates, AFrozenWeightStaysUntilTheUnitsInsideOfItsUnitAreDone) {
  const auto expect_values = [](auto make, const auto& shard) {
    Gradients expected;
    in_one_process([&] {
      auto model = make();
      expected = accumulate_in_one_process(*model, 0, 2, 2);
    });
    on_ranks(2, [&](int rank) {
      manual_seed(3);
      auto model = make();
      Mesh mesh(world());
      shard(*model, mesh);
      for (int step = 0; step < 2; ++step) {
        model->zero_grad();
        loss_of(*model, rank).backward();
        const auto gradients = whole_gradients(*model);
        for (size_t i = 0; i < expected.names.size(); ++i) {
          if (expected.values[i].empty()) continue;
          EXPECT_EQ(gradients.at(expected.names[i]), expected.values[i]) << expected.names[i];
        }
      }
    });
  };
  for (const bool reshard : {true, false}) {
    SCOPED_TRACE(reshard);
    FullyShardOptions options;
    options.reshard_after_forward = reshard;
    expect_values([] { return std::make_unique<FrozenHead>(); },
                  [&](FrozenHead& model, Mesh& mesh) {
                    fully_shard(model.body, mesh, options);
                    fully_shard(model, mesh, options);
                  });
    expect_values([] { return std::make_unique<Outer>(); },
                  [&](Outer& model, Mesh& mesh) {
                    fully_shard(model.inside.body, mesh, options);
                    fully_shard(model.inside, mesh, options);
                    fully_shard(model, mesh, options);
                  });
  }
}

TEST(FullyShardStates, WhatRequiresGradMayChangeBetweenSteps) {
  const auto freeze = [](nn::ModuleBase& model, int step) {
    for (const auto& [name, tensor] : model.named_parameters()) {
      const bool bias = name.ends_with("bias");
      tensor.set_requires_grad(step == 0 || (step == 1) == bias);
      if (!tensor.requires_grad()) tensor.set_grad(Tensor());
    }
  };
  for (const Way way : {Way::kZero1, Way::kZero2, Way::kFully, Way::kFullyKept, Way::kZero3}) {
    for (const int size : {1, 2, 3}) {
      SCOPED_TRACE(std::string(name_of(way)) + " on " + std::to_string(size));
      std::vector<Gradients> expected;
      in_one_process([&] {
        Odd model;
        for (int step = 0; step < 3; ++step) {
          freeze(model, step);
          expected.push_back(accumulate_in_one_process(model, step * size, size, size));
        }
      });
      on_ranks(size, [&](int rank) {
        manual_seed(3);
        Odd model;
        Mesh mesh(world());
        const auto parallel = shard_in(way, model, mesh);
        for (int step = 0; step < 3; ++step) {
          model.zero_grad();
          freeze(model, step);
          loss_of(model, step * size + rank).backward();
          const auto gradients = whole_gradients(model);
          const Gradients& wanted = expected[static_cast<size_t>(step)];
          for (size_t i = 0; i < wanted.names.size(); ++i) {
            if (wanted.values[i].empty()) {
              EXPECT_FALSE(gradients.contains(wanted.names[i])) << step << wanted.names[i];
            } else {
              EXPECT_EQ(gradients.at(wanted.names[i]), wanted.values[i]) << wanted.names[i];
            }
          }
        }
      });
    }
  }
}

// Gradients that are there stay where their parameter is frozen, and add up where it is not.
TEST(FullyShardStates, GradientsStayWhenAnotherParameterIsFrozen) {
  const auto train = [](Net& model, const std::function<void(int64_t first)>& batches) {
    batches(0);
    model.first.weight.set_requires_grad(false);
    batches(2);
  };
  Gradients expected;
  in_one_process([&] {
    Net model;
    train(model, [&](int64_t first) {
      for (int64_t i = 0; i < 2; ++i) loss_of(model, first + i).backward();
    });
    const NoGradGuard no_grad;
    for (const Tensor& parameter : model.parameters()) mul_(parameter.grad(), 0.5);
    expected = gradients_of(model);
  });
  for (const Way way : {Way::kZero2, Way::kFully}) {
    SCOPED_TRACE(name_of(way));
    on_ranks(2, [&](int rank) {
      manual_seed(3);
      Net model;
      Mesh mesh(world());
      const auto parallel = shard_in(way, model, mesh);
      train(model, [&](int64_t first) { loss_of(model, first + rank).backward(); });
      const auto gradients = whole_gradients(model);
      for (size_t i = 0; i < expected.names.size(); ++i) {
        EXPECT_EQ(gradients.at(expected.names[i]), expected.values[i]) << expected.names[i];
      }
    });
  }
}

TEST(FullyShardStates, WhatZeroLeftWholeMustStayFrozen) {
  on_ranks(2, [](int rank) {
    Net model;
    model.first.weight.set_requires_grad(false);
    Mesh mesh(world());
    const ShardedModel zero1 = zero(model, mesh);
    loss_of(model, rank).backward();
    model.first.weight.set_requires_grad(true);
    const std::string message = message_of<ConfigError>([&] { loss_of(model, rank); });
    EXPECT_NE(message.find("'first.weight'"), std::string::npos) << message;
  });
}

struct Tied : nn::Module<Tied> {
  Tied()
      : in(add<nn::Linear>("in", 8, 8, nn::LinearOptions{.bias = false})),
        out(add<nn::Linear>("out", 8, 8, nn::LinearOptions{.bias = false})) {
    out.share_parameter("weight", in.weight);
  }
  Tensor forward(const Tensor& x) { return out(relu(in(x))); }
  nn::Linear& in;
  nn::Linear& out;
};

TEST(FullyShardStates, TiedWeightsAreOneParameterOfOneUnit) {
  Gradients expected;
  in_one_process([&] {
    Tied model;
    expected = accumulate_in_one_process(model, 0, 2, 2);
  });
  on_ranks(2, [&](int rank) {
    manual_seed(3);
    Tied model;
    Mesh mesh(world());
    fully_shard(model, mesh);
    loss_of(model, rank).backward();
    EXPECT_EQ(model.parameters().size(), 1u);
    EXPECT_TRUE(model.in.weight.is(model.out.weight));
    EXPECT_EQ(whole_gradients(model).at("in.weight"), expected.values[0]);

    Tied across;
    fully_shard(across.in, mesh);
    const std::string message = message_of<ConfigError>([&] { fully_shard(across, mesh); });
    EXPECT_NE(message.find("'out.weight'"), std::string::npos) << message;
    EXPECT_NE(message.find("tied"), std::string::npos) << message;
  });
}

TEST(FullyShardStates, IgnoredParametersAreUntouched) {
  on_ranks(2, [](int rank) {
    Net model;
    Mesh mesh(world());
    const Tensor bias = model.second.bias;
    const void* const data = bias.data();
    fully_shard(model, mesh, {.ignored = {"second.bias", "third"}});
    EXPECT_FALSE(is_dtensor(bias));
    EXPECT_EQ(bias.data(), data);
    EXPECT_FALSE(is_dtensor(model.third.weight));
    loss_of(model, rank).backward();
    EXPECT_TRUE(model.second.bias.is(bias));
    EXPECT_EQ(bias.data(), data);
    EXPECT_EQ(bias.grad().shape(), bias.shape()) << "each rank's own affair";
    EXPECT_THROW(fully_shard(*std::make_unique<Net>(), mesh, {.ignored = {"fourth"}}), ConfigError);
  });
}

TEST(FullyShardStates, AnotherDimensionMayBeCutWhereItIsEven) {
  Gradients expected;
  in_one_process([&] {
    Net model;
    expected = accumulate_in_one_process(model, 0, 2, 2);
  });
  const ShardPlacement columns = [](const std::string& name,
                                    const Tensor& tensor) -> std::optional<Shard> {
    if (name == "second.weight") return Shard(-1);
    if (tensor.dim() == 2) return Shard(1);
    return {};
  };
  for (const int size : {1, 2}) {
    on_ranks(size, [&](int rank) {
      manual_seed(3);
      Net model;
      Mesh mesh(world());
      const auto parallel = shard_in(Way::kFully, model, mesh, {.placement = columns});
      EXPECT_EQ(placements_of(model.second.weight), Placements{Shard(1)});
      EXPECT_EQ(model.second.weight.shape(), (Shape{64, 32 / size}));
      EXPECT_EQ(placements_of(model.second.bias), Placements{Shard(0)});
      if (size == 1) return;
      loss_of(model, rank).backward();
      const auto gradients = whole_gradients(model);
      for (size_t i = 0; i < expected.names.size(); ++i) {
        EXPECT_EQ(gradients.at(expected.names[i]), expected.values[i]) << expected.names[i];
      }
    });
  }
  on_ranks(3, [&](int) {
    Net model;
    Mesh mesh(world());
    EXPECT_THROW(shard_in(Way::kFully, model, mesh, {.placement = columns}), ConfigError);
  });
}

// Fewer rows than ranks: some hold nothing of a parameter, and take part in everything.
TEST(FullyShardStates, RanksWithoutRowsTakePart) {
  for (const int size : {3, 8}) {
    Gradients expected;
    std::vector<std::vector<float>> values;
    struct Small : nn::Module<Small> {
      Small() : narrow(add<nn::Linear>("narrow", 8, 1)), wide(add<nn::Linear>("wide", 1, 9)) {}
      Tensor forward(const Tensor& x) { return wide(narrow(x)); }
      nn::Linear& narrow;
      nn::Linear& wide;
    };
    in_one_process([&] {
      Small model;
      optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
      for (int step = 0; step < 2; ++step) {
        expected = accumulate_in_one_process(model, step * size, size, size);
        optimizer.step();
      }
      values = values_of(model);
    });
    on_ranks(size, [&](int rank) {
      manual_seed(3);
      Small model;
      Mesh mesh(world());
      const auto parallel = shard_in(Way::kFullyKept, model, mesh);
      EXPECT_EQ(model.narrow.weight.numel(), rank == 0 ? 8 : 0);
      optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
      for (int step = 0; step < 2; ++step) {
        model.zero_grad();
        loss_of(model, step * size + rank).backward();
        optimizer.step();
      }
      const auto gradients = whole_gradients(model), own = whole_values(model);
      for (size_t i = 0; i < expected.names.size(); ++i) {
        EXPECT_EQ(gradients.at(expected.names[i]), expected.values[i]) << expected.names[i];
        EXPECT_EQ(own.at(expected.names[i]), values[i]) << expected.names[i];
      }
    });
  }
}

// An embedding whose ids have no gradient, a method beside forward, a loss of one of the outputs.
struct Encoder : nn::Module<Encoder> {
  Encoder() : table(add<nn::Embedding>("table", 11, 8)), head(add<nn::Linear>("head", 8, 3)) {}
  Tensor encode(const Tensor& ids) { return table(ids).mean(); }
  std::pair<Tensor, Tensor> forward(const Tensor& ids) {
    const Tensor h = table(ids);
    return {head(h), h};
  }
  nn::Embedding& table;
  nn::Linear& head;
};

TEST(FullyShardStates, OtherMethodsAndPartsOfOutputsTrain) {
  on_ranks(2, [](int rank) {
    Encoder model;
    Mesh mesh(world());
    const auto parallel = shard_in(Way::kZero3, model, mesh);
    const Tensor ids = full({4}, rank, {.dtype = kI64});
    model.call(&Encoder::encode, ids).backward();
    EXPECT_TRUE(model.table.weight.grad().defined());
    EXPECT_FALSE(model.head.weight.grad().defined());
    model.zero_grad();
    model(ids).second.sum().backward();
    EXPECT_FALSE(model.head.weight.grad().defined());
    EXPECT_EQ(whole_gradients(model).at("table.weight")[0], 2.0f) << "of rank 0's four ids, halved";
    EXPECT_EQ(memory_stats()->current(MemoryCategory::kUnsharded), 0);
  });
}

}  // namespace
}  // namespace tessera::distributed::test_fully_shard_states
