// The Accelerator: ranks change no bits of a training; what is prepared, and let go.
// ctest labels: threads
#include "accelerate/accelerator_fixture.h"

#include <cstddef>
#include <memory>
#include <new>
#include <optional>
#include <string>

#include <tessera/autograd/node.h>
#include <tessera/core/error.h>

namespace tessera::test_accelerator {
namespace {

// Trains over `samples` lines and returns the parameters.
std::vector<std::vector<float>> train(int64_t steps, int64_t samples, int epochs = 2) {
  manual_seed(11);
  const Line line(samples);
  Accelerator accelerator({.gradient_accumulation_steps = steps});
  Net net;
  optim::AdamW optimizer(net.named_parameters(), {.lr = 1e-2});
  data::DataLoader loader(line, {.batch_size = 4, .shuffle = true, .seed = 5});
  optim::CosineSchedule schedule(optimizer, {.warmup = 2, .total = 20});
  accelerator.prepare(schedule, loader, optimizer, net);
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (auto& [x, y] : loader) {
      auto micro = accelerator.accumulate(net);
      accelerator.backward(squared_error(net(x), y));
      accelerator.clip_grad_norm(net.parameters(), 0.5);
      optimizer.step(), schedule.step(), optimizer.zero_grad();
    }
  }
  return values_of(net);
}

// SCR-10 with bits instead of bounds, and dropout.
TEST(Accelerator, RanksWithOneMicroBatchHaveTheBitsOfOneProcessThatAccumulates) {
  for (const int ranks : {2, 4}) {
    const auto expected = train(ranks, 64);
    on_ranks(ranks, [&](int) { EXPECT_EQ(train(1, 64), expected) << ranks << " ranks"; });
  }
}

TEST(Accelerator, RanksThatAccumulateDifferFromOneProcessByTheRoundingOfTheirSums) {
  for (const int ranks : {2, 4}) {
    const auto expected = train(4 * ranks, 128);
    on_ranks(ranks, [&](int) { expect_near(train(4, 128), expected, 1e-5); });
  }
}

TEST(Accelerator, SavesAModelGivesItsStateAndComputesOutsideOfItInThePrecision) {
  const std::string folder = testing::TempDir() + "accelerator_save_model";
  on_ranks(2, [&](int) {
    Accelerator accelerator({.mixed_precision = Precision::kBF16, .collective_timeout = 77});
    EXPECT_EQ(distributed::rank_context().timeouts.collective, 77);
    Regression model, other;
    accelerator.prepare(model);
    {
      const NoGradGuard no_grad;
      model.a.fill_(2), model.b.fill_(3);
    }
    accelerator.save_model(model, folder);
    load_model(other, folder);
    EXPECT_EQ(values_of(other), values_of(model));
    EXPECT_EQ(accelerator.get_state_dict(model).at("a").item(), 2);
    const Tensor x = ones({2, 2});
    {
      const auto scope = accelerator.autocast();
      EXPECT_EQ(matmul(x, x).dtype(), kBF16);
      const auto off = accelerator.autocast(false);
      EXPECT_EQ(matmul(x, x).dtype(), kF32);
    }
    EXPECT_EQ(matmul(x, x).dtype(), kF32);
  });
}

// ---- Objects -----------------------------------------------------------------------------------

// ACC-1 and SCR-13 without globals: a second Accelerator with other settings is no error and
// changes nothing.
TEST(Accelerator, TwoSideBySideEachHaveTheBitsThatTheyHaveAlone) {
  struct Training {
    explicit Training(int64_t steps, Precision precision)
        : line(64),
          accelerator({.mixed_precision = precision, .gradient_accumulation_steps = steps}),
          optimizer(net.named_parameters(), {.lr = 1e-2}),
          loader(line, {.batch_size = 4, .shuffle = true, .seed = 5}) {
      accelerator.prepare(net, optimizer, loader);
    }
    void step() {
      auto batch = loader.next();
      if (!batch) return;
      const auto micro = accelerator.accumulate(net);
      accelerator.backward(squared_error(net((*batch)[0]), (*batch)[1]));
      optimizer.step(), optimizer.zero_grad();
    }
    Line line;
    Accelerator accelerator;
    Net net;
    optim::AdamW optimizer;
    data::DataLoader<std::array<Tensor, 2>> loader;
  };
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [](int) {
      const auto alone = [](int64_t steps, Precision precision) {
        manual_seed(9);
        Training training(steps, precision);
        for (int i = 0; i < 8; ++i) training.step();
        return values_of(training.net);
      };
      const auto first = alone(1, Precision::kNo), second = alone(3, Precision::kBF16);
      manual_seed(9);
      Training a(1, Precision::kNo), b(3, Precision::kBF16);
      for (int i = 0; i < 8; ++i) {
        a.step();
        b.step();
        EXPECT_TRUE(a.accelerator.sync_gradients());
      }
      EXPECT_EQ(values_of(a.net), first);
      EXPECT_EQ(values_of(b.net), second);
    });
  }
}

