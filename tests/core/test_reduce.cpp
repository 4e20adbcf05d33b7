#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/gradcheck.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::test_reduce {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Tensor filled(const Shape& shape, DType dtype = kF32, int seed = 1) {
  std::vector<double> values(static_cast<size_t>(numel_of(shape)));
  uint64_t h = static_cast<uint64_t>(seed) * 0x9e3779b97f4a7c15u;
  for (double& v : values) {
    h = h * 6364136223846793005u + 1442695040888963407u;
    v = is_floating(dtype) ? static_cast<double>(h >> 11) * 0x1p-52 - 1
                           : static_cast<double>(h >> 60);
    if (dtype == kBool) v = v < 12;
  }
  return tensor(std::span<const double>(values), shape, dtype);
}
bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() &&
         std::memcmp(a.data(), b.data(), static_cast<size_t>(a.nbytes())) == 0;
}
// The same bits with one and with two threads.
Tensor on_any_threads(const std::function<Tensor()>& f) {
  const int threads = num_threads();
  set_num_threads(1);
  const Tensor one = f();
  set_num_threads(2);
  const Tensor two = f();
  set_num_threads(threads);
  EXPECT_TRUE(same_bits(one, two)) << "the result depends on the thread count";
  return two;
}

// The groups of elements that reduce to one output, in row-major order of the outputs.
std::vector<std::vector<double>> groups_of(const Tensor& x, const Shape& dims) {
  const Shape shape = reduced_shape(x.shape(), dims, true);
  std::vector<std::vector<double>> groups(static_cast<size_t>(numel_of(shape)));
  const Shape strides = contiguous_strides(shape);
  const std::vector<double> values = x.to_vector<double>();
  Shape index = Shape::filled(x.dim(), 0);
  for (double v : values) {
    int64_t output = 0;
    for (int d = 0; d < x.dim(); ++d) output += shape[d] == 1 ? 0 : index[d] * strides[d];
    groups[static_cast<size_t>(output)].push_back(v);
    for (int d = x.dim() - 1; d >= 0; --d) {
      if (++index[d] < x.shape()[d]) break;
      index[d] = 0;
    }
  }
  return groups;
}

struct Layout {
  std::string name;
  std::function<Tensor(DType)> make;
};
const std::vector<Layout>& layouts() {
  static const std::vector<Layout> list = {
      {"matrix",
       [](DType d) {
         return filled({37, 53}, d);
       }},
      {"wide matrix",
       [](DType d) {
         return filled({5, 3001}, d);
       }},
      {"tall matrix",
       [](DType d) {
         return filled({3001, 5}, d);
       }},
      {"many columns",
       [](DType d) {
         return filled({130, 1500}, d);
       }},
      {"transposed",
       [](DType d) {
         return raw::transpose(filled({41, 67}, d), 0, 1);
       }},
      {"four dimensions",
       [](DType d) {
         return filled({3, 5, 7, 11}, d);
       }},
      {"permuted",
       [](DType d) {
         return raw::permute(filled({3, 5, 7, 11}, d), {2, 0, 3, 1});
       }},
      {"sliced",
       [](DType d) {
         return raw::slice(filled({9, 40}, d), 1, 3, 37, 2);
       }},
      {"narrowed rows",
       [](DType d) {
         return raw::narrow(filled({50, 20}, d), 1, 2, 9);
       }},
      {"expanded",
       [](DType d) {
         return raw::expand(filled({6, 1, 9}, d), {6, 8, 9});
       }},
      {"one element",
       [](DType d) {
         return filled({1, 1}, d);
       }},
      {"scalar", [](DType d) { return filled({}, d); }},
      {"long vector", [](DType d) { return filled({200003}, d); }},
  };
  return list;
}
// Every subset of the dimensions, the empty one left out (which means all).
std::vector<Shape> subsets(int dims) {
  std::vector<Shape> list;
  for (int bits = 1; bits < (1 << dims); ++bits) {
    Shape subset;
    for (int d = 0; d < dims; ++d) {
      if (bits >> d & 1) subset.push_back(d);
    }
    list.push_back(subset);
  }
  if (dims == 0) list.push_back({});
  return list;
}

