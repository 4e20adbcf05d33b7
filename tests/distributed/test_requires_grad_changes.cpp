// Parameters that begin or end to require grad after their ranks have agreed on what they train:
// one process's values, or an error on every rank that names the parameter.
// ctest labels: threads
#include <atomic>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <tessera/accelerate/accelerator.h>
#include <tessera/core/error.h>
#include <tessera/distributed/backward/requires_grad_changes.h>
#include <tessera/nn/lora/lora.h>
#include <tessera/nn/norm.h>

#include "distributed/sharded_fixture.h"
#include "message_of.h"

namespace tessera::test_requires_grad_changes {
namespace {

using accelerate::Sharding;
using distributed::compared_ranks;
using distributed::failing_ranks;
using distributed::whole_values;

constexpr Sharding kModes[] = {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2, Sharding::kZero3,
                               Sharding::kFsdp};
const char* name_of(Sharding sharding) {
  static const char* const names[] = {"ddp", "zero1", "zero2", "zero3", "fsdp"};
  return names[static_cast<int>(sharding)];
}
bool keeps_frozen_whole(Sharding sharding) {
  return sharding == Sharding::kZero1 || sharding == Sharding::kZero2;
}

struct Layer : nn::Module<Layer> {
  explicit Layer(int64_t width) : linear(add<nn::Linear>("linear", width, width)) {}
  Tensor forward(const Tensor& x) { return tanh(linear(x)); }
  nn::Linear& linear;
};

// Layers that are units where parameters are cut, and a head that belongs to the root.
struct Tower : nn::Module<Tower> {
  Tower()
      : first(add<Layer>("first", 6)),
        second(add<Layer>("second", 6)),
        head(add<nn::Linear>("head", 6, 3)) {}
  Tensor forward(const Tensor& x) { return head(second(first(x))); }
  Layer& first;
  Layer& second;
  nn::Linear& head;
};

AcceleratorOptions in_mode(Sharding sharding, int64_t accumulation = 1) {
  AcceleratorOptions options{.gradient_accumulation_steps = accumulation,
                             .seed = 5,
                             .sharding = sharding,
                             .config_file = ""};
  if (sharding == Sharding::kFsdp || sharding == Sharding::kZero3) {
    options.fsdp.wrap_modules = {{"Layer"}};
  }
  return options;
}

Tensor loss_of(Tower& model, int64_t batch) {
  const Tensor x = randn({4, 6}, {}, RandomStream{7, static_cast<uint64_t>(batch)});
  const Tensor y = model(x);
  return (y * y).mean();
}

using Numbers = std::map<std::string, std::vector<float>>;
void expect_near(const Numbers& got, const Numbers& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [name, values] : expected) {
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_NEAR(got.at(name)[i], values[i], 1e-6) << name << " element " << i;
    }
  }
}

// What happens to the model before step number `step`, the same on all ranks unless it asks.
using Change = std::function<void(Tower& model, int step)>;

// Four steps with SGD, one window each, of ranks * accumulation batches.
template <class Model = Tower>
Numbers train(Accelerator& accelerator, Model& model, optim::Optimizer& optimizer,
              const std::function<void(Model&, int)>& change, int64_t accumulation = 1) {
  const int64_t ranks = accelerator.num_processes();
  for (int step = 0; step < 4; ++step) {
    if (change) change(model, step);
    for (int64_t micro = 0; micro < accumulation; ++micro) {
      const auto scope = accelerator.accumulate(model);
      const int64_t batch = (step * accumulation + micro) * ranks + accelerator.process_index();
      accelerator.backward(loss_of(model, batch));
      optimizer.step(), optimizer.zero_grad();
    }
  }
  return whole_values(model);
}

template <class Model = Tower>
Numbers trained_in(Sharding sharding, const std::function<void(Model&, int)>& change,
                   int64_t accumulation = 1) {
  manual_seed(5);
  Accelerator accelerator(in_mode(sharding, accumulation));
  Model model;
  optim::SGD optimizer(model.named_parameters(), {.lr = 0.5});
  change(model, -1);
  accelerator.prepare(model, optimizer);
  return train<Model>(accelerator, model, optimizer, change, accumulation);
}

// One process, of the ranks' batches.
template <class Model = Tower>
Numbers expected_of(int ranks, const std::function<void(Model&, int)>& change,
                    int64_t accumulation = 1) {
  Numbers values;
  distributed::in_one_process(
      [&] { values = trained_in<Model>(Sharding::kDdp, change, ranks * accumulation); });
  return values;
}