// ACC-4: nothing passes through, nothing is prepared twice, and objects keep their identity.
TEST(Accelerator, PreparesOnceInPlaceAndInAnyOrder) {
  on_ranks(2, [](int) {
    const Line line(32);
    Accelerator accelerator;
    auto model = std::make_unique<Regression>();
    Regression* nobody = nullptr;
    std::unique_ptr<Regression> empty;
    optim::SGD optimizer(model->named_parameters(), {.lr = 0.1});
    data::DataLoader loader(line, {.batch_size = 4});
    const TensorImpl* weight = model->a.impl();
    std::nullptr_t nothing = nullptr;
    accelerator.prepare(optimizer, nothing, nobody, empty, model, loader);
    accelerator.prepare(model, loader, optimizer);
    EXPECT_EQ(model->a.impl(), weight);
    EXPECT_EQ(accelerator.models().size(), 1u);
    EXPECT_EQ(accelerator.optimizers().size(), 1u);
    EXPECT_EQ(accelerator.loaders().size(), 1u);
    EXPECT_EQ(loader.size(), 4);  // half of 8 batches, not a quarter
    const auto [x, y] = line.rows(0, 4);
    const int64_t before =
        static_cast<int64_t>(distributed::rank_context().trace->records().size());
    accelerator.backward(squared_error((*model)(x), y));
    // A weight, a bucket, a used map, an order of buckets: reduced once.
    EXPECT_EQ(static_cast<int64_t>(distributed::rank_context().trace->records().size()) - before,
              4);
  });
}

// ACC-1: what was prepared is let go.
TEST(Accelerator, FreeMemoryLetsGoOfEverything) {
  on_ranks(2, [](int rank) {
    const Line line(32);
    Accelerator accelerator({.gradient_accumulation_steps = 2});
    data::DataLoader loader(line, {.batch_size = 4});
    {
      Regression model;
      optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
      accelerator.prepare(model, optimizer, loader);
      const Tensor held = model.a;
      const int32_t holders = held.use_count();
      { const auto micro = accelerator.accumulate(model); }
      accelerator.free_memory();
      EXPECT_LT(held.use_count(), holders);
      EXPECT_TRUE(accelerator.models().empty());
      EXPECT_TRUE(accelerator.loaders().empty());
      EXPECT_EQ(loader.size(), 8);
      EXPECT_TRUE(accelerator.sync_gradients());
      // It trains alone: gradients are this rank's.
      const auto [x, y] = line.rows(rank * 4, rank * 4 + 4);
      squared_error(model(x), y).backward();
      EXPECT_TRUE(optimizer.step());
      const Tensor all = accelerator.gather(model.a.detach());
      EXPECT_NE(all[0].item(), all[1].item());
    }
    Regression next;  // perhaps at the same address
    accelerator.prepare(next, loader);
    EXPECT_EQ(accelerator.models().size(), 1u);
  });
}

// Fine-tuning: what is frozen is nobody's, what trains is everybody's.
TEST(Accelerator, APartlyFrozenModelTrainsOnAllRanks) {
  on_ranks(2, [](int rank) {
    const Line line(32);
    Accelerator accelerator;
    Regression model;
    model.a.set_requires_grad(false);
    optim::SGD optimizer({{"b", model.b}}, {.lr = 0.5});
    accelerator.prepare(model, optimizer);
    const auto [x, y] = line.rows(16 * rank, 16 * rank + 16);
    accelerator.backward(squared_error(model(x), y));
    Regression whole;
    const auto [all_x, all_y] = line.rows(0, 32);
    squared_error(whole(all_x), all_y).backward();
    EXPECT_FALSE(model.a.grad().defined());
    EXPECT_NEAR(model.b.grad().item(), whole.b.grad().item(), 1e-5);
  });
}