struct Case {
  std::string name;
  std::function<Tensor(const Tensor&, const Shape&)> run;
  std::function<double(const std::vector<double>&)> reference;
  // Terms may cancel: the error is measured against the sum or mean of absolute values.
  bool reads_signs;
};
double sum_of(const std::vector<double>& v, const std::function<double(double)>& f) {
  long double sum = 0;
  for (double x : v) sum += static_cast<long double>(f(x));
  return static_cast<double>(sum);
}
const std::vector<Case>& cases() {
  using Values = std::vector<double>;
  static const std::vector<Case> list = {
      {"sum", [](auto& x, auto& d) { return kernels::sum(x, d, false, x.dtype()); },
       [](const Values& v) { return sum_of(v, [](double x) { return x; }); }, true},
      {"mean", [](auto& x, auto& d) { return kernels::mean(x, d, true); },
       [](const Values& v) {
         return sum_of(v, [](double x) { return x; }) / static_cast<double>(v.size());
       },
       true},
      {"var",
       [](auto& x, auto& d) { return kernels::moments(x, d, false, 0, false, x.dtype()).variance; },
       [](const Values& v) {
         const double n = static_cast<double>(v.size());
         const double mean = sum_of(v, [](double x) { return x; }) / n;
         return sum_of(v, [&](double x) { return (x - mean) * (x - mean); }) / n;
       },
       true},
      {"amax", [](auto& x, auto& d) { return kernels::amax(x, d, false); },
       [](const Values& v) { return *std::max_element(v.begin(), v.end()); }, false},
      {"amin", [](auto& x, auto& d) { return kernels::amin(x, d, true); },
       [](const Values& v) { return *std::min_element(v.begin(), v.end()); }, false},
      {"norm 2", [](auto& x, auto& d) { return kernels::norm(x, 2, d, false); },
       [](const Values& v) { return std::sqrt(sum_of(v, [](double x) { return x * x; })); }, true},
      {"norm 1", [](auto& x, auto& d) { return kernels::norm(x, 1, d, false); },
       [](const Values& v) { return sum_of(v, [](double x) { return std::abs(x); }); }, true},
      {"norm 3", [](auto& x, auto& d) { return kernels::norm(x, 3, d, false); },
       [](const Values& v) {
         return std::cbrt(sum_of(v, [](double x) { return std::pow(std::abs(x), 3); }));
       },
       true},
      {"norm 0", [](auto& x, auto& d) { return kernels::norm(x, 0, d, false); },
       [](const Values& v) { return sum_of(v, [](double x) { return x != 0; }); }, true},
      {"norm infinity", [](auto& x, auto& d) { return kernels::norm(x, kInfinity, d, false); },
       [](const Values& v) {
         double largest = 0;
         for (double x : v) largest = std::max(largest, std::abs(x));
         return largest;
       },
       false},
      {"logsumexp", [](auto& x, auto& d) { return kernels::logsumexp(x, d, false); },
       [](const Values& v) { return std::log(sum_of(v, [](double x) { return std::exp(x); })); },
       true},
  };
  return list;
}

class Reduce : public testing::TestWithParam<DType> {};

