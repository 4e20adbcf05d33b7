// Every mode beside replicas and one process, for optimizers, windows and precisions, of a model
// whose parameters are as uneven as they come: one element, more than a bucket, frozen; with groups
// of none and of frozen ones alone.
// ctest labels: threads
#include "accelerate/sharded_words.h"
#include "thinned.h"

namespace tessera::test_shard_matrix {
namespace {

using accelerate::Sharding;
using distributed::compared_ranks;

enum class Rule { kAdam, kAdamW, kMomentum };

struct Lumpy : nn::Module<Lumpy> {
  Lumpy()
      : wide(add<nn::Linear>("wide", 8, 90)),
        frozen(add<nn::Linear>("frozen", 90, 90)),
        narrow(add<nn::Linear>("narrow", 90, 3)),
        gain(parameter("gain", tessera::ones({1}))),
        dropout(add<nn::Dropout>("dropout", 0.2)) {
    for (const Tensor& tensor : frozen.parameters()) tensor.set_requires_grad(false);
  }
  Tensor forward(const Tensor& x) { return narrow(dropout(relu(frozen(relu(wide(x)))))) * gain; }
  nn::Linear& wide;
  nn::Linear& frozen;
  nn::Linear& narrow;
  const Tensor& gain;
  nn::Dropout& dropout;
};

class Points : public data::Dataset<std::array<Tensor, 2>> {
 public:
  explicit Points(int64_t size) : size_(size) {}
  int64_t size() const override { return size_; }
  std::array<Tensor, 2> get(int64_t index) const override {
    const auto at = static_cast<uint64_t>(index);
    return {randn({8}, {}, RandomStream{31, at}), randn({3}, {}, RandomStream{32, at})};
  }

 private:
  int64_t size_;
};

struct Setting {
  Rule rule = Rule::kAdamW;
  std::optional<Precision> precision = {};
  std::optional<PrecisionPolicy> policy = {};
  bool each_batch = true;
};

template <class Optimizer>
std::unique_ptr<optim::Optimizer> with_groups(Lumpy& model, typename Optimizer::Options options) {
  using Group = optim::ParameterGroup<typename Optimizer::Options>;
  options.lr = 0.02;
  typename Optimizer::Options slow = options;
  slow.lr = 0.005, slow.weight_decay = 0;
  const auto named = [&](std::initializer_list<const char*> names) {
    NamedTensors list;
    for (const auto& one : model.named_parameters()) {
      if (std::ranges::find(names, one.name) != names.end()) list.push_back(one);
    }
    return list;
  };
  return std::make_unique<Optimizer>(
      std::vector<Group>{{named({"wide.weight", "narrow.weight"}), options},
                         {{}, options},
                         {named({"frozen.weight", "frozen.bias"}), options},
                         {named({"gain", "wide.bias", "narrow.bias"}), slow}});
}

std::unique_ptr<optim::Optimizer> make_optimizer(Rule rule, Lumpy& model) {
  switch (rule) {
    case Rule::kAdam:
      return with_groups<optim::Adam>(model, {.weight_decay = 0.1});
    case Rule::kAdamW:
      return with_groups<optim::AdamW>(model, {.weight_decay = 0.1});
    case Rule::kMomentum:
      return with_groups<optim::SGD>(model, {.momentum = 0.9, .weight_decay = 0.1});
  }
  return nullptr;
}

struct Learned {
  std::vector<double> losses, norms;
  std::vector<std::vector<float>> values;
};

// So many micro-batches of the rank for a step; three steps.
Learned learn(const Setting& one, Sharding sharding, int ranks, int micro) {
  constexpr int kSteps = 3;
  std::vector<Learned> all(static_cast<size_t>(ranks));
  compared_ranks(ranks, [&](int rank) {
    manual_seed(5);
    AcceleratorOptions options{.mixed_precision = one.precision,
                               .precision_policy = one.policy,
                               .gradient_accumulation_steps = micro,
                               .sync_each_batch = one.each_batch,
                               .seed = 5,
                               .sharding = sharding,
                               .config_file = ""};
    if (sharding == Sharding::kZero3 || sharding == Sharding::kFsdp) {
      options.fsdp.wrap_modules = {"Linear"};
    } else {
      options.ddp.bucket_cap_mb = 0.001;
    }
    Accelerator accelerator(options);
    Lumpy model;
    const auto optimizer = make_optimizer(one.rule, model);
    data::DataLoader loader(std::make_shared<Points>(kSteps * ranks * micro * 2),
                            {.batch_size = 2, .shuffle = true});
    accelerator.prepare(model, *optimizer, loader);
    Learned& run = all[static_cast<size_t>(rank)];
    for (const auto& batch : loader) {
      const auto window = accelerator.accumulate(model);
      const Tensor loss = squared_error(model(batch[0]), batch[1]);
      run.losses.push_back(loss.item());
      accelerator.backward(loss);
      const Tensor norm = accelerator.clip_grad_norm(model.parameters(), 0.5);
      if (window.sync_gradients()) run.norms.push_back(norm.item());
      optimizer->step();
      optimizer->zero_grad();
    }
    EXPECT_EQ(run.norms.size(), kSteps);
    run.values = whole_values(model);
  });
  Learned first = all[0];
  first.losses.clear();
  for (size_t turn = 0; turn < all[0].losses.size(); ++turn) {
    for (const Learned& run : all) first.losses.push_back(run.losses[turn]);
  }
  for (const Learned& run : all) EXPECT_TRUE(run.values == first.values);
  return first;
}

void expect_same(const Learned& own, const Learned& expected) {
  EXPECT_EQ(own.losses, expected.losses);
  EXPECT_EQ(own.norms, expected.norms);
  EXPECT_TRUE(own.values == expected.values);
}

constexpr Sharding kFiveWays[] = {Sharding::kDdp, Sharding::kZero1, Sharding::kZero2,
                                  Sharding::kZero3, Sharding::kFsdp};

void expect_modes_alike(const Setting& setting) {
  for (const Rule rule : tests::thinned({Rule::kAdam, Rule::kAdamW, Rule::kMomentum}, 2)) {
    Setting one = setting;
    one.rule = rule;
    for (const int micro : tests::thinned({1, 4}, 2)) {
      one.each_batch = true;
      const Learned expected = learn(one, Sharding::kDdp, 1, 3 * micro);
      for (const Sharding sharding : kFiveWays) {
        SCOPED_TRACE(testing::Message() << "rule " << static_cast<int>(rule) << ", " << micro
                                        << " micro-batches, mode " << static_cast<int>(sharding));
        expect_same(learn(one, sharding, 3, micro), expected);
      }
      one.each_batch = false;  // sums of a rank first
      if (micro > 1) {
        expect_same(learn(one, Sharding::kZero1, 3, micro), learn(one, Sharding::kDdp, 3, micro));
      }
    }
  }
}

TEST(ShardMatrix, InF32EveryModeIsOneProcess) { expect_modes_alike({}); }

TEST(ShardMatrix, UnderAutocastEveryModeIsOneProcess) {
  expect_modes_alike({.precision = Precision::kBF16, .policy = PrecisionPolicy::kAutocast});
}

TEST(ShardMatrix, InPure16BitsWithMastersEveryModeIsOneProcess) {
  expect_modes_alike({.precision = Precision::kBF16, .policy = PrecisionPolicy::kPure});
}

}  // namespace
}  // namespace tessera::test_shard_matrix