// Else the noise of the first micro-batch would be that of what the program drew for itself.
TEST(Accelerator, ModelsDrawOtherNumbersThanTheProgramFromTheFirstMicroBatchOn) {
  struct Noise : nn::Module<Noise> {
    Tensor forward(const Tensor& x) { return x + rand({8}); }
  };
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [](int) {
      Accelerator accelerator({.seed = 7});
      const std::vector<double> own = rand({8}).to_vector();
      Noise model;
      accelerator.prepare(model);
      std::vector<std::vector<double>> drawn = {own};
      for (int i = 0; i < 2; ++i) {
        const auto micro = accelerator.accumulate(model);
        const Tensor all = accelerator.gather(model(zeros({8})).reshape({1, 8}));
        for (int64_t rank = 0; rank < all.size(0); ++rank) drawn.push_back(all[rank].to_vector());
      }
      for (size_t i = 0; i < drawn.size(); ++i) {
        for (size_t j = 0; j < i; ++j) EXPECT_NE(drawn[i], drawn[j]) << i << " and " << j;
      }
    });
  }
}

TEST(Accelerator, AsksOnlyOptimizersThatItPreparedWhetherTheySkipped) {
  Accelerator accelerator;
  Regression model;
  const optim::SGD optimizer(model.named_parameters(), {.lr = 1});
  EXPECT_THROW(accelerator.optimizer_step_was_skipped(optimizer), ValueError);
}

TEST(Accelerator, AModelAtTheAddressOfADeadOneIsAnother) {
  Accelerator accelerator({.gradient_accumulation_steps = 4});
  alignas(Regression) std::byte room[sizeof(Regression)];
  auto* model = new (room) Regression;
  accelerator.prepare(*model);
  { const auto micro = accelerator.accumulate(*model); }
  model->~Regression();
  model = new (room) Regression;
  accelerator.prepare(*model);
  EXPECT_EQ(accelerator.models().size(), 1u);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(accelerator.accumulate(*model).sync_gradients(), i == 3);
  model->~Regression();
}

struct Growing : nn::Module<Growing> {
  Growing() : first(add<nn::Linear>("first", 1, 4)), last(add<nn::Linear>("last", 4, 1)) {}
  void grow() { middle = &add<nn::Linear>("middle", 4, 4); }
  Tensor forward(const Tensor& x) {
    return last(middle == nullptr ? first(x) : (*middle)(first(x)));
  }
  nn::Linear& first;
  nn::Linear& last;
  nn::Linear* middle = nullptr;
};

// An optimizer that has stepped knows the model as it was.
TEST(Accelerator, AModelThatIsPreparedAgainWithMoreParametersIsReducedOnce) {
  on_ranks(2, [](int rank) {
    const Line line(16);
    Accelerator accelerator;
    Growing model;
    optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
    accelerator.prepare(model, optimizer);
    const auto reductions = [&] {
      const distributed::CommTrace::Scope scope(*distributed::rank_context().trace);
      const auto [x, y] = line.rows(rank * 8, rank * 8 + 8);
      accelerator.backward(squared_error(model(x), y));
      optimizer.step(), model.zero_grad();
      return distributed::count(scope.records(), distributed::Operation::kAllReduce,
                                distributed::Channel::kGradient);
    };
    EXPECT_EQ(reductions(), 1);
    model.grow();
    accelerator.prepare(model);
    EXPECT_EQ(reductions(), 1);
    for (const auto& [name, parameter] : model.named_parameters()) {
      EXPECT_TRUE(autograd_slot(parameter)->main_grad.defined()) << name << " has no bucket";
    }
    EXPECT_EQ(reductions(), 1);
  });
}

