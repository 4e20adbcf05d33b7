#include <tessera/nn/init.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <numbers>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/kernels/linalg/linalg.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::nn::init {
namespace {

void check_floating(const Tensor& x, std::string_view where) {
  TS_CHECK_DTYPE(is_floating(x.dtype()), where, "needs a floating tensor; got ", x);
}

// A rule that has to know all values, row by row, to give one: `values` tells them, once for all
// pieces.
const Tensor& by_values(const Tensor& x, std::function<std::vector<double>()> values) {
  return by_range(x, [values = std::move(values), known = std::make_shared<std::vector<double>>()](
                         const Tensor& piece, int64_t first) {
    if (known->empty()) *known = values();
    const std::span<const double> range(known->data() + first, static_cast<size_t>(piece.numel()));
    copy_(piece, tensor(range, piece.shape(), kF64).to(piece.device()));
  });
}

// Random numbers of a stream by index, as fills draw them: 53 bits in (0, 1).
class Uniforms {
 public:
  explicit Uniforms(Stream stream) : stream_(stream ? *stream : next_random_stream()) {}
  double operator()(uint64_t index) const {
    const auto bits = philox4x32(stream_.seed, stream_.stream, index / 2);
    const size_t lane = 2 * (index % 2);
    return uniform_from_bits64(bits[lane], bits[lane + 1]) + 0x1p-54;
  }

 private:
  RandomStream stream_;
};

double normal_cdf(double x) { return 0.5 * std::erfc(-x / std::numbers::sqrt2); }

// The x with normal_cdf(x) = p, by Newton steps inside a shrinking bracket: full f64 accuracy
// without a table of coefficients, some 100 ns a value.
double normal_quantile(double p, double low, double high) {
  double x = 0.5 * (low + high);
  for (int step = 0; step < 80; ++step) {
    const double error = normal_cdf(x) - p;
    (error > 0 ? high : low) = x;
    const double density = std::exp(-0.5 * x * x) / std::sqrt(2 * std::numbers::pi);
    double next = x - error / density;
    if (!(next > low && next < high)) next = 0.5 * (low + high);
    if (std::abs(next - x) <= 1e-14 * (1 + std::abs(x))) return next;
    x = next;
  }
  return x;
}

}  // namespace

const Tensor& by_range(const Tensor& x, FillRange fill) {
  check_whole(x, "init");
  const NoGradGuard no_grad;
  if (!x.is_meta() && x.numel() > 0) {
    const Tensor own = raw::alias(x);
    const Tensor dense = own.is_contiguous() ? own : raw::empty(x.shape(), x.dtype(), x.device());
    fill(raw::view(dense, {x.numel()}), 0);
    if (!dense.is(own)) copy_(own, dense);
  }
  x.bump_version("init");
  remember_fill(x, std::move(fill));
  return x;
}

const Tensor& by_index(const Tensor& x, std::function<double(int64_t)> value) {
  return by_range(x, [value = std::move(value)](const Tensor& piece, int64_t first) {
    constexpr int64_t kMost = 1 << 16;  // values beside the piece
    std::vector<double> values;
    for (int64_t done = 0; done < piece.numel(); done += kMost) {
      const int64_t count = std::min(kMost, piece.numel() - done);
      values.resize(static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) values[static_cast<size_t>(i)] = value(first + done + i);
      copy_(piece.narrow(0, done, count), tensor(values, {count}, kF64).to(piece.device()));
    }
  });
}

double calculate_gain(Nonlinearity nonlinearity, double slope) {
  switch (nonlinearity) {
    case Nonlinearity::kLinear:
    case Nonlinearity::kSigmoid:
      return 1;
    case Nonlinearity::kTanh:
      return 5.0 / 3;
    case Nonlinearity::kRelu:
      return std::numbers::sqrt2;
    case Nonlinearity::kLeakyRelu:
      return std::sqrt(2 / (1 + slope * slope));
    case Nonlinearity::kSelu:
      return 0.75;
  }
  return 1;
}

