// Rows of ops/order.cpp, rearrange.cpp, grid_sample.cpp, cdist.cpp, and of scatter_reduce and
// tensordot.
#include "autograd/op_samples.h"

namespace tessera::tests {
namespace {

using enum Differentiable;

struct CloseOptions {
  double rtol, atol;
  bool equal_nan;
  explicit CloseOptions(Attrs& a)
      : rtol(a.number("rtol", 1e-5)),
        atol(a.number("atol", 1e-8)),
        equal_nan(a.flag("equal_nan", false)) {}
};

Result median_of(const Args& in, Attrs& a) {
  const bool keepdim = a.flag("keepdim", false);
  if (const auto dim = a.maybe_integer("dim")) return median(in[0], *dim, keepdim);
  return median(in[0]);
}

Result quantile_at(const Args& in, Attrs& a) {
  const std::string name = a.text("interpolation", "linear");
  const std::map<std::string, Quantile> kinds = {{"linear", Quantile::kLinear},
                                                 {"lower", Quantile::kLower},
                                                 {"higher", Quantile::kHigher},
                                                 {"midpoint", Quantile::kMidpoint},
                                                 {"nearest", Quantile::kNearest}};
  TS_CHECK(kinds.contains(name), "quantile", "unknown 'interpolation' '", name, "'");
  const auto dim = a.maybe_integer("dim");
  const bool keepdim = a.flag("keepdim", false);
  if (in.has(1)) return quantile(in[0], in[1], dim, keepdim, kinds.at(name));
  if (!a.is_list("q")) return quantile(in[0], a.number("q"), dim, keepdim, kinds.at(name));
  const std::vector<double> q = a.numbers("q");
  Tensor list = tensor(q, {static_cast<int64_t>(q.size())}, in[0].dtype());
  if (in[0].is_meta()) list = zeros(list.shape(), {in[0].dtype(), kMeta});
  return quantile(in[0], in[0].device().is_cuda() ? list.to(in[0].device()) : list, dim, keepdim,
                  kinds.at(name));
}

Result distinct_values(const Args& in, Attrs& a) {
  const bool inverse = a.flag("return_inverse", false), counts = a.flag("return_counts", false);
  const UniqueResult found =
      unique(in[0], a.flag("sorted", true), inverse, counts, a.maybe_integer("dim"));
  TensorList result = {found.values};
  if (inverse) result.push_back(found.inverse);
  if (counts) result.push_back(found.counts);
  if (result.size() == 1) return found.values;
  return result;
}

Result places_in(const Args& in, Attrs& a, bool boundaries_first) {
  const std::string side = a.text("side", "");
  TS_CHECK(side.empty() || side == "left" || side == "right", "searchsorted",
           "'side' is \"left\" or \"right\"; got '", side, "'");
  const bool right = a.flag("right", false);
  TS_CHECK(side != "left" || !right, "searchsorted", "'side' and 'right' contradict each other");
  const DType dtype = a.flag("out_int32", false) ? kI32 : kI64;
  const size_t values_at = boundaries_first ? 1 : 0, sequence_at = boundaries_first ? 0 : 1;
  const Tensor sequence = in[sequence_at];
  Tensor values = in.optional(values_at);
  if (!values.defined()) {
    const Scalar number = a.scalar("input|self");
    const DType kind =
        number.is_floating() && !is_floating(sequence.dtype()) ? kF32 : sequence.dtype();
    values = full({}, number, {.dtype = kind, .device = sequence.device()});
  }
  if (!boundaries_first) return bucketize(values, sequence, right, dtype);
  return searchsorted(sequence, values, right || side == "right", in.optional(2), dtype);
}

Result unfolded(const Args& in, Attrs& a) {
  if (a.has("step")) {  // torch.Tensor.unfold
    return unfold_dim(in[0], a.integer("dimension"), a.integer("size"), a.integer("step"));
  }
  return unfold(in[0], a.integers("kernel_size"), a.integers("dilation", {1}),
                a.integers("padding", {0}), a.integers("stride", {1}));
}

Result scatter_reduced(const Args& in, Attrs& a) {
  const std::string name = a.text("reduce");
  const std::map<std::string, ScatterReduce> kinds = {{"sum", ScatterReduce::kSum},
                                                      {"prod", ScatterReduce::kProd},
                                                      {"mean", ScatterReduce::kMean},
                                                      {"amax", ScatterReduce::kAmax},
                                                      {"amin", ScatterReduce::kAmin}};
  TS_CHECK(kinds.contains(name), "scatter_reduce", "unknown 'reduce' '", name, "'");
  return scatter_reduce(in[0], a.integer("dim"), in[1], in[2], kinds.at(name),
                        a.flag("include_self", true));
}

Result contracted(const Args& in, Attrs& a) {
  if (!a.is_list("dims")) return tensordot(in[0], in[1], a.integer("dims", 2));
  const std::vector<Shape> dims = a.integer_lists("dims");
  TS_CHECK(dims.size() == 2, "tensordot", "'dims' is a number or two lists");
  return tensordot(in[0], in[1], dims[0], dims[1]);
}

Result distances_of(const Args& in, Attrs& a) {
  const std::string mode = a.text("compute_mode", "use_mm_for_euclid_dist_if_necessary");
  const std::map<std::string, EuclideanProduct> modes = {
      {"use_mm_for_euclid_dist_if_necessary", EuclideanProduct::kAuto},
      {"use_mm_for_euclid_dist", EuclideanProduct::kAlways},
      {"donot_use_mm_for_euclid_dist", EuclideanProduct::kNever}};
  TS_CHECK(modes.contains(mode), "cdist", "unknown 'compute_mode' '", mode, "'");
  return cdist(in[0], in[1], a.number("p", 2), modes.at(mode));
}

Result sampled(const Args& in, Attrs& a) {
  const std::string mode = a.text("mode", "bilinear"), padding = a.text("padding_mode", "zeros");
  TS_CHECK_AS(UnsupportedError, mode == "bilinear" || mode == "nearest", "grid_sample",
              "'mode' is \"bilinear\" or \"nearest\"; got '", mode, "'");
  const std::map<std::string, GridPadding> paddings = {{"zeros", GridPadding::kZeros},
                                                       {"border", GridPadding::kBorder},
                                                       {"reflection", GridPadding::kReflection}};
  TS_CHECK(paddings.contains(padding), "grid_sample", "unknown 'padding_mode' '", padding, "'");
  return grid_sample(in[0], in[1],
                     mode == "nearest" ? Interpolation::kNearest : Interpolation::kLinear,
                     paddings.at(padding), a.flag("align_corners", false));
}

Input narrow_grid(const Shape& shape) { return uniform(-0.9, 0.9, shape); }

}  // namespace

std::vector<OpRow> order_rows() {
  std::vector<OpRow> rows = {
      {.name = "isclose",
       .parameters = "input, other",
       .call = [](const Args& in, Attrs& a) -> Result {
         const CloseOptions o(a);
         return isclose(in[0], in[1], o.rtol, o.atol, o.equal_nan);
       },
       .samples = {{{integers(4, {3, 5}), integers(4, {5})}, R"({"rtol": 0.5})"},
                   {{booleans({4}), booleans({2, 1})}, R"({"rtol": 0, "atol": 0})"},
                   {{integers(9, {}), integers(9, {0, 2})}}},
       .differentiable = kNo,
       .records = {""}},
      {.name = "allclose",
       .parameters = "input, other",
       .call = [](const Args& in, Attrs& a) -> Result {
         const CloseOptions o(a);
         const bool close = allclose(in[0], in[1], o.rtol, o.atol, o.equal_nan);
         return full({}, close, {.dtype = kBool, .device = in[0].device()});
       },
       .samples = {{{integers(4, {3, 5}), integers(4, {3, 5})}, R"({"atol": 4})"},
                   {{integers(4, {3, 5}), integers(4, {5})}}},
       .differentiable = kNo,
       .value_dependent = true,
       .records = {""}},
      {.name = "median",
       .parameters = "input",
       .call = median_of,
       .samples = {{{distinct({3, 5})}},
                   {{distinct({4, 6})}, R"({"dim": 1})"},
                   {{distinct({3, 4, 2})}, R"({"dim": 0, "keepdim": true})"},
                   {{distinct({})}, R"({"dim": 0})"},
                   {{distinct({0, 3})}, R"({"dim": 1})"}}},
      {.name = "quantile",
       .parameters = "input, q",
       .call = quantile_at,
       .samples = {{{distinct({3, 5})}, R"({"q": 0.3})", 2},
                   {{distinct({4, 6})}, R"({"q": [0.1, 0.75], "dim": 0})", 4},
                   {{distinct({3, 4, 2}), constant(probability({3}))},
                    R"({"dim": 1, "keepdim": true})",
                    6},
                   {{distinct({2, 7})}, R"({"q": 0.4, "dim": 1, "interpolation": "midpoint"})", 2},
                   {{distinct({9})}, R"({"q": [0.3, 0.6], "interpolation": "nearest"})", 2}},
       .tolerance = 8,
       .records = {""}},
      {.name = "unique",
       .parameters = "input",
       .call = distinct_values,
       .samples = {{{integers(4, {3, 5})}, R"({"return_inverse": true, "return_counts": true})"},
                   {{integers(2, {6, 2})}, R"({"dim": 0, "return_inverse": true})"},
                   {{booleans({7})}},
                   {{integers(3, {0})}, R"({"return_counts": true})"}},
       .differentiable = kNo,
       .value_dependent = true,
       .records = {""}},
      {.name = "cummax",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result { return cummax(in[0], a.integer("dim")); },
       .samples = {{{distinct({3, 7})}, R"({"dim": 1})", 7},
                   {{distinct({5, 3, 2})}, R"({"dim": 0})", 5},
                   {{distinct({})}, R"({"dim": 0})"},
                   {{distinct({2, 0})}, R"({"dim": 1})"}}},
      {.name = "cummin",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result { return cummin(in[0], a.integer("dim")); },
       .samples = {{{distinct({3, 7})}, R"({"dim": -1})", 7},
                   {{distinct({2, 70, 2})}, R"({"dim": 1})", 70}}},
      {.name = "searchsorted",
       .parameters = "sorted_sequence, input|self, sorter",
       .call = [](const Args& in, Attrs& a) -> Result { return places_in(in, a, true); },
       .samples = {{{integers(9, {6}), integers(9, {2, 5})}},
                   {{integers(9, {2, 5}), integers(9, {2, 3})}, R"({"right": true})"},
                   {{integers(9, {5}), integers(9, {})}, R"({"side": "right", "out_int32": true})"},
                   {{integers(9, {0}), integers(9, {3})}}},
       .differentiable = kNo},
      {.name = "bucketize",
       .parameters = "input, boundaries",
       .call = [](const Args& in, Attrs& a) -> Result { return places_in(in, a, false); },
       .samples = {{{integers(9, {2, 5}), integers(9, {6})}, R"({"right": true})"}},
       .differentiable = kNo,
       .records = {""}},
  };
  return rows;
}

std::vector<OpRow> rearrange_rows() {
  std::vector<OpRow> rows = {
      {.name = "meshgrid",
       .parameters = "tensors*",
       .call = [](const Args& in, Attrs& a) -> Result {
         const std::string name = a.text("indexing", "ij");
         TS_CHECK(name == "ij" || name == "xy", "meshgrid", "'indexing' is \"ij\" or \"xy\"; got '",
                  name, "'");
         return meshgrid(in.list(), name == "xy" ? Indexing::kXy : Indexing::kIj);
       },
       .samples = {{{normal({3}), normal({2})}, "{}", 3},
                   {{normal({3}), normal({}), normal({2})}, R"({"indexing": "xy"})", 6}},
       .records = {""}},
      {.name = "movedim",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         return movedim(in[0], a.integers("source"), a.integers("destination"));
       },
       .samples = {{{normal({2, 3, 4})}, R"({"source": 0, "destination": -1})"},
                   {{normal({2, 3, 4})}, R"({"source": [0, 1], "destination": [2, 0]})"},
                   {{normal({})}, R"({"source": 0, "destination": 0})"}},
       .records = {""}},
      {.name = "diagonal",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         return diagonal(in[0], a.integer("offset", 0), a.integer("dim1", 0), a.integer("dim2", 1));
       },
       .samples = {{{normal({3, 4})}},
                   {{normal({4, 3})}, R"({"offset": -2})"},
                   {{normal({2, 3, 4})}, R"({"offset": 1, "dim1": 2, "dim2": 0})"},
                   {{normal({2, 3})}, R"({"offset": 5})"}},
       .records = {"diagonal"}},
      {.name = "diag_embed",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         return diag_embed(in[0], a.integer("offset", 0), a.integer("dim1", -2),
                           a.integer("dim2", -1));
       },
       .samples = {{{normal({2, 3})}},
                   {{normal({4})}, R"({"offset": -2})"},
                   {{normal({2, 3})}, R"({"offset": 1, "dim1": 2, "dim2": 0})"},
                   {{normal({2, 0})}, R"({"offset": 2})"}},
       .records = {""}},
      {.name = "unfold",
       .parameters = "input",
       .call = unfolded,
       .samples =
           {{{normal({2, 3, 5, 4})}, R"({"kernel_size": 2})", 4},
            {{normal({2, 5, 6})},
             R"({"kernel_size": [3, 2], "stride": [2, 1], "padding": 1, "dilation": [1, 2]})",
             6},
            {{normal({7, 2})}, R"({"dimension": 0, "size": 3, "step": 2})", 2}},
       .sums = true,
       .records = {""}},
      {.name = "fold",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         return fold(in[0], a.integers("output_size"), a.integers("kernel_size"),
                     a.integers("dilation", {1}), a.integers("padding", {0}),
                     a.integers("stride", {1}));
       },
       .samples =
           {{{normal({2, 4, 9})}, R"({"output_size": [4, 4], "kernel_size": 2})", 4},
            {{normal({6, 12})},
             R"({"output_size": [5, 4], "kernel_size": [3, 2], "padding": 1, "stride": [2, 1], "dilation": [1, 2]})",
             6}},
       .sums = true,
       .records = {""}},
      {.name = "scatter_reduce",
       .parameters = "input, index, src",
       .call = scatter_reduced,
       .samples = {{{distinct({4, 5}), integers(5, {4, 7}), away({4, 8})},
                    R"({"dim": 1, "reduce": "amax"})",
                    7},
                   {{distinct({4, 5}), integers(4, {9, 5}), away({9, 5})},
                    R"({"dim": 0, "reduce": "amin", "include_self": false})",
                    9},
                   {{away({3, 5}), integers(5, {3, 6}), away({3, 6})},
                    R"({"dim": 1, "reduce": "prod"})",
                    7},
                   {{away({5}), integers(5, {6}), away({6})},
                    R"({"dim": 0, "reduce": "prod", "include_self": false})",
                    7},
                   {{normal({3, 5}), integers(5, {3, 6}), normal({3, 6})},
                    R"({"dim": 1, "reduce": "mean"})",
                    7},
                   {{normal({3, 5}), integers(5, {3, 6}), normal({3, 6})},
                    R"({"dim": 1, "reduce": "sum", "include_self": false})",
                    7}},
       .tolerance = 16},
      {.name = "tensordot",
       .parameters = "a, b",
       .call = contracted,
       .samples = {{{normal({2, 3, 4}), normal({3, 4, 5})}, "{}", 12},
                   {{normal({3, 4, 2}), normal({2, 5, 3})}, R"({"dims": [[0, 2], [2, 0]]})", 6},
                   {{normal({3}), normal({2})}, R"({"dims": 0})", 3},
                   {{normal({3, 1}), normal({4, 2})}, R"({"dims": 1})", 8}},
       .sums = true,
       .records = {""}},
      {.name = "cdist",
       .parameters = "x1, x2",
       .call = distances_of,
       .samples = {{{distinct({3, 4}), distinct({5, 4})}, "{}", 5},
                   {{normal({2, 1, 3, 2}), uniform(4, 6, {4, 2})}, R"({"p": 1})", 8},
                   {{normal({3, 4}), uniform(4, 6, {2, 4})}, R"({"p": 3.0})", 4},
                   {{normal({3, 2}), uniform(4, 6, {2, 2})}, R"({"p": 1.5})", 4},
                   {{normal({3, 4}), uniform(4, 6, {2, 4})}, R"({"p": Infinity})", 3},
                   {{normal({3, 4}), uniform(4, 6, {2, 4})},
                    R"({"compute_mode": "use_mm_for_euclid_dist"})",
                    30},
                   {{normal({0, 4}), normal({2, 4})}}},
       .tolerance = 16},
      {.name = "grid_sample",
       .parameters = "input, grid",
       .call = sampled,
       .samples =
           {{{normal({2, 3, 4, 5}), narrow_grid({2, 2, 3, 2})}, R"({"align_corners": true})", 8},
            {{normal({1, 2, 3, 4}), uniform(-1.8, 1.8, {1, 3, 2, 2})},
             R"({"padding_mode": "reflection"})",
             8},
            {{normal({1, 2, 3, 4}), uniform(-1.3, 1.3, {1, 3, 2, 2})},
             R"({"padding_mode": "border"})",
             8},
            {{normal({1, 1, 2, 3, 2}), narrow_grid({1, 2, 1, 2, 3})}, "{}", 8},
            {{normal({1, 2, 3, 4}), narrow_grid({1, 3, 2, 2})}, R"({"mode": "nearest"})", 6}},
       .sums = true,
       .tolerance =
           64,  // coordinates in 16 bits: a unit of theirs moves a place by a unit of the plane
       .records = {""}},
  };
  return rows;
}

}  // namespace tessera::tests