TEST_P(Reduce, agrees_with_f64_over_every_layout_and_set_of_dimensions) {
  const DType dtype = GetParam();
  for (const Layout& layout : layouts()) {
    const Tensor x = layout.make(dtype);
    for (const Shape& dims : subsets(x.dim())) {
      const auto groups = groups_of(x, dims);
      for (const Case& c : cases()) {
        const std::vector<double> values =
            on_any_threads([&] { return c.run(x, dims); }).template to_vector<double>();
        ASSERT_EQ(values.size(), groups.size());
        for (size_t i = 0; i < groups.size(); ++i) {
          const double expected = c.reference(groups[i]);
          if (dtype == kF16 && expected > 65504) continue;
          double scale = std::abs(expected);
          if (c.reads_signs) {
            scale += sum_of(groups[i], [](double v) { return std::abs(v); }) /
                     (c.name == "sum" ? 1 : static_cast<double>(groups[i].size()));
          }
          // Blocks of 1024 in 32 lanes: at most 32 additions in a row lose bits.
          const double eps = is_low_precision(dtype) ? epsilon_of(dtype) : 4 * epsilon_of(dtype);
          ASSERT_NEAR(values[i], expected, eps * scale)
              << c.name << " of " << layout.name << " over " << dims << " at " << i;
        }
      }
    }
  }
}
INSTANTIATE_TEST_SUITE_P(DTypes, Reduce, testing::Values(kF64, kF32, kF16, kBF16),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST(Reductions, of_integers_and_bools_are_exact) {
  for (DType dtype : {kI64, kI32, kU8, kBool}) {
    for (const Layout& layout : layouts()) {
      const Tensor x = layout.make(dtype);
      for (const Shape& dims : subsets(x.dim())) {
        const auto groups = groups_of(x, dims);
        const auto sum = on_any_threads([&] { return kernels::sum(x, dims, false, kI64); });
        const auto largest = kernels::amax(x, dims, false),
                   smallest = kernels::amin(x, dims, false);
        const auto any = kernels::any(x, dims, false), all = kernels::all(x, dims, false);
        EXPECT_EQ(largest.dtype(), dtype);
        EXPECT_EQ(any.dtype(), kBool);
        for (size_t i = 0; i < groups.size(); ++i) {
          const auto& g = groups[i];
          ASSERT_EQ(sum.to_vector<double>()[i], sum_of(g, [](double v) { return v; }))
              << layout.name << " over " << dims;
          ASSERT_EQ(largest.to_vector<double>()[i], *std::max_element(g.begin(), g.end()));
          ASSERT_EQ(smallest.to_vector<double>()[i], *std::min_element(g.begin(), g.end()));
          ASSERT_EQ(any.to_vector<double>()[i] != 0,
                    sum_of(g, [](double v) { return v != 0; }) > 0);
          ASSERT_EQ(all.to_vector<double>()[i] != 0,
                    sum_of(g, [](double v) { return v == 0; }) == 0);
          if (groups.size() > 50 && i > 50) break;
        }
      }
    }
  }
}

TEST(Reductions, a_long_sum_of_f32_keeps_nearly_every_bit) {
  const int64_t n = 1 << 24;  // a running float would stop at 2^24 for ones and lose more before
  const Tensor x = raw::full({n}, 1.1f, kF32);
  const double expected = static_cast<double>(1.1f) * static_cast<double>(n);
  EXPECT_NEAR(kernels::sum(x, {0}, false, kF32).item() / expected, 1, 4 * epsilon_of(kF32));
  const Tensor columns = raw::view(x, {n / 4, 4});
  for (float v : kernels::sum(columns, {0}, false, kF32).to_vector<float>()) {
    EXPECT_NEAR(v / (1.1f * static_cast<float>(n / 4)), 1, 4 * epsilon_of(kF32));
  }
}

TEST(Reductions, var_survives_a_mean_far_from_zero) {
  const Tensor x = tensor({10000.0, 10001.0, 10002.0, 10003.0});
  EXPECT_FLOAT_EQ(kernels::moments(x, {0}, false, 1, false, kF32).variance.item<float>(), 5.0f / 3);
  EXPECT_FLOAT_EQ(kernels::moments(x, {0}, false, 0, true, kF32).variance.item<float>(),
                  std::sqrt(1.25f));
  const Tensor one = tensor({3.0});
  EXPECT_TRUE(std::isnan(kernels::moments(one, {0}, false, 1, false, kF32).variance.item()));
}

TEST(Reductions, NaN_passes_through_extrema_wherever_it_stands) {
  for (int64_t n : {1, 5, 33, 1000, 5000, 70000}) {
    for (int64_t at : {int64_t{0}, n / 2, n - 1}) {
      const Tensor x = filled({n});
      x.data_as<float>()[at] = static_cast<float>(kNan);
      EXPECT_TRUE(std::isnan(kernels::amax(x, {0}, false).item())) << n << " at " << at;
      EXPECT_TRUE(std::isnan(kernels::amin(x, {0}, false).item())) << n << " at " << at;
      EXPECT_TRUE(std::isnan(kernels::norm(x, kInfinity, {0}, false).item()));
      EXPECT_EQ(kernels::extremum(x, 0, false, true).indices.item<int64_t>(), at);
      const Tensor column = raw::view(x, {n, 1});
      EXPECT_TRUE(std::isnan(kernels::amax(column, {0}, false).item()));
      const Tensor two = raw::transpose(raw::expand(x, {2, n}), 0, 1);
      EXPECT_EQ(kernels::extremum(two, 0, false, false).indices.to_vector<int64_t>()[1], at);
    }
  }
}

TEST(Reductions, the_first_of_equal_extrema_is_reported) {
  const Tensor x = tensor(std::span<const double>(std::vector<double>{1, 3, 3, 0, 0, 2}), {2, 3});
  const auto largest = kernels::extremum(x, 1, false, true);
  EXPECT_EQ(largest.values.to_vector<double>(), (std::vector<double>{3, 2}));
  EXPECT_EQ(largest.indices.to_vector<int64_t>(), (std::vector<int64_t>{1, 2}));
  const auto smallest = kernels::extremum(x, 0, true, false);
  EXPECT_EQ(smallest.values.shape(), (Shape{1, 3}));
  EXPECT_EQ(smallest.indices.to_vector<int64_t>(), (std::vector<int64_t>{1, 1, 1}));
  const Tensor constant = raw::full({3000}, 7, kI32);
  EXPECT_EQ(kernels::extremum(constant, 0, false, true).indices.item<int64_t>(), 0);
}

TEST(Reductions, of_nothing_give_the_neutral_element_or_an_error) {
  const Tensor x = raw::empty({0, 3}, kF32);
  EXPECT_EQ(kernels::sum(x, {0}, false, kF32).to_vector<float>(), (std::vector<float>{0, 0, 0}));
  EXPECT_EQ(kernels::prod(x, {0}, false, kF32).to_vector<float>(), (std::vector<float>{1, 1, 1}));
  EXPECT_TRUE(std::isnan(kernels::mean(x, {0, 1}, false).item()));
  EXPECT_EQ(kernels::all(x, {0, 1}, false).item<bool>(), true);
  EXPECT_EQ(kernels::any(x, {0, 1}, false).item<bool>(), false);
  EXPECT_EQ(kernels::logsumexp(x, {0}, false).to_vector<double>()[0], -kInfinity);
  EXPECT_EQ(kernels::sum(x, {1}, false, kF32).numel(), 0);
  EXPECT_THROW(kernels::amax(x, {0}, false), IndexError);
  EXPECT_THROW(kernels::extremum(x, 0, false, true), IndexError);
}

TEST(Reductions, logsumexp_holds_infinities_and_large_numbers) {
  EXPECT_EQ(kernels::logsumexp(tensor({-kInfinity, -kInfinity}), {0}, false).item(), -kInfinity);
  EXPECT_EQ(kernels::logsumexp(tensor({1.0, kInfinity}), {0}, false).item(), kInfinity);
  EXPECT_NEAR(kernels::logsumexp(tensor({1000.0, 1000.0}), {0}, false).item(), 1000 + std::log(2.0),
              1e-4);
  EXPECT_TRUE(std::isnan(kernels::logsumexp(tensor({1.0, kNan}), {0}, false).item()));
}

TEST(Reductions, running_sums_and_products_follow_each_dimension) {
  for (DType dtype : {kF64, kF32, kBF16, kI32}) {
    for (const Layout& layout : layouts()) {
      const Tensor x = layout.make(dtype);
      if (x.dim() < 2 || x.numel() > 20000) continue;
      const DType out = is_floating(dtype) ? dtype : kI64;
      for (int dim = 0; dim < x.dim(); ++dim) {
        const Tensor sums = on_any_threads([&] { return kernels::cumsum(x, dim, out); });
        const Tensor back = kernels::cumsum(x, dim, out, true);
        const int64_t n = x.shape()[dim];
        double total = 0;
        for (int64_t i = 0; i < n; ++i) {
          const auto first = [&](const Tensor& t) {
            Tensor at = raw::select(t, dim, i);
            while (at.dim() > 0) at = raw::select(at, 0, at.shape()[0] - 1);
            return at.item();
          };
          total += first(x);
          const double scale = static_cast<double>(n) * epsilon_of(dtype);
          ASSERT_NEAR(first(sums), total, scale) << layout.name << " along " << dim;
          if (i == n - 1) {
            Tensor at = raw::select(back, dim, 0);
            while (at.dim() > 0) at = raw::select(at, 0, at.shape()[0] - 1);
            ASSERT_NEAR(at.item(), total, scale) << layout.name << " from the end";
          }
        }
      }
    }
  }
  for (DType dtype : {kF64, kF32}) {  // blocks of eight and what is left, from both ends
    std::vector<double> ones(21, 1), up(21), down(21);
    for (size_t i = 0; i < 21; ++i) up[i] = static_cast<double>(i + 1), down[20 - i] = up[i];
    const Tensor x = tensor(std::span<const double>(ones), {21}, dtype);
    EXPECT_EQ(kernels::cumsum(x, 0, dtype).to_vector<double>(), up);
    EXPECT_EQ(kernels::cumsum(x, 0, dtype, true).to_vector<double>(), down);
  }
  EXPECT_EQ(kernels::cumprod(tensor({1.0, 2.0, 3.0, 4.0}), 0, kF32).to_vector<double>(),
            (std::vector<double>{1, 2, 6, 24}));
}

TEST(Reductions, sum_to_undoes_broadcasting) {
  const Tensor x = filled({4, 3, 5}, kF64);
  for (const Shape& shape : {Shape{5}, Shape{3, 1}, Shape{1, 3, 5}, Shape{4, 1, 1}, Shape{}}) {
    Shape dims;
    for (int d = 0; d < 3; ++d) {
      const int at = d - (3 - shape.size());
      if (at < 0 || shape[at] == 1) dims.push_back(d);
    }
    const auto groups = groups_of(x, dims);
    const Tensor y = kernels::sum_to(x, shape);
    ASSERT_EQ(y.shape(), shape);
    for (size_t i = 0; i < groups.size(); ++i) {
      EXPECT_NEAR(y.to_vector<double>()[i], sum_of(groups[i], [](double v) { return v; }), 1e-13);
    }
  }
  EXPECT_TRUE(kernels::sum_to(x, {4, 3, 5}).is(x));
  EXPECT_THROW(kernels::sum_to(x, {4}), ShapeError);
}

TEST(Reductions, meta_tensors_have_shapes_and_fp8_is_refused) {
  const Tensor meta = raw::empty({4, 5}, kBF16, kMeta);
  EXPECT_EQ(kernels::sum(meta, {1}, true, kBF16).shape(), (Shape{4, 1}));
  EXPECT_EQ(kernels::moments(meta, {0}, false, 1, false, kBF16).variance.shape(), (Shape{5}));
  EXPECT_EQ(kernels::logsumexp(meta, {0, 1}, false).shape(), Shape{});
  EXPECT_EQ(kernels::extremum(meta, 1, false, true).indices.dtype(), kI64);
  EXPECT_EQ(kernels::cumsum(meta, 1, kBF16).shape(), (Shape{4, 5}));
  EXPECT_THROW(kernels::sum(raw::empty({4}, kF8E4M3), {0}, false, kF32), DTypeError);
}

// ---- The ops ------------------------------------------------------------------------------------

using Function = std::function<Tensor(const Tensor&)>;
void expect_gradients(const Function& f, const Tensor& x) {
  const Tensor leaf = detach(clone(x)).set_requires_grad();
  const auto list = [&](const TensorList& in) { return TensorList{f(in[0])}; };
  const GradcheckResult once = gradcheck(list, {leaf}), twice = gradgradcheck(list, {leaf});
  EXPECT_TRUE(once.ok) << once.message;
  EXPECT_TRUE(twice.ok) << "second derivatives: " << twice.message;
}

TEST(ReduceOps, have_first_and_second_derivatives) {
  const std::vector<Function> functions = {
      [](const Tensor& x) { return sum(x, {1}); },
      [](const Tensor& x) {
        return mean(x, {0, 2}, true);
      },
      [](const Tensor& x) {
        return var(x, {1, 2});
      },
      [](const Tensor& x) { return tessera::std(x, {0}, 0, true); },
      [](const Tensor& x) { return prod(x, 1); },
      [](const Tensor& x) { return prod(x); },
      [](const Tensor& x) { return amax(x, {1}); },
      [](const Tensor& x) { return min(x, 2, true).values; },
      [](const Tensor& x) { return max(x); },
      [](const Tensor& x) { return norm(x); },
      [](const Tensor& x) { return norm(x, 1, {1}); },
      [](const Tensor& x) { return norm(x, 3, {2}, true); },
      [](const Tensor& x) { return norm(x, 1.5, {0}); },
      [](const Tensor& x) { return norm(x, kInfinity, {1}); },
      [](const Tensor& x) {
        return logsumexp(x, {0, 1});
      },
      [](const Tensor& x) { return cumsum(x, 1); },
      [](const Tensor& x) { return cumprod(x, 2); },
      [](const Tensor& x) { return softmax(x, 1); },
      [](const Tensor& x) { return log_softmax(x, -1); },
      [](const Tensor& x) { return normalize(x); },
      [](const Tensor& x) { return cosine_similarity(x, narrow(x, 0, 0, 1), 2); },
      [](const Tensor& x) {
        return sum_to(x, {3, 1});
      },
  };
  for (size_t i = 0; i < functions.size(); ++i) {
    SCOPED_TRACE(i);
    expect_gradients(functions[i], filled({2, 3, 4}, kF64));
  }
}

TEST(ReduceOps, products_with_zeros_have_first_and_second_derivatives) {
  for (const std::vector<double>& values :
       {std::vector<double>{0.5, 0, 2, -1.5}, std::vector<double>{0, 3, 0, 2},
        std::vector<double>{1.5, 2, 0.5, 0}}) {
    const Tensor x = tensor(std::span<const double>(values), {4}, kF64);
    expect_gradients([](const Tensor& x) { return prod(x); }, x);
    const Tensor leaf = clone(x).set_requires_grad();
    const GradcheckResult r =
        gradcheck([](const TensorList& in) { return TensorList{cumprod(in[0], 0)}; }, {leaf});
    EXPECT_TRUE(r.ok) << r.message;
  }
}

TEST(ReduceOps, ties_of_an_extremum_share_its_gradient) {
  const Tensor x = tensor({1.0, 3.0, 3.0, 2.0, 3.0}).set_requires_grad();
  amax(x).backward();
  for (int64_t i : {1, 2, 4}) EXPECT_FLOAT_EQ(x.grad()[i].item<float>(), 1.0f / 3);
  EXPECT_EQ(x.grad()[0].item(), 0);
  x.zero_grad();
  max(x, 0).values.backward();  // along a dimension: the first of equals takes all
  EXPECT_EQ(x.grad().to_vector<double>(), (std::vector<double>{0, 1, 0, 0, 0}));
}

TEST(ReduceOps, softmax_agrees_with_f64_over_all_lengths_dimensions_and_dtypes) {
  for (DType dtype : {kF64, kF32, kBF16, kF16}) {
    for (int64_t n : {1, 2, 31, 64, 100, 1023, 1024, 1025, 3000}) {
      const Tensor rows = filled({3, n}, dtype, 5), columns = filled({2, n, 3}, dtype, 6);
      for (const auto& [x, dim] :
           {std::pair{rows, 1}, std::pair{columns, 1}, std::pair{raw::transpose(rows, 0, 1), 0}}) {
        const Tensor large = mul(x, 8);
        const Tensor y = on_any_threads([&, &x = large, dim = dim] { return softmax(x, dim); });
        const Tensor logs = log_softmax(large, dim);
        const Tensor wide = to(large, kF64);
        const Tensor exact = exp(sub(wide, logsumexp(wide, {dim}, true)));
        const auto got = y.to_vector<double>(), log_got = logs.to_vector<double>();
        const auto expected = exact.to_vector<double>();
        const double eps = is_low_precision(dtype)
                               ? 0.6 * epsilon_of(dtype)
                               : 40 * epsilon_of(dtype);  // of exp(x - y), |x - y| < 20
        for (size_t i = 0; i < got.size(); ++i) {
          ASSERT_NEAR(got[i], expected[i], eps * expected[i] + (dtype == kF16 ? 6e-8 : 0))
              << dtype << " " << n;
          ASSERT_NEAR(log_got[i], std::log(expected[i]), eps * (1 + std::abs(log_got[i])));
        }
      }
    }
  }
}

TEST(ReduceOps, softmax_of_masked_rows_is_that_of_torch) {
  const Tensor x = tensor(
      std::span<const double>(std::vector<double>{-kInfinity, 0, -kInfinity, -kInfinity, kNan, 1}),
      {3, 2});
  const auto y = softmax(x, 1).to_vector<double>();
  EXPECT_EQ(y[0], 0);
  EXPECT_EQ(y[1], 1);
  for (size_t i = 2; i < 6; ++i) EXPECT_TRUE(std::isnan(y[i])) << i;
  // A block of -infinity in front of numbers does not spoil the row.
  const Tensor row = full({1, 5000}, -kInfinity);
  row.data_as<float>()[4000] = 2;
  EXPECT_EQ(softmax(row, 1).to_vector<float>()[4000], 1);
}

TEST(ReduceOps, integers_sum_to_i64_and_have_a_dtype_on_demand) {
  const Tensor x = tensor(std::span<const double>(std::vector<double>{200, 100, 7}), {3}, kU8);
  EXPECT_EQ(sum(x).dtype(), kI64);
  EXPECT_EQ(sum(x).item<int64_t>(), 307);
  EXPECT_EQ(prod(to(x, kI32)).item<int64_t>(), 140000);
  EXPECT_EQ(cumsum(x, 0).dtype(), kI64);
  EXPECT_EQ(sum(x, {}, false, kF32).dtype(), kF32);
  EXPECT_EQ(argmax(x).item<int64_t>(), 0);
  EXPECT_EQ(argmin(raw::view(x, {3, 1}), 0, true).shape(), (Shape{1, 1}));
  EXPECT_THROW(mean(x), DTypeError);
}

TEST(ReduceOps, name_what_is_wrong) {
  const Tensor x = filled({2, 3});
  EXPECT_THROW(sum(x, {2}), IndexError);
  EXPECT_THROW(sum(x, {0, 0}), ValueError);
  EXPECT_THROW(max(empty({0})), IndexError);
  EXPECT_THROW(softmax(to(x, kI64), 1), DTypeError);
}

}  // namespace
}  // namespace tessera::test_reduce