void unfreeze_backbone(Tower& model, int step) {
  if (step != -1 && step != 2) return;
  model.first.requires_grad_(step == 2);
  model.second.requires_grad_(step == 2);
}

TEST(RequiresGradChanges, AnUnfrozenPartTrainsAsInOneProcessOrIsAnErrorThatNamesIt) {
  for (const int64_t accumulation : {1, 2}) {
    const Numbers expected = expected_of<Tower>(2, unfreeze_backbone, accumulation);
    for (const Sharding sharding : kModes) {
      SCOPED_TRACE(testing::Message() << name_of(sharding) << ", " << accumulation);
      compared_ranks(2, [&](int) {
        if (!keeps_frozen_whole(sharding)) {
          return expect_near(trained_in<Tower>(sharding, unfreeze_backbone, accumulation),
                             expected);
        }
        const std::string message = message_of<ConfigError>(
            [&] { trained_in<Tower>(sharding, unfreeze_backbone, accumulation); });
        EXPECT_TRUE(mentions(message, "'first.linear.weight' was frozen")) << message;
      });
    }
  }
}

// One layer after the other, from the head down, and away again; so do the two sides of a GAN.
TEST(RequiresGradChanges, PartsThatTrainInTurnHaveTheValuesOfOneProcess) {
  const Change change = [](Tower& model, int step) {
    if (step < 0) return;
    model.first.requires_grad_(step % 2 == 1);
    model.head.requires_grad_(step % 2 == 0);
    model.second.linear.bias.set_requires_grad(step != 2);
  };
  const Numbers expected = expected_of<Tower>(2, change);
  for (const Sharding sharding : kModes) {
    SCOPED_TRACE(name_of(sharding));
    compared_ranks(2, [&](int) { expect_near(trained_in<Tower>(sharding, change), expected); });
  }
}

TEST(RequiresGradChanges, WithinAWindowTheyHaveTheValuesOfOneProcess) {
  const auto in_window = [](Accelerator& accelerator, int64_t batches) {
    Tower model;
    model.first.requires_grad_(false);
    optim::SGD optimizer(model.named_parameters(), {.lr = 0.5});
    accelerator.prepare(model, optimizer);
    const int64_t ranks = accelerator.num_processes();
    for (int64_t micro = 0; micro < batches; ++micro) {
      // As many of all ranks' batches in each half.
      if (micro == batches / 2) model.first.requires_grad_(true);
      const auto scope = accelerator.accumulate(model);
      accelerator.backward(loss_of(model, micro * ranks + accelerator.process_index()));
      optimizer.step(), optimizer.zero_grad();
    }
    return whole_values(model);
  };
  Numbers expected;
  distributed::in_one_process([&] {
    manual_seed(5);
    Accelerator accelerator(in_mode(Sharding::kDdp, 4));
    expected = in_window(accelerator, 4);
  });
  for (const Sharding sharding : {Sharding::kDdp, Sharding::kZero3, Sharding::kFsdp}) {
    SCOPED_TRACE(name_of(sharding));
    compared_ranks(2, [&](int) {
      manual_seed(5);
      Accelerator accelerator(in_mode(sharding, 2));
      expect_near(in_window(accelerator, 2), expected);
    });
  }
}

// Nobody has agreed on anything: the error says what to do, and that helps.
TEST(RequiresGradChanges, AModelThatWasFrozenAsAWholeIsPreparedAnewOrRefused) {
  const Change from_here = [](Tower& model, int step) {
    if (step < 1) model.requires_grad_(step == 0);
  };
  const Change never = [](Tower&, int) {};
  const Numbers expected = expected_of<Tower>(2, never);
  for (const Sharding sharding : kModes) {
    SCOPED_TRACE(name_of(sharding));
    compared_ranks(2, [&](int) {
      const std::string message =
          message_of<ConfigError>([&] { trained_in<Tower>(sharding, from_here); });
      EXPECT_TRUE(mentions(message, "'first.linear.weight'")) << message;
      EXPECT_TRUE(mentions(message, "prepare()")) << message;
      manual_seed(5);
      Accelerator accelerator(in_mode(sharding));
      Tower model;
      model.requires_grad_(false);
      optim::SGD optimizer(model.named_parameters(), {.lr = 0.5});
      accelerator.prepare(model, optimizer);
      {
        const NoGradGuard no_grad;
        loss_of(model, 0);  // a teacher
      }
      loss_of(model, 0);
      model.requires_grad_(true);
      accelerator.prepare(model, optimizer);
      expect_near(train<Tower>(accelerator, model, optimizer, never), expected);
    });
  }
}

