// The f32 masters of 16-bit parameters follow whoever writes the parameters, as an f32 parameter
// would that is written alike; and what they know beyond 16 bits stays where nobody wrote.
// ctest labels: threads
#include <gtest/gtest.h>

#include <vector>

#include <tessera/accelerate/full_values.h>
#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/weight_cache.h>
#include <tessera/core/profile/profiler.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/fully_shard/fully_shard.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/optim/ema.h>

#include "accelerate/accelerator_fixture.h"
#include "optim/master_writes.h"
#include "optim/optimizer_kinds.h"

namespace tessera::optim::test_master_writes {
namespace {

template <class T>
class EveryOptimizersMasters : public testing::Test {};
TYPED_TEST_SUITE(EveryOptimizersMasters, OptimizerKinds);

TYPED_TEST(EveryOptimizersMasters, GoesOnFromWhatWasWrittenAsWithAnF32Parameter) {
  for (const Write& write : writes()) expect_to_follow<TypeParam>(write, kCpu);
}

TEST(MasterWrites, TheNextStepGoesOnFromThem) {
  const Tensor p = raw::full({1}, 1, kBF16).set_requires_grad();
  SGD optimizer({{"p", p}}, {.lr = 0.1});
  const auto step = [&] {
    p.set_grad(raw::full({1}, 1, kBF16));
    optimizer.step();
  };
  step();
  {
    const NoGradGuard no_grad;
    p.fill_(9);
  }
  step();
  EXPECT_EQ(p.item(), raw::full({1}, 9 - 0.1, kF32).to(kBF16).item());
}

// Averages that are copied into the parameters stay there.
TEST(MasterWrites, AveragesThatBecomeTheParametersStay) {
  const Tensor p = raw::full({3}, 1, kBF16).set_requires_grad();
  SGD optimizer({{"p", p}}, {.lr = 0.25});
  EMA average({{"p", p}}, {.decay = 0.5});
  for (int i = 0; i < 3; ++i) {
    p.set_grad(raw::full({3}, 1, kBF16));
    optimizer.step();
    average.update();
  }
  average.copy_to_parameters();
  const std::vector<double> averages = p.to_vector();
  EXPECT_GT(averages[0], 0.25);
  p.set_grad(raw::full({3}, 0, kBF16));
  optimizer.step();
  EXPECT_EQ(p.to_vector(), averages);
}

// Steps without a write read no parameter; nor do parameters that are parts of one tensor, whose
// version they share, lose what their masters know.
TEST(MasterWrites, StepsWithoutThemReadNoParameter) {
  const Tensor flat = raw::full({8}, 1, kBF16);
  const Tensor a = raw::narrow(flat, 0, 0, 4).set_requires_grad();
  const Tensor b = raw::narrow(flat, 0, 4, 4).set_requires_grad();
  AdamW optimizer({{"a", a}, {"b", b}}, {.lr = 1e-4, .weight_decay = 0});
  const auto step = [&] {
    for (const Tensor& p : {a, b}) p.set_grad(raw::full({4}, 1, kBF16));
    optimizer.step();
  };
  step();
  const Tensor master = optimizer.state_dict().at("state.a.master");
  const uint32_t before = master.version();
  Profiler profiler;
  {
    const ProfilerScope scope(profiler);
    for (int i = 0; i < 3; ++i) step();
  }
  EXPECT_EQ(profiler.entries().count("to"), 0U);
  EXPECT_EQ(master.version() - before, 3U);
  EXPECT_EQ(a.to_vector(), std::vector<double>(4, 1));
  EXPECT_LT(master.to_vector()[0], 1);
}

// The master of a state that is loaded says more than a parameter that was not written since.
TEST(MasterWrites, AStateThatIsLoadedBringsItsMasters) {
  const Tensor p = raw::full({1}, 1, kBF16).set_requires_grad();
  AdamW optimizer({{"p", p}}, {.lr = 1e-4, .weight_decay = 0});
  for (int i = 0; i < 3; ++i) {
    p.set_grad(raw::full({1}, 1, kBF16));
    optimizer.step();
  }
  const StateDict saved = optimizer.state_dict().clone();
  const double master = saved.at("state.p.master").item();
  ASSERT_NE(master, p.item());
  for (const bool model_first : {true, false}) {
    const Tensor q = raw::full({1}, 3, kBF16).set_requires_grad();
    AdamW other({{"p", q}}, {.lr = 1e-4});
    const auto load_model = [&] {
      const NoGradGuard no_grad;
      q.copy_(p);
    };
    if (model_first) load_model();
    other.load_state_dict(saved);
    if (!model_first) load_model();
    EXPECT_EQ(other.state_dict().at("state.p.master").item(), master) << model_first;
  }
}

// ---- Raw memory ---------------------------------------------------------------------------------

// Whoever writes through data_as() says so, and autocast's copies follow.
TEST(RawWrites, AreSeenByCopiesOnceTheVersionSaysSo) {
  const Tensor weight = raw::full({2, 2}, 1, kF32).set_requires_grad();
  const Tensor x = raw::full({1, 2}, 1, kF32);
  const auto forward = [&] {
    const AutocastGuard autocast(kBF16);
    return linear(x, weight).to(kF32).to_vector();
  };
  const WeightKey in_fp8{.dtype = kF8E4M3, .layout = WeightLayout::kTransposed};
  EXPECT_EQ(forward(), (std::vector<double>{2, 2}));
  EXPECT_EQ(weight_cache::get(weight, in_fp8).to(kF32).to_vector()[0], 1);
  weight.data_as<float>()[0] = 4;
  weight.bump_version();
  EXPECT_EQ(forward(), (std::vector<double>{5, 2}));
  EXPECT_EQ(weight_cache::get(weight, in_fp8).to(kF32).to_vector()[0], 4);
}

// ---- The Accelerator ----------------------------------------------------------------------------

using accelerate::Sharding;
constexpr Sharding kWays[] = {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2, Sharding::kZero3,
                              Sharding::kFsdp};

struct Layers : nn::Module<Layers> {
  Layers() : first(add<nn::Linear>("first", 3, 5)), second(add<nn::Linear>("second", 5, 1)) {}
  Tensor forward(const Tensor& x) { return second(tanh(first(x))); }
  nn::Linear& first;
  nn::Linear& second;
};

// What ways of writing a sharded model there are.
enum class Through { kWholes, kParts, kStateDict };

void write(Layers& model, Through through, double value) {
  const NoGradGuard no_grad;
  switch (through) {
    case Through::kWholes: {
      const auto scope = distributed::full_parameters(model, {.writes = true});
      for (const Tensor& p : model.parameters()) p.fill_(value);
      return;
    }
    case Through::kParts:
      for (const Tensor& p : model.parameters()) {
        (distributed::is_dtensor(p) ? distributed::to_local(p) : p).fill_(value);
      }
      return;
    case Through::kStateDict: {
      Layers other;
      for (const Tensor& p : other.parameters()) p.fill_(value);
      model.load_state_dict(other.state_dict());
    }
  }
}

void expect_writes_to_stay(Sharding sharding, Precision precision, Through through) {
  Accelerator accelerator({.mixed_precision = precision,
                           .precision_policy = PrecisionPolicy::kPure,
                           .sharding = sharding,
                           .loss_scale = {.init_scale = 1},
                           .config_file = ""});
  manual_seed(3);
  Layers model;
  SGD optimizer(model.named_parameters(), {.lr = 0.5, .momentum = 0.5});
  accelerator.prepare(model, optimizer);
  const auto step = [&] {
    const auto scope = accelerator.accumulate(model);
    accelerator.backward(model(ones({4, 3})).mean());
    EXPECT_TRUE(optimizer.step());
    optimizer.zero_grad();
  };
  step();
  step();
  write(model, through, 9);
  optimizer.set_lr(0);
  step();
  const accelerate::FullValues values = accelerator.full_values(model);
  for (const auto& [name, parameter] : model.named_parameters()) {
    const Tensor whole = values.parameter(name);  // the master
    EXPECT_EQ(whole.to_vector(), std::vector<double>(static_cast<size_t>(whole.numel()), 9))
        << name;
    const Tensor own = distributed::is_dtensor(parameter)
                           ? distributed::full_tensor(parameter.detach())
                           : parameter.detach();
    EXPECT_NE(own.dtype(), kF32);
    EXPECT_EQ(own.to_vector(), whole.to_vector()) << name;
  }
}

TEST(MasterWrites, StayInEveryModeOfThePurePolicy) {
  for (const Sharding sharding : kWays) {
    for (const Through through : {Through::kWholes, Through::kParts, Through::kStateDict}) {
      if (sharding == Sharding::kDdp && through == Through::kWholes) continue;
      for (const Precision precision : {Precision::kBF16, Precision::kFP16}) {
        SCOPED_TRACE(testing::Message()
                     << static_cast<int>(sharding) << " " << static_cast<int>(through) << " "
                     << static_cast<int>(precision));
        on_ranks(2, [&](int) { expect_writes_to_stay(sharding, precision, through); });
      }
    }
  }
}

}  // namespace
}  // namespace tessera::optim::test_master_writes
