// Rows of ops/matmul.cpp, ops/fused.cpp, ops/conv.cpp and ops/attention.cpp.
#include "autograd/op_samples.h"

namespace tessera::tests {
namespace {

using enum Differentiable;

// torch's conv takes an unbatched input and "same" or "valid" padding: both become plain calls.
Result convolve(const Args& in, Attrs& a, int spatial,
                Tensor (*conv)(const Tensor&, const Tensor&, const Tensor&, const ConvOptions&)) {
  ConvOptions options;
  options.stride = a.integers("stride", {1});
  options.dilation = a.integers("dilation", {1});
  options.groups = a.integer("groups", 1);
  Tensor x = in[0];
  const bool unbatched = x.dim() == spatial + 1;
  if (unbatched) x = unsqueeze(x, 0);
  if (a.is_text("padding")) {
    const std::string mode = a.text("padding");
    TS_CHECK(mode == "same" || mode == "valid", "conv",
             "'padding' is a number, a list, \"same\" or \"valid\"; got '", mode, "'");
    if (mode == "same") {
      Shape sizes;
      for (int d = spatial - 1; d >= 0; --d) {
        const int64_t dilation =
            options.dilation.size() == 1 ? options.dilation[0] : options.dilation[d];
        const int64_t total = dilation * (in[1].size(2 + d) - 1);
        sizes.push_back(total / 2);
        sizes.push_back(total - total / 2);
      }
      x = pad(x, sizes);
    }
  } else {
    options.padding = a.integers("padding", {0});
  }
  const Tensor y = conv(x, in[1], in.optional(2), options);
  return unbatched ? squeeze(y, 0) : y;
}

Result max_pool(const Args& in, Attrs& a,
                ValuesIndices (*pool)(const Tensor&, const Shape&, const Shape&, const Shape&,
                                      const Shape&, bool)) {
  const bool with_indices = a.flag("return_indices", false);
  const ValuesIndices result =
      pool(in[0], a.integers("kernel_size"), a.integers("stride", {}), a.integers("padding", {0}),
           a.integers("dilation", {1}), a.flag("ceil_mode", false));
  return with_indices ? Result(result) : Result(result.values);
}

// "lengths" of a row of the table: of each sample.
Tensor lengths_of(Attrs& a, const Tensor& like) {
  const Shape lengths = a.integers("lengths", {});
  if (lengths.empty()) return {};
  return tensor(std::vector<double>(lengths.begin(), lengths.end()), {lengths.size()}, kI64)
      .to(like.device());
}

Result attend(const Args& in, Attrs& a) {
  AttentionOptions options;
  // Packed documents: the fourth input are their starts and no mask, and without is_causal a fifth
  // one their ends.
  if (a.flag("packed", false)) {
    options.starts = in.optional(3);
    options.ends = in.optional(4);
  } else {
    options.mask = in.optional(3);
    TS_CHECK(!in.has(4), "scaled_dot_product_attention", "ends are for packed documents");
  }
  options.lengths = lengths_of(a, in[0]);
  options.dropout = a.number("dropout_p", 0);
  options.causal = a.flag("is_causal", false);
  options.scale = a.maybe_number("scale");
  options.enable_gqa = a.flag("enable_gqa", false);
  // torch takes any leading dimensions; the op takes [B, H, T, E].
  const int missing = 4 - in[0].dim();
  TS_CHECK_SHAPE(missing >= 0, "scaled_dot_product_attention", "expects at most 4 dimensions; got ",
                 in[0]);
  Tensor q = in[0], k = in[1], v = in[2];
  for (int i = 0; i < missing; ++i) {
    q = unsqueeze(q, 0);
    k = unsqueeze(k, 0);
    v = unsqueeze(v, 0);
  }
  Tensor y = scaled_dot_product_attention(q, k, v, options);
  for (int i = 0; i < missing; ++i) y = squeeze(y, 0);
  return y;
}

Gelu approximation(Attrs& a) {
  return a.text("approximate", "tanh") == "tanh" ? Gelu::kTanh : Gelu::kNone;
}

std::vector<Sample> attention_samples() {
  return {
      {{normal({1, 2, 5, 4}), normal({1, 2, 5, 4}), normal({1, 2, 5, 4})}, "{}", 5},
      {{normal({2, 2, 5, 4}), normal({2, 2, 5, 4}), normal({2, 2, 5, 4})},
       R"({"is_causal": true})",
       5},
      {{normal({1, 2, 3, 4}), normal({1, 2, 7, 4}), normal({1, 2, 7, 6})}, R"({"scale": 0.3})", 7},
      {{normal({1, 2, 5, 4}), normal({1, 2, 6, 4}), normal({1, 2, 6, 4}), constant(normal({5, 6}))},
       "{}",
       6},
      {{normal({1, 4, 5, 4}), normal({1, 2, 5, 4}), normal({1, 2, 5, 4})},
       R"({"is_causal": true, "enable_gqa": true})",
       10},
      {{normal({2, 2, 5, 4}), normal({2, 2, 7, 4}), normal({2, 2, 7, 4})},
       R"({"lengths": [3, 7]})",
       7},
      {{normal({2, 2, 12, 4}), normal({2, 2, 12, 4}), normal({2, 2, 12, 4}), starts({2, 12})},
       R"({"is_causal": true, "packed": true})",
       12},
      {{normal({2, 4, 9, 4}), normal({2, 2, 30, 4}), normal({2, 2, 30, 6}), starts({2, 9})},
       R"({"packed": true, "enable_gqa": true})",
       30},
      {{normal({1, 1, 37, 3}), normal({1, 1, 37, 3}), normal({1, 1, 37, 3})},
       R"({"is_causal": true})",
       37}};
}

}  // namespace

std::vector<OpRow> matmul_rows() {
  return {
      {.name = "matmul",
       .parameters = "input, other|mat2|vec",
       .call = [](const Args& in, Attrs&) -> Result { return matmul(in[0], in[1]); },
       .samples = {{{normal({3, 4}), normal({4, 5})}, "{}", 5},
                   {{normal({7}), normal({7})}, "{}", 7},
                   {{normal({3, 4}), normal({4})}, "{}", 4},
                   {{normal({4}), normal({4, 3})}, "{}", 4},
                   {{normal({2, 3, 4}), normal({4, 5})}, "{}", 6},
                   {{normal({2, 1, 3, 4}), normal({5, 4, 2})}, "{}", 20},
                   {{normal({3, 4}), normal({2, 4, 5})}, "{}", 10},
                   {{normal({0, 4}), normal({4, 3})}, "{}", 4},
                   {{normal({3, 0}), normal({0, 2})}},
                   {{normal({9, 17}), normal({17, 5})}, "{}", 17}},
       .sums = true,
       .perf = Sample{{normal({1024, 1024}), normal({1024, 1024})}}},
      {.name = "bmm",
       .parameters = "input, mat2",
       .call = [](const Args& in, Attrs&) -> Result { return bmm(in[0], in[1]); },
       .samples = {{{normal({2, 3, 4}), normal({2, 4, 5})}, "{}", 5},
                   {{normal({0, 3, 4}), normal({0, 4, 5})}}},
       .sums = true,
       .perf = Sample{{normal({48, 256, 64}), normal({48, 64, 256})}}},
      {.name = "linear",
       .parameters = "input, weight, bias",
       .call = [](const Args& in, Attrs&) -> Result {
         return linear(in[0], in[1], in.optional(2));
       },
       .samples = {{{normal({3, 4}), normal({5, 4}), normal({5})}, "{}", 5},
                   {{normal({2, 3, 6}), normal({5, 6}), absent()}, "{}", 6},
                   {{normal({7}), normal({2, 7}), normal({2})}, "{}", 7},
                   {{normal({0, 4}), normal({3, 4}), normal({3})}, "{}", 4}},
       .sums = true,
       .perf = Sample{{normal({2048, 384}), normal({1536, 384}), normal({1536})}}},
      {.name = "addmm",
       .parameters = "input, mat1, mat2",
       .call = [](const Args& in, Attrs& a) -> Result {
         return addmm(in[0], in[1], in[2], a.scalar("beta", 1), a.scalar("alpha", 1));
       },
       .samples = {{{normal({3, 5}), normal({3, 4}), normal({4, 5})}, "{}", 5},
                   {{normal({5}), normal({3, 4}), normal({4, 5})},
                    R"({"beta": 0.5, "alpha": 2.0})",
                    5}},
       .sums = true},
      {.name = "dot",
       .parameters = "input, tensor|other",
       .call = [](const Args& in, Attrs&) -> Result { return dot(in[0], in[1]); },
       .samples = {{{normal({7}), normal({7})}, "{}", 7}, {{normal({0}), normal({0})}}},
       .sums = true},
      {.name = "outer",
       .parameters = "input, vec2",
       .call = [](const Args& in, Attrs&) -> Result { return outer(in[0], in[1]); },
       .samples = {{{normal({4}), normal({5})}, "{}", 5}},
       .sums = true},
      {.name = "einsum",
       .parameters = "operands*",
       .call = [](const Args& in, Attrs& a) -> Result {
         return einsum(a.text("equation"), in.list());
       },
       .samples = {{{normal({2, 3, 4}), normal({2, 4, 5})}, R"({"equation": "bij,bjk->bik"})", 5},
                   {{normal({4, 4})}, R"({"equation": "ii->i"})"},
                   {{normal({2, 2, 3, 4}), normal({2, 2, 5, 4})},
                    R"({"equation": "bhqd,bhkd->bhqk"})",
                    5},
                   {{normal({3, 4}), normal({3, 4})}, R"({"equation": "ij,ij->"})", 12}},
       .sums = true},
      {.name = "linear_gelu",
       .parameters = "input, weight, bias",
       .call = [](const Args& in, Attrs& a) -> Result {
         return linear_gelu(in[0], in[1], in.optional(2), approximation(a));
       },
       .samples = {{{normal({3, 4}), normal({5, 4}), normal({5})}, "{}", 5},
                   {{normal({2, 3, 6}), normal({5, 6}), normal({5})},
                    R"({"approximate": "none"})",
                    6},
                   {{constant(normal({3, 4})), normal({5, 4}), absent()}, "{}", 5}},
       .sums = true,
       .tolerance = 8,
       .perf = Sample{{normal({2048, 384}), normal({1536, 384}), normal({1536})}}},
      {.name = "linear_gelu_linear",
       .parameters = "input, weight, bias, out_weight, out_bias",
       .call = [](const Args& in, Attrs& a) -> Result {
         return linear_gelu_linear(in[0], in[1], in.optional(2), in[3], in.optional(4),
                                   approximation(a));
       },
       .samples = {{{normal({3, 4}), normal({5, 4}), normal({5}), normal({2, 5}), normal({2})},
                    "{}",
                    10},
                   {{normal({2, 3, 6}), normal({5, 6}), absent(), normal({4, 5}), absent()},
                    R"({"approximate": "none"})",
                    12}},
       .sums = true,
       .tolerance = 8,
       .perf = Sample{{normal({2048, 384}), normal({1536, 384}), normal({1536}),
                       normal({384, 1536}), normal({384})}}},
      {.name = "linear_cross_entropy",
       .parameters = "input, weight, target",
       .call = [](const Args& in, Attrs& a) -> Result {
         const std::string name = a.text("reduction", "mean");
         return linear_cross_entropy(in[0], in[1], in[2], a.integer("ignore_index", -100),
                                     name == "sum" ? Reduction::kSum : Reduction::kMean);
       },
       .samples = {{{normal({6, 4}), normal({5, 4}), integers(5, {6})}, "{}", 30},
                   {{normal({6, 4}), normal({5, 4}), integers(5, {6})},
                    R"({"ignore_index": 3, "reduction": "sum"})",
                    30}},
       .differentiable = kOnce,
       .float32_result = true,
       .bf16_inside_on_gpu = true,  // the logits
       .tolerance = 8,
       .perf = Sample{{normal({1024, 384}), normal({8192, 384}), integers(8192, {1024})}}},
  };
}

std::vector<OpRow> convolution_rows() {
  return {
      {.name = "conv1d",
       .parameters = "input, weight, bias",
       .call = [](const Args& in, Attrs& a) -> Result { return convolve(in, a, 1, conv1d); },
       .samples = {{{normal({2, 3, 8}), normal({4, 3, 3}), normal({4})}, "{}", 36},
                   {{normal({1, 2, 9}), normal({3, 2, 2}), absent()},
                    R"({"stride": 2, "padding": 1})",
                    18},
                   {{normal({1, 4, 7}), normal({4, 2, 3}), normal({4})},
                    R"({"padding": 2, "dilation": 2, "groups": 2})",
                    18}},
       .sums = true},
      {.name = "conv2d",
       .parameters = "input, weight, bias",
       .call = [](const Args& in, Attrs& a) -> Result { return convolve(in, a, 2, conv2d); },
       .samples = {{{normal({1, 2, 4, 5}), normal({3, 2, 3, 3}), normal({3})}, "{}", 27},
                   {{normal({1, 2, 5, 4}), normal({2, 2, 3, 2}), absent()},
                    R"({"stride": [2, 1], "padding": [1, 0]})",
                    18},
                   {{normal({1, 2, 5, 5}), normal({2, 1, 3, 3}), normal({2})},
                    R"({"padding": 2, "dilation": 2, "groups": 2})",
                    25}},
       .sums = true,
       .perf = Sample{{normal({32, 32, 28, 28}), normal({64, 32, 3, 3}), normal({64})},
                      R"({"padding": 1})"}},
      {.name = "max_pool1d",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         return max_pool(in, a, max_pool1d_with_indices);
       },
       .samples = {{{distinct({1, 2, 6})}, R"({"kernel_size": 2})"},
                   {{distinct({2, 9})},
                    R"({"kernel_size": 3, "stride": 2, "padding": 1, "dilation": 2})",
                    4},
                   {{distinct({1, 2, 8})},
                    R"({"kernel_size": 3, "ceil_mode": true, "return_indices": true})"}}},
      {.name = "max_pool2d",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         return max_pool(in, a, max_pool2d_with_indices);
       },
       .samples = {{{distinct({1, 2, 4, 6})}, R"({"kernel_size": 2})"},
                   {{distinct({1, 1, 7, 7})},
                    R"({"kernel_size": 3, "stride": 2, "padding": 1})",
                    4},
                   {{distinct({1, 7, 8})},
                    R"({"kernel_size": [2, 3], "stride": [1, 2], "ceil_mode": true})",
                    4},
                   {{distinct({2, 5, 6})}, R"({"kernel_size": 3, "return_indices": true})"}}},
      {.name = "avg_pool2d",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         const Shape kernel = a.integers("kernel_size");
         const bool ceil_mode = a.flag("ceil_mode", false);
         const std::optional<int64_t> divisor = a.maybe_integer("divisor_override");
         const bool count_pad = a.flag("count_include_pad", true);
         const Tensor y = avg_pool2d(in[0], kernel, a.integers("stride", {}),
                                     a.integers("padding", {0}), ceil_mode, count_pad || divisor);
         if (!divisor) return y;
         TS_CHECK(!ceil_mode && *divisor != 0, "avg_pool2d",
                  "'divisor_override' must not be 0 and is served without 'ceil_mode'");
         return mul(y,
                    static_cast<double>(kernel[0] * kernel.back()) / static_cast<double>(*divisor));
       },
       .samples = {{{normal({1, 2, 4, 6})}, R"({"kernel_size": 2})", 4},
                   {{normal({1, 1, 7, 7})},
                    R"({"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": false})",
                    9},
                   {{normal({1, 6, 7})}, R"({"kernel_size": [2, 3], "ceil_mode": true})", 6}},
       .sums = true},
      {.name = "adaptive_avg_pool2d",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         Shape size;
         const auto sizes = a.maybe_integers("output_size");
         for (size_t i = 0; i < sizes.size(); ++i) {  // null keeps the input's size
           const int64_t dim = static_cast<int64_t>(i) - static_cast<int64_t>(sizes.size());
           size.push_back(sizes[i] ? *sizes[i] : in[0].size(dim));
         }
         return adaptive_avg_pool2d(in[0], size);
       },
       .samples = {{{normal({1, 2, 7, 5})}, R"({"output_size": [3, 4]})", 9},
                   {{normal({2, 3, 4, 4})}, R"({"output_size": 1})", 16}},
       .sums = true},
      {.name = "interpolate",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         const std::string mode = a.text("mode", "nearest");
         const int spatial = in[0].dim() - 2;
         constexpr const char* kLinear[] = {"linear", "bilinear", "trilinear"};
         const bool linear = spatial >= 1 && spatial <= 3 && mode == kLinear[spatial - 1];
         TS_CHECK_AS(UnsupportedError, linear || mode == "nearest", "interpolate",
                     "'mode' is \"nearest\", or \"linear\", \"bilinear\" or \"trilinear\" for one, "
                     "two or three spatial dimensions; got '",
                     mode, "' for ", in[0]);
         const bool recompute = a.flag("recompute_scale_factor", false);
         const bool align_corners = a.flag("align_corners", false);
         Shape size = a.integers("size", {});
         std::vector<double> factors = a.numbers("scale_factor");
         if (factors.size() == 1)
           factors.resize(static_cast<size_t>(spatial < 1 ? 1 : spatial), factors[0]);
         if (recompute && size.empty()) {  // the factors of the rounded sizes
           for (int d = 0; d < spatial; ++d) {
             const double exact =
                 static_cast<double>(in[0].size(2 + d)) * factors[static_cast<size_t>(d)];
             size.push_back(static_cast<int64_t>(exact));
           }
           factors.clear();
         }
         return interpolate(in[0], size, factors,
                            linear ? Interpolation::kLinear : Interpolation::kNearest,
                            align_corners);
       },
       .samples = {{{normal({1, 2, 3, 4})}, R"({"scale_factor": 2})", 4},
                   {{normal({1, 2, 3, 4})}, R"({"size": [5, 3]})", 4},
                   {{normal({2, 2, 5})}, R"({"size": 8})", 2},
                   {{normal({1, 2, 3, 4})}, R"({"size": [5, 3], "mode": "bilinear"})", 8},
                   {{normal({1, 2, 3, 4})}, R"({"scale_factor": 1.7, "mode": "bilinear"})", 8},
                   {{normal({2, 2, 5})},
                    R"({"size": 8, "mode": "linear", "align_corners": true})",
                    4},
                   {{normal({1, 1, 2, 3, 2})}, R"({"size": 3, "mode": "trilinear"})", 16}},
       .sums = true},
  };
}