// On one rank alone, before step 1: all are told at once, by name, and not when the time is over.
void expect_named_on_every_rank(const std::string& name, const std::function<void(int)>& body) {
  std::atomic<int> told{0};
  EXPECT_THROW(failing_ranks("one of them trains something else", 2,
                             [&](int rank) {
                               try {
                                 body(rank);
                               } catch (const DistributedError& error) {
                                 const std::string message = error.what();
                                 EXPECT_TRUE(mentions(message, name)) << message;
                                 EXPECT_TRUE(mentions(message, "on all ranks")) << message;
                                 EXPECT_FALSE(mentions(message, "waited")) << message;
                                 ++told;
                                 throw;
                               }
                             },
                             {.timeout_seconds = 20}),
               DistributedError);
  EXPECT_EQ(told, 2);
}

struct OneSided {
  const char* what;
  std::function<void(Tower& model, bool late)> change;  // before prepare(), and on one rank later
  const char* name;  // or what several have alike, one of which is named
};
const OneSided kOneSided[] = {
    {"freezes a layer",
     [](Tower& model, bool late) {
       if (late) model.second.requires_grad_(false);
     },
     "'second.linear."},
    {"freezes the last of the root",
     [](Tower& model, bool late) { model.head.requires_grad_(!late); }, "'head."},
    {"freezes the layers",
     [](Tower& model, bool late) {
       model.first.requires_grad_(!late);
       model.second.requires_grad_(!late);
     },
     ".linear."},
    {"trains again",
     [](Tower& model, bool late) { model.second.linear.bias.set_requires_grad(late); },
     "'second.linear.bias'"},
};

TEST(RequiresGradChanges, OfOneRankAloneAreAnErrorOnEveryRankThatNamesTheParameter) {
  for (const Sharding sharding : kModes) {
    for (const OneSided& one : kOneSided) {
      if (keeps_frozen_whole(sharding) && one.what == std::string("trains again")) continue;
      for (const int64_t accumulation : {1, 2}) {
        SCOPED_TRACE(testing::Message()
                     << name_of(sharding) << " " << one.what << " " << accumulation);
        expect_named_on_every_rank(one.name, [&](int rank) {
          trained_in<Tower>(
              sharding,
              [&](Tower& model, int step) {
                if (step == -1) one.change(model, false);
                if (step == 1 && rank == 1) one.change(model, true);
              },
              accumulation);
        });
      }
    }
  }
}

TEST(RequiresGradChanges, OfOneRankAmongReplicasOfShardsAreAnErrorOnEveryRank) {
  for (const Sharding sharding : {Sharding::kZero3, Sharding::kFsdp}) {
    SCOPED_TRACE(name_of(sharding));
    std::atomic<int> told{0};
    EXPECT_THROW(failing_ranks("one of them trains something else", 4,
                               [&](int rank) {
                                 manual_seed(5);
                                 AcceleratorOptions options = in_mode(sharding);
                                 options.dp_replicate_size = 2;
                                 Accelerator accelerator(options);
                                 Tower model;
                                 optim::SGD optimizer(model.named_parameters(), {.lr = 0.5});
                                 accelerator.prepare(model, optimizer);
                                 try {
                                   train<Tower>(accelerator, model, optimizer,
                                                [&](Tower& own, int step) {
                                                  if (step == 1 && rank == 3)
                                                    own.second.requires_grad_(false);
                                                });
                                 } catch (const DistributedError& error) {
                                   const std::string message = error.what();
                                   EXPECT_TRUE(mentions(message, "'second.linear.")) << message;
                                   EXPECT_FALSE(mentions(message, "waited")) << message;
                                   ++told;
                                   throw;
                                 }
                               },
                               {.timeout_seconds = 20}),
                 DistributedError);
    EXPECT_EQ(told, 4);
  }
}

TEST(RequiresGradChanges, OfIgnoredModulesAreAnErrorThatNamesTheParameter) {
  for (const Sharding sharding : {Sharding::kZero3, Sharding::kFsdp}) {
    SCOPED_TRACE(name_of(sharding));
    compared_ranks(2, [&](int) {
      AcceleratorOptions options = in_mode(sharding);
      options.fsdp.ignored_modules = "first";
      Accelerator accelerator(options);
      Tower model;
      model.first.requires_grad_(false);
      accelerator.prepare(model);
      accelerator.backward(loss_of(model, 0));
      model.first.requires_grad_(true);
      const std::string message = message_of<ConfigError>([&] { loss_of(model, 0); });
      EXPECT_TRUE(mentions(message, "'first.linear.weight'")) << message;
      EXPECT_TRUE(mentions(message, "fsdp_ignored_modules")) << message;
    });
  }
}