// Locals that die on out-of-memory, then free_memory() at the top of the next try.
TEST(Accelerator, ForgetsWhatDiedBeforeIt) {
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [](int) {
      const Line line(32);
      Accelerator accelerator({.gradient_accumulation_steps = 2});
      const auto attempt = [&](bool use) {
        Regression model;
        optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
        optim::StepSchedule schedule(optimizer, {.step_size = 1});
        optim::PlateauSchedule plateau(optimizer);
        data::DataLoader loader(line, {.batch_size = 4});
        accelerator.prepare(model, optimizer, loader, schedule, plateau);
        if (!use) return;
        const auto [x, y] = line.rows(0, 4);
        const auto micro = accelerator.accumulate(model);  // an open window
        accelerator.backward(squared_error(model(x), y));
        optimizer.step(), schedule.step(), optimizer.zero_grad();
      };
      for (const bool use : {false, true}) {
        attempt(use);
        EXPECT_TRUE(accelerator.models().empty());
        EXPECT_TRUE(accelerator.optimizers().empty());
        EXPECT_TRUE(accelerator.schedules().empty());
        EXPECT_TRUE(accelerator.plateau_schedules().empty());
        EXPECT_TRUE(accelerator.loaders().empty());
        EXPECT_EQ(accelerator.describe().find("model "), std::string::npos);
        EXPECT_FALSE(accelerator.optimizer_step_was_skipped());
        accelerator.free_memory();
      }
      // Others are prepared in the place of the dead, and train.
      attempt(false);
      Regression model;
      optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
      optim::StepSchedule schedule(optimizer, {.step_size = 1});
      accelerator.prepare(model, optimizer, schedule);
      accelerator.set_gradient_accumulation_steps(1);
      const auto [x, y] = line.rows(0, 4);
      accelerator.backward(squared_error(model(x), y));
      EXPECT_TRUE(optimizer.step());
      EXPECT_TRUE(schedule.step());
    });
  }
}

// A checkpoint without the model that was trained would be found out much later.
TEST(Accelerator, ACheckpointWithoutWhatDiedIsAnErrorThatNamesIt) {
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [](int) {
      const std::string folder = testing::TempDir() + "accelerator_gone";
      Accelerator accelerator;
      {
        Regression model;
        optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
        accelerator.prepare(model, optimizer);
      }
      Regression other;
      accelerator.prepare(other);
      for (const bool save : {true, false}) {
        try {
          save ? (void)accelerator.save_state(folder) : (void)accelerator.load_state(folder);
          ADD_FAILURE() << "nothing was thrown";
        } catch (const ValueError& error) {
          const std::string text = error.what();
          EXPECT_NE(text.find("Regression"), std::string::npos) << text;
          EXPECT_NE(text.find("an optimizer of 2 parameters"), std::string::npos) << text;
          EXPECT_NE(text.find("free_memory()"), std::string::npos) << text;
        }
      }
      accelerator.free_memory();
      accelerator.prepare(other);
      accelerator.save_state(folder);
      accelerator.load_state(folder);
    });
  }
}

TEST(Accelerator, AStateIsNeitherSavedNorLoadedWithinAWindow) {
  const std::string folder = testing::TempDir() + "accelerator_window";
  Accelerator accelerator({.gradient_accumulation_steps = 2});
  Regression model;
  accelerator.prepare(model);
  accelerator.save_state(folder);
  { const auto first = accelerator.accumulate(model); }
  EXPECT_THROW(accelerator.save_state(folder), ValueError);
  EXPECT_THROW(accelerator.load_state(folder), ValueError);
  { const auto last = accelerator.accumulate(model); }
  accelerator.save_state(folder);
  accelerator.load_state(folder);
}

TEST(Accelerator, FreeMemoryTakesTheObjectsThatAreToGo) {
  Accelerator accelerator;
  auto model = std::make_unique<Regression>();
  auto optimizer = std::make_shared<optim::SGD>(model->named_parameters(), optim::SGDOptions{});
  std::optional<optim::StepSchedule> schedule(std::in_place, *optimizer, optim::Step{1});
  Regression local;
  Regression* pointer = &local;
  accelerator.prepare(model, optimizer, *schedule, local);
  accelerator.free_memory(schedule, optimizer, model, pointer, local);
  EXPECT_EQ(model, nullptr);
  EXPECT_EQ(optimizer, nullptr);
  EXPECT_FALSE(schedule.has_value());
  EXPECT_EQ(pointer, nullptr);
  EXPECT_TRUE(accelerator.models().empty());
}

}  // namespace
}  // namespace tessera::test_accelerator
