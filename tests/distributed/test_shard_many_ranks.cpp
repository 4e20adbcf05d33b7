// Gathers and reductions of units among 64 ranks beside naive ones: wholes are what was cut, and a
// part of a gradient is the sum of the ranks' contributions in their order, in 32 and in 16 bits,
// for rows that are fewer than the ranks, as many, one more or less.
// ctest labels: threads
#include <cmath>

#include "distributed/sharded_fixture.h"
#include "thinned.h"

namespace tessera::distributed::test_shard_many_ranks {
namespace {

constexpr int kMany = 64;
const Shape kShapes[] = {{1},     {3, 5},   {63},     {64, 2},   {65, 1},
                         {2, 31}, {127, 3}, {130, 7}, {5, 4, 3}, {1, 129}};

Tensor value_of(size_t i, DType dtype) {
  return randn(kShapes[i], {}, RandomStream{21, i}).to(dtype);
}
// What a rank's micro-batch contributes to the gradient of a parameter.
Tensor contribution(size_t i, int64_t batch, DType dtype) {
  return randn(kShapes[i], {}, RandomStream{100 + static_cast<uint64_t>(batch), i}).to(dtype);
}

struct Shapes : nn::Module<Shapes> {
  explicit Shapes(DType dtype) : dtype(dtype) {
    for (size_t i = 0; i < std::size(kShapes); ++i) {
      const std::string name = "p" + std::to_string(i);
      places.push_back(&parameter(name, value_of(i, dtype)));
    }
  }
  // The gradient of each parameter is its contribution.
  Tensor forward(const Tensor& batch) {
    const auto number = static_cast<int64_t>(batch.item());
    Tensor loss;
    for (size_t i = 0; i < places.size(); ++i) {
      const Tensor& whole = *places[i];
      EXPECT_EQ(whole.to_vector<float>(), value_of(i, dtype).to(whole.dtype()).to_vector<float>());
      const Tensor term = (whole * contribution(i, number, whole.dtype())).to(kF32).sum();
      loss = loss.defined() ? loss + term : term;
    }
    return loss;
  }
  DType dtype;
  std::vector<const Tensor*> places;
};

struct Exchange {
  DType parameter = kF32;  // as it is kept
  DType whole = kF32;      // as ops read it, and gradients come
  DType reduce = kF32;     // as gradients travel
  int micro = 1;
  GradientAverage average = GradientAverage::kRanks;
};

// In f32 and in the order of the batches; sums that travel in 16 bits are rounded once.
std::vector<float> naive_sum(size_t i, const Exchange& one) {
  std::vector<float> sum(static_cast<size_t>(numel_of(kShapes[i])));
  for (int64_t batch = 0; batch < one.micro * kMany; ++batch) {
    const std::vector<float> part = contribution(i, batch, one.whole).to_vector<float>();
    for (size_t j = 0; j < sum.size(); ++j) sum[j] += part[j];
  }
  const float divisor = one.average == GradientAverage::kNone ? 1 : kMany * one.micro;
  for (float& value : sum) {
    if (one.reduce != kF32)
      value = static_cast<float>(raw::full({}, value, kF32).to(one.reduce).to(kF32).item());
    value /= divisor;  // a power of two
  }
  return sum;
}

void expect_naive(Way way, const Exchange& one) {
  SCOPED_TRACE(testing::Message() << name_of(way) << ", parameters " << name_of(one.parameter)
                                  << ", wholes " << name_of(one.whole) << ", reduced in "
                                  << name_of(one.reduce) << ", micro-batches " << one.micro);
  std::vector<std::vector<float>> expected;
  in_one_process([&] {
    for (size_t i = 0; i < std::size(kShapes); ++i) expected.push_back(naive_sum(i, one));
  });
  compared_ranks(kMany, [&](int rank) {
    Shapes model(one.parameter);
    Mesh mesh(world());
    ShardIn options{.average = one.average, .bucket_bytes = 1500};
    if (one.whole != one.parameter || one.reduce != one.parameter) {
      options.precision = {.param_dtype = one.whole, .reduce_dtype = one.reduce};
    }
    const auto parallel = shard_in(way, model, mesh, options);
    for (int k = 0; k < one.micro; ++k) {
      StepPlan plan = StepPlan::of(k, one.micro);
      plan.sync_gradients = true;
      parallel->set_plan(plan);
      model(full({1}, static_cast<double>(k * kMany + rank))).backward();
    }
    // Each rank looks at what it owns, where it lies in the whole.
    for (size_t i = 0; i < std::size(kShapes); ++i) {
      const Tensor grad = model.parameters()[i].grad();
      if (!is_dtensor(grad)) {
        EXPECT_EQ(grad.to_vector<float>(), expected[i]) << i;
        continue;
      }
      const std::vector<float> own = to_local(grad).to_vector<float>();
      const int64_t rows = kShapes[i][0], row = numel_of(kShapes[i]) / rows;
      if (way == Way::kZero3) {
        const int64_t chunk = (rows + kMany - 1) / kMany;
        const int64_t begin = std::min(rows, rank * chunk), end = std::min(rows, begin + chunk);
        const std::vector<float> part(expected[i].begin() + begin * row,
                                      expected[i].begin() + end * row);
        EXPECT_EQ(own, part) << i;
      }
    }
    const auto whole = whole_gradients(model);
    if (rank % 21 != 0) return;
    for (size_t i = 0; i < std::size(kShapes); ++i) {
      EXPECT_EQ(whole.at("p" + std::to_string(i)), expected[i]) << i;
    }
  });
}

TEST(ShardManyRanks, UnitsAreGatheredAndReducedAsNaively) {
  for (const Way way :
       tests::thinned({Way::kReplicate, Way::kZero1, Way::kZero2, Way::kZero3}, 2)) {
    expect_naive(way, {});
    expect_naive(way, {.micro = 2, .average = GradientAverage::kWindow});
    expect_naive(way, {.average = GradientAverage::kNone});
  }
}

TEST(ShardManyRanks, SixteenBitsAreSummedInF32AndRoundedOnce) {
  for (const DType narrow : tests::thinned({kBF16, kF16}, 2)) {
    for (const Way way :
         tests::thinned({Way::kReplicate, Way::kZero1, Way::kZero2, Way::kZero3}, 2)) {
      expect_naive(way, {.parameter = narrow,
                         .whole = narrow,
                         .reduce = narrow,
                         .average = GradientAverage::kNone});
    }
    expect_naive(Way::kZero3,
                 {.whole = narrow, .reduce = narrow, .average = GradientAverage::kNone});
    expect_naive(Way::kZero3, {.whole = narrow, .reduce = kF32, .average = GradientAverage::kNone});
  }
}

}  // namespace
}  // namespace tessera::distributed::test_shard_many_ranks