// What one rank alone refuses by itself ends the others, too.
TEST(RequiresGradChanges, OfOneRankThatItRefusesAreToldToTheOthers) {
  for (const Sharding sharding : {Sharding::kZero1, Sharding::kZero2}) {
    SCOPED_TRACE(name_of(sharding));
    std::atomic<int> told{0};
    EXPECT_THROW(failing_ranks("one trains what nobody reduces", 2,
                               [&](int rank) {
                                 try {
                                   trained_in<Tower>(sharding, [&](Tower& model, int step) {
                                     if (step == -1 || rank == 1) unfreeze_backbone(model, step);
                                   });
                                 } catch (const Error& error) {
                                   const std::string message = error.what();
                                   EXPECT_TRUE(mentions(message, "'first.linear.weight'"))
                                       << message;
                                   EXPECT_FALSE(mentions(message, "waited")) << message;
                                   ++told;
                                   throw;
                                 }
                               },
                               {.timeout_seconds = 20}),
                 Error);
    EXPECT_EQ(told, 2);
  }
}

// ---- By hand -----------------------------------------------------------------------------------

// Three steps; `forward` makes the prediction.
Numbers by_hand(int ranks, int rank, bool replicated,
                const std::function<void(Tower&, int)>& change,
                const std::function<Tensor(Tower&, const Tensor&)>& forward) {
  using namespace distributed;
  manual_seed(5);
  Tower model;
  change(model, -1);
  std::optional<Mesh> mesh;
  std::optional<Replica> replica;
  if (replicated) replica.emplace(replicate(model, mesh.emplace(world()), small_buckets()));
  optim::SGD optimizer(model.named_parameters(), {.lr = 0.5});
  for (int step = 0; step < 3; ++step) {
    change(model, step);
    const int own = replicated ? 1 : ranks;  // batches of this process
    for (int i = 0; i < own; ++i) {
      const int64_t batch = step * ranks + (replicated ? rank : i);
      const Tensor y =
          forward(model, randn({4, 6}, {}, RandomStream{7, static_cast<uint64_t>(batch)}));
      ((y * y).mean() * (1.0 / own)).backward();
    }
    optimizer.step(), optimizer.zero_grad();
  }
  return whole_values(model);
}

TEST(RequiresGradChanges, OfAReplicaMadeByHandHaveTheValuesOfOneProcess) {
  const auto call = [](Tower& model, const Tensor& x) { return model(x); };
  // No hook of the whole model runs.
  const auto in_parts = [](Tower& model, const Tensor& x) {
    return model.head(model.second(model.first(x)));
  };
  const auto whole = [](Tower& model, int step) {
    if (step == -1 || step == 1) model.requires_grad_(step == 1);
    if (step == -1 || step == 0) model.head.requires_grad_(step == 0);
  };
  // What trained before ends, so that nothing known has a gradient.
  const auto other = [](Tower& model, int step) {
    if (step == -1) model.first.requires_grad_(false), model.second.requires_grad_(false);
    if (step == 1) model.head.requires_grad_(false), model.second.requires_grad_(true);
  };
  for (const auto& change :
       {std::function<void(Tower&, int)>(unfreeze_backbone),
        std::function<void(Tower&, int)>(whole), std::function<void(Tower&, int)>(other)}) {
    for (const auto& forward : {std::function<Tensor(Tower&, const Tensor&)>(call),
                                std::function<Tensor(Tower&, const Tensor&)>(in_parts)}) {
      Numbers expected;
      distributed::in_one_process([&] { expected = by_hand(2, 0, false, change, forward); });
      compared_ranks(
          2, [&](int rank) { expect_near(by_hand(2, rank, true, change, forward), expected); });
    }
  }
}

TEST(RequiresGradChanges, OfOneRanksReplicaAreAnErrorOnEveryRankThatNamesTheParameter) {
  for (const OneSided& one : kOneSided) {
    SCOPED_TRACE(one.what);
    expect_named_on_every_rank(one.name, [&](int rank) {
      by_hand(
          2, rank, true,
          [&](Tower& model, int step) {
            if (step == -1) one.change(model, false);
            if (step == 1 && rank == 1) one.change(model, true);
          },
          [](Tower& model, const Tensor& x) { return model(x); });
    });
  }
}

// ---- Adapters ----------------------------------------------------------------------------------

struct Adapted : Tower {
  Adapted() {
    nn::add_lora(*this, {.names = {"linear"}, .rank = 2, .alpha = 4});
    nn::add_lora(*this, {.adapter = "other", .names = {"linear"}, .rank = 2, .alpha = 4});
  }
};