std::vector<OpRow> attention_rows() {
  return {
      {.name = "scaled_dot_product_attention",
       .parameters = "query, key, value, attn_mask|starts, ends",
       .call = attend,
       .samples = attention_samples(),
       .tolerance = 8,
       .perf = Sample{{normal({8, 6, 256, 64}), normal({8, 6, 256, 64}), normal({8, 6, 256, 64})},
                      R"({"is_causal": true})"}},
      {.name = "packed_attention",
       .parameters = "packed",
       .call = [](const Args& in, Attrs& a) -> Result {
         AttentionOptions options;
         options.causal = a.flag("is_causal", false);
         options.scale = a.maybe_number("scale");
         options.lengths = lengths_of(a, in[0]);
         return packed_attention(in[0], options);
       },
       .samples = {{{normal({2, 5, 3, 2, 4})}, R"({"is_causal": true})", 5},
                   {{normal({2, 5, 3, 2, 4})}, R"({"is_causal": true, "lengths": [4, 1]})", 5},
                   {{normal({1, 3, 3, 4, 2})}, "{}", 7},
                   {{normal({1, 7, 3, 1, 3})}, "{}", 7}},
       .tolerance = 8,
       .perf = Sample{{normal({8, 256, 3, 6, 64})}, R"({"is_causal": true})"}},
  };
}

}  // namespace tessera::tests