Fans calculate_fans(const Tensor& weight) {
  TS_CHECK_SHAPE(weight.dim() >= 2, "init", "fan in and fan out need 2 dimensions or more; got ",
                 weight);
  int64_t field = 1;
  for (int d = 2; d < weight.dim(); ++d) field *= weight.size(d);
  return {weight.size(1) * field, weight.size(0) * field};
}

const Tensor& constant(const Tensor& x, double value) {
  const NoGradGuard no_grad;
  return fill_(x, value), x;
}
const Tensor& zeros(const Tensor& x) { return constant(x, 0); }
const Tensor& ones(const Tensor& x) { return constant(x, 1); }

const Tensor& uniform(const Tensor& x, double low, double high, Stream stream) {
  check_floating(x, "init::uniform");
  const NoGradGuard no_grad;
  return uniform_(x, low, high, stream), x;
}
const Tensor& normal(const Tensor& x, double mean, double std, Stream stream) {
  check_floating(x, "init::normal");
  const NoGradGuard no_grad;
  return normal_(x, mean, std, stream), x;
}

const Tensor& trunc_normal(const Tensor& x, double mean, double std, double low, double high,
                           Stream stream) {
  check_floating(x, "init::trunc_normal");
  TS_CHECK(std > 0 && low < high, "init::trunc_normal", "needs std > 0 and low < high; got std ",
           std, ", [", low, ", ", high, "]");
  const double from = (low - mean) / std, to = (high - mean) / std;
  const double p_low = normal_cdf(from), p_high = normal_cdf(to);
  TS_CHECK(p_high > p_low, "init::trunc_normal", "[", low, ", ", high,
           "] holds none of the distribution with mean ", mean, " and std ", std);
  const Uniforms draw(stream);
  return by_index(x, [=](int64_t i) {
    const double p = p_low + draw(static_cast<uint64_t>(i)) * (p_high - p_low);
    const double value = mean + std * normal_quantile(p, std::max(from, -40.0), std::min(to, 40.0));
    return std::clamp(value, low, high);
  });
}

const Tensor& eye(const Tensor& x) {
  TS_CHECK_SHAPE(x.dim() == 2, "init::eye", "needs 2 dimensions; got ", x);
  const int64_t columns = x.size(1);
  return by_index(x, [columns](int64_t i) { return i / columns == i % columns ? 1.0 : 0.0; });
}

const Tensor& dirac(const Tensor& x, int64_t groups) {
  TS_CHECK_SHAPE(x.dim() >= 3 && x.dim() <= 5, "init::dirac", "needs 3 to 5 dimensions; got ", x);
  TS_CHECK(groups > 0 && x.size(0) % groups == 0, "init::dirac", groups,
           " groups do not divide the first dimension of ", x);
  int64_t field = 1, center = 0;
  for (int d = 2; d < x.dim(); ++d) {
    field *= x.size(d);
    center = center * x.size(d) + x.size(d) / 2;
  }
  const int64_t in = x.size(1), out_per_group = x.size(0) / groups;
  return by_index(x, [=](int64_t i) {
    const int64_t input = i / field % in, output = i / (field * in) % out_per_group;
    return i % field == center && input == output ? 1.0 : 0.0;
  });
}

const Tensor& xavier_uniform(const Tensor& x, double gain, Stream stream) {
  const Fans fans = calculate_fans(x);
  const double bound = gain * std::sqrt(6.0 / static_cast<double>(fans.in + fans.out));
  return uniform(x, -bound, bound, stream);
}
const Tensor& xavier_normal(const Tensor& x, double gain, Stream stream) {
  const Fans fans = calculate_fans(x);
  return normal(x, 0, gain * std::sqrt(2.0 / static_cast<double>(fans.in + fans.out)), stream);
}

namespace {

double kaiming_std(const Tensor& x, const KaimingOptions& options) {
  const Fans fans = calculate_fans(x);
  const int64_t fan = options.mode == FanMode::kFanIn ? fans.in : fans.out;
  return calculate_gain(options.nonlinearity, options.slope) / std::sqrt(static_cast<double>(fan));
}

}  // namespace