TEST(RequiresGradChanges, AnotherAdapterTrainsAsInOneProcessOrIsAnErrorThatNamesIt) {
  const std::function<void(Adapted&, int)> change = [](Adapted& model, int step) {
    if (step == 2) nn::set_lora(model, "other");
  };
  const Numbers expected = expected_of<Adapted>(2, change);
  for (const Sharding sharding : kModes) {
    SCOPED_TRACE(name_of(sharding));
    compared_ranks(2, [&](int) {
      if (!keeps_frozen_whole(sharding)) {
        return expect_near(trained_in<Adapted>(sharding, change), expected);
      }
      const std::string message =
          message_of<ConfigError>([&] { trained_in<Adapted>(sharding, change); });
      EXPECT_TRUE(mentions(message, "other") && mentions(message, "was frozen")) << message;
    });
  }
}

// ---- What is said of them ----------------------------------------------------------------------

const std::string kRemedy = ": set requires_grad alike on all ranks";

NamedTensors four_parameters() {
  NamedTensors parameters;
  for (const char* name : {"a", "b", "c", "d"}) {
    parameters.push_back({name, zeros({1}).set_requires_grad()});
  }
  return parameters;
}

TEST(ChangedFlags, AreSaidByTheFirstNameUntilTheyAreAgreedOn) {
  const NamedTensors parameters = four_parameters();
  distributed::RequiresGradChanges changes(parameters);
  EXPECT_FALSE(changes.look());
  EXPECT_EQ(changes.text(), "");
  parameters[1].tensor.set_requires_grad(false);
  EXPECT_TRUE(changes.look());
  EXPECT_EQ(changes.text(), "; 'b' is frozen here" + kRemedy);
  EXPECT_FALSE(changes.look());  // nothing since
  EXPECT_EQ(changes.text(), "; 'b' is frozen here" + kRemedy);
  parameters[1].tensor.set_requires_grad();
  EXPECT_TRUE(changes.look());
  EXPECT_EQ(changes.text(), "");
  parameters[1].tensor.set_requires_grad(false);
  EXPECT_TRUE(changes.look());
  changes.agree();
  EXPECT_EQ(changes.text(), "");
  EXPECT_FALSE(changes.look());
  parameters[1].tensor.set_requires_grad();
  EXPECT_TRUE(changes.look());
  EXPECT_EQ(changes.text(), "; 'b' requires grad here" + kRemedy);
}

// Ranks with other changes have other texts, whatever they begin with.
TEST(ChangedFlags, OfSeveralAreCountedAndToldApart) {
  std::set<std::string> texts;
  const std::vector<std::vector<size_t>> frozen = {{0, 1}, {0, 2}, {0, 3}, {0, 1, 2}, {0, 1, 3}};
  for (const std::vector<size_t>& places : frozen) {
    const NamedTensors parameters = four_parameters();
    distributed::RequiresGradChanges changes(parameters);
    for (const size_t place : places) parameters[place].tensor.set_requires_grad(false);
    EXPECT_TRUE(changes.look());
    const std::string begin =
        "; 'a' is frozen here and " + std::to_string(places.size() - 1) + " more changed (";
    EXPECT_TRUE(changes.text().starts_with(begin) && changes.text().ends_with(")" + kRemedy))
        << changes.text();
    texts.insert(changes.text());
  }
  // The second one begins to require grad here.
  const NamedTensors parameters = four_parameters();
  parameters[1].tensor.set_requires_grad(false);
  distributed::RequiresGradChanges changes(parameters);
  parameters[0].tensor.set_requires_grad(false);
  parameters[1].tensor.set_requires_grad();
  EXPECT_TRUE(changes.look());
  texts.insert(changes.text());
  EXPECT_EQ(texts.size(), frozen.size() + 1);
}

TEST(ChangedFlags, OfLongNamesSayTheEnd) {
  for (const size_t length : {90, 91, 200}) {
    const std::string name = std::string(length - 3, 'x') + "end";
    const NamedTensors parameters = {{name, zeros({1})}};
    distributed::RequiresGradChanges changes(parameters);
    parameters[0].tensor.set_requires_grad();
    EXPECT_TRUE(changes.look());
    const std::string said = length == 90 ? name : "..." + name.substr(length - 90);
    EXPECT_EQ(changes.text(), "; '" + said + "' requires grad here" + kRemedy);
  }
}

}  // namespace
}  // namespace tessera::test_requires_grad_changes
