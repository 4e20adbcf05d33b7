// Rows of ops/reduce.cpp, ops/norm.cpp and ops/loss.cpp.
#include <cmath>
#include <limits>

#include "autograd/op_samples.h"

namespace tessera::tests {
namespace {

using enum Differentiable;

// The whole tensor, one dimension, several with keepdim, the last, 0-d.
std::vector<Sample> reductions(Input (*make)(const Shape&)) {
  return {{{make({4, 7})}, "{}", 28},
          {{make({3, 5, 2})}, R"({"dim": 1})", 5},
          {{make({3, 5, 2})}, R"({"dim": [0, 2], "keepdim": true})", 6},
          {{make({2, 41})}, R"({"dim": -1})", 41},
          {{make({})}, "{}"}};
}

Tensor in_dtype(const Tensor& x, Attrs& a) {
  const std::optional<DType> dtype = a.dtype();
  return dtype ? to(x, *dtype) : x;
}

// Running sums and products of integers are i64, unless another dtype is asked for.
Tensor out_dtype(const Tensor& y, Attrs& a) { return in_dtype(y, a); }

// torch's any and all reduce nothing over "dim": [], where an empty list elsewhere means all.
bool no_dims(Attrs& a) { return a.is_list("dim") && a.integers("dim", {}).empty(); }
Tensor each_is_true(const Tensor& x) { return to(ne(x, 0), x.dtype() == kU8 ? kU8 : kBool); }

double correction_of(Attrs& a) {
  if (a.has("unbiased")) return a.flag("unbiased", true) ? 1 : 0;
  return a.number("correction", 1);
}

Result extreme(const Args& in, Attrs& a, Tensor (*all)(const Tensor&),
               ValuesIndices (*one)(const Tensor&, int64_t, bool),
               Tensor (*two)(const Tensor&, const Tensor&)) {
  if (in.has(1)) return two(in[0], in[1]);
  if (a.has("dim")) return one(in[0], a.integer("dim"), a.flag("keepdim", false));
  return all(in[0]);
}

double norm_order(Attrs& a) {
  if (!a.has("p|ord") || (a.is_text("p|ord") && a.text("p|ord") == "fro")) return 2;
  return a.number("p|ord");
}

Reduction reduction_of(Attrs& a, std::string_view op) {
  const std::string name = a.text("reduction", "mean");
  if (name == "none") return Reduction::kNone;
  if (name == "sum") return Reduction::kSum;
  TS_CHECK(name == "mean", op, "'reduction' is \"none\", \"mean\" or \"sum\"; got '", name, "'");
  return Reduction::kMean;
}

CrossEntropyOptions cross_entropy_options(const Args& in, Attrs& a, std::string_view op) {
  CrossEntropyOptions options;
  options.weight = in.optional(2);
  options.ignore_index = a.integer("ignore_index", -100);
  options.reduction = reduction_of(a, op);
  if (op == "cross_entropy") options.label_smoothing = a.number("label_smoothing", 0);
  return options;
}

// torch's `weight`: the mean of mse_loss and l1_loss divides by the sum of weights, that of
// huber_loss by the number of elements.
Result weighted(const Args& in, Reduction reduction, const Tensor& each, bool by_weights = true) {
  TS_CHECK_SHAPE(in[2].shape() == in[0].shape(), "loss",
                 "'weight' must have the shape of the input ", in[0], "; got ", in[2]);
  const Tensor scaled = mul(each, in[2]);
  if (reduction == Reduction::kNone) return scaled;
  if (reduction == Reduction::kSum) return sum(scaled);
  return by_weights ? div(sum(scaled), sum(in[2])) : mean(scaled);
}

constexpr const char* kLossParameters = "input, target, weight";

}  // namespace

std::vector<OpRow> reduce_rows() {
  std::vector<OpRow>
      rows =
          {
              {.name = "sum",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return sum(in[0], a.integers("dim", {}), a.flag("keepdim", false), a.dtype());
               },
               .samples = reductions(normal),
               .sums = true,
               .perf = Sample{{normal({4096, 1024})}, R"({"dim": 1})"}},
              {.name = "mean",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return mean(in_dtype(in[0], a), a.integers("dim", {}), a.flag("keepdim", false));
               },
               .samples = reductions(normal),
               .sums = true,
               .perf = Sample{{normal({4096, 1024})}, R"({"dim": 1})"}},
              {.name = "var",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return var(in[0], a.integers("dim", {}), correction_of(a),
                            a.flag("keepdim", false));
               },
               .samples = {{{normal({4, 7})}, "{}", 28},
                           {{normal({3, 5, 2})}, R"({"dim": 1, "correction": 0})", 5},
                           {{normal({3, 5, 2})}, R"({"dim": [0, 2], "keepdim": true})", 6}},
               .perf = Sample{{normal({4096, 1024})}, R"({"dim": 1})"}},
              {.name = "std",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return tessera::std(in[0], a.integers("dim", {}), correction_of(a),
                                     a.flag("keepdim", false));
               },
               .samples = {{{normal({4, 7})}, "{}", 28},
                           {{normal({3, 5, 2})}, R"({"dim": 1, "unbiased": false})", 5},
                           {{normal({3, 5, 2})}, R"({"dim": [0, 2], "keepdim": true})", 6}}},
              {.name = "prod",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 const Tensor x = in_dtype(in[0], a);
                 return out_dtype(
                     a.has("dim") ? prod(x, a.integer("dim"), a.flag("keepdim", false)) : prod(x),
                     a);
               },
               .samples = {{{away({3, 3})}, "{}", 9},
                           {{away({3, 5, 2})}, R"({"dim": 1})", 5},
                           {{away({4, 3})}, R"({"dim": 0, "keepdim": true})", 4},
                           {{away({})}}}},
              {.name = "amax",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return amax(in[0], a.integers("dim", {}), a.flag("keepdim", false));
               },
               .samples = reductions(distinct),
               .perf = Sample{{normal({4096, 1024})}, R"({"dim": 1})"}},
              {.name = "amin",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return amin(in[0], a.integers("dim", {}), a.flag("keepdim", false));
               },
               .samples = reductions(distinct)},
              {.name = "max",
               .parameters = "input, other",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return extreme(in, a, max, max, maximum);
               },
               .samples = {{{distinct({4, 7})}},
                           {{distinct({3, 5, 2})}, R"({"dim": 1})"},
                           {{distinct({3, 5})}, R"({"dim": 0, "keepdim": true})"}}},
              {.name = "min",
               .parameters = "input, other",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return extreme(in, a, min, min, minimum);
               },
               .samples = {{{distinct({4, 7})}},
                           {{distinct({3, 5, 2})}, R"({"dim": 1})"},
                           {{distinct({3, 5})}, R"({"dim": 0, "keepdim": true})"}}},
              {.name = "argmax",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return argmax(in[0], a.maybe_integer("dim"), a.flag("keepdim", false));
               },
               .samples = {{{distinct({4, 7})}},
                           {{distinct({3, 5, 2})}, R"({"dim": 1})"},
                           {{distinct({3, 5})}, R"({"dim": 0, "keepdim": true})"}},
               .differentiable = kNo},
              {.name = "argmin",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return argmin(in[0], a.maybe_integer("dim"), a.flag("keepdim", false));
               },
               .samples = {{{distinct({4, 7})}},
                           {{distinct({3, 5, 2})}, R"({"dim": 1})"},
                           {{distinct({3, 5})}, R"({"dim": 0, "keepdim": true})"}},
               .differentiable = kNo},
              {.name = "any",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 const bool keepdim = a.flag("keepdim", false);
                 if (no_dims(a)) return each_is_true(in[0]);
                 return any(in[0], a.integers("dim", {}), keepdim);
               },
               .samples = reductions(booleans),
               .differentiable = kNo},
              {.name = "count_nonzero",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return count_nonzero(in[0], a.integers("dim", {}));
               },
               .samples = {{{booleans({4, 7})}},
                           {{booleans({3, 5, 2})}, R"({"dim": 1})"},
                           {{booleans({3, 5, 2})}, R"({"dim": [0, 2]})"}},
               .differentiable = kNo},
              {.name = "all",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 const bool keepdim = a.flag("keepdim", false);
                 if (no_dims(a)) return each_is_true(in[0]);
                 return all(in[0], a.integers("dim", {}), keepdim);
               },
               .samples = reductions(booleans),
               .differentiable = kNo},
              {.name = "norm",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return norm(in_dtype(in[0], a), norm_order(a), a.integers("dim", {}),
                             a.flag("keepdim", false));
               },
               .samples = {{{normal({4, 7})}, "{}", 28},
                           {{away({3, 5})}, R"({"p": 1, "dim": 1})", 5},
                           {{away({3, 5})}, R"({"p": 3, "dim": 0, "keepdim": true})", 3},
                           {{distinct({3, 5})}, R"({"p": "inf", "dim": 1})"},
                           {{distinct({4})}, R"({"p": "fro"})", 4}},
               .tolerance = 8},
              {.name = "logsumexp",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return logsumexp(in[0], a.integers("dim"), a.flag("keepdim", false));
               },
               .samples = {{{normal({4, 7})}, R"({"dim": 1})", 7},
                           {{normal({3, 5, 2})}, R"({"dim": [0, 2], "keepdim": true})", 6},
                           {{normal({})}, R"({"dim": 0})"}}},
              {.name = "cumsum",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return out_dtype(cumsum(in_dtype(in[0], a), a.integer("dim")), a);
               },
               .samples = {{{normal({4, 6})}, R"({"dim": 1})", 6},
                           {{normal({3, 5, 2})}, R"({"dim": 0})", 3},
                           {{normal({2, 0})}, R"({"dim": 1})"},
                           {{normal({})}, R"({"dim": 0})"}},
               .sums = true,
               .perf = Sample{{normal({4096, 1024})}, R"({"dim": 1})"}},
              {.name = "cumprod",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return out_dtype(cumprod(in_dtype(in[0], a), a.integer("dim")), a);
               },
               .samples = {{{away({4, 5})}, R"({"dim": 1})", 5},
                           {{away({3, 4, 2})}, R"({"dim": -2})", 4},
                           {{away({0, 2})}, R"({"dim": 0})"}}},
              {.name = "softmax",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return softmax(in_dtype(in[0], a), a.integer("dim"));
               },
               .samples = {{{normal({3, 7})}, R"({"dim": -1})", 7},
                           {{normal({3, 5, 2})}, R"({"dim": 1})", 5},
                           {{normal({2, 37})}, R"({"dim": 1})", 37},
                           {{normal({0, 3})}, R"({"dim": 1})"},
                           {{normal({})}, R"({"dim": 0})"}},
               .perf = Sample{{normal({4096, 1024})}, R"({"dim": 1})"}},
              {.name = "log_softmax",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return log_softmax(in_dtype(in[0], a), a.integer("dim"));
               },
               .samples = {{{normal({3, 7})}, R"({"dim": -1})", 7},
                           {{normal({3, 5, 2})}, R"({"dim": 1})", 5},
                           {{normal({2, 37})}, R"({"dim": 1})", 37},
                           {{normal({0, 3})}, R"({"dim": 1})"}},
               .perf = Sample{{normal({4096, 1024})}, R"({"dim": 1})"}},
              {.name = "normalize",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return normalize(in[0], a.number("p", 2), a.integer("dim", 1),
                                  a.number("eps", 1e-12));
               },
               .samples = {{{normal({3, 5})}, "{}", 5},
                           {{away({2, 3, 4})}, R"({"p": 1, "dim": 2})", 4}},
               .tolerance = 8},
              {.name = "cosine_similarity",
               .parameters = "x1, x2",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return cosine_similarity(in[0], in[1], a.integer("dim", 1), a.number("eps", 1e-8));
               },
               .samples = {{{normal({3, 5}), normal({3, 5})}, "{}", 5},
                           {{normal({2, 3, 4}), normal({3, 4})}, R"({"dim": -1})", 8}},
               .tolerance = 8},
              {.name = "sum_to",
               .parameters = "input",
               .call = [](const Args& in, Attrs& a) -> Result {
                 return sum_to(in[0], a.integers("shape"));
               },
               .samples = {{{normal({2, 3, 4})}, R"({"shape": [3, 1]})", 8},
                           {{normal({3, 4})}, R"({"shape": [4]})", 3},
                           {{normal({3, 4})}, R"({"shape": []})", 12}},
               .sums = true},
          };
  return rows;
}

