// Rows of what layers are made of and torch has as functions: transposed convolutions, conv3d,
// instance_norm, embedding_bag, recurrent layers, further activations and losses.
#include <tessera/autograd/recurrent.h>

#include "autograd/op_samples.h"

namespace tessera::tests {
namespace {

Reduction reduction_named(Attrs& a, std::string_view op) {
  const std::string name = a.text("reduction", "mean");
  TS_CHECK(name == "mean" || name == "sum" || name == "none", op,
           "'reduction' is \"mean\", \"sum\" or \"none\"; got '", name, "'");
  return name == "sum" ? Reduction::kSum : name == "none" ? Reduction::kNone : Reduction::kMean;
}

// torch's convolutions take a sample without a batch, too.
Result on_batch(const Args& in, int spatial, auto&& op) {
  const bool batched = in[0].dim() != spatial + 1;
  const Tensor y = op(batched ? in[0] : unsqueeze(in[0], 0));
  return batched ? y : squeeze(y, 0);
}

Result transposed(const Args& in, Attrs& a, int spatial,
                  Tensor (*conv)(const Tensor&, const Tensor&, const Tensor&,
                                 const ConvTransposeOptions&)) {
  const ConvTransposeOptions options{.stride = a.integers("stride", {1}),
                                     .padding = a.integers("padding", {0}),
                                     .output_padding = a.integers("output_padding", {0}),
                                     .groups = a.integer("groups", 1),
                                     .dilation = a.integers("dilation", {1})};
  return on_batch(in, spatial,
                  [&](const Tensor& x) { return conv(x, in[1], in.optional(2), options); });
}

Result bag_of(const Args& in, Attrs& a) {
  const std::string mode = a.text("mode", "mean");
  TS_CHECK(mode == "sum" || mode == "mean" || mode == "max", "embedding_bag",
           "'mode' is \"sum\", \"mean\" or \"max\"; got '", mode, "'");
  a.only("scale_grad_by_freq", false);
  a.only("sparse", false);
  Tensor offsets = in.optional(2);
  if (!offsets.defined() && a.has("offsets")) {
    const Shape list = a.integers("offsets");
    offsets = tensor(std::vector<double>(list.begin(), list.end()), {list.size()}, kI64)
                  .to(in[0].device());
  }
  return embedding_bag(in[0], in[1], offsets,
                       {.mode = mode == "sum"   ? BagMode::kSum
                                : mode == "max" ? BagMode::kMax
                                                : BagMode::kMean,
                        .per_sample_weights = in.optional(3),
                        .include_last_offset = a.flag("include_last_offset", false),
                        .padding_idx = a.maybe_integer("padding_idx")});
}

// Integers that are a tensor or a list of numbers.
Tensor integers_of(const Args& in, size_t i, Attrs& a, const char* key) {
  if (in.has(i)) return in[i];
  const Shape list = a.integers(key);
  return tensor(std::vector<double>(list.begin(), list.end()), {list.size()}, kI64);
}

RecurrentSteps recurrent_steps(Attrs& a) {
  return {a.has("batch_sizes") ? a.integers("batch_sizes").to_vector() : std::vector<int64_t>(),
          a.flag("reverse", false)};
}

Result ctc(const Args& in, Attrs& a) {
  // The gradient is meant for log_softmax: with it central differences see what torch gives.
  const Tensor log_probs = a.flag("logits", false) ? log_softmax(in[0], -1) : in[0];
  return ctc_loss(log_probs, in[1], integers_of(in, 2, a, "input_lengths"),
                  integers_of(in, 3, a, "target_lengths"), a.integer("blank", 0),
                  reduction_named(a, "ctc_loss"), a.flag("zero_infinity", false));
}

}  // namespace

std::vector<OpRow> layer_rows() {
  return {
      {.name = "selu",
       .parameters = "input",
       .call = [](const Args& in, Attrs&) -> Result { return selu(in[0]); },
       .samples = {{{away({3, 5})}}, {{away({})}}, {{away({0, 2})}}},
       .records = {"elu", "mul"}},
      {.name = "mish",
       .parameters = "input",
       .call = [](const Args& in, Attrs&) -> Result { return mish(in[0]); },
       .samples = {{{normal({3, 5})}}, {{uniform(-30, 30, {9})}}, {{normal({})}}, {{normal({0})}}}},
      {.name = "hardswish",
       .parameters = "input",
       .call = [](const Args& in, Attrs&) -> Result { return hardswish(in[0]); },
       .samples = {{{normal({3, 5})}}, {{uniform(-7, 7, {11})}}, {{normal({})}}, {{normal({0})}}}},
      {.name = "prelu",
       .parameters = "input, weight",
       .call = [](const Args& in, Attrs&) -> Result { return prelu(in[0], in[1]); },
       .samples = {{{away({2, 3, 4}), normal({3})}, "{}", 8},
                   {{away({3, 5}), normal({1})}, "{}", 15},
                   {{away({4}), normal({4})}, "{}", 1},
                   {{away({4}), normal({})}, "{}", 4},
                   {{away({0, 3}), normal({3})}}},
       .sums = true},
      {.name = "conv_transpose1d",
       .parameters = "input, weight, bias",
       .call = [](const Args& in, Attrs& a) -> Result {
         return transposed(in, a, 1, conv_transpose1d);
       },
       .samples = {{{normal({2, 3, 5}), normal({3, 2, 3}), normal({2})}, "{}", 21},
                   {{normal({1, 4, 5}), normal({4, 2, 3}), absent()},
                    R"({"stride": 2, "padding": 1, "output_padding": 1, "groups": 2})",
                    18},
                   {{normal({2, 4}), normal({2, 2, 2}), normal({2})}, R"({"dilation": 2})", 8},
                   {{normal({2, 2, 3}), normal({2, 1, 1}), normal({1})},
                    R"({"output_padding": 1, "dilation": 2})",
                    8}},
       .sums = true,
       .records = {"conv_transpose2d"}},
      {.name = "conv_transpose2d",
       .parameters = "input, weight, bias",
       .call = [](const Args& in, Attrs& a) -> Result {
         return transposed(in, a, 2, conv_transpose2d);
       },
       .samples =
           {{{normal({1, 3, 3, 2}), normal({3, 2, 2, 2}), normal({2})}, "{}", 18},
            {{normal({2, 2, 2, 3}), normal({2, 1, 3, 2}), absent()},
             R"({"stride": [2, 1], "padding": [1, 0], "groups": 2})",
             18},
            {{normal({1, 2, 2, 2}), normal({2, 2, 2, 2}), normal({2})},
             R"({"stride": 2, "output_padding": 1, "dilation": 2})",
             16},
            {{normal({1, 2, 2, 3}), normal({2, 1, 2, 2}), normal({2})},
             R"({"padding": [1, 0], "output_padding": [2, 1], "dilation": [3, 2], "groups": 2})",
             12}},
       .sums = true,
       .perf = Sample{{normal({32, 64, 14, 14}), normal({64, 32, 4, 4}), normal({32})},
                      R"({"stride": 2, "padding": 1})"}},
      {.name = "conv3d",
       .parameters = "input, weight, bias",
       .call = [](const Args& in, Attrs& a) -> Result {
         const ConvOptions options{.stride = a.integers("stride", {1}),
                                   .padding = a.integers("padding", {0}),
                                   .dilation = a.integers("dilation", {1}),
                                   .groups = a.integer("groups", 1)};
         return on_batch(
             in, 3, [&](const Tensor& x) { return conv3d(x, in[1], in.optional(2), options); });
       },
       .samples = {{{normal({1, 2, 3, 3, 2}), normal({2, 2, 2, 2, 2}), normal({2})}, "{}", 16},
                   {{normal({2, 2, 3, 2, 3}), normal({2, 1, 2, 1, 2}), absent()},
                    R"({"stride": [2, 1, 1], "padding": [1, 0, 1], "groups": 2})",
                    24},
                   {{normal({1, 5, 2, 3}), normal({2, 1, 2, 2, 2}), normal({2})},
                    R"({"dilation": [2, 1, 1], "padding": [1, 0, 0]})",
                    30}},
       .sums = true,
       .records = {"conv2d"},
       .perf = Sample{{normal({4, 16, 16, 28, 28}), normal({32, 16, 3, 3, 3}), normal({32})},
                      R"({"padding": 1})"}},
      {.name = "avg_pool1d",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         return avg_pool1d(in[0], a.integers("kernel_size"), a.integers("stride", {}),
                           a.integers("padding", {0}), a.flag("ceil_mode", false),
                           a.flag("count_include_pad", true));
       },
       .samples = {{{normal({1, 2, 6})}, R"({"kernel_size": 2})", 2},
                   {{normal({2, 9})},
                    R"({"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": false})",
                    3},
                   {{normal({1, 2, 8})}, R"({"kernel_size": 3, "ceil_mode": true})", 3}},
       .sums = true,
       .records = {"avg_pool2d"}},
      {.name = "instance_norm",
       .parameters = "input, running_mean, running_var, weight, bias",
       .call = [](const Args& in, Attrs& a) -> Result {
         // Copies, as the caller's inputs are not written to.
         const auto copy = [&](size_t i) { return in.has(i) ? clone(in[i]) : Tensor(); };
         return instance_norm(in[0], copy(1), copy(2), in.optional(3), in.optional(4),
                              a.flag("use_input_stats", true), a.number("momentum", 0.1),
                              a.number("eps", 1e-5));
       },
       .samples = {{{normal({2, 3, 5}), absent(), absent(), normal({3}), normal({3})}, "{}", 10},
                   {{normal({1, 2, 2, 4})}, R"({"eps": 0.001})", 8},
                   {{normal({2, 3, 4}), constant(normal({3})), constant(positive({3})), normal({3}),
                     normal({3})},
                    R"({"use_input_stats": false})",
                    8}},
       .tolerance = 8,
       .records = {"group_norm", "batch_norm"}},
      {.name = "embedding_bag",
       .parameters = "input, weight, offsets, per_sample_weights",
       .call = bag_of,
       .samples =
           {{{integers(7, {3, 4}), normal({7, 3})}, "{}", 12},
            {{integers(7, {3, 4}), normal({7, 3})}, R"({"mode": "max", "padding_idx": 2})", 3},
            {{integers(5, {6}), normal({5, 3})}, R"({"mode": "sum", "offsets": [0, 2, 2]})", 6},
            {{integers(5, {6}), normal({5, 3})},
             R"({"mode": "mean", "offsets": [0, 1, 4, 6], "include_last_offset": true,
                        "padding_idx": -1})",
             6},
            {{integers(5, {7}), normal({5, 2})}, R"({"mode": "max", "offsets": [0, 3, 3, 6]})", 7},
            {{integers(5, {2, 3}), normal({5, 2}), absent(), normal({2, 3})},
             R"({"mode": "sum"})",
             6},
            {{integers(5, {0}), normal({5, 2})}, R"({"offsets": [0, 0]})", 1}},
       .records = {"embedding", "index_add"},
       .perf = Sample{{integers(8192, {1024, 16}), normal({8192, 128})}}},
      {.name = "poisson_nll_loss",
       .parameters = "input, target",
       .call = [](const Args& in, Attrs& a) -> Result {
         return poisson_nll_loss(in[0], in[1], a.flag("log_input", true), a.flag("full", false),
                                 a.number("eps", 1e-8), reduction_named(a, "poisson_nll_loss"));
       },
       .samples = {{{normal({3, 4}), positive({3, 4})}, "{}", 12},
                   {{normal({3, 4}), uniform(1.25, 4, {3, 4})},
                    R"({"full": true, "reduction": "sum"})",
                    24},
                   {{positive({7}), constant(positive({7}))},
                    R"({"log_input": false, "full": true, "eps": 0.01, "reduction": "none"})",
                    4}},
       .tolerance = 8},
      {.name = "gaussian_nll_loss",
       .parameters = "input, target, var",
       .call = [](const Args& in, Attrs& a) -> Result {
         return gaussian_nll_loss(in[0], in[1], in[2], a.flag("full", false), a.number("eps", 1e-6),
                                  reduction_named(a, "gaussian_nll_loss"));
       },
       .samples = {{{normal({3, 4}), normal({3, 4}), positive({3, 4})}, "{}", 12},
                   {{normal({3, 4}), normal({3, 4}), positive({3})},
                    R"({"full": true, "reduction": "sum"})",
                    24},
                   {{normal({3, 4}), normal({3, 4}), positive({3, 1})},
                    R"({"reduction": "none"})",
                    4}},
       .tolerance = 8},
      {.name = "triplet_margin_loss",
       .parameters = "anchor, positive, negative",
       .call = [](const Args& in, Attrs& a) -> Result {
         return triplet_margin_loss(in[0], in[1], in[2], a.number("margin", 1), a.number("p", 2),
                                    a.number("eps", 1e-6), a.flag("swap", false),
                                    reduction_named(a, "triplet_margin_loss"));
       },
       .samples = {{{normal({3, 4}), normal({3, 4}), normal({3, 4})}, R"({"margin": 6})", 12},
                   {{normal({3, 4}), normal({3, 4}), normal({3, 4})},
                    R"({"margin": 9, "swap": true, "p": 3, "reduction": "none"})",
                    12},
                   {{normal({5}), normal({5}), normal({5})},
                    R"({"margin": 7, "reduction": "sum"})",
                    10}},
       .tolerance = 16,
       .records = {"norm"}},
      {.name = "cosine_embedding_loss",
       .parameters = "input1, input2, target",
       .call = [](const Args& in, Attrs& a) -> Result {
         const Tensor target = integers_of(in, 2, a, "target").to(in[0].device());
         return cosine_embedding_loss(in[0], in[1], in[0].dim() == 1 ? reshape(target, {}) : target,
                                      a.number("margin", 0),
                                      reduction_named(a, "cosine_embedding_loss"));
       },
       .samples = {{{normal({4, 3}), normal({4, 3})}, R"({"target": [1, -1, 1, -1]})", 12},
                   {{normal({4, 3}), normal({4, 3})},
                    R"({"target": [-1, -1, -1, 1], "margin": -0.9, "reduction": "none"})",
                    6},
                   {{normal({5}), normal({5})}, R"({"target": 1, "reduction": "sum"})", 10}},
       .tolerance = 8,
       .records = {""}},
      {.name = "ctc_loss",
       .parameters = "log_probs, targets, input_lengths, target_lengths",
       .call = ctc,
       .samples = {{{normal({4, 2, 4}), integers(3, {2, 2})},
                    R"({"logits": true, "blank": 3, "input_lengths": [4, 3],
                        "target_lengths": [2, 1]})",
                    32},
                   {{normal({5, 2, 3}), integers(2, {3})},
                    R"({"logits": true, "blank": 2, "input_lengths": [5, 4],
                        "target_lengths": [2, 1], "reduction": "none"})",
                    40},
                   {{normal({4, 3}), integers(2, {2})},
                    R"({"logits": true, "blank": 2, "input_lengths": [4], "target_lengths": [2],
                        "reduction": "sum"})",
                    32}},
       .tolerance = 8,
       .records = {""}},
      {.name = "lstm_layer",
       .parameters = "input, weight_ih, weight_hh, bias_ih, bias_hh, hidden, cell",
       .call = [](const Args& in, Attrs& a) -> Result {
         const RecurrentLayer r = lstm_layer(in[0], in[1], in[2], in.optional(3), in.optional(4),
                                             in[5], in[6], recurrent_steps(a));
         return TensorList{r.output, r.hidden, r.cell};
       },
       .samples = {{{normal({3, 2, 3}), normal({8, 3}), normal({8, 2}), normal({8}), normal({8}),
                     normal({2, 2}), normal({2, 2})},
                    "{}",
                    60},
                   {{normal({6, 2}), normal({12, 2}), normal({12, 3}), absent(), absent(),
                     normal({3, 3}), normal({3, 3})},
                    R"({"batch_sizes": [3, 2, 1], "reverse": true})",
                    60},
                   {{normal({6, 2}), normal({4, 2}), normal({4, 1}), normal({4}), normal({4}),
                     normal({3, 1}), normal({3, 1})},
                    R"({"batch_sizes": [3, 2, 1]})",
                    60}},
       .tolerance = 8,
       .perf = Sample{{normal({64, 32, 512}), normal({2048, 512}), normal({2048, 512}),
                       normal({2048}), normal({2048}), normal({32, 512}), normal({32, 512})}}},
      {.name = "gru_layer",
       .parameters = "input, weight_ih, weight_hh, bias_ih, bias_hh, hidden",
       .call = [](const Args& in, Attrs& a) -> Result {
         const RecurrentLayer r = gru_layer(in[0], in[1], in[2], in.optional(3), in.optional(4),
                                            in[5], recurrent_steps(a));
         return TensorList{r.output, r.hidden};
       },
       .samples = {{{normal({3, 2, 3}), normal({6, 3}), normal({6, 2}), normal({6}), normal({6}),
                     normal({2, 2})},
                    "{}",
                    60},
                   {{normal({6, 2}), normal({9, 2}), normal({9, 3}), absent(), absent(),
                     normal({3, 3})},
                    R"({"batch_sizes": [3, 2, 1], "reverse": true})",
                    60},
                   {{normal({6, 2}), normal({3, 2}), normal({3, 1}), normal({3}), normal({3}),
                     normal({3, 1})},
                    R"({"batch_sizes": [3, 2, 1]})",
                    60}},
       .tolerance = 8,
       .perf = Sample{{normal({64, 32, 512}), normal({1536, 512}), normal({1536, 512}),
                       normal({1536}), normal({1536}), normal({32, 512})}}},
      {.name = "lstm_cell",
       .parameters = "input, hidden, cell, weight_ih, weight_hh, bias_ih, bias_hh",
       .call = [](const Args& in, Attrs&) -> Result {
         const LstmStates next =
             lstm_cell(in[0], in[1], in[2], in[3], in[4], in.optional(5), in.optional(6));
         return TensorList{next.hidden, next.cell};
       },
       .samples = {{{normal({3, 2}), normal({3, 2}), normal({3, 2}), normal({8, 2}), normal({8, 2}),
                     normal({8}), normal({8})},
                    "{}",
                    30},
                   {{normal({3}), normal({2}), normal({2}), normal({8, 3}), normal({8, 2})},
                    "{}",
                    30}},
       .tolerance = 8,
       .records = {""}},
      {.name = "gru_cell",
       .parameters = "input, hidden, weight_ih, weight_hh, bias_ih, bias_hh",
       .call = [](const Args& in, Attrs&) -> Result {
         return gru_cell(in[0], in[1], in[2], in[3], in.optional(4), in.optional(5));
       },
       .samples = {{{normal({3, 2}), normal({3, 2}), normal({6, 2}), normal({6, 2}), normal({6}),
                     normal({6})},
                    "{}",
                    30},
                   {{normal({3}), normal({2}), normal({6, 3}), normal({6, 2})}, "{}", 30}},
       .tolerance = 8,
       .records = {""}},
  };
}

}  // namespace tessera::tests
