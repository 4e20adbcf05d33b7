// Corners of single ops where torch has a rule of its own.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/profiler.h>

namespace tessera {
namespace {

TEST(AnyAll, GiveU8ForU8AndBoolOtherwise) {
  const Tensor x = tensor({0, 1, 2, 0}).view({2, 2}).to(kU8);
  for (const Tensor& y : {any(x), all(x), any(x, {1}), all(x, {0}, true)}) {
    EXPECT_EQ(y.dtype(), kU8);
  }
  EXPECT_EQ(any(x, {1}).to_vector(), (std::vector<double>{1, 1}));  // 1, not the element 2
  EXPECT_EQ(all(x, {0}).to_vector(), (std::vector<double>{0, 0}));
  for (const DType dtype : {kBool, kI32, kF32}) EXPECT_EQ(any(x.to(dtype)).dtype(), kBool);
  EXPECT_EQ(any(zeros({2}, {.dtype = kU8, .device = kMeta})).dtype(), kU8);
}

TEST(Glu, IsOneOpThatAutocastLeavesInItsDtype) {
  const Tensor x = randn({3, 8});
  // One range, of its own name.
  Profiler profiler;
  {
    const ProfilerScope scope(profiler);
    glu(x);
  }
  ASSERT_EQ(profiler.entries().size(), 1u);
  EXPECT_EQ(profiler.entries().begin()->first, "glu");
  const AutocastGuard autocast;
  EXPECT_EQ(glu(x).dtype(), kF32);
  EXPECT_EQ(glu(x.to(kBF16)).dtype(), kBF16);
  EXPECT_THROW(glu(scalar_tensor(1, kF32)), ShapeError);
  EXPECT_THROW(glu(randn({3, 3})), ShapeError);
  EXPECT_THROW(glu(ones({4}, {.dtype = kI64})), DTypeError);
}

TEST(MaxPool, GivesThePositionsOfItsValues) {
  const Tensor x = tensor({1, 5, 2, 5, 0, 3, 4, 4, 1}).view({1, 1, 3, 3}).clone();
  x.set_requires_grad();
  const auto [values, indices] = max_pool2d_with_indices(x, {2}, {1});
  EXPECT_EQ(values.to_vector(), (std::vector<double>{5, 5, 5, 4}));
  EXPECT_EQ(indices.dtype(), kI64);
  EXPECT_EQ(indices.to_vector(), (std::vector<double>{1, 1, 3, 7}));
  EXPECT_TRUE(values.requires_grad());
  EXPECT_FALSE(indices.requires_grad());
  values.sum().backward();
  EXPECT_EQ(x.grad().to_vector(), (std::vector<double>{0, 2, 0, 1, 0, 0, 0, 1, 0}));

  const auto row = max_pool1d_with_indices(tensor({3, 1, 2, 7, 5}).view({1, 5}), {2}, {}, {1});
  EXPECT_EQ(row.values.to_vector(), (std::vector<double>{3, 2, 7}));
  EXPECT_EQ(row.indices.to_vector(), (std::vector<double>{0, 2, 3}));
  EXPECT_THROW(max_pool1d(randn({1, 1, 4, 4}), {2}), ShapeError);
  EXPECT_THROW(max_pool2d(randn({1, 4, 4}), {2}, {}, {int64_t{1} << 62}), ValueError);
}

TEST(Losses, RefuseToTrainTheirWeights) {
  const Tensor x = randn({3, 2}), t = rand({3, 2}), classes = zeros({3}, {.dtype = kI64});
  const Tensor weight = rand({2}).set_requires_grad();
  const auto full = [&] { return weight.expand({3, 2}); };
  EXPECT_THROW(binary_cross_entropy_with_logits(x, t, full()), ValueError);
  EXPECT_THROW(binary_cross_entropy_with_logits(x, t, {}, Reduction::kMean, weight), ValueError);
  EXPECT_THROW(binary_cross_entropy(t, t, full()), ValueError);
  EXPECT_THROW(cross_entropy(x, classes, {.weight = weight}), ValueError);
  EXPECT_THROW(nll_loss(x, classes, {.weight = weight}), ValueError);
  EXPECT_NO_THROW(cross_entropy(x, classes, {.weight = weight.detach()}));
  const NoGradGuard no_grad;
  EXPECT_NO_THROW(binary_cross_entropy_with_logits(x, t, full()));
}

TEST(Pad, RefusesSizesWhoseSumsAreNoNumbers) {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  const Tensor x = ones({1, 3});
  for (const Pad mode : {Pad::kConstant, Pad::kReplicate, Pad::kReflect, Pad::kCircular}) {
    for (const Shape& sizes :
         {Shape{kMax, 0}, Shape{0, kMax}, Shape{kMax, kMax}, Shape{kMin, 0}, Shape{kMin, kMin},
          Shape{kMax, kMin}, Shape{kMax / 2, kMax / 2}, Shape{kMax / 4, 0, kMax / 4, 0}}) {
      EXPECT_THROW(pad(x, sizes, mode), ShapeError) << "mode " << static_cast<int>(mode);
    }
  }
  EXPECT_EQ(pad(x, {1, 2}).shape(), (Shape{1, 6}));
}

}  // namespace
}  // namespace tessera