std::vector<OpRow> norm_rows() {
  return {
      {.name = "layer_norm",
       .parameters = "input, weight, bias",
       .call = [](const Args& in, Attrs& a) -> Result {
         return layer_norm(in[0], a.integers("normalized_shape"), in.optional(1), in.optional(2),
                           a.number("eps", 1e-5));
       },
       .samples = {{{normal({3, 7}), normal({7}), normal({7})}, R"({"normalized_shape": [7]})", 7},
                   {{normal({2, 3, 4}), normal({3, 4}), normal({3, 4})},
                    R"({"normalized_shape": [3, 4], "eps": 0.001})",
                    12},
                   {{normal({2, 33}), normal({33}), absent()}, R"({"normalized_shape": [33]})", 33},
                   {{normal({4, 6})}, R"({"normalized_shape": [6]})", 6},
                   {{normal({0, 4}), normal({4}), normal({4})}, R"({"normalized_shape": [4]})"}},
       .tolerance = 8,
       .perf = Sample{{normal({8192, 768}), normal({768}), normal({768})},
                      R"({"normalized_shape": [768]})"}},
      {.name = "rms_norm",
       .parameters = "input, weight",
       .call = [](const Args& in, Attrs& a) -> Result {
         return rms_norm(in[0], a.integers("normalized_shape"), in.optional(1),
                         a.maybe_number("eps"));
       },
       .samples = {{{normal({3, 7}), normal({7})}, R"({"normalized_shape": [7], "eps": 1e-6})", 7},
                   {{normal({2, 3, 4}), normal({3, 4})},
                    R"({"normalized_shape": [3, 4], "eps": 0.01})",
                    12},
                   {{normal({2, 33})}, R"({"normalized_shape": [33], "eps": 1e-5})", 33}},
       .tolerance = 8,
       .perf = Sample{{normal({8192, 768}), normal({768})},
                      R"({"normalized_shape": [768], "eps": 1e-5})"}},
      {.name = "group_norm",
       .parameters = "input, weight, bias",
       .call = [](const Args& in, Attrs& a) -> Result {
         return group_norm(in[0], a.integer("num_groups"), in.optional(1), in.optional(2),
                           a.number("eps", 1e-5));
       },
       .samples = {{{normal({2, 4, 5}), normal({4}), normal({4})}, R"({"num_groups": 2})", 10},
                   {{normal({2, 6, 2, 3}), normal({6}), normal({6})},
                    R"({"num_groups": 3, "eps": 0.001})",
                    12},
                   {{normal({3, 4})}, R"({"num_groups": 1})", 4}},
       .tolerance = 8},
      {.name = "batch_norm",
       .parameters = "input, running_mean, running_var, weight, bias",
       .call = [](const Args& in, Attrs& a) -> Result {
         return batch_norm(in[0], in.optional(1), in.optional(2), in.optional(3), in.optional(4),
                           a.flag("training", false), a.number("momentum", 0.1),
                           a.number("eps", 1e-5));
       },
       .samples = {{{normal({5, 3}), absent(), absent(), normal({3}), normal({3})},
                    R"({"training": true})",
                    5},
                   {{normal({2, 3, 4}), constant(normal({3})), constant(positive({3})), normal({3}),
                     normal({3})},
                    "{}",
                    8},
                   {{normal({2, 3, 2, 2})}, R"({"training": true, "eps": 0.001})", 8}},
       .tolerance = 8},
      {.name = "residual_layer_norm",
       .parameters = "input, residual, weight, bias",
       .call = [](const Args& in, Attrs& a) -> Result {
         const ResidualNorm both =
             residual_layer_norm(in[0], in[1], a.integers("normalized_shape"), in.optional(2),
                                 in.optional(3), a.number("eps", 1e-5));
         return TensorList{both.residual, both.normalized};
       },
       .samples = {{{normal({3, 7}), normal({3, 7}), normal({7}), normal({7})},
                    R"({"normalized_shape": [7]})",
                    7},
                   {{normal({2, 2, 9}), normal({2, 2, 9}), normal({9}), absent()},
                    R"({"normalized_shape": [9]})",
                    9}},
       .tolerance = 8,
       .perf = Sample{{normal({8192, 768}), normal({8192, 768}), normal({768}), normal({768})},
                      R"({"normalized_shape": [768]})"}},
      {.name = "residual_rms_norm",
       .parameters = "input, residual, weight",
       .call = [](const Args& in, Attrs& a) -> Result {
         const ResidualNorm both = residual_rms_norm(in[0], in[1], a.integers("normalized_shape"),
                                                     in.optional(2), a.maybe_number("eps"));
         return TensorList{both.residual, both.normalized};
       },
       .samples = {{{normal({3, 7}), normal({3, 7}), normal({7})},
                    R"({"normalized_shape": [7], "eps": 1e-5})",
                    7},
                   {{normal({2, 2, 9}), normal({2, 2, 9}), absent()},
                    R"({"normalized_shape": [9], "eps": 1e-5})",
                    9}},
       .tolerance = 8,
       .perf = Sample{{normal({8192, 768}), normal({8192, 768}), normal({768})},
                      R"({"normalized_shape": [768], "eps": 1e-5})"}},
  };
}