const Tensor& kaiming_uniform(const Tensor& x, const KaimingOptions& options, Stream stream) {
  if (x.numel() == 0) return x;
  const double bound = std::numbers::sqrt3 * kaiming_std(x, options);
  return uniform(x, -bound, bound, stream);
}
const Tensor& kaiming_normal(const Tensor& x, const KaimingOptions& options, Stream stream) {
  if (x.numel() == 0) return x;
  return normal(x, 0, kaiming_std(x, options), stream);
}

namespace {

std::vector<double> orthogonal_values(int64_t rows, int64_t columns, double gain,
                                      RandomStream numbers) {
  const int64_t count = std::min(rows, columns), length = std::max(rows, columns);
  // The QR factor whose R has a positive diagonal is uniform over rotations.
  const Tensor draws = randn({count, length}, {.dtype = kF64}, numbers);
  const auto [q, r] = kernels::linalg::qr(draws.transpose(0, 1), kernels::linalg::QrMode::kReduced);
  const std::vector<double> basis = q.to_vector<double>();  // [length, count]
  const std::vector<double> triangle = r.to_vector<double>();
  std::vector<double> values(static_cast<size_t>(rows * columns));
  for (int64_t i = 0; i < count; ++i) {
    const double sign = triangle[static_cast<size_t>(i * count + i)] < 0 ? -gain : gain;
    for (int64_t k = 0; k < length; ++k) {
      const int64_t position = rows <= columns ? i * columns + k : k * columns + i;
      values[static_cast<size_t>(position)] = sign * basis[static_cast<size_t>(k * count + i)];
    }
  }
  return values;
}

std::vector<double> sparse_values(int64_t rows, int64_t columns, double sparsity, double std,
                                  RandomStream numbers) {
  const auto zeros_per_column =
      static_cast<int64_t>(std::ceil(sparsity * static_cast<double>(rows)));
  std::vector<double> values = randn({rows, columns}, {.dtype = kF64}, numbers).to_vector<double>();
  for (double& value : values) value *= std;
  // The zeros of a column are the rows with the smallest of another stream's numbers.
  const Uniforms keys(RandomStream{numbers.seed, numbers.stream ^ (uint64_t{1} << 62)});
  std::vector<int64_t> order(static_cast<size_t>(rows));
  for (int64_t column = 0; column < columns; ++column) {
    std::iota(order.begin(), order.end(), int64_t{0});
    const auto key = [&](int64_t row) { return keys(static_cast<uint64_t>(column * rows + row)); };
    std::ranges::sort(order, {}, key);
    for (int64_t i = 0; i < zeros_per_column; ++i) {
      values[static_cast<size_t>(order[static_cast<size_t>(i)] * columns + column)] = 0;
    }
  }
  return values;
}

}  // namespace

const Tensor& orthogonal(const Tensor& x, double gain, Stream stream) {
  check_floating(x, "init::orthogonal");
  TS_CHECK_SHAPE(x.dim() >= 2, "init::orthogonal", "needs 2 dimensions or more; got ", x);
  if (x.numel() == 0) return x;
  const RandomStream numbers = stream ? *stream : next_random_stream();
  const int64_t rows = x.size(0), columns = x.numel() / rows;
  return by_values(x, [=] { return orthogonal_values(rows, columns, gain, numbers); });
}

const Tensor& sparse(const Tensor& x, double sparsity, double std, Stream stream) {
  check_floating(x, "init::sparse");
  TS_CHECK_SHAPE(x.dim() == 2, "init::sparse", "needs 2 dimensions; got ", x);
  TS_CHECK(sparsity >= 0 && sparsity <= 1, "init::sparse", "sparsity must be in [0, 1]; got ",
           sparsity);
  if (x.numel() == 0) return x;
  const RandomStream numbers = stream ? *stream : next_random_stream();
  const int64_t rows = x.size(0), columns = x.size(1);
  return by_values(x, [=] { return sparse_values(rows, columns, sparsity, std, numbers); });
}

}  // namespace tessera::nn::init
