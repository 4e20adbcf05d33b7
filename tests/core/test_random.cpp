// Creation and random numbers: known answers, independence of threads, layouts and instruction
// sets, and statistics with bounds of five standard deviations.
// ctest own program: it calls the variants of kernels by name
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/context.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/random/random_fill.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::test_random {
namespace {

using Values = std::vector<double>;

constexpr RandomStream kStream{7, 3};

// ---- Creation ----------------------------------------------------------------------------------

TEST(Creation, ArangeHasTorchsDTypesSizesAndValues) {
  EXPECT_EQ(arange(4).dtype(), kI64);
  EXPECT_EQ(arange(0, 1.0).dtype(), kF32);
  EXPECT_EQ(arange(5, -4, -2).to_vector(), (Values{5, 3, 1, -1, -3}));
  EXPECT_EQ(arange(1, 2.5, 0.5).to_vector(), (Values{1, 1.5, 2}));
  EXPECT_EQ(arange(3, 3).numel(), 0);
  EXPECT_EQ(arange(0.9, 5.1, 2, kI32).to_vector(), (Values{0, 2, 4}));
  EXPECT_EQ(arange(-0.5, 5.5, 1.5, kI64).to_vector(), (Values{0, 1, 2, 3}));
  EXPECT_EQ(arange(0, 1.2, 0.3, kF16).to_vector(),
            (Values{0, 0.300048828125, 0.60009765625, 0.89990234375}));
  EXPECT_EQ(arange(int64_t{1} << 62, (int64_t{1} << 62) + 2).to_vector<int64_t>(),
            (std::vector<int64_t>{int64_t{1} << 62, (int64_t{1} << 62) + 1}));
  EXPECT_EQ(arange(0, 5, 1, kI32, kMeta).shape(), Shape({5}));
  EXPECT_THROW(arange(0, 5, 0), ValueError);
  EXPECT_THROW(arange(0, 5, -1), ValueError);
  EXPECT_THROW(arange(0, HUGE_VAL), ValueError);
}

TEST(Creation, LinspaceCountsEachHalfFromItsEnd) {
  EXPECT_EQ(linspace(3, 10, 5).to_vector(), (Values{3, 4.75, 6.5, 8.25, 10}));
  EXPECT_EQ(linspace(3, 10, 1).to_vector(), (Values{3}));
  EXPECT_EQ(linspace(3, 10, 0).numel(), 0);
  EXPECT_EQ(linspace(-1, 1, 5, {.dtype = kI64}).to_vector(), (Values{-1, 0, 0, 0, 1}));
  const Values values = linspace(-3.3, 7.7, 1000).to_vector();
  EXPECT_EQ(values.front(), static_cast<float>(-3.3));
  EXPECT_EQ(values.back(), static_cast<float>(7.7));
  EXPECT_THROW(linspace(0, 1, -1), ValueError);
}

TEST(Creation, EyeMayHaveMoreColumnsThanRows) {
  EXPECT_EQ(eye(2, 3).to_vector(), (Values{1, 0, 0, 0, 1, 0}));
  EXPECT_EQ(eye(2, {}, {.dtype = kBool}).to_vector<bool>(),
            (std::vector<bool>{true, false, false, true}));
  EXPECT_EQ(full_like(eye(2, 3, {.dtype = kBF16}), 1.5).dtype(), kBF16);
}

// ---- Philox ------------------------------------------------------------------------------------

// The vectors that Random123 publishes (kat_vectors, philox4x32 10).
TEST(Philox, GivesThePublishedNumbers) {
  using Block = std::array<uint32_t, 4>;
  EXPECT_EQ(philox4x32(0, 0, 0), (Block{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint64_t ones = ~uint64_t{0};
  EXPECT_EQ(philox4x32(ones, ones, ones), (Block{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox4x32(0x299f31d0a4093822, 0x0370734413198a2e, 0x85a308d3243f6a88),
            (Block{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Philox, TheVectorLoopsEqualTheScalarFunction) {
  const uint64_t first = 0xfffffffa;  // the block number passes 2^32 on the way
  for (const int64_t count : {1, 3, 8, 16, 17, 37}) {
    std::vector<uint32_t> bits(static_cast<size_t>(4 * count) + 1, 0x5a5a5a5a);
    TS_SIMD_CALL(philox_range, bits.data(), kStream, first, count);
    for (int64_t i = 0; i < count; ++i) {
      const auto block = philox4x32(kStream.seed, kStream.stream, first + static_cast<uint64_t>(i));
      for (size_t lane = 0; lane < 4; ++lane) {
        ASSERT_EQ(bits[static_cast<size_t>(4 * i) + lane], block[lane]) << count << " " << i;
      }
    }
    EXPECT_EQ(bits.back(), 0x5a5a5a5a) << "wrote beyond " << count << " blocks";
  }
}

#if defined(TESSERA_WITH_V4)
TEST(Philox, EveryInstructionSetGivesTheSameBits) {
  if (kernels::cpu_isa() < kernels::Isa::kV4) GTEST_SKIP() << "kernels run without AVX-512 here";
  std::vector<float> a(10000), b(10000);
  for (const int64_t first : {0, 3}) {  // at a group of four, and within one
    kernels::v3::normal_range(a.data(), 0, 10000, kStream, first, 0.5, 2);
    kernels::v4::normal_range(b.data(), 0, 10000, kStream, first, 0.5, 2);
    EXPECT_EQ(a, b) << first;
    kernels::v3::uniform_range(a.data(), 0, 10000, kStream, first, -1, 3);
    kernels::v4::uniform_range(b.data(), 0, 10000, kStream, first, -1, 3);
    EXPECT_EQ(a, b) << first;
  }
}
#endif

// ---- Streams -----------------------------------------------------------------------------------

TEST(Random, BitsDoNotDependOnThreadsOrLayout) {
  const auto draw = [](int threads) {
    set_num_threads(threads);
    TensorList drawn = {rand({100003}, {}, kStream), randn({100003}, {.dtype = kBF16}, kStream),
                        randint(-5, 1000, {70001}, kI32, kStream),
                        dropout(ones({70001}), 0.3, true, kStream)};
    const Tensor transposed = transpose(empty({300, 501}), 0, 1);
    drawn.push_back(contiguous(normal_(transposed, 1, 2, kStream)));
    return drawn;
  };
  const int threads = num_threads();
  const TensorList one = draw(1), three = draw(3);
  set_num_threads(threads);
  for (size_t i = 0; i < one.size(); ++i) EXPECT_EQ(one[i].to_vector(), three[i].to_vector()) << i;
  EXPECT_EQ(one[4].to_vector(), normal_(empty({501, 300}), 1, 2, kStream).to_vector());
}

TEST(Random, AnElementIsAFunctionOfItsPlaceAlone) {
  const Values longer = randn({4096}, {}, kStream).to_vector();
  for (const int64_t size : {1, 2, 3, 5, 1023, 1025}) {
    const Values values = randn({size}, {}, kStream).to_vector();
    EXPECT_TRUE(std::equal(values.begin(), values.end(), longer.begin())) << size;
  }
  const Values doubles = randn({1025}, {.dtype = kF64}, kStream).to_vector();
  const Values fewer = randn({7}, {.dtype = kF64}, kStream).to_vector();
  EXPECT_TRUE(std::equal(fewer.begin(), fewer.end(), doubles.begin()));
}

TEST(Random, APartHasTheNumbersOfTheWholeWhereverItIsCut) {
  const RandomStream stream{3, 9};
  const auto expect_parts = [&](DType dtype, const auto& fill) {
    const Tensor whole = raw::empty({70000}, dtype);
    fill(whole, 0);
    for (const int64_t first : {1, 2, 3, 4, 5, 1023, 1024, 32769}) {
      for (const int64_t length : {0, 1, 2, 7, 35000}) {
        const Tensor part = raw::empty({length}, dtype);
        fill(part, first);
        ASSERT_EQ(part.to_vector(), raw::narrow(whole, 0, first, length).to_vector())
            << dtype << ", " << length << " from " << first;
      }
    }
  };
  for (const DType dtype : {kF64, kF32, kF16, kBF16}) {
    expect_parts(dtype, [&](const Tensor& x, int64_t first) {
      kernels::random_normal(x, 1, 2, stream, first);
    });
    expect_parts(dtype, [&](const Tensor& x, int64_t first) {
      kernels::random_uniform(x, 0, 1, stream, first);
    });
  }
  for (const DType dtype : {kI64, kBool}) {
    expect_parts(dtype, [&](const Tensor& x, int64_t first) {
      kernels::random_integers(x, 0, 2, stream, first);
    });
    expect_parts(dtype, [&](const Tensor& x, int64_t first) {
      kernels::random_bernoulli(x, 0.3, stream, first);
    });
  }
}

TEST(Random, ASeedStartsTheSameStreamsAgain) {
  manual_seed(42);
  const Values a = rand({8}).to_vector(), b = rand({8}).to_vector();
  manual_seed(42);
  EXPECT_EQ(rand({8}).to_vector(), a);
  EXPECT_EQ(rand({8}).to_vector(), b);
  EXPECT_NE(a, b);
  manual_seed(43);
  EXPECT_NE(rand({8}).to_vector(), a);
}

TEST(Random, ThreadsWithoutASeedDrawNumbersOfTheirOwn) {
  std::vector<Values> drawn, seeded, named;
  for (int i = 0; i < 3; ++i) {
    std::thread([&] {
      drawn.push_back(rand({8}).to_vector());
      named.push_back(rand({8}, {}, named_random_stream("fc.weight")).to_vector());
      manual_seed(7);
      seeded.push_back(rand({8}).to_vector());
    }).join();
  }
  Context fresh;  // as the main thread's before it draws
  const ContextGuard guard(fresh);
  drawn.push_back(rand({8}).to_vector());
  for (size_t a = 0; a < drawn.size(); ++a) {
    for (size_t b = 0; b < a; ++b) EXPECT_NE(drawn[a], drawn[b]) << a << " and " << b;
  }
  EXPECT_EQ(drawn[3], rand({8}, {}, RandomStream{0, 0}).to_vector());
  manual_seed(7);
  const Values expected = rand({8}).to_vector();
  for (const Values& values : seeded) EXPECT_EQ(values, expected);
  for (const Values& values : named) EXPECT_EQ(values, named[0]);
}

// ---- Statistics --------------------------------------------------------------------------------

struct Moments {
  double mean, std;
};
Moments moments_of(const Values& values) {
  const auto n = static_cast<double>(values.size());
  const double mean = std::accumulate(values.begin(), values.end(), 0.0) / n;
  double squares = 0;
  for (const double value : values) squares += (value - mean) * (value - mean);
  return {mean, std::sqrt(squares / n)};
}

// Chi-square of equally likely bins, as standard deviations from its expectation.
double chi_square_deviation(const std::vector<int64_t>& bins) {
  const double expected =
      static_cast<double>(std::accumulate(bins.begin(), bins.end(), int64_t{0})) /
      static_cast<double>(bins.size());
  double sum = 0;
  for (const int64_t count : bins) {
    const double difference = static_cast<double>(count) - expected;
    sum += difference * difference / expected;
  }
  const double freedom = static_cast<double>(bins.size()) - 1;
  return std::abs(sum - freedom) / std::sqrt(2 * freedom);
}

constexpr int64_t kSamples = 1 << 20;

TEST(Random, UniformNumbersFillTheirRangeEvenly) {
  for (const DType dtype : {kF32, kF64, kF16, kBF16}) {
    const Values values = rand({kSamples}, {.dtype = dtype}, kStream).to_vector();
    std::vector<int64_t> bins(128);
    double correlation = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_TRUE(values[i] >= 0 && values[i] < 1) << values[i];
      ++bins[static_cast<size_t>(values[i] * 128)];
      if (i > 0) correlation += (values[i] - 0.5) * (values[i - 1] - 0.5);
    }
    EXPECT_LT(chi_square_deviation(bins), 5) << dtype;
    EXPECT_LT(std::abs(correlation), 5 * std::sqrt(kSamples) / 12) << dtype;
  }
}

TEST(Random, UniformStaysBelowItsUpperEndAfterRounding) {
  for (const DType dtype : {kF32, kF16, kBF16}) {
    const double low = 0.96875;
    const Tensor x = uniform_(empty({kSamples}, {.dtype = dtype}), low, 1, kStream);
    for (const double value : x.to_vector()) ASSERT_TRUE(value >= low && value < 1) << value;
  }
}

TEST(Random, NormalNumbersHaveTheRightMomentsAndTails) {
  for (const DType dtype : {kF32, kF64}) {
    const Values values = randn({4 * kSamples}, {.dtype = dtype}, kStream).to_vector();
    const auto n = static_cast<double>(values.size());
    const Moments moments = moments_of(values);
    EXPECT_LT(std::abs(moments.mean), 5 / std::sqrt(n)) << dtype;
    EXPECT_LT(std::abs(moments.std - 1), 5 / std::sqrt(2 * n)) << dtype;
    double fourth = 0;
    std::vector<int64_t> bins(64);
    for (const double value : values) {
      fourth += value * value * value * value / n;
      const double level = 0.5 * std::erfc(-value / std::sqrt(2.0));  // uniform if normal
      ++bins[std::min<size_t>(static_cast<size_t>(level * 64), 63)];
    }
    EXPECT_LT(std::abs(fourth - 3), 5 * std::sqrt(96 / n)) << dtype;
    EXPECT_LT(chi_square_deviation(bins), 5) << dtype;
    for (const double far : {3.0, 4.0}) {
      const double expected = n * std::erfc(far / std::sqrt(2.0));
      const auto found = static_cast<double>(std::count_if(
          values.begin(), values.end(), [&](double value) { return std::abs(value) > far; }));
      EXPECT_LT(std::abs(found - expected), 5 * std::sqrt(expected)) << dtype << " beyond " << far;
    }
  }
}

TEST(Random, NormalNumbersAreThoseOfBoxAndMuller) {
  const Values values = randn({64}, {}, kStream).to_vector();
  for (size_t i = 0; i < values.size(); i += 2) {
    const auto block = philox4x32(kStream.seed, kStream.stream, i / 4);
    const double u = (block[i % 4] + 0.5) * 0x1p-32, v = block[i % 4 + 1] * 0x1p-32;
    const double radius = std::sqrt(-2 * std::log(u)), angle = 2 * M_PI * v;
    EXPECT_NEAR(values[i], radius * std::cos(angle), 16 * 0x1p-24 * radius);
    EXPECT_NEAR(values[i + 1], radius * std::sin(angle), 16 * 0x1p-24 * radius);
  }
}

TEST(Random, IntegersCoverTheirRangeEvenly) {
  const std::vector<int64_t> values =
      randint(-3, 97, {kSamples}, kI64, kStream).to_vector<int64_t>();
  std::vector<int64_t> bins(100);
  for (const int64_t value : values) ++bins.at(static_cast<size_t>(value + 3));
  EXPECT_LT(chi_square_deviation(bins), 5);
  const auto wide = randint(INT64_MIN, INT64_MAX, {1000}, kI64, kStream).to_vector<int64_t>();
  EXPECT_GT(std::count_if(wide.begin(), wide.end(), [](int64_t v) { return v < 0; }), 400);
  EXPECT_THROW(randint(3, 3, {2}), ValueError);
}

TEST(Random, BernoulliHitsItsProbability) {
  for (const double p : {0.0, 0.3, 1.0}) {
    const Values values = bernoulli_(empty({kSamples}, {.dtype = kU8}), p, kStream).to_vector();
    const double mean = moments_of(values).mean;
    EXPECT_LE(std::abs(mean - p), 5 * std::sqrt(p * (1 - p) / kSamples)) << p;
  }
  EXPECT_THROW(bernoulli_(empty({2}), 1.5), ValueError);
}

TEST(Random, APermutationHasEveryNumberOnceInAnyPlace) {
  std::vector<int64_t> bins(10);
  for (uint64_t stream = 0; stream < 2000; ++stream) {
    std::vector<int64_t> values = randperm(10, RandomStream{1, stream}).to_vector<int64_t>();
    ++bins[static_cast<size_t>(values[4])];
    std::sort(values.begin(), values.end());
    for (size_t i = 0; i < 10; ++i) ASSERT_EQ(values[i], static_cast<int64_t>(i));
  }
  EXPECT_LT(chi_square_deviation(bins), 5);
  EXPECT_EQ(randperm(0).numel(), 0);
}

TEST(Random, MultinomialFollowsTheWeights) {
  const Tensor weights = tensor({1, 0, 3, 4, 0});
  const auto chosen = multinomial(weights, kSamples, true, kStream).to_vector<int64_t>();
  std::vector<int64_t> bins(5);
  for (const int64_t index : chosen) ++bins.at(static_cast<size_t>(index));
  EXPECT_EQ(bins[1] + bins[4], 0);
  for (const size_t i : {0, 2, 3}) {
    const double p = weights.to_vector()[i] / 8;
    EXPECT_LT(std::abs(static_cast<double>(bins[i]) - kSamples * p),
              5 * std::sqrt(kSamples * p * (1 - p)));
  }
}

TEST(Random, WithoutReplacementTheFirstIsChosenByWeightAndNoneTwice) {
  const int64_t rows = 20000;
  const Tensor weights = expand(tensor({1, 0, 3, 4}), {rows, 4});
  const auto chosen = multinomial(weights, 3, false, kStream).to_vector<int64_t>();
  std::vector<int64_t> first(4);
  for (size_t row = 0; row < static_cast<size_t>(rows); ++row) {
    std::vector<int64_t> three(chosen.begin() + static_cast<int64_t>(3 * row),
                               chosen.begin() + static_cast<int64_t>(3 * row + 3));
    ++first[static_cast<size_t>(three[0])];
    std::sort(three.begin(), three.end());
    ASSERT_EQ(three, (std::vector<int64_t>{0, 2, 3}));
  }
  EXPECT_LT(std::abs(static_cast<double>(first[3]) - rows * 0.5), 5 * std::sqrt(rows * 0.25));
}

// A product with the least number there is rounds up to it: what is behind the last positive
// weight, nothing or the next row, is not chosen.
TEST(Random, MultinomialChoosesAPositiveWeightWhereTheDrawRoundsToTheEnd) {
  const double least = std::numeric_limits<double>::denorm_min();
  const Tensor weights = tensor({least, 0, 0, least, 1, 0}, kF64).view({3, 2});
  const auto chosen = multinomial(weights, 64, true, kStream).to_vector<int64_t>();
  for (size_t i = 0; i < chosen.size(); ++i) ASSERT_EQ(chosen[i], i / 64 == 1 ? 1 : 0) << i;
}

TEST(Random, MultinomialRefusesWeightsThatAreNone) {
  EXPECT_THROW(multinomial(tensor({1, -1}), 1, true), ValueError);
  EXPECT_THROW(multinomial(tensor({1, HUGE_VAL}), 1, true), ValueError);
  EXPECT_THROW(multinomial(tensor({0, 0}), 1, true), ValueError);
  EXPECT_THROW(multinomial(tensor({0, 1}), 2, false), ValueError);
  EXPECT_THROW(multinomial(tensor({1, 1}), 3, false), ValueError);
  const Tensor large = tensor({1e308, 1e308}, kF64);  // finite, and their sum is not
  EXPECT_THROW(multinomial(large, 1, true), ValueError);
  EXPECT_NO_THROW(multinomial(large, 2, false));
  EXPECT_THROW(multinomial(tensor({1, 1}, kI64), 1, true), DTypeError);
}

// ---- Dropout -----------------------------------------------------------------------------------

TEST(Dropout, KeepsItsShareScalesItAndBackwardDrawsTheSameMask) {
  for (const DType dtype : {kF32, kF64, kBF16}) {
    const Tensor x = full({kSamples}, 2, {.dtype = dtype}).set_requires_grad();
    const Tensor y = dropout(x, 0.25, true, kStream);
    y.backward(ones({kSamples}, {.dtype = dtype}));
    const Values values = y.to_vector(), grads = x.grad().to_vector();
    const double scale = full({}, 1 / 0.75, {.dtype = dtype}).item();
    const double kept = full({}, 2 / 0.75, {.dtype = dtype}).item();
    int64_t dropped = 0;
    for (size_t i = 0; i < values.size(); ++i) {
      ASSERT_TRUE(values[i] == 0 || values[i] == kept) << values[i];
      ASSERT_EQ(grads[i], values[i] == 0 ? 0 : scale);
      dropped += values[i] == 0;
    }
    EXPECT_LT(std::abs(static_cast<double>(dropped) - kSamples * 0.25),
              5 * std::sqrt(kSamples * 0.25 * 0.75));
  }
}

TEST(Dropout, TheMaskDoesNotDependOnTheDType) {
  const auto mask = [](DType dtype) {
    return ne(dropout(ones({4099}, {.dtype = dtype}), 0.5, true, kStream), 0).to_vector();
  };
  EXPECT_EQ(mask(kF32), mask(kBF16));
  EXPECT_EQ(mask(kF32), mask(kF64));
}

// The elements of a whole that a part has, by hand: chunk `part` of `parts` in each block.
Tensor chunk_by_hand(const Tensor& whole, const DimCut& cut) {
  const int64_t length = whole.size(cut.dim) / cut.blocks, chunk = length / cut.parts;
  TensorList pieces;
  for (int64_t b = 0; b < cut.blocks; ++b) {
    pieces.push_back(whole.narrow(cut.dim, b * length + cut.part * chunk, chunk));
  }
  return cat(pieces, cut.dim);
}

TEST(Dropout, APartKeepsWhatTheWholeKeepsOfIt) {
  struct Case {
    Shape whole;
    std::vector<DimCut> cuts;
  };
  for (const DType dtype : {kF32, kF64, kBF16}) {
    for (const Case& c :
         {Case{{4, 6, 8}, {{.dim = 1, .parts = 3}}}, Case{{4, 6, 9}, {{.dim = 1, .parts = 2}}},
          Case{{5, 3, 6}, {{.dim = 2, .parts = 2}}},
          Case{{3, 2, 24}, {{.dim = 2, .blocks = 3, .parts = 4}}},
          Case{{6, 5}, {{.dim = 0, .parts = 3}}},
          Case{{2, 12, 5}, {{.dim = 1, .blocks = 2, .parts = 3}}},
          Case{{4, 6, 8}, {{.dim = 1, .parts = 2}, {.dim = 2, .parts = 2}}},
          Case{{4, 6, 70000}, {{.dim = 0, .parts = 2}, {.dim = 2, .parts = 7}}}}) {
      const Tensor x = rand(c.whole, {.dtype = dtype});
      const Tensor whole = kernels::dropout(x, 0.4, kStream);
      for (int64_t part = 0; part < 2; ++part) {
        std::vector<DimCut> cuts = c.cuts;
        Tensor own = x, expected = whole;
        for (DimCut& cut : cuts) {
          cut.part = part;
          own = chunk_by_hand(own, cut), expected = chunk_by_hand(expected, cut);
        }
        const kernels::DrawPlace place = kernels::DrawPlace::of(own.shape(), cuts);
        EXPECT_EQ(kernels::dropout(own, 0.4, kStream, place).to_vector(), expected.to_vector())
            << c.whole << ", part " << part;
      }
    }
  }
}

TEST(Dropout, TheEndsOfTheRangeAndEvaluationDrawNothing) {
  const Tensor x = tensor({1, 2, 3});
  manual_seed(1);
  EXPECT_EQ(dropout(x, 0, true).to_vector(), x.to_vector());
  EXPECT_EQ(dropout(x, 0.5, false).to_vector(), x.to_vector());
  EXPECT_EQ(dropout(x, 1, true).to_vector(), (Values{0, 0, 0}));
  EXPECT_EQ(random_state().next_stream, 0u);
  EXPECT_THROW(dropout(x, 1.1), ValueError);
  EXPECT_THROW(dropout(tensor({1, 2}, kI64)), DTypeError);
}

TEST(Random, WritingRandomNumbersEndsTheHistory) {
  const Tensor x = ones({3}).set_requires_grad();
  EXPECT_THROW(uniform_(x, 0, 1), AutogradError);
  const Tensor y = mul(x, Scalar(2));
  normal_(y, 0, 1);
  y.backward(ones({3}));
  EXPECT_TRUE(!x.grad().defined() || x.grad().to_vector() == Values({0, 0, 0}));
  NoGradGuard no_grad;
  uniform_(x, 2, 3);
  EXPECT_GE(x.to_vector()[0], 2);
}

}  // namespace
}  // namespace tessera::test_random
