// Attention of cuDNN and of own kernels, forward and backward, against products and sums in f64.
#include "shapes.h"

#include <optional>

#include <tessera/core/context.h>
#include <tessera/core/cuda/libraries/library_graph.h>
#include <tessera/core/kernels/attention/attention.h>

namespace tessera::gpu_shapes {
namespace {

struct Case {
  const char* name;
  int64_t B, H, Hk, T, S, E;
  bool causal = false, mask = false, packed = false;
};

// q, k, v in f64: [B, H, T, E], keys and values repeated for the heads that share them.
struct Expected {
  Tensor y, dq, dk, dv;
  // The same with magnitudes in the place of numbers: what a rounding of a factor may change.
  Tensor y_size, dq_size, dk_size, dv_size;
};
Expected expected_of(const Case& c, const Tensor& q, const Tensor& k, const Tensor& v,
                     const Tensor& up, const Tensor& mask) {
  const double scale = 1 / std::sqrt(static_cast<double>(c.E));
  const int64_t share = c.H / c.Hk;
  const Tensor keys = repeat_interleave(k, share, 1), values = repeat_interleave(v, share, 1);
  Tensor scores = mul(matmul(q, keys.transpose(2, 3)), scale);
  if (mask.defined()) scores = add(scores, mask);
  if (c.causal) {
    const Tensor later = gt(arange(0, c.S, 1, kI64, kGpu).view({1, c.S}),
                            arange(0, c.T, 1, kI64, kGpu).view({c.T, 1}));
    scores = masked_fill(scores, later, -1e30);
  }
  const Tensor powers = exp(sub(scores, amax(scores, {3}, true)));
  const Tensor p = div(powers, sum(powers, {3}, true));
  const auto heads = [&](const Tensor& x) {
    return sum(x.view({c.B, c.Hk, share, c.S, c.E}), {2});
  };
  Expected e;
  e.y = matmul(p, values);
  e.y_size = matmul(p, abs(values));
  const Tensor dp = matmul(up, values.transpose(2, 3));
  const Tensor delta = sum(mul(up, e.y), {3}, true);
  const Tensor ds = mul(mul(p, sub(dp, delta)), scale);
  e.dq = matmul(ds, keys);
  e.dk = heads(matmul(ds.transpose(2, 3), q));
  e.dv = heads(matmul(p.transpose(2, 3), up));
  const Tensor dp_size = matmul(abs(up), abs(values.transpose(2, 3)));
  const Tensor delta_size = sum(mul(abs(up), e.y_size), {3}, true);
  const Tensor ds_size = mul(mul(p, add(dp_size, delta_size)), scale);
  e.dq_size = matmul(ds_size, abs(keys));
  e.dk_size = heads(matmul(ds_size.transpose(2, 3), abs(q)));
  e.dv_size = heads(matmul(p.transpose(2, 3), abs(up)));
  return e;
}

void check(const Case& c, DType dtype, bool library) {
  manual_seed(21);
  const std::string what = std::string(c.name) + " " + std::string(name_of(dtype)) +
                           (library ? ", library" : ", own kernels");
  SCOPED_TRACE(what);
  kernels::AttentionPolicy policy;
  policy.library = library;
  const ScopedValue<kernels::AttentionPolicy> scope(
      Context::current().slot<kernels::AttentionPolicy>(), policy);
  // In memory [B, rows, heads, E], or parts of one [B, T, 3, H, E], as linear layers give them.
  const Tensor packed =
      c.packed ? normal({c.B, c.T, 3, c.H, c.E}, dtype).detach().set_requires_grad() : Tensor();
  const auto made = [&](int64_t heads, int64_t rows) {
    return normal({c.B, rows, heads, c.E}, dtype).transpose(1, 2).detach().set_requires_grad();
  };
  const auto part = [&](int64_t which) { return packed.select(2, which).transpose(1, 2); };
  const Tensor q = c.packed ? part(0) : made(c.H, c.T), k = c.packed ? part(1) : made(c.Hk, c.S),
               v = c.packed ? part(2) : made(c.Hk, c.S);
  const Tensor up = normal({c.B, c.T, c.H, c.E}, dtype).transpose(1, 2);
  AttentionOptions options{.causal = c.causal, .enable_gqa = c.H != c.Hk};
  Tensor mask;
  if (c.mask) {  // of each head and key, as relative positions have it
    mask = normal({1, c.H, c.T, c.S}, dtype);
    options.mask = mask;
    mask = mask.to(kF64);
  }
  const auto counted = [] { return Context::current().slot<gpu::GraphCounts>().library; };
  const int64_t before = counted();
  const Tensor y = scaled_dot_product_attention(q, k, v, options);
  y.backward(up);
  if (library && c.T > 1 && gpu::graph_library_version() > 0 && dtype != kF32) {
    EXPECT_GE(counted() - before, 2) << "forward and backward ran on own kernels";
  } else if (!library || c.T == 1) {  // a single query is own kernels'
    EXPECT_EQ(counted(), before) << "the library ran, and was not to";
  }
  const auto f64 = [](const Tensor& x) { return x.detach().to(kF64); };
  const Expected e = expected_of(c, f64(q), f64(k), f64(v), up.to(kF64), mask);
  // Roundings of probabilities, of ds, of the result, each of them of 16 bits on tensor cores, and
  // of scores in f32: a dozen of them of numbers below 16.
  const double relative = 3 * epsilon_of(dtype) + 256 * 0x1p-23;
  const auto near = [&](const Tensor& got, const Tensor& value, const Tensor& size,
                        const char* name) {
    expect_within(got, value, add(mul(size, relative), rounding(value, dtype)), what + name);
  };
  near(y.detach(), e.y, e.y_size, "");
  const auto grad = [&](int64_t which, const Tensor& x) {
    return c.packed ? packed.grad().select(2, which).transpose(1, 2) : x.grad();
  };
  near(grad(0, q), e.dq, e.dq_size, ": query");
  near(grad(1, k), e.dk, e.dk_size, ": key");
  near(grad(2, v), e.dv, e.dv_size, ": value");
}

std::vector<Case> cases() {
  if (small_shapes()) {
    return {{"causal", 1, 2, 2, 70, 70, 16, true},
            {"odd", 1, 1, 1, 37, 53, 8},
            {"grouped", 1, 4, 2, 33, 33, 16, true},
            {"masked", 1, 2, 2, 20, 20, 8, false, true},
            {"packed", 1, 2, 2, 33, 33, 16, true, false, true}};
  }
  return {{"causal 64", 2, 4, 4, 1024, 1024, 64, true},
          {"packed 64", 2, 4, 4, 1024, 1024, 64, true, false, true},
          {"causal 128", 2, 2, 2, 1024, 1024, 128, true},
          {"bert 64", 2, 4, 4, 512, 512, 64},
          {"odd 64", 2, 3, 3, 777, 777, 64, true},
          {"cross 64", 2, 2, 2, 100, 1000, 64},
          {"grouped 128", 1, 8, 2, 1000, 1000, 128, true},
          {"masked 64", 2, 4, 4, 512, 512, 64, false, true},
          {"one query", 2, 4, 4, 1, 513, 64},
          {"over a border", 1, 2, 2, 129, 129, 64, true}};
}

TEST(ShapesAttention, OfTheLibrary) {
  if (gpu::graph_library_version() == 0) GTEST_SKIP() << gpu::graph_library();
  for (const DType dtype : {kBF16, kF16}) {
    for (const Case& c : cases()) check(c, dtype, true);
  }
}

TEST(ShapesAttention, OfOwnKernels) {
  for (const DType dtype : {kBF16, kF16, kF32}) {
    for (const Case& c : cases()) check(c, dtype, false);
  }
}

}  // namespace
}  // namespace tessera::gpu_shapes
