// Indexing, embedding and rotary positions.
#include <vector>

#include <gtest/gtest.h>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/gradcheck.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/kernels/embedding/embedding.h>
#include <tessera/core/parallel.h>

#include "message_of.h"

namespace tessera::test_index {
namespace {

using Values = std::vector<double>;
using Function = std::function<TensorList(const TensorList&)>;

Tensor counting(const Shape& shape, DType dtype = kF32) {
  return view(arange(0, numel_of(shape), 1, dtype), shape);
}
Tensor leaf(const Shape& shape, uint64_t stream = 1) {
  return randn(shape, {.dtype = kF64}, RandomStream{5, stream}).set_requires_grad();
}
Tensor list(std::initializer_list<double> values) { return tensor(values, kI64); }
Tensor mask(std::initializer_list<double> values) { return tensor(values, kBool); }

void expect_gradients(const Function& f, const TensorList& inputs) {
  const Function squared = [&](const TensorList& in) {
    TensorList result;
    for (const Tensor& y : f(in)) result.push_back(mul(y, y));
    return result;
  };
  const GradcheckResult first = gradcheck(squared, inputs), second = gradgradcheck(squared, inputs);
  EXPECT_TRUE(first.ok) << first.message;
  EXPECT_TRUE(second.ok) << second.message;
}
#define EXPECT_GRADIENTS(expression, ...) \
  expect_gradients([&](const TensorList& in) -> TensorList { return expression; }, {__VA_ARGS__})

// ---- x[indices] --------------------------------------------------------------------------------

TEST(Index, ResultDimensionsStandWhereTorchPutsThem) {
  const Tensor x = counting({2, 3, 4});
  const Tensor none;
  EXPECT_EQ(index(x, {list({1, 0}), none, list({3, 0})}).to_vector(),
            (Values{15, 19, 23, 0, 4, 8}));
  EXPECT_EQ(index(x, {none, list({2, 0}), list({1, -1})}).to_vector(), (Values{9, 3, 21, 15}));
  const Tensor column = view(list({1, 0}), {2, 1});
  EXPECT_EQ(index(x, {column, list({0, 2})}).to_vector(),
            (Values{12, 13, 14, 15, 20, 21, 22, 23, 0, 1, 2, 3, 8, 9, 10, 11}));
  const Tensor square = view(list({0, -1, 2, 1}), {2, 2});
  EXPECT_EQ(index(x, {none, square}).shape(), Shape({2, 2, 2, 4}));
  EXPECT_EQ(index(x, {none, square}).to_vector()[4], 8);
}

TEST(Index, MasksStandForTheirCoordinates) {
  const Tensor x = counting({2, 3, 4});
  const Tensor places = view(mask({1, 0, 1, 0, 0, 1}), {2, 3});
  EXPECT_EQ(index(x, {places}).to_vector(), (Values{0, 1, 2, 3, 8, 9, 10, 11, 20, 21, 22, 23}));
  EXPECT_EQ(index(x, {Tensor(), mask({1, 0, 1}), list({0, 3})}).to_vector(),
            (Values{0, 11, 12, 23}));
  EXPECT_EQ(index(x, {mask({1, 1}), Tensor(), list({0, 3})}).to_vector(),
            (Values{0, 4, 8, 15, 19, 23}));
  EXPECT_EQ(index(x, {mask({0, 0})}).shape(), Shape({0, 3, 4}));
  EXPECT_THROW(index(x, {mask({1, 0, 1})}), ShapeError);
  EXPECT_THROW(index(counting({3}), {list({0}), mask({1, 0, 1})}), ShapeError);  // too many
  EXPECT_EQ(masked_select(counting({2, 3}), mask({1, 0, 1})).to_vector(), (Values{0, 2, 3, 5}));
  EXPECT_EQ(masked_select(counting({2, 1}), view(mask({1, 0, 1}), {1, 3})).to_vector(),
            (Values{0, 0, 1, 1}));
}

TEST(Index, PutWritesTheLastOfEqualPlacesAndAddsInOrder) {
  const Tensor x = zeros({3, 2});
  const Tensor rows = list({1, -1, 1}), values = counting({3, 2});
  EXPECT_EQ(index_put(x, {rows}, values).to_vector(), (Values{0, 0, 4, 5, 2, 3}));
  EXPECT_EQ(index_put(x, {rows}, values, true).to_vector(), (Values{0, 0, 4, 6, 2, 3}));
  EXPECT_EQ(index_put(x, {Tensor(), list({1})}, tensor({7})).to_vector(),
            (Values{0, 7, 0, 7, 0, 7}));
  EXPECT_EQ(
      index_put(counting({2, 2, 2}), {list({0}), Tensor(), list({1})}, full({}, 9)).to_vector(),
      (Values{0, 9, 2, 9, 4, 5, 6, 7}));
  EXPECT_EQ(x.to_vector(), Values(6, 0)) << "x itself stays";
  EXPECT_THROW(index_put(x, {rows}, counting({4, 2})), ShapeError);
  EXPECT_THROW(index_put(x, {rows}, counting({3, 2}, kF64)), DTypeError);
}

TEST(Index, PutInPlaceWritesAnyLayoutAndKeepsGradientsRight) {
  const Tensor x = transpose(zeros({2, 3}), 0, 1);
  index_put_(x, {list({2, 0})}, counting({2, 2}));
  EXPECT_EQ(x.to_vector(), (Values{2, 3, 0, 0, 0, 1}));
  const Tensor self = counting({4});
  index_put_(self, {list({1, 2, 3})}, narrow(self, 0, 0, 3));
  EXPECT_EQ(self.to_vector(), (Values{0, 0, 1, 2})) << "values lie in x itself";

  const Tensor a = leaf({3, 2}), b = leaf({2}, 2);
  const auto put = [](const TensorList& in, bool accumulate) {
    const Tensor y = mul(in[0], Scalar(2));
    index_put_(y, {list({1, 1, 0})}, in[1], accumulate);
    return TensorList{y};
  };
  // Equal places are written by equal values: the gradient is then defined.
  expect_gradients([&](const TensorList& in) { return put(in, true); }, {a, b});
  const Tensor c = ones({3}).set_requires_grad(), d = ones({2}).set_requires_grad();
  const Tensor y = mul(c, Scalar(2));
  index_put_(y, {list({2, 0})}, d);
  y.backward(tensor({1, 2, 3}));
  EXPECT_EQ(c.grad().to_vector(), (Values{0, 4, 0}));
  EXPECT_EQ(d.grad().to_vector(), (Values{3, 1}));
  EXPECT_THROW(index_put_(c, {list({0})}, ones({})), AutogradError);
}

TEST(Index, GradientsOfAnyOrderAreRight) {
  const Tensor x = leaf({3, 2, 4}), v = leaf({2, 4}, 2);
  EXPECT_GRADIENTS({index(in[0], {list({2, 0, 2})})}, x);
  EXPECT_GRADIENTS({index(in[0], {list({2, 0}), Tensor(), list({1, 1})})}, x);
  EXPECT_GRADIENTS({index(in[0], {mask({1, 0, 1})})}, x);
  EXPECT_GRADIENTS({masked_select(in[0], gt(detach(in[0]), 0))}, x);
  EXPECT_GRADIENTS({index_put(in[0], {list({2, 0})}, in[1])}, x, v);
  EXPECT_GRADIENTS({index_put(in[0], {list({2, 2})}, in[1], true)}, x, v);
  EXPECT_GRADIENTS({index_put(in[0], {list({1}), Tensor(), list({3})}, select(in[1], 1, 0))}, x, v);
  EXPECT_GRADIENTS({index_select(in[0], 1, list({1, 1, 0}))}, x);
  EXPECT_GRADIENTS({index_add(in[0], 1, list({1, 1}), expand(unsqueeze(in[1], 0), {3, 2, 4}))}, x,
                   v);
  EXPECT_GRADIENTS({tril(in[0], -1)}, x);
  EXPECT_GRADIENTS({triu(in[0], 1)}, x);
}

// ---- gather and scatter ------------------------------------------------------------------------

TEST(Scatter, FollowsTheOrderOfTheIndexForAnyNumberOfThreads) {
  const int64_t n = 5000;
  const Tensor places = randint(0, 7, {n, 40}, kI64, RandomStream{1, 1});
  const Tensor source = randn({n, 40}, {}, RandomStream{1, 2});
  const int threads = num_threads();
  TensorList results[2];
  for (int i = 0; i < 2; ++i) {
    set_num_threads(i == 0 ? 1 : 3);
    results[i] = {scatter(zeros({7, 40}), 0, places, source),
                  scatter_add(zeros({7, 40}), 0, places, source),
                  scatter_add(zeros({n, 7}), 1, remainder(places, 7), source),
                  index_add(zeros({7, 40}), 0, contiguous(select(places, 1, 0)), source),
                  index_put(zeros({7, 40}), {contiguous(select(places, 1, 0))}, source)};
  }
  set_num_threads(threads);
  for (size_t i = 0; i < results[0].size(); ++i) {
    EXPECT_EQ(results[0][i].to_vector(), results[1][i].to_vector()) << i;
  }
  const Values last = source.to_vector(), written = results[0][0].to_vector();
  const auto where = places.to_vector<int64_t>();
  for (size_t column = 0; column < 40; ++column) {
    Values expected(7, 0);
    for (size_t row = 0; row < static_cast<size_t>(n); ++row) {
      expected[static_cast<size_t>(where[row * 40 + column])] = last[row * 40 + column];
    }
    for (size_t k = 0; k < 7; ++k) ASSERT_EQ(written[k * 40 + column], expected[k]);
  }
}

TEST(Scatter, SixteenBitSumsAreRoundedOnce) {
  // 256 + 1 is 256 in bf16: summing in bf16 would stay there.
  const Tensor places = zeros({300}, {.dtype = kI64});
  const Tensor ones_16 = ones({300}, {.dtype = kBF16});
  const Tensor start = full({1}, 256, {.dtype = kBF16});
  EXPECT_EQ(scatter_add(start, 0, places, ones_16).item(), 556);
  EXPECT_EQ(index_add(start, 0, places, ones_16).item(), 556);
  EXPECT_EQ(index_put(start, {places}, ones_16, true).item(), 556);
}

TEST(Scatter, TheIndexMayBeSmallerThanXAndTheSource) {
  const Tensor x = counting({3, 4});
  EXPECT_EQ(gather(x, 0, view(list({2, 0}), {1, 2})).to_vector(), (Values{8, 1}));
  EXPECT_EQ(gather(x, 1, view(list({3, 0}), {2, 1})).to_vector(), (Values{3, 4}));
  EXPECT_EQ(scatter(zeros({2, 3}), 1, view(list({2}), {1, 1}), counting({2, 2})).to_vector(),
            Values(6, 0));
  EXPECT_EQ(scatter(zeros({3}), 0, list({1, 2}), 4).to_vector(), (Values{0, 4, 4}));
  EXPECT_EQ(gather(full({}, 3), 0, list({0, 0})).to_vector(), (Values{3, 3}));
  EXPECT_THROW(gather(x, 1, zeros({4, 1}, {.dtype = kI64})), ShapeError);
  EXPECT_THROW(gather(x, 1, list({0})), ShapeError);
  EXPECT_THROW(scatter(x, 0, zeros({2, 2}, {.dtype = kI64}), ones({1, 2})), ShapeError);
  EXPECT_THROW(scatter_add(x, 0, zeros({1, 2}, {.dtype = kI64}), ones({1, 2}, {.dtype = kF64})),
               DTypeError);
}

TEST(Scatter, GradientsOfAnyOrderAreRight) {
  const Tensor x = leaf({3, 4}), s = leaf({3, 3}, 2);
  const Tensor unique = view(list({0, 3, 1, 2, 1, 0}), {2, 3});
  const Tensor repeated = view(list({0, 0, 1, 2, 2, 2}), {2, 3});
  EXPECT_GRADIENTS({gather(in[0], 1, repeated)}, x);
  EXPECT_GRADIENTS({gather(in[0], 0, repeated)}, x);
  // An element and a list of one dimension.
  const Tensor element = tensor({1.5}, kF64).view({}).clone().set_requires_grad();
  const Tensor place = list({2}).view({}), origin = list({0}).view({});
  EXPECT_GRADIENTS({gather(in[0], 0, list({0, 0, 0}))}, element);
  EXPECT_GRADIENTS({gather(in[0], 0, place)}, leaf({3}));
  EXPECT_GRADIENTS({gather(in[0], 0, origin)}, element);
  EXPECT_EQ(gather(leaf({3}), 0, place).shape(), Shape{});
  EXPECT_GRADIENTS({scatter(in[0], 1, unique, in[1])}, x, s);
  EXPECT_GRADIENTS({scatter(in[0], 1, unique, 1.5)}, x);
  EXPECT_GRADIENTS({scatter_add(in[0], 1, repeated, in[1])}, x, s);
  EXPECT_GRADIENTS({scatter_add(in[0], 0, repeated, in[1])}, x, s);
}

// ---- Errors and meta ---------------------------------------------------------------------------

TEST(Index, AnIndexOutOfRangeIsNamedWithItsPositionAndRange) {
  const Tensor x = counting({3, 4});
  const Tensor bad = view(list({0, 1, 2, 3}), {2, 2});
  EXPECT_EQ(message_of<IndexError>([&] { gather(x, 0, bad); }),
            "gather: index 3 at position [1, 1] is outside [0, 3); check where the indices come "
            "from");
  EXPECT_NE(message_of<IndexError>([&] { scatter_add(x, 0, bad, x); }).find("scatter_add: index 3"),
            std::string::npos);
  EXPECT_NE(message_of<IndexError>([&] {
              index_select(x, 0, list({0, -1}));
            }).find("index_select: index -1 at position [1] is outside [0, 3)"),
            std::string::npos);
  EXPECT_NE(message_of<IndexError>([&] {
              index(x, {Tensor(), list({0, -5})});
            }).find("index: index -5 at position [1] is outside [-4, 4)"),
            std::string::npos);
  EXPECT_NE(message_of<IndexError>([&] {
              index_add(x, 0, list({7}), ones({1, 4}));
            }).find("index_add: index 7"),
            std::string::npos);
  EXPECT_NE(message_of<IndexError>([&] {
              embedding(view(list({0, 9}), {1, 2}), x);
            }).find("embedding: index 9 at position [0, 1] is outside [0, 3)"),
            std::string::npos);
  EXPECT_NE(message_of<IndexError>([&] {
              one_hot(list({0, 3}), 3);
            }).find("one_hot: index 3"),
            std::string::npos);
  EXPECT_THROW(gather(x, 0, zeros({1, 4})), DTypeError);
  EXPECT_THROW(index(x, {list({0}), list({0}), list({0})}), ShapeError);
}

TEST(Index, MetaTensorsHaveShapesAndDataDependentOnesAreRefused) {
  const Tensor x = empty({3, 4}, {.device = kMeta});
  const Tensor places = empty({2, 4}, {.dtype = kI64, .device = kMeta});
  const Tensor row = empty({5}, {.dtype = kI64, .device = kMeta});
  EXPECT_EQ(gather(x, 0, places).shape(), Shape({2, 4}));
  EXPECT_EQ(index_select(x, 1, row).shape(), Shape({3, 5}));
  EXPECT_EQ(index(x, {row}).shape(), Shape({5, 4}));
  EXPECT_EQ(index(x, {row, row}).shape(), Shape({5}));
  // Each of several is looked at.
  const Tensor real = empty({5}, {.device = kMeta});
  EXPECT_THROW(index(x, {real, row}), DTypeError);
  EXPECT_THROW(index(x, {row, real}), DTypeError);
  EXPECT_THROW(index(x, {row, empty({4}, {.dtype = kI64, .device = kMeta})}), ShapeError);
  EXPECT_EQ(embedding(row, x).shape(), Shape({5, 4}));
  EXPECT_TRUE(tril(x).is_meta());
  EXPECT_THROW(nonzero(x), DeviceError);
  EXPECT_THROW(bincount(row), DeviceError);
  EXPECT_THROW(one_hot(row), DeviceError);
  EXPECT_THROW(masked_select(x, empty({3, 4}, {.dtype = kBool, .device = kMeta})), DeviceError);
}

// ---- Masks and counts --------------------------------------------------------------------------

TEST(Index, CountsAndCoordinatesAreTorchs) {
  EXPECT_EQ(nonzero(view(tensor({0, 2, 0, -1, 0, 0}), {2, 3})).to_vector(), (Values{0, 1, 1, 0}));
  EXPECT_EQ(nonzero(full({}, 3)).shape(), Shape({1, 0}));
  EXPECT_EQ(nonzero(zeros({0, 2})).shape(), Shape({0, 2}));
  const Tensor many = eq(remainder(arange(100000), 3), 0);
  EXPECT_EQ(nonzero(many).to_vector(), arange(0, 100000, 3).to_vector());
  EXPECT_EQ(bincount(list({1, 3, 1})).to_vector(), (Values{0, 2, 0, 1}));
  EXPECT_EQ(bincount(list({1, 3, 1}), tensor({0.5, 1, 2}), 5).to_vector(),
            (Values{0, 2.5, 0, 1, 0}));
  EXPECT_EQ(bincount(list({1}), tensor({1}, kBF16)).dtype(), kF64);
  EXPECT_EQ(one_hot(list({2, 0})).to_vector(), (Values{0, 0, 1, 1, 0, 0}));
  EXPECT_EQ(tril(counting({2, 3}), 1).to_vector(), (Values{0, 1, 0, 3, 4, 5}));
  EXPECT_EQ(triu(counting({2, 3}), 1).to_vector(), (Values{0, 1, 2, 0, 0, 5}));
  EXPECT_EQ(tril(counting({2, 3}), -5).to_vector(), Values(6, 0));
  EXPECT_THROW(bincount(list({-1})), ValueError);
  EXPECT_THROW(tril(counting({3})), ShapeError);
}

// ---- Embedding and rotary positions ------------------------------------------------------------

TEST(Embedding, BackwardAddsRowsInOrderForAnyNumberOfThreads) {
  const Tensor index = randint(0, 50, {3000}, kI64, RandomStream{1, 1});
  const Tensor grad = randn({3000, 70}, {}, RandomStream{1, 2});
  const int threads = num_threads();
  set_num_threads(1);
  const Tensor one = kernels::embedding_backward(grad, index, 60, 4);
  set_num_threads(3);
  const Tensor three = kernels::embedding_backward(grad, index, 60, 4);
  set_num_threads(threads);
  EXPECT_EQ(one.to_vector(), three.to_vector());
  std::vector<float> expected(60 * 70, 0.0f);
  const auto rows = index.to_vector<int64_t>();
  const auto values = grad.to_vector<float>();
  for (size_t i = 0; i < 3000; ++i) {
    if (rows[i] == 4) continue;
    for (size_t c = 0; c < 70; ++c) {
      expected[static_cast<size_t>(rows[i]) * 70 + c] += values[i * 70 + c];
    }
  }
  EXPECT_EQ(one.to_vector<float>(), expected) << "f32 sums in the order of the index, bit by bit";
}

TEST(Embedding, BackwardAddsOntoWhatIsThereWithOneRounding) {
  const Tensor index = randint(0, 50, {3000}, kI64, RandomStream{1, 1});
  for (const DType dtype : {kF32, kBF16, kF16}) {
    const Tensor grad = randn({3000, 70}, {}, RandomStream{1, 2}).to(dtype);
    const Tensor before = randn({60, 70}, {}, RandomStream{1, 3}).to(dtype);
    const Tensor onto = before.clone();
    EXPECT_TRUE(kernels::embedding_backward(grad, index, 60, 4, onto).is(onto));
    const Tensor rows = kernels::embedding_backward(grad.to(kF64), index, 60, 4);
    const Tensor expected = add(before.to(kF64), rows);
    const double error = sub(onto.to(kF64), expected).div(add(abs(expected), 1)).abs().max().item();
    EXPECT_LT(error, epsilon_of(dtype) + 60 * epsilon_of(kF32)) << name_of(dtype);
    // Rows without a term keep their bits, and so does that of padding_idx.
    for (const int64_t row : {4, 50, 59}) {
      EXPECT_EQ(onto.select(0, row).to_vector(), before.select(0, row).to_vector());
    }
  }
}

// As the embedding and the head of a language model have.
TEST(Embedding, ASharedWeightsGradientIsOneTensorAndNobodyElsesIsWritten) {
  const Tensor places = view(list({1, 4, 1, 0}), {2, 2});
  const Tensor c = leaf({5, 3}, 2).detach(), d = leaf({2, 2, 3}, 3).detach();
  const Tensor rows = kernels::embedding_backward(d, places, 5, -1);
  const Tensor weight = leaf({5, 3}), other = leaf({5, 3}, 4);
  const auto loss = [&] {
    // Backward goes the other way: the sum gives both one gradient, which `later` still waits for
    // when the rows are added to weight's.
    const Tensor later = mul(other, 1), picked = embedding(places, weight);
    return sum(mul(picked, d)) + sum(mul(weight + later, c));
  };
  loss().backward();
  EXPECT_EQ(other.grad().to_vector(), c.to_vector());
  EXPECT_EQ(weight.grad().to_vector(), add(c, rows).to_vector());
  loss().backward();
  EXPECT_EQ(weight.grad().to_vector(), mul(add(c, rows), 2).to_vector());
  const Tensor alone = leaf({5, 3});
  const Tensor picked = embedding(places, alone);
  (sum(mul(picked, d)) + sum(mul(alone, c))).backward();
  EXPECT_EQ(alone.grad().to_vector(), add(c, rows).to_vector());
  EXPECT_GRADIENTS((TensorList{embedding(places, in[0]), mul(in[0], in[0])}), weight);
}

TEST(Embedding, AddsOtherRowsInOneOp) {
  const Tensor places = view(list({1, 4, 1, 0}), {2, 2}), weight = leaf({5, 3});
  for (const Shape& shape :
       {Shape{3}, Shape{2, 3}, Shape{1, 2, 3}, Shape{2, 2, 3}, Shape{2, 1, 3}, Shape{1}, Shape{}}) {
    const Tensor other = leaf(shape, 2);
    EXPECT_EQ(embedding_add(places, weight, other).to_vector(),
              add(embedding(places, weight), other).to_vector());
    EXPECT_GRADIENTS({embedding_add(places, in[0], in[1])}, weight, other);
  }
  const Tensor table = ones({5, 3}).set_requires_grad();
  embedding_add(places, table, ones({3}), -4).backward(ones({2, 2, 3}));
  EXPECT_EQ(table.grad().to_vector(), (Values{1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1}));
  EXPECT_EQ(embedding_add(places, weight.to(kBF16), leaf({3})).dtype(), kF64) << "as + has it";
  EXPECT_THROW(embedding_add(places, weight, leaf({4})), ShapeError);
  EXPECT_THROW(embedding_add(places, weight, leaf({3, 2, 2, 3})), ShapeError);
  EXPECT_THROW(embedding_add(list({5}), weight, leaf({3})), IndexError);
}

TEST(Embedding, GradientsOfAnyOrderAreRightAndThePaddingRowHasNone) {
  const Tensor weight = leaf({5, 3}), places = view(list({1, 4, 1, 0}), {2, 2});
  EXPECT_GRADIENTS({embedding(places, in[0])}, weight);
  const Tensor table = ones({5, 3}).set_requires_grad();
  embedding(places, table, -4).backward(ones({2, 2, 3}));
  EXPECT_EQ(table.grad().to_vector(), (Values{1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1}));
  const Tensor wide = leaf({5, 3}), upstream = leaf({2, 2, 3}, 2);
  const Tensor product = sum(mul(embedding(places, wide, 1), upstream));
  const Tensor first = grad(product, TensorList{wide}, {}, {.create_graph = true})[0];
  const Tensor second = grad(sum(first), TensorList{upstream})[0];
  EXPECT_EQ(second.to_vector(), (Values{0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1}));
  EXPECT_THROW(embedding(places, table, 5), IndexError);
  EXPECT_THROW(embedding(places, ones({5})), ShapeError);
}

TEST(Rotary, TurnsEachPairByItsAngleInBothLayouts) {
  const Tensor angles = leaf({3, 2}).detach(), cosines = cos(angles), sines = sin(angles);
  const Tensor x = leaf({2, 3, 4}, 2);
  const auto a = [&](bool interleaved) {
    return interleaved ? slice(x, 2, 0, {}, 2) : narrow(x, 2, 0, 2);
  };
  const auto b = [&](bool interleaved) {
    return interleaved ? slice(x, 2, 1, {}, 2) : narrow(x, 2, 2, 2);
  };
  for (const bool interleaved : {false, true}) {
    const Tensor first = sub(mul(a(interleaved), cosines), mul(b(interleaved), sines));
    const Tensor second = add(mul(a(interleaved), sines), mul(b(interleaved), cosines));
    const Tensor expected =
        interleaved ? flatten(stack({first, second}, -1), 2) : cat({first, second}, 2);
    const Values found = rotary_embedding(x, cosines, sines, interleaved).to_vector();
    const Values wanted = expected.to_vector();
    for (size_t i = 0; i < wanted.size(); ++i) EXPECT_NEAR(found[i], wanted[i], 1e-15);
  }
}

TEST(Rotary, TakesAnyLayoutAndNarrowTypes) {
  const Tensor x = randn({2, 5, 3, 8}, {}, RandomStream{1, 1});  // [B, T, H, C]
  const Tensor angles = randn({5, 4}, {}, RandomStream{1, 2});
  const Tensor heads = transpose(x, 1, 2);
  const Values expected = rotary_embedding(contiguous(heads), cos(angles), sin(angles)).to_vector();
  EXPECT_EQ(rotary_embedding(heads, cos(angles), sin(angles)).to_vector(), expected);
  const Tensor odd = transpose(contiguous(transpose(heads, 2, 3)), 2, 3);
  EXPECT_EQ(rotary_embedding(odd, cos(angles), sin(angles)).to_vector(), expected);
  const Values narrow_type =
      rotary_embedding(to(heads, kBF16), cos(angles), sin(angles)).to_vector();
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(narrow_type[i], expected[i], 4 * 0x1p-8 * 4);
  }
  EXPECT_THROW(rotary_embedding(ones({2, 3}), ones({1}), ones({1})), ShapeError);
  EXPECT_THROW(rotary_embedding(ones({2, 4}), ones({3, 2}), ones({3, 2})), ShapeError);
}

TEST(Rotary, GradientsOfAnyOrderAreRight) {
  const Tensor x = leaf({2, 3, 4}), c = leaf({3, 2}, 2), s = leaf({3, 2}, 3);
  EXPECT_GRADIENTS({rotary_embedding(in[0], in[1], in[2])}, x, c, s);
  EXPECT_GRADIENTS({rotary_embedding(in[0], in[1], in[2], true)}, x, c, s);
}

}  // namespace
}  // namespace tessera::test_index
