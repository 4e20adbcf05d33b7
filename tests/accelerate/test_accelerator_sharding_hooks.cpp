// What programs hang on parameters, or have of them, when a mode of sharding cuts them: hooks,
// averages, gradients that they ask for by grad().
// ctest labels: threads
#include "accelerate/sharded_words.h"

#include <string>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/optim/ema.h>

#include "message_of.h"

namespace tessera::test_accelerator_sharding_hooks {
namespace {

using accelerate::Sharding;
using distributed::full_tensor;
using distributed::is_dtensor;

constexpr Sharding kShardedWays[] = {Sharding::kZero1, Sharding::kZero2, Sharding::kZero3,
                                     Sharding::kFsdp};

Tensor loss_of(Words& model, const std::array<Tensor, 2>& batch) {
  return cross_entropy(model(batch[0]).reshape({-1, 131}), batch[1].reshape({-1}));
}
std::array<Tensor, 2> batch_of(int64_t number) {
  const Tensor rows =
      randint(0, 131, {4, 7}, kI64, RandomStream{12, static_cast<uint64_t>(number)});
  return {raw::narrow(rows, 1, 0, 6), raw::narrow(rows, 1, 1, 6)};
}

struct Training {
  explicit Training(Sharding sharding, int64_t accumulation = 1)
      : accelerator({.gradient_accumulation_steps = accumulation,
                     .seed = 5,
                     .sharding = sharding,
                     .config_file = ""}),
        optimizer(model.named_parameters(), {.lr = 0.05}) {}
  void prepare() { accelerator.prepare(model, optimizer); }
  void backward(int64_t number) {
    const auto micro = accelerator.accumulate(model);
    accelerator.backward(loss_of(model, batch_of(number)));
  }
  void step() { optimizer.step(), optimizer.zero_grad(); }
  Accelerator accelerator;
  Words model;
  optim::SGD optimizer;
};

void in_all_ways(const std::function<void(Sharding, int rank)>& body) {
  for (const int ranks : {2, 3}) {
    for (const Sharding sharding : kShardedWays) {
      on_ranks(ranks, [&](int rank) {
        SCOPED_TRACE(testing::Message() << static_cast<int>(sharding) << " on " << ranks);
        manual_seed(5);
        body(sharding, rank);
      });
    }
  }
}

// ---- Hooks -------------------------------------------------------------------------------------

// Before prepare() or after it, once for a step, with what `.grad` is then.
TEST(HooksOfParts, RunWhenTheGradientIsReduced) {
  for (const bool before : {false, true}) {
    in_all_ways([&](Sharding sharding, int) {
      Training run(sharding, 2);
      size_t gradients = 0, after = 0;
      std::vector<HookHandle> handles;  // a hook that holds its parameter is removed
      const auto hang = [&] {
        for (const auto& [name, parameter] : run.model.named_parameters()) {
          handles.push_back(
              register_hook(parameter, [&gradients, parameter = parameter](const Tensor& gradient) {
                EXPECT_EQ(gradient.shape(), parameter.grad().shape());
                gradients += 1;
                return Tensor();
              }));
          register_post_accumulate_hook(parameter, [&](const Tensor& leaf) {
            EXPECT_TRUE(is_dtensor(leaf) && leaf.grad().defined());
            after += 1;
          });
        }
      };
      if (before) hang();
      run.prepare();
      if (!before) hang();
      const size_t count = run.model.named_parameters().size();
      for (size_t step = 1; step <= 2; ++step) {
        run.backward(0), run.backward(1);
        EXPECT_EQ(gradients, step * count);
        EXPECT_EQ(after, step * count);
        run.step();
      }
      for (HookHandle& handle : handles) handle.remove();
    });
  }
}

TEST(HooksOfParts, GiveTheGradientThatTheStepTakesAndGoWithTheirHandle) {
  in_all_ways([](Sharding sharding, int) {
    const auto outcome = [&](bool hooks) {
      manual_seed(5);
      Training run(sharding);
      run.prepare();
      std::vector<HookHandle> handles;
      for (const auto& [name, parameter] : run.model.named_parameters()) {
        if (!hooks) break;
        handles.push_back(register_hook(parameter, [](const Tensor& g) { return g * 2; }));
        handles.push_back(register_post_accumulate_hook(parameter, [](const Tensor& leaf) {
          const NoGradGuard no_grad;
          mul_(raw::alias(leaf.grad()), Scalar(0.25));
        }));
      }
      run.backward(0);
      run.optimizer.set_lr(hooks ? 0.1 : 0.05);  // of half the gradient
      run.step();
      for (HookHandle& handle : handles) handle.remove();
      run.optimizer.set_lr(0.05);
      run.backward(1);
      run.step();
      return whole_values(run.model);
    };
    EXPECT_TRUE(outcome(true) == outcome(false));
  });
}

// PyTorch's optimizer in backward: no gradient stays.
TEST(HooksOfParts, MayStepAndClear) {
  in_all_ways([](Sharding sharding, int) {
    Training run(sharding);
    run.prepare();
    for (const auto& [name, parameter] : run.model.named_parameters()) {
      register_post_accumulate_hook(parameter, [](const Tensor& leaf) {
        const NoGradGuard no_grad;
        add_(raw::alias(leaf), raw::alias(leaf.grad()), -0.05);
        leaf.zero_grad();
      });
    }
    for (int64_t step = 0; step < 3; ++step) run.backward(step);
    const auto values = whole_values(run.model);
    manual_seed(5);
    Training plain(sharding);
    plain.prepare();
    for (int64_t step = 0; step < 3; ++step) plain.backward(step), plain.step();
    expect_near(values, whole_values(plain.model), 1e-5);
  });
}

TEST(HooksOfParts, ThatThrowOnOneRankHoldNoOther) {
  in_all_ways([](Sharding sharding, int rank) {
    Training run(sharding);
    run.prepare();
    const Tensor parameter = run.model.norm.weight;
    bool throws = rank == 1;
    register_post_accumulate_hook(parameter, [&](const Tensor&) {
      if (throws) TS_THROW(ValueError, "hook", "said no");
    });
    if (throws) {
      EXPECT_THROW(run.backward(0), ValueError);
    } else {
      run.backward(0);
    }
    throws = false;
    run.step();
    run.backward(1);
    run.step();
  });
}

// ---- Averages ----------------------------------------------------------------------------------

TEST(AveragesOfParts, MayBeMadeBeforePrepare) {
  for (const bool updated : {false, true}) {
    in_all_ways([&](Sharding sharding, int) {
      const auto outcome = [&](Sharding way, bool before) {
        manual_seed(5);
        Training run(way);
        std::optional<optim::EMA> average;
        const auto make = [&] {
          average.emplace(run.model.named_parameters(), optim::EMAOptions{.decay = 0.5});
          if (updated) average->update();
        };
        if (before) make();
        run.prepare();
        if (!before) make();
        for (int64_t step = 0; step < 2; ++step) {
          run.backward(step), run.step();
          average->update();
        }
        const optim::EMA::Scope scope(*average);
        return whole_values(run.model);
      };
      EXPECT_TRUE(outcome(sharding, true) == outcome(sharding, false));
    });
  }
}

TEST(AveragesOfParts, OfBeforePrepareAreSavedAndLoadedAsParts) {
  in_all_ways([](Sharding sharding, int) {
    Training run(sharding);
    optim::EMA average(run.model.named_parameters());
    run.prepare();
    const StateDict state = average.state_dict();
    for (const auto& [name, parameter] : run.model.named_parameters()) {
      EXPECT_TRUE(same_placement(state.at("average." + name), parameter)) << name;
    }
    average.load_state_dict(state);
  });
}

// ---- grad() ------------------------------------------------------------------------------------

TEST(GradOfParts, IsRefusedWithTheRemedy) {
  in_all_ways([](Sharding sharding, int) {
    Training run(sharding);
    run.prepare();
    const Tensor loss = loss_of(run.model, batch_of(0));
    const TensorList parameters = run.model.parameters();
    for (const bool allow_unused : {false, true}) {
      const std::string message = message_of<UnsupportedError>(
          [&] { grad(loss, parameters, {}, {.allow_unused = allow_unused}); });
      EXPECT_TRUE(mentions(message, "this rank's part of a parameter") &&
                  mentions(message, "call backward()"))
          << message;
    }
    run.accelerator.backward(loss);
  });
}

}  // namespace
}  // namespace tessera::test_accelerator_sharding_hooks
