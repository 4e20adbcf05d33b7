// Norms, softmax, losses, embeddings, AdamW and reductions at the sizes of real steps, against f64
// on the device.
#include "shapes.h"

#include <utility>

#include <tessera/core/context.h>
#include <tessera/optim/optimizers.h>

namespace tessera::gpu_shapes {
namespace {

constexpr DType kDTypes[] = {kBF16, kF16, kF32};

Tensor constant(double value) { return full({1}, value, {.dtype = kF64, .device = kGpu}); }
Tensor leaf(const Tensor& x) { return x.detach().set_requires_grad(); }

class ShapesOps : public testing::Test {
 protected:
  void SetUp() override { manual_seed(9); }
};

// f32 statistics of a row and f64 sums over rows: a few roundings of the dtype, and of f32 as many
// as a row's sum has steps (its root, of numbers about 1).
TEST_F(ShapesOps, RowNormsOfAllWidths) {
  for (const DType dtype : kDTypes) {
    for (const int64_t width : small_shapes() ? std::vector<int64_t>{48, 33}
                                              : std::vector<int64_t>{768, 1024, 4096, 771}) {
      for (const bool center : {true, false}) {
        const int64_t rows = size_or(16384, 70);
        const Tensor x = normal({rows, width}, dtype), up = normal({rows, width}, dtype);
        const Tensor weight = add(mul(normal({width}, kF32), 0.2), 1).to(dtype).detach(),
                     bias = normal({width}, dtype);
        const auto run = [&](DType compute) {
          const Tensor in = leaf(x.to(compute)), w = leaf(weight.to(compute)),
                       b = leaf(bias.to(compute));
          const Tensor y = center ? layer_norm(in, {width}, w, b) : rms_norm(in, {width}, w, 1e-5);
          y.backward(up.to(compute));
          return TensorList{y.detach(), in.grad(), w.grad(), center ? b.grad() : Tensor()};
        };
        // In f64 by sums and products alone.
        const Tensor in = x.to(kF64);
        const Tensor m = center ? mean(in, {1}, true) : constant(0);
        const Tensor off = sub(in, m);
        const Tensor rstd = rsqrt(add(mean(square(off), {1}, true), 1e-5));
        const Tensor normalised = mul(off, rstd);
        Tensor y = mul(normalised, weight.to(kF64));
        if (center) y = add(y, bias.to(kF64));
        const Tensor dy = up.to(kF64), scaled = mul(dy, weight.to(kF64));
        Tensor dx = sub(scaled, mul(normalised, mean(mul(scaled, normalised), {1}, true)));
        if (center) dx = sub(dx, mean(scaled, {1}, true));
        dx = mul(dx, rstd);
        const double step = 0x1p-23 * std::sqrt(static_cast<double>(width));
        const TensorList got = run(dtype);
        const std::string what = std::string(name_of(dtype)) + " " + std::to_string(width) +
                                 (center ? " layer_norm" : " rms_norm");
        const Tensor large = add(abs(y), 1);
        expect_within(got[0], y, add(rounding(y, dtype), mul(large, 8 * step)), what);
        const Tensor slope = mul(add(add(abs(scaled), abs(normalised)), 1), mul(rstd, 8 * step));
        expect_within(got[1], dx, add(rounding(dx, dtype), slope), what + ": input");
        const Tensor terms = mul(dy, normalised);
        const auto of_rows = [&](const Tensor& one, const Tensor& result, const char* name) {
          const Tensor sums = sum(one, {0});
          const Tensor bound = mul(sum(abs(one), {0}), 8 * step);
          expect_within(result, sums, add(rounding(sums, result.dtype()), bound), what + name);
        };
        of_rows(terms, got[2], ": weight");
        if (center) of_rows(dy, got[3], ": bias");
      }
    }
  }
}

// Of a row: exp of differences to the largest, f32 sums of 50304 terms.
TEST_F(ShapesOps, SoftmaxAndCrossEntropyOfAVocabulary) {
  const int64_t rows = size_or(4096, 37), classes = size_or(50304, 301);
  for (const DType dtype : kDTypes) {
    const std::string what(name_of(dtype));
    const Tensor x = mul(normal({rows, classes}, kF32), 3).to(dtype).detach();
    const Tensor in = x.to(kF64);
    const Tensor largest = amax(in, {1}, true);
    const Tensor powers = exp(sub(in, largest));
    const Tensor total = sum(powers, {1}, true);
    const Tensor p = div(powers, total);
    // A rounding of the difference, whose size is below 40, one of exp and those of the sum.
    const double relative = 0x1p-23 * (64 + std::sqrt(static_cast<double>(classes)));
    const Tensor little = constant(dtype == kF16 ? 0x1p-24 : 0x1p-126);
    expect_within(softmax(x, 1), p, add(add(rounding(p, dtype), mul(p, relative)), little),
                  what + ": softmax");

    const Tensor index = remainder(mul(arange(0, rows, 1, kI64, kGpu), 7919), classes);
    const Tensor target = where(eq(remainder(arange(0, rows, 1, kI64, kGpu), 17), 5), -100, index);
    const Tensor counted = ne(target, -100);
    const Tensor place =
        eq(arange(0, classes, 1, kI64, kGpu).view({1, classes}), target.view({rows, 1}));
    const Tensor at = sum(mul(in, place.to(kF64)), {1});
    const Tensor losses = mul(sub(add(log(total), largest).view({rows}), at), counted.to(kF64));
    const double count = sum(counted.to(kF64)).item();
    const Tensor expected = div(sum(losses), count);
    const Tensor gradient =
        mul(sub(p, place.to(kF64)), div(counted.to(kF64), count).view({rows, 1}));
    const auto compare = [&](const Tensor& loss, const Tensor& dx, int roundings,
                             const std::string& name) {
      const Tensor bound = add(rounding(expected, loss.dtype()), mul(constant(1), relative * 16));
      expect_within(loss.view({1}), expected.view({1}), bound, name);
      const Tensor probability = mul(div(p, count), relative);
      // What f16 has no digits for is lost below 2^-24.
      expect_within(dx, gradient,
                    add(add(mul(rounding(gradient, dtype), roundings), probability),
                        constant(dtype == kF16 ? 0x1p-24 : 0x1p-126)),
                    name + ": gradient");
    };
    const Tensor logits = leaf(x);
    const Tensor loss = cross_entropy(logits, target);
    loss.backward();
    compare(loss.detach(), logits.grad(), 1, what + ": cross_entropy");
    const Tensor source = leaf(x);
    const Tensor last = cross_entropy_inplace(mul(source, 1), target);
    last.backward();
    // That of f16 lies over the logits before it is divided by the number of rows.
    compare(last.detach(), source.grad(), dtype == kF16 ? 2 : 1, what + ": cross_entropy_inplace");
  }
}

// Rows of the table, against products with ones where an index names the row.
TEST_F(ShapesOps, EmbeddingGradients) {
  const int64_t tokens = size_or(65536, 150), vocabulary = size_or(50304, 60),
                width = size_or(768, 24);
  for (const DType dtype : kDTypes) {
    // Many of one index, none of others.
    const Tensor index =
        clamp(floor(mul(square(rand({tokens}, {.device = kGpu})), vocabulary)), 0, vocabulary - 1)
            .to(kI64);
    const Tensor table = leaf(integers({vocabulary, width}, dtype, 8));
    const Tensor up = integers({tokens, width}, dtype, 2);
    const Tensor y = embedding(index, table);
    y.backward(up);
    std::vector<int64_t> rows = sampled_rows(vocabulary);
    const Tensor wanted =
        tensor(std::span<const int64_t>(rows), {static_cast<int64_t>(rows.size()), 1}).to(kGpu);
    const Tensor named = eq(wanted, index.view({1, tokens})).to(kF64);
    const Tensor expected = matmul(named, up.to(kF64));
    const std::string what(name_of(dtype));
    expect_within(rows_of(table.grad(), 0, rows), expected, rounding(expected, dtype),
                  what + ": gradient");
    // The values of the tokens: a product of the table's sums with those of the places.
    const Tensor places = sum(named, {1}, true);
    expect_within(matmul(named, y.detach().to(kF64)), mul(rows_of(table.detach(), 0, rows), places),
                  constant(0), what + ": values");
  }
}

// GPT-2 124M's parameters, and ones that begin at odd places: three steps by torch's formula.
TEST_F(ShapesOps, AdamWOf124MParameters) {
  const std::vector<int64_t> sizes =
      small_shapes() ? std::vector<int64_t>{3000, 1, 257}
                     : std::vector<int64_t>{50304 * 768, 768, 1, 1024 * 768, 12 * 7'087'872, 2305};
  int64_t count = 0;
  for (const int64_t size : sizes) count += size;
  constexpr double kLr = 1e-2, kFirst = 0.9, kSecond = 0.95, kEps = 1e-8, kDecay = 0.1;
  for (const DType dtype : {kF32, kBF16}) {
    // One buffer, so that all but the first begin where the one before ends.
    const Tensor start = mul(normal({count}, kF32), 0.02).to(dtype).detach();
    const Tensor values = start.clone(), gradients = empty({count}, {dtype, kGpu});
    NamedTensors parameters;
    int64_t begin = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const Tensor one = raw::as_parameter(raw::narrow(values, 0, begin, sizes[i]));
      one.set_requires_grad();
      one.set_grad(raw::narrow(gradients, 0, begin, sizes[i]));
      parameters.push_back({"p" + std::to_string(i), one});
      begin += sizes[i];
    }
    optim::AdamW optimizer(
        parameters, {.lr = kLr, .betas = {kFirst, kSecond}, .eps = kEps, .weight_decay = kDecay});
    Tensor w = start.to(kF64), m = zeros({count}, {kF64, kGpu}), v = zeros({count}, {kF64, kGpu});
    for (int step = 1; step <= 3; ++step) {
      copy_(gradients, mul(normal({count}, kF32), 1e-3));
      optimizer.step();
      const Tensor g = gradients.to(kF64);
      w = mul(w, 1 - kLr * kDecay);
      m = add(mul(m, kFirst), mul(g, 1 - kFirst));
      v = add(mul(v, kSecond), mul(square(g), 1 - kSecond));
      const Tensor root = add(div(sqrt(v), std::sqrt(1 - std::pow(kSecond, step))), kEps);
      w = sub(w, mul(div(m, root), kLr / (1 - std::pow(kFirst, step))));
    }
    // Each step moves a number by about lr, calculated in f32 with a dozen roundings, eps beside
    // numbers of 1e-3 in sqrt(v) none of them.
    const Tensor bound = add(mul(abs(w), 8 * 0x1p-24), constant(3 * kLr * 32 * 0x1p-23));
    expect_within(values, w, dtype == kF32 ? bound : add(bound, rounding(w, dtype)),
                  std::string(name_of(dtype)) + ": parameters");
  }
}

// Whole numbers, whose sums are exact; one row and one column of the result a step away from tiles.
TEST_F(ShapesOps, ReductionsOfWholeNumbers) {
  const int64_t rows = size_or(65537, 131), columns = size_or(3073, 67);
  for (const DType dtype : kDTypes) {
    const Tensor x = integers({rows, columns}, dtype, 3);
    const Tensor in = x.to(kF64);
    const Tensor down = ones({1, rows}, {kF64, kGpu}), across = ones({columns, 1}, {kF64, kGpu});
    const std::string what(name_of(dtype));
    const Tensor of_columns = matmul(down, in).view({columns}),
                 of_rows = matmul(in, across).view({rows});
    expect_within(sum(x, {0}), of_columns, rounding(of_columns, dtype), what + ": down");
    expect_within(sum(x, {1}), of_rows, rounding(of_rows, dtype), what + ": across");
    expect_same(sum(x, {0}, false, kF32).to(kF64), of_columns, what + ": down to f32");
    const Tensor all = sum(of_rows);
    expect_same(sum(x, {}, false, kF32).to(kF64), all, what + ": all");
    const Tensor means = div(of_rows, columns);
    expect_within(mean(x, {1}), means, mul(rounding(means, dtype), 3), what + ": means");
    expect_same(amax(x, {1}).to(kF64), amax(in, {1}), what + ": amax");
    expect_same(amin(x, {0}).to(kF64), amin(in, {0}), what + ": amin");
    const Tensor marked = x.clone();
    fill_(marked.narrow(0, rows - 2, 1).narrow(1, columns - 3, 1), 9);
    EXPECT_EQ(argmax(marked).item<int64_t>(), (rows - 2) * columns + columns - 3) << what;
    EXPECT_EQ(max(marked).item(), 9) << what;
  }
}

}  // namespace
}  // namespace tessera::gpu_shapes
