// ctest labels: threads
#include <tessera/autograd/weight_cache.h>

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/fp8/weight.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/kernels/fp8/cast_transpose.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/nn/linear.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/optimizers.h>

namespace tessera::test_weight_cache {
namespace {

using Values = std::vector<double>;

const WeightKey kLow{.dtype = kBF16};

Tensor weight_of(const Shape& shape) {
  manual_seed(11);
  return randn(shape).set_requires_grad();
}

int64_t counted_bytes() { return memory_stats()->current(MemoryCategory::kWeightCache); }

Tensor product(const Tensor& x, const Tensor& weight) {
  const AutocastGuard autocast(kBF16);
  return linear(x, weight);
}

TEST(WeightCache, OneLeafHoldsSeveralCopies) {
  const Tensor weight = weight_of({5, 3});
  const Tensor scale = tensor({4.0}, kF32).view({});
  const WeightKey rows{kF8E4M3, WeightLayout::kAsIs, scale};
  const WeightKey columns{kF8E4M3, WeightLayout::kTransposed, scale};
  const WeightKey low_columns{.dtype = kBF16, .layout = WeightLayout::kTransposed};
  const Tensor low = weight_cache::get(weight, kLow);
  const Tensor f8 = weight_cache::get(weight, rows);
  const Tensor f8_columns = weight_cache::get(weight, columns);

  EXPECT_EQ(low.to_vector(), weight.detach().to(kBF16).to_vector());
  EXPECT_EQ(f8.dtype(), kF8E4M3);
  EXPECT_EQ(f8.shape(), (Shape{5, 3}));
  EXPECT_EQ(f8.to_vector(), (weight.detach() * 4.0).to(kF8E4M3).to_vector());
  EXPECT_EQ(f8_columns.shape(), (Shape{3, 5}));
  EXPECT_EQ(f8_columns.to_vector(), f8.t().contiguous().to_vector());
  EXPECT_EQ(weight_cache::get(weight, low_columns).to_vector(), low.t().contiguous().to_vector());

  // Each stays in its place: nothing is made again.
  EXPECT_TRUE(weight_cache::get(weight, kLow).is(low));
  EXPECT_TRUE(weight_cache::get(weight, rows).is(f8));
  EXPECT_TRUE(weight_cache::get(weight, columns).is(f8_columns));
  EXPECT_EQ(weight_cache::bytes(weight), 15 * (2 + 1 + 1 + 2));
  EXPECT_FALSE(low.requires_grad());
}

// Whoever has the values writes them.
TEST(WeightCache, ACopyCanBeProvided) {
  const Tensor weight = weight_of({5, 3});
  const NoGradGuard no_grad;
  const Tensor given = weight_cache::provide(weight, kLow);
  EXPECT_EQ(given.shape(), weight.shape());
  fill_(given, 2.0);
  EXPECT_TRUE(weight_cache::get(weight, kLow).is(given));
  EXPECT_TRUE(weight_cache::provide(weight, kLow).is(given)) << "it is current";

  // Released and provided again for unchanged values: a graph that saved it goes on.
  const uint32_t version = given.version();
  weight_cache::release(weight);
  EXPECT_EQ(weight_cache::bytes(weight), 0);
  EXPECT_NE(given.version(), version);
  EXPECT_TRUE(weight_cache::provide(weight, kLow).is(given));
  EXPECT_EQ(given.version(), version);
  EXPECT_EQ(weight_cache::bytes(weight), 15 * 2);

  // Other values: the same memory, which old graphs refuse.
  weight.bump_version("a test");
  EXPECT_TRUE(weight_cache::provide(weight, kLow).is(given));
  EXPECT_NE(given.version(), version);
  fill_(given, 3.0);
  EXPECT_EQ(weight_cache::get(weight, kLow).to_vector(), Values(15, 3));

  EXPECT_THROW(weight_cache::provide(weight, {.dtype = kF8E4M3}), ValueError);
}

// The same of bytes, with the scales that they were made with; who reads them first is told.
TEST(WeightCache, AQuantisedCopyCanBeProvided) {
  const Tensor weight = weight_of({16, 32});
  const NoGradGuard no_grad;
  const kernels::QuantizeOptions options{.format = kF8E4M3};
  const WeightKey key{.dtype = kF8E4M3, .tiles = options};
  const auto provide = [&] {
    kernels::Quantized made = kernels::quantize(raw::alias(weight), options);
    const Tensor values = made.values;
    const Tensor given = weight_cache::provide(weight, key, std::move(made));
    std::memcpy(given.data(), values.data(), static_cast<size_t>(values.numel()));
    return given;
  };
  const Tensor given = provide();
  bool is_new = false;
  const kernels::Quantized read = weight_cache::quantized(weight, options, {}, &is_new);
  EXPECT_TRUE(read.values.is(given));
  EXPECT_TRUE(is_new);
  EXPECT_EQ(read.amax, max(abs(weight)).item());
  EXPECT_EQ(read.scale.item(), kernels::fp8_scale(read.amax, kF8E4M3, false));
  weight_cache::quantized(weight, options, {}, &is_new);
  EXPECT_FALSE(is_new) << "told once";

  // Released and provided again for unchanged values, and for others.
  const uint32_t version = given.version();
  weight_cache::release(weight);
  EXPECT_EQ(weight_cache::bytes(weight), 0);
  EXPECT_TRUE(provide().is(given));
  EXPECT_EQ(given.version(), version);
  weight_cache::quantized(weight, options, {}, &is_new);
  EXPECT_FALSE(is_new);
  weight.bump_version("a test");
  EXPECT_TRUE(provide().is(given));
  EXPECT_NE(given.version(), version);
  weight_cache::quantized(weight, options, {}, &is_new);
  EXPECT_TRUE(is_new);

  EXPECT_THROW(weight_cache::provide(weight, kLow, {}), ValueError);
}

TEST(WeightCache, AWeightOfAConvolutionHasAScaledCopyInItsShape) {
  const Tensor weight = weight_of({4, 3, 2, 2});
  const Tensor scale = tensor({2.0}, kF32).view({});
  const Tensor f8 = weight_cache::get(weight, {kF8E5M2, WeightLayout::kAsIs, scale});
  EXPECT_EQ(f8.shape(), weight.shape());
  EXPECT_EQ(f8.to_vector(), (weight.detach() * 2.0).to(kF8E5M2).to_vector());
  EXPECT_THROW(weight_cache::get(weight, {kF8E5M2, WeightLayout::kTransposed, scale}), ShapeError);
  EXPECT_EQ(weight_cache::bytes(weight), 48);  // a refusal leaves nothing behind
}

TEST(WeightCache, RefusesTheFormThatTheLeafHas) {
  EXPECT_THROW(weight_cache::get(weight_of({2, 2}), {.dtype = kF32}), ValueError);
}

TEST(WeightCache, AnyWriteOfTheLeafMakesEveryCopyStale) {
  nn::Linear layer(3, 3, {.bias = false});
  const Tensor& weight = layer.weight;
  const Tensor scale = tensor({4.0}, kF32).view({});
  const WeightKey columns{kF8E4M3, WeightLayout::kTransposed, scale};
  const Tensor values = weight_of({3, 3}).detach();
  optim::EMA average(layer.named_parameters(), {.decay = 0.5});
  StateDict state;
  state.set("weight", values);
  const NoGradGuard no_grad;
  const std::vector<std::pair<const char*, std::function<void()>>> writes = {
      {"copy_", [&] { copy_(weight, values); }},
      {"fill_", [&] { fill_(weight, 3); }},
      {"a view", [&] { zero_(weight.select(0, 1)); }},
      {"load_state_dict", [&] { layer.load_state_dict(state); }},
      {"set_data",
       [&] {
         weight.set_data(ones({3, 3}));
       }},
      {"set_data of the same storage", [&] { weight.set_data(weight.detach().t()); }},
      {"EMA", [&] { average.copy_to_parameters(); }},
  };
  for (const auto& [name, write] : writes) {
    SCOPED_TRACE(name);
    const Tensor low = weight_cache::get(weight, kLow);
    const Tensor f8 = weight_cache::get(weight, columns);
    const Values before = low.to_vector();
    write();
    EXPECT_FALSE(weight_cache::find(weight, kLow).defined());
    EXPECT_FALSE(weight_cache::find(weight, columns).defined());
    EXPECT_EQ(weight_cache::get(weight, kLow).to_vector(), weight.to(kBF16).to_vector());
    EXPECT_EQ(weight_cache::get(weight, columns).to_vector(),
              (weight * 4.0).to(kF8E4M3).t().contiguous().to_vector());
    EXPECT_EQ(low.to_vector(), before);  // who holds the old one keeps its values
  }
}

TEST(WeightCache, AnAverageInPlaceOfTheParametersIsSeenAtOnce) {
  nn::Linear layer(3, 2, {.bias = false});
  optim::EMA average(layer.named_parameters(), {.decay = 0.5});
  {
    const NoGradGuard no_grad;
    fill_(layer.weight, 1);
  }
  average.update();
  const Values own = product(ones({1, 3}), layer.weight).to_vector();
  {
    const optim::EMA::Scope averaged(average);
    EXPECT_EQ(product(ones({1, 3}), layer.weight).to_vector(),
              linear(ones({1, 3}).to(kBF16), layer.weight.detach().to(kBF16)).to_vector());
    EXPECT_NE(product(ones({1, 3}), layer.weight).to_vector(), own);
  }
  EXPECT_EQ(product(ones({1, 3}), layer.weight).to_vector(), own);
}

TEST(WeightCache, AScaleThatIsWrittenMakesItsCopiesStaleAndNoOthers) {
  const Tensor weight = weight_of({4, 4});
  const Tensor scale = tensor({4.0}, kF32).view({}), other = tensor({8.0}, kF32).view({});
  const WeightKey rows{kF8E4M3, WeightLayout::kAsIs, scale};
  const WeightKey rows_by_other{kF8E4M3, WeightLayout::kAsIs, other};
  weight_cache::get(weight, rows);
  const Tensor by_other = weight_cache::get(weight, rows_by_other);
  const Tensor low = weight_cache::get(weight, kLow);
  fill_(scale, 16);
  EXPECT_FALSE(weight_cache::find(weight, rows).defined());
  EXPECT_EQ(weight_cache::get(weight, rows).to_vector(),
            (weight.detach() * 16.0).to(kF8E4M3).to_vector());
  EXPECT_TRUE(weight_cache::find(weight, rows_by_other).is(by_other));
  EXPECT_TRUE(weight_cache::find(weight, kLow).is(low));
}

TEST(WeightCache, BothLayoutsOfOneScaleAreRenewedInOneRead) {
  const Tensor weight = weight_of({4, 2});
  const Tensor scale = tensor({4.0}, kF32).view({});
  const WeightKey rows{kF8E4M3, WeightLayout::kAsIs, scale};
  const WeightKey columns{kF8E4M3, WeightLayout::kTransposed, scale};
  weight_cache::get(weight, rows);
  weight_cache::get(weight, columns);
  {
    const NoGradGuard no_grad;
    fill_(weight, 1.5);
  }
  weight_cache::get(weight, columns);
  EXPECT_EQ(weight_cache::find(weight, rows).to_vector(), Values(8, 6));
}

// ---- The writer's side -------------------------------------------------------------------------

TEST(WeightCache, AnOptimizerWritesThePlainCastAndLeavesTheOthersStale) {
  const Tensor weight = weight_of({6, 4});
  const Tensor scale = tensor({4.0}, kF32).view({});
  const WeightKey rows{kF8E4M3, WeightLayout::kAsIs, scale};
  const WeightKey low_columns{.dtype = kBF16, .layout = WeightLayout::kTransposed};
  const Tensor low = weight_cache::get(weight, kLow);
  weight_cache::get(weight, rows);
  weight_cache::get(weight, low_columns);
  weight.set_grad(ones({6, 4}));
  optim::SGD optimizer({{"weight", weight}}, {.lr = 0.5});
  optimizer.step();
  EXPECT_TRUE(weight_cache::find(weight, kLow).is(low));
  EXPECT_EQ(low.to_vector(), weight.detach().to(kBF16).to_vector());
  EXPECT_FALSE(weight_cache::find(weight, rows).defined());
  EXPECT_FALSE(weight_cache::find(weight, low_columns).defined());
  EXPECT_EQ(weight_cache::get(weight, rows).to_vector(),
            (weight.detach() * 4.0).to(kF8E4M3).to_vector());
}

TEST(WeightCache, AWriterGetsWhatWasGotSinceTheLastWrite) {
  const Tensor weight = weight_of({2, 2});
  const WeightKey half{.dtype = kF16};
  weight_cache::get(weight, kLow);
  weight_cache::get(weight, half);
  EXPECT_EQ(weight_cache::begin_write(weight).size(), 2u);
  weight_cache::get(weight, half);
  weight_cache::find(weight, kLow);  // looks only
  const std::vector<weight_cache::Copy> copies = weight_cache::begin_write(weight);
  ASSERT_EQ(copies.size(), 1u);
  EXPECT_TRUE(copies[0].key == half);
  EXPECT_EQ(weight_cache::bytes(weight), 8);  // the other was let go
  weight.bump_version();
  EXPECT_FALSE(weight_cache::find(weight, half).defined());
  weight_cache::mark_written(weight, copies[0]);
  EXPECT_TRUE(weight_cache::find(weight, half).is(copies[0].tensor));
  weight.bump_version();
  weight_cache::get(weight, half);  // another tensor has taken its place
  weight.bump_version();
  weight_cache::mark_written(weight, copies[0]);
  EXPECT_FALSE(weight_cache::find(weight, half).defined());
}

// ---- Release -----------------------------------------------------------------------------------

TEST(WeightCache, ReleaseFreesTheBytes) {
  const Tensor weight = weight_of({32, 32});
  const int64_t before = counted_bytes(), all = memory_stats()->current();
  const WeightKey half{.dtype = kF16};
  weight_cache::get(weight, kLow);
  weight_cache::get(weight, half);
  EXPECT_EQ(counted_bytes() - before, 2 * 2048);
  EXPECT_TRUE(weight_cache::release(weight, kLow));
  EXPECT_FALSE(weight_cache::release(weight, kLow));
  EXPECT_EQ(counted_bytes() - before, 2048);
  EXPECT_TRUE(weight_cache::find(weight, half).defined());
  weight_cache::release(weight);
  EXPECT_EQ(counted_bytes(), before);
  EXPECT_EQ(memory_stats()->current(), all);
  EXPECT_FALSE(weight_cache::release(weight_of({2, 2}), kLow));  // never had any
}

TEST(WeightCache, ReleasingOneCopyLeavesThoseBeforeItAndBehindIt) {
  const WeightKey half{.dtype = kF16};
  const WeightKey columns{.dtype = kBF16, .layout = WeightLayout::kTransposed};
  const Tensor weight = weight_of({4, 6});
  for (const WeightKey& key : {kLow, half, columns}) weight_cache::get(weight, key);
  EXPECT_TRUE(weight_cache::release(weight, half));
  EXPECT_TRUE(weight_cache::find(weight, kLow).defined());
  EXPECT_FALSE(weight_cache::find(weight, half).defined());
  EXPECT_TRUE(weight_cache::find(weight, columns).defined());
}

TEST(WeightCache, TheCopiesGoWithTheLeaf) {
  const int64_t before = counted_bytes();
  weight_cache::get(weight_of({32, 32}), kLow);
  EXPECT_EQ(counted_bytes(), before);
}

// What sharded training does between forward and backward.
TEST(WeightCache, AGraphReadsAReleasedCopyOnceItIsMadeAgain) {
  const Tensor weight = weight_of({16, 8});
  const Tensor x = randn({2, 8}).set_requires_grad();
  product(x, weight).to(kF32).sum().backward();
  const Values expected = x.grad().to_vector();
  x.zero_grad();

  const int64_t before = counted_bytes();
  const Tensor loss = product(x, weight).to(kF32).sum();
  weight_cache::release(weight, kLow);
  EXPECT_EQ(before - counted_bytes(), 16 * 8 * 2);  // though the graph holds it
  EXPECT_EQ(weight_cache::bytes(weight), 0);
  EXPECT_THROW(backward(loss, {}, {.retain_graph = true}), AutogradError);
  weight_cache::get(weight, kLow);
  EXPECT_EQ(counted_bytes(), before);
  loss.backward();
  EXPECT_EQ(x.grad().to_vector(), expected);
}

TEST(WeightCache, AGraphRefusesAReleasedCopyThatIsMadeAgainFromOtherValues) {
  const Tensor weight = weight_of({16, 8});
  const Tensor x = randn({2, 8}).set_requires_grad();
  const Tensor loss = product(x, weight).to(kF32).sum();
  weight_cache::release(weight);
  {
    const NoGradGuard no_grad;
    fill_(weight, 2);
  }
  EXPECT_EQ(weight_cache::get(weight, kLow).to_vector(), Values(128, 2));
  EXPECT_THROW(loss.backward(), AutogradError);
}

TEST(WeightCache, AnOptimizerPassesOverAReleasedCopy) {
  const Tensor weight = weight_of({16, 8});
  const Tensor x = randn({2, 8}).set_requires_grad();  // so that the graph holds the copy
  const Tensor loss = product(x, weight).to(kF32).sum();
  weight_cache::release(weight);
  weight.set_grad(ones({16, 8}));
  optim::SGD optimizer({{"weight", weight}}, {.lr = 0.5});
  optimizer.step();
  EXPECT_FALSE(weight_cache::find(weight, kLow).defined());
  EXPECT_EQ(weight_cache::get(weight, kLow).to_vector(), weight.detach().to(kBF16).to_vector());
  weight_cache::release(weight);
  EXPECT_TRUE(weight_cache::begin_write(weight).empty());
}

// ---- Threads -----------------------------------------------------------------------------------

TEST(WeightCache, ThreadsWithContextsOfTheirOwnShareTheCopies) {
  const Tensor weight = weight_of({64, 64});
  const Tensor x = randn({4, 64});
  const Values expected = linear(x.to(kBF16), weight.detach().to(kBF16)).to_vector();
  std::vector<Values> got(4);
  std::vector<std::thread> threads;
  for (Values& values : got) {
    threads.emplace_back([&] {
      Context context;
      const ContextGuard guard(context);
      const NoGradGuard no_grad;
      for (int i = 0; i < 20; ++i) values = product(x, weight).to_vector();
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Values& values : got) EXPECT_EQ(values, expected);
  EXPECT_EQ(weight_cache::bytes(weight), 64 * 64 * 2);  // one copy, whoever came first
}

}  // namespace
}  // namespace tessera::test_weight_cache