std::vector<OpRow> loss_rows() {
  std::vector<OpRow> rows = {
      {.name = "cross_entropy",
       .parameters = kLossParameters,
       .call = [](const Args& in, Attrs& a) -> Result {
         return cross_entropy(in[0], in[1], cross_entropy_options(in, a, "cross_entropy"));
       },
       .samples = {{{normal({6, 5}), integers(5, {6})}, "{}", 30},
                   {{normal({6, 5}), integers(5, {6}), constant(positive({5}))},
                    R"({"label_smoothing": 0.2})",
                    30},
                   {{normal({6, 5}), integers(5, {6})},
                    R"({"reduction": "none", "ignore_index": 3})",
                    5},
                   {{normal({2, 5, 3}), integers(5, {2, 3})}, R"({"reduction": "sum"})", 30},
                   {{normal({5}), integers(5, {})}, "{}", 5},
                   {{normal({4, 5}), constant(probability({4, 5}))}, "{}", 20}},
       .float32_under_autocast = true,
       .perf = Sample{{normal({2048, 8192}), integers(8192, {2048})}}},
      {.name = "cross_entropy_inplace",
       .parameters = "input, target",
       .call = [](const Args& in, Attrs& a) -> Result {
         return cross_entropy_inplace(clone(in[0]), in[1], a.integer("ignore_index", -100));
       },
       .samples = {{{normal({6, 5}), integers(5, {6})}, "{}", 30},
                   {{normal({6, 5}), integers(5, {6})}, R"({"ignore_index": 3})", 30}},
       .differentiable = kOnce,
       .float32_under_autocast = true,
       .perf = Sample{{normal({2048, 8192}), integers(8192, {2048})}}},
      {.name = "nll_loss",
       .parameters = kLossParameters,
       .call = [](const Args& in, Attrs& a) -> Result {
         return nll_loss(in[0], in[1], cross_entropy_options(in, a, "nll_loss"));
       },
       .samples = {{{normal({6, 5}), integers(5, {6})}, "{}", 6},
                   {{normal({6, 5}), integers(5, {6}), constant(positive({5}))},
                    R"({"ignore_index": 3})",
                    6},
                   {{normal({6, 5}), integers(5, {6})}, R"({"reduction": "none"})"},
                   {{normal({2, 5, 3}), integers(5, {2, 3})}, R"({"reduction": "sum"})", 6}},
       .tolerance = 8},
      {.name = "mse_loss",
       .parameters = kLossParameters,
       .call = [](const Args& in, Attrs& a) -> Result {
         const Reduction reduction = reduction_of(a, "mse_loss");
         if (in.has(2)) return weighted(in, reduction, mse_loss(in[0], in[1], Reduction::kNone));
         return mse_loss(in[0], in[1], reduction);
       },
       .samples = {{{normal({3, 4}), normal({3, 4})}, "{}", 12},
                   {{normal({3, 4}), normal({3, 4})}, R"({"reduction": "sum"})", 12},
                   {{normal({7}), normal({7})}, R"({"reduction": "none"})"}}},
      {.name = "l1_loss",
       .parameters = kLossParameters,
       .call = [](const Args& in, Attrs& a) -> Result {
         const Reduction reduction = reduction_of(a, "l1_loss");
         if (in.has(2)) return weighted(in, reduction, l1_loss(in[0], in[1], Reduction::kNone));
         return l1_loss(in[0], in[1], reduction);
       },
       .samples = {{{probability({3, 4}), uniform(1.5, 2, {3, 4})}, "{}", 12},
                   {{uniform(1.5, 2, {7}), probability({7})}, R"({"reduction": "none"})"}}},
      {.name = "smooth_l1_loss",
       .parameters = "input, target",
       .call = [](const Args& in, Attrs& a) -> Result {
         return smooth_l1_loss(in[0], in[1], reduction_of(a, "smooth_l1_loss"),
                               a.number("beta", 1));
       },
       .samples = {{{probability({3, 4}), uniform(1.0, 1.5, {3, 4})}, R"({"beta": 2.5})", 12},
                   {{uniform(1.5, 2, {7}), probability({7})},
                    R"({"reduction": "none", "beta": 0.25})"}}},
      {.name = "huber_loss",
       .parameters = kLossParameters,
       .call = [](const Args& in, Attrs& a) -> Result {
         const Reduction reduction = reduction_of(a, "huber_loss");
         const double delta = a.number("delta", 1);
         if (in.has(2))
           return weighted(in, reduction, huber_loss(in[0], in[1], Reduction::kNone, delta), false);
         return huber_loss(in[0], in[1], reduction, delta);
       },
       .samples = {{{probability({3, 4}), uniform(1.0, 1.5, {3, 4})}, R"({"delta": 2.5})", 12},
                   {{uniform(1.5, 2, {7}), probability({7})},
                    R"({"reduction": "none", "delta": 0.25})"}}},
      {.name = "binary_cross_entropy",
       .parameters = kLossParameters,
       .call = [](const Args& in, Attrs& a) -> Result {
         return binary_cross_entropy(in[0], in[1], in.optional(2),
                                     reduction_of(a, "binary_cross_entropy"));
       },
       .samples = {{{probability({3, 4}), constant(probability({3, 4}))}, "{}", 12},
                   {{probability({7}), constant(probability({7})), constant(positive({7}))},
                    R"({"reduction": "none"})"}},
       .tolerance = 8},
      {.name = "binary_cross_entropy_with_logits",
       .parameters = "input, target, weight, pos_weight",
       .call = [](const Args& in, Attrs& a) -> Result {
         return binary_cross_entropy_with_logits(
             in[0], in[1], in.optional(2), reduction_of(a, "binary_cross_entropy_with_logits"),
             in.optional(3));
       },
       .samples = {{{normal({3, 4}), constant(probability({3, 4}))}, "{}", 12},
                   {{normal({3, 4}), constant(probability({3, 4})), constant(positive({4})),
                     constant(positive({4}))},
                    R"({"reduction": "sum"})",
                    12},
                   {{normal({7}), constant(probability({7}))}, R"({"reduction": "none"})"}},
       .tolerance = 8},
      {.name = "kl_div",
       .parameters = "input, target",
       .call = [](const Args& in, Attrs& a) -> Result {
         const std::string name = a.text("reduction", "mean");
         const bool log_target = a.flag("log_target", false);
         return kl_div(in[0], in[1],
                       name == "batchmean"                             ? KlReduction::kBatchMean
                       : reduction_of(a, "kl_div") == Reduction::kNone ? KlReduction::kNone
                       : name == "sum"                                 ? KlReduction::kSum
                                                                       : KlReduction::kMean,
                       log_target);
       },
       .samples = {{{uniform(-3, -0.1, {3, 4}), probability({3, 4})},
                    R"({"reduction": "batchmean"})",
                    12},
                   {{uniform(-3, -0.1, {3, 4}), uniform(-3, -0.1, {3, 4})},
                    R"({"reduction": "sum", "log_target": true})",
                    12},
                   {{uniform(-3, -0.1, {5}), probability({5})}, R"({"reduction": "none"})"}},
       .tolerance = 8},
  };
  return rows;
}

}  // namespace tessera::tests
