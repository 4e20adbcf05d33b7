// What the layers and losses that are made of others promise beyond the values that the golden
// tests compare with torch's: initial values, names of the state, copies, modes, errors.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/nn/activation.h>
#include <tessera/nn/conv.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/loss.h>
#include <tessera/nn/norm.h>
#include <tessera/nn/pooling.h>
#include <tessera/nn/recurrent/recurrent.h>

namespace tessera::nn::test_further_layers {
namespace {

Tensor random(const Shape& shape, uint64_t stream = 0) {
  return randn(shape, {}, RandomStream{12, stream});
}
double largest_difference(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.shape(), b.shape());
  return (a - b).abs().max().item();
}
double bound_of(const Tensor& x) { return x.abs().max().item(); }

// ---- Initial values ----------------------------------------------------------------------------

TEST(FurtherLayers, TransposedConvolutionsBeginUniformByTorchsFanIn) {
  // [in, out / groups, kernel]: 8 * 5 * 5 elements meet in what torch calls the fan in.
  const ConvTranspose2d conv(4, 16, 5, {.groups = 2});
  EXPECT_EQ(conv.weight.shape(), (Shape{4, 8, 5, 5}));
  const double bound = 1 / std::sqrt(8 * 25.0);
  EXPECT_LE(bound_of(conv.weight), bound);
  EXPECT_GT(bound_of(conv.weight), 0.98 * bound);
  EXPECT_LE(bound_of(conv.bias), bound);
  EXPECT_THROW(ConvTranspose2d(3, 4, 2, {.groups = 2}), ValueError);
}

TEST(FurtherLayers, ConvolutionsTakeASampleWithoutABatch) {
  Conv1d conv1(2, 3, 2);
  Conv3d conv3(2, 3, 2, {.padding = {1}});
  ConvTranspose1d back(2, 3, 2);
  const auto check = [](auto& conv, const Tensor& x) {
    EXPECT_EQ(largest_difference(conv(x), conv(x.unsqueeze(0)).squeeze(0)), 0);
  };
  check(conv1, random({2, 5}));
  check(conv3, random({2, 3, 4, 2}));
  check(back, random({2, 5}));
}

TEST(FurtherLayers, OthersBeginAsTorchs) {
  EXPECT_EQ(PReLU(3).weight.to_vector(), std::vector<double>(3, 0.25));
  EXPECT_FALSE(InstanceNorm1d(3).weight.defined());
  EXPECT_TRUE(InstanceNorm1d(3).state_dict().empty());
  const InstanceNorm2d norm(3, {.affine = true, .track_running_stats = true});
  EXPECT_EQ(norm.running_var.to_vector(), std::vector<double>(3, 1));
  const EmbeddingBag bag(400, 30, {.padding_idx = -2});
  EXPECT_EQ(bag.weight.select(0, 398).to_vector(), std::vector<double>(30, 0));
  EXPECT_NEAR(std(bag.weight.detach()).item(), 1, 0.03);
  const RNN rnn(3, 16, {.num_layers = 2, .bidirectional = true});
  EXPECT_LE(bound_of(rnn.get_parameter("weight_ih_l1_reverse")), 0.25);
  EXPECT_EQ(rnn.get_parameter("weight_ih_l1_reverse").shape(), (Shape{16, 32}));
}

TEST(FurtherLayers, AreCopiedByClone) {
  const Tensor x = random({2, 4, 6});
  const auto check = [](auto& module, const auto&... inputs) {
    EXPECT_EQ(largest_difference((*module.clone())(inputs...), module(inputs...)), 0);
  };
  ConvTranspose1d conv(4, 2, 3, {.stride = {2}, .output_padding = {1}});
  PReLU prelu(4, 0.1);
  InstanceNorm1d norm(4, {.affine = true});
  MaxPool1d most(2);
  AvgPool1d average(3, {.padding = {1}});
  check(conv, x), check(prelu, x), check(norm, x), check(most, x), check(average, x);
  EXPECT_EQ(average.extra_repr(), "kernel_size=(3,), stride=(3,), padding=(1,)");
  EXPECT_EQ(PReLU(2).extra_repr(), "num_parameters=2");
}

TEST(FurtherLayers, RowsArePooledAsPlanesOfHeightOne) {
  const Tensor x = random({2, 3, 9});
  AvgPool1d average(3, {.stride = {2}, .padding = {1}});
  AvgPool2d plane({1, 3}, {.stride = {1, 2}, .padding = {0, 1}});
  EXPECT_EQ(largest_difference(average(x), plane(x.unsqueeze(2)).squeeze(2)), 0);
  EXPECT_THROW(AvgPool1d({2, 2})(x), ValueError);
  EXPECT_THROW(MaxPool1d(20)(x), ShapeError);
}

// ---- Bags --------------------------------------------------------------------------------------

TEST(EmbeddingBags, AnEmptyBagIsZerosAndGivesNoGradient) {
  const Tensor weight = random({5, 2}).set_requires_grad();
  const Tensor index = tensor(std::vector<int64_t>{1, 3}, {2});
  const Tensor offsets = tensor(std::vector<int64_t>{0, 0, 2}, {3});
  for (const BagMode mode : {BagMode::kSum, BagMode::kMean, BagMode::kMax}) {
    const Tensor bags = embedding_bag(index, weight, offsets, {.mode = mode});
    EXPECT_EQ(bags.select(0, 0).to_vector(), std::vector<double>(2, 0));
    EXPECT_EQ(bags.select(0, 2).to_vector(), std::vector<double>(2, 0));
    const Tensor gradient = grad(bags.sum(), {{weight}})[0];
    EXPECT_EQ(gradient.sum().item(), mode == BagMode::kSum ? 4 : 2);
  }
}

TEST(EmbeddingBags, RefuseWhatDoesNotFit) {
  const Tensor weight = random({5, 2}), index = tensor(std::vector<int64_t>{1, 3}, {2});
  const Tensor offsets = tensor(std::vector<int64_t>{0}, {1});
  EXPECT_THROW(embedding_bag(index, weight), ShapeError);
  EXPECT_THROW(embedding_bag(index.view({1, 2}), weight, offsets), ShapeError);
  EXPECT_THROW(embedding_bag(index, weight, offsets, {.per_sample_weights = ones({2})}),
               ValueError);
  const Tensor falling = tensor(std::vector<int64_t>{2, 1}, {2});
  EXPECT_THROW(embedding_bag(index, weight, falling, {.mode = BagMode::kMax}), ValueError);
}

// ---- Losses ------------------------------------------------------------------------------------

Tensor longs(std::vector<int64_t> values) {
  const auto size = static_cast<int64_t>(values.size());
  return tensor(values, {size});
}

// By hand: two steps, one label. Alignments: label-label, blank-label, label-blank.
TEST(CtcLosses, SumOverAllAlignments) {
  const Tensor probs = tensor({0.6, 0.4, 0.3, 0.7}, kF64).view({2, 1, 2});
  const double sum = 0.4 * 0.7 + 0.6 * 0.7 + 0.4 * 0.3;
  CTCLoss loss;
  EXPECT_NEAR(loss(probs.log(), longs({1}).view({1, 1}), longs({2}), longs({1})).item(),
              -std::log(sum), 1e-14);
}

TEST(CtcLosses, ATargetWithoutAnAlignmentIsInfiniteOrLeftOut) {
  const Tensor logits = random({3, 2, 4}).set_requires_grad();
  const Tensor targets = tensor(std::vector<int64_t>{1, 1, 2, 3}, {2, 2});  // 1, 1 needs 3 steps
  const auto losses = [&](bool zero_infinity) {
    return ctc_loss(log_softmax(logits, 2), targets, longs({2, 3}), longs({2, 2}), 0,
                    Reduction::kNone, zero_infinity);
  };
  EXPECT_EQ(losses(false).to_vector()[0], std::numeric_limits<double>::infinity());
  const Tensor left_out = losses(true);
  EXPECT_EQ(left_out.to_vector()[0], 0);
  EXPECT_GT(left_out.to_vector()[1], 0);
  const Tensor gradient = grad(left_out.sum(), {{logits}})[0];
  EXPECT_EQ(bound_of(gradient.select(1, 0)), 0);
  EXPECT_GT(bound_of(gradient.select(1, 1)), 0);
  EXPECT_TRUE(std::isfinite(bound_of(gradient)));
}

TEST(CtcLosses, RefuseLengthsAndLabelsThatDoNotFit) {
  const Tensor logs = log_softmax(random({3, 2, 4}), 2);
  const Tensor targets = tensor(std::vector<int64_t>{1, 1, 2, 3}, {2, 2});
  CTCLoss loss;
  EXPECT_THROW(loss(logs, targets, longs({4, 3}), longs({2, 2})), ValueError);
  EXPECT_THROW(loss(logs, targets, longs({3, 3}), longs({3, 2})), ValueError);
  EXPECT_THROW(loss(logs, targets, longs({3}), longs({2, 2})), ShapeError);
  EXPECT_THROW(loss(logs, longs({1, 2, 3}), longs({3, 3}), longs({1, 1})), ShapeError);
  EXPECT_THROW(loss(logs, ones({2, 2}), longs({3, 3}), longs({1, 1})), DTypeError);
  EXPECT_THROW(CTCLoss(4)(logs, targets, longs({3, 3}), longs({1, 1})), ValueError);
  const Tensor beyond = tensor(std::vector<int64_t>{1, 9, 2, 3}, {2, 2});
  EXPECT_THROW(loss(logs, beyond, longs({3, 3}), longs({2, 2})), IndexError);
  EXPECT_NO_THROW(loss(logs, beyond, longs({3, 3}), longs({1, 2}))) << "behind its target's end";
}

TEST(FurtherLosses, AreFloat32UnderAutocastAndRefuseOtherShapes) {
  const Tensor a = random({4, 3}, 1).to(kBF16), b = random({4, 3}, 2).to(kBF16);
  const Tensor signs = tensor({1.0, -1.0, 1.0, -1.0}), var = full({4, 3}, 0.5, {.dtype = kBF16});
  {
    const AutocastGuard autocast(kBF16);
    EXPECT_EQ(TripletMarginLoss()(a, b, b).dtype(), kF32);
    EXPECT_EQ(CosineEmbeddingLoss()(a, b, signs).dtype(), kF32);
    EXPECT_EQ(PoissonNLLLoss()(a, b).dtype(), kF32);
    EXPECT_EQ(GaussianNLLLoss()(a, b, var).dtype(), kF32);
    EXPECT_EQ(CTCLoss()(log_softmax(random({3, 2, 4}).to(kBF16), 2), longs({1, 2}), longs({3, 3}),
                        longs({1, 1}))
                  .dtype(),
              kF32);
  }
  EXPECT_EQ(TripletMarginLoss()(a, b, b).dtype(), kBF16);
  EXPECT_THROW(PoissonNLLLoss()(a, b.view({3, 4})), ShapeError);
  EXPECT_THROW(GaussianNLLLoss()(a, b, ones({3})), ShapeError);
  EXPECT_THROW(GaussianNLLLoss()(a, b, -1.0 * var), ValueError);
  EXPECT_THROW(CosineEmbeddingLoss()(a, b, ones({3})), ShapeError);
  EXPECT_THROW(TripletMarginLoss(-1)(a, b, b), ValueError);
  EXPECT_THROW(TripletMarginLoss()(a, b, random({3})), ShapeError);
}

}  // namespace
}  // namespace tessera::nn::test_further_layers
