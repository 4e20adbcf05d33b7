// Rows of ops/shape.cpp, ops/index.cpp, ops/sort.cpp and ops/embedding.cpp.
#include "autograd/op_samples.h"

namespace tessera::tests {
namespace {

using enum Differentiable;

Result split_tensor(const Args& in, Attrs& a) {
  constexpr std::string_view kKey = "split_size_or_sections|split_size|sections|split_sections";
  const int64_t dim = a.integer("dim", 0);
  if (a.is_list(kKey)) return split(in[0], a.integers(kKey), dim);
  return split(in[0], a.integer(kKey), dim);
}

Result squeezed(const Args& in, Attrs& a) {
  if (!a.has("dim")) return squeeze(in[0]);
  const Shape dims = wrap_dims(a.integers("dim"), in[0].dim(), "squeeze");
  Tensor y = in[0];
  for (int i = dims.size() - 1; i >= 0; --i) y = squeeze(y, dims[i]);
  return y;
}

Result padded(const Args& in, Attrs& a) {
  const std::string mode = a.text("mode", "constant");
  const Pad kind = mode == "reflect"     ? Pad::kReflect
                   : mode == "replicate" ? Pad::kReplicate
                   : mode == "circular"  ? Pad::kCircular
                                         : Pad::kConstant;
  TS_CHECK(kind != Pad::kConstant || mode == "constant", "pad",
           "'mode' is \"constant\", \"reflect\", \"replicate\" or \"circular\"; got '", mode, "'");
  return pad(in[0], a.integers("pad"), kind, a.number("value", 0));
}

Result repeated(const Args& in, Attrs& a) {
  const std::optional<int64_t> dim = a.maybe_integer("dim");
  const std::optional<int64_t> size = a.maybe_integer("output_size");
  const Tensor y = in.has(1) ? repeat_interleave(in[0], in[1], dim)
                             : repeat_interleave(in[0], a.integer("repeats"), dim);
  TS_CHECK(!size || y.size(dim.value_or(0)) == *size, "repeat_interleave", "'output_size' is ",
           *size, " and the result has ", y.size(dim.value_or(0)));
  return y;
}

// torch.nn.functional.embedding(input, weight), and torch.embedding(weight, indices).
Result embedded(const Args& in, Attrs& a) {
  a.only("scale_grad_by_freq", false);
  a.only("sparse", false);
  const bool swapped = is_floating(in[0].dtype()) && !is_floating(in[1].dtype());
  const Tensor& weight = swapped ? in[0] : in[1];
  std::optional<int64_t> padding = a.maybe_integer("padding_idx");
  if (padding && *padding < 0) *padding += weight.size(0);
  return embedding(swapped ? in[1] : in[0], weight, padding);
}

// Python's slices of all dimensions as one op of the table: shape ops of the table take one tensor.
OpRow view_row(std::string_view name, Result (*call)(const Args&, Attrs&),
               std::vector<Sample> samples) {
  return {.name = name, .parameters = "input", .call = call, .samples = std::move(samples)};
}

}  // namespace

std::vector<OpRow> shape_rows() {
  std::vector<OpRow> rows = {
      view_row(
          "view",
          [](const Args& in, Attrs& a) -> Result { return view(in[0], a.integers("size|shape")); },
          {{{normal({4, 3})}, R"({"size": [2, -1]})"},
           {{normal({})}, R"({"size": [1, 1]})"},
           {{normal({0, 3})}, R"({"size": [3, 0]})"}}),
      view_row("reshape",
               [](const Args& in, Attrs& a) -> Result {
                 return reshape(in[0], a.integers("shape|size"));
               },
               {{{normal({4, 3})}, R"({"shape": [2, -1]})"},
                {{normal({2, 3, 2})}, R"({"shape": [12]})"},
                {{normal({1})}, R"({"shape": []})"}}),
      view_row("flatten",
               [](const Args& in, Attrs& a) -> Result {
                 return flatten(in[0], a.integer("start_dim", 0), a.integer("end_dim", -1));
               },
               {{{normal({2, 3, 4})}, R"({"start_dim": 1})"},
                {{normal({4, 2, 3})}, R"({"start_dim": 1})"},
                {{normal({})}}}),
      view_row(
          "permute",
          [](const Args& in, Attrs& a) -> Result { return permute(in[0], a.integers("dims")); },
          {{{normal({2, 3, 4})}, R"({"dims": [2, 0, 1]})"},
           {{normal({2, 3})}, R"({"dims": [-1, 0]})"}}),
      view_row("transpose",
               [](const Args& in, Attrs& a) -> Result {
                 return transpose(in[0], a.integer("dim0|axis0"), a.integer("dim1|axis1"));
               },
               {{{normal({2, 3, 4})}, R"({"dim0": 1, "dim1": -1})"}}),
      view_row("t", [](const Args& in, Attrs&) -> Result { return in[0].t(); },
               {{{normal({3, 4})}}}),
      view_row("expand",
               [](const Args& in, Attrs& a) -> Result {
                 return expand(in[0], a.integers("size|sizes|shape"));
               },
               {{{normal({3, 1})}, R"({"size": [2, -1, 4]})", 8},
                {{normal({})}, R"({"size": [2, 2]})", 4}}),
      view_row("squeeze", squeezed,
               {{{normal({1, 3, 1})}}, {{normal({1, 3, 1})}, R"({"dim": 0})"}}),
      view_row(
          "unsqueeze",
          [](const Args& in, Attrs& a) -> Result { return unsqueeze(in[0], a.integer("dim")); },
          {{{normal({2, 3})}, R"({"dim": -1})"}, {{normal({})}, R"({"dim": 0})"}}),
      view_row("narrow",
               [](const Args& in, Attrs& a) -> Result {
                 return narrow(in[0], a.integer("dim"), a.integer("start"), a.integer("length"));
               },
               {{{normal({5, 3})}, R"({"dim": 0, "start": 1, "length": 3})"},
                {{normal({2, 6})}, R"({"dim": -1, "start": 4, "length": 0})"}}),
      view_row("select",
               [](const Args& in, Attrs& a) -> Result {
                 return select(in[0], a.integer("dim"), a.integer("index"));
               },
               {{{normal({3, 4})}, R"({"dim": 0, "index": 2})"},
                {{normal({2, 3, 4})}, R"({"dim": 1, "index": -1})"}}),
      view_row("slice",
               [](const Args& in, Attrs& a) -> Result {
                 return slice(in[0], a.integer("dim", 0), a.maybe_integer("start"),
                              a.maybe_integer("end"), a.integer("step", 1));
               },
               {{{normal({6, 3})}, R"({"start": 1, "end": 6, "step": 2})"},
                {{normal({2, 7})}, R"({"dim": 1, "start": -5, "end": -1})"}}),
      view_row("as_strided",
               [](const Args& in, Attrs& a) -> Result {
                 return as_strided(clone(in[0]), a.integers("size"), a.integers("stride"),
                                   a.integer("storage_offset", 0));
               },
               {{{normal({12})}, R"({"size": [3, 3], "stride": [3, 2], "storage_offset": 1})", 3}}),
      view_row("split", split_tensor,
               {{{normal({5, 3})}, R"({"split_size_or_sections": 2})"},
                {{normal({2, 6})}, R"({"split_size_or_sections": [1, 3, 2], "dim": 1})"}}),
      view_row("chunk",
               [](const Args& in, Attrs& a) -> Result {
                 return chunk(in[0], a.integer("chunks"), a.integer("dim", 0));
               },
               {{{normal({7, 2})}, R"({"chunks": 3})"},
                {{normal({2, 4})}, R"({"chunks": 4, "dim": -1})"}}),
      view_row(
          "unbind",
          [](const Args& in, Attrs& a) -> Result { return unbind(in[0], a.integer("dim", 0)); },
          {{{normal({3, 4})}}, {{normal({2, 3, 2})}, R"({"dim": -1})"}}),
      view_row("repeat",
               [](const Args& in, Attrs& a) -> Result {
                 return repeat(in[0], a.integers("repeats|sizes"));
               },
               {{{normal({2, 3})}, R"({"repeats": [2, 2]})", 4},
                {{normal({3})}, R"({"repeats": [2, 1, 2]})", 4}}),
      {.name = "detach",
       .parameters = "input",
       .call = [](const Args& in, Attrs&) -> Result { return detach(in[0]); },
       .samples = {{{normal({2, 3})}}},
       .differentiable = kNo,
       .records = {""}},
      {.name = "repeat_interleave",
       .parameters = "input, repeats",
       .call = repeated,
       .samples = {{{normal({2, 3})}, R"({"repeats": 2})"},
                   {{normal({2, 3})}, R"({"repeats": 3, "dim": 1})", 3}}},
      {.name = "cat",
       .parameters = "tensors*",
       .call = [](const Args& in,
                  Attrs& a) -> Result { return cat(in.list(), a.integer("dim", 0)); },
       .samples = {{{normal({2, 3}), normal({1, 3})}},
                   {{normal({2, 3}), normal({2, 1}), normal({2, 4})}, R"({"dim": -1})"},
                   {{normal({2, 0}), normal({2, 3})}, R"({"dim": 1})"}},
       .perf = Sample{{normal({2048, 512}), normal({2048, 512})}, R"({"dim": 1})"}},
      {.name = "stack",
       .parameters = "tensors*",
       .call = [](const Args& in,
                  Attrs& a) -> Result { return stack(in.list(), a.integer("dim", 0)); },
       .samples = {{{normal({2, 3}), normal({2, 3})}},
                   {{normal({2, 3}), normal({2, 3}), normal({2, 3})}, R"({"dim": -1})"},
                   {{normal({}), normal({})}}}},
      {.name = "flip",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result { return flip(in[0], a.integers("dims")); },
       .samples = {{{normal({3, 4})}, R"({"dims": [0]})"},
                   {{normal({2, 3, 2})}, R"({"dims": [0, -1]})"}}},
      {.name = "roll",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a)
           -> Result { return roll(in[0], a.integers("shifts"), a.integers("dims", {})); },
       .samples = {{{normal({3, 4})}, R"({"shifts": 2})"},
                   {{normal({3, 4})}, R"({"shifts": [1, -3], "dims": [0, 1]})"}}},
      {.name = "pad",
       .parameters = "input",
       .call = padded,
       .samples = {{{normal({2, 3})}, R"({"pad": [1, 2, 0, 1], "value": 0.5})"},
                   {{normal({4, 5})}, R"({"pad": [-1, 1]})"},
                   {{normal({1, 2, 5})}, R"({"pad": [2, 1], "mode": "reflect"})", 3},
                   {{normal({1, 2, 5})}, R"({"pad": [2, 1], "mode": "replicate"})", 3},
                   {{normal({1, 2, 5})}, R"({"pad": [2, 1], "mode": "circular"})", 3}}},
  };
  rows.front().refuses_layouts = true;  // view
  return rows;
}

std::vector<OpRow> index_rows() {
  return {
      {.name = "index_select",
       .parameters = "input, index",
       .call = [](const Args& in, Attrs& a) -> Result {
         return index_select(in[0], a.integer("dim"), in[1]);
       },
       .samples = {{{normal({5, 3}), integers(5, {4})}, R"({"dim": 0})", 4},
                   {{normal({2, 5, 3}), integers(5, {7})}, R"({"dim": -2})", 7},
                   {{normal({2, 5}), integers(5, {0})}, R"({"dim": 1})"}}},
      {.name = "gather",
       .parameters = "input, index",
       .call = [](const Args& in, Attrs& a) -> Result {
         a.only("sparse_grad", false);
         return gather(in[0], a.integer("dim"), in[1]);
       },
       .samples = {{{normal({4, 5}), integers(4, {3, 5})}, R"({"dim": 0})", 3},
                   {{normal({2, 3, 6}), integers(6, {2, 2, 4})}, R"({"dim": -1})", 4},
                   {{normal({}), integers(1, {3})}, R"({"dim": 0})", 4},
                   {{normal({5}), integers(5, {})}, R"({"dim": 0})", 4}}},
      {.name = "scatter",
       .parameters = "input, index, src",
       .call = [](const Args& in, Attrs& a) -> Result {
         const int64_t dim = a.integer("dim");
         TS_CHECK(!a.has("reduce"), "scatter", "'reduce' is not served; use scatter_add for sums");
         return in.has(2) ? scatter(in[0], dim, in[1], in[2])
                          : scatter(in[0], dim, in[1], a.scalar("value"));
       },
       .samples = {{{normal({4, 5}), integers(1, {4, 1}), normal({4, 1})}, R"({"dim": 1})"},
                   {{normal({4, 5}), integers(5, {4, 2})}, R"({"dim": 1, "value": 1.5})"}}},
      {.name = "scatter_add",
       .parameters = "input, index, src",
       .call = [](const Args& in, Attrs& a) -> Result {
         return scatter_add(in[0], a.integer("dim"), in[1], in[2]);
       },
       .samples = {{{normal({4, 5}), integers(5, {4, 7}), normal({4, 7})}, R"({"dim": 1})", 7},
                   {{normal({3, 2, 2}), integers(3, {6, 2, 1}), normal({6, 2, 1})},
                    R"({"dim": 0})",
                    6}},
       .sums = true},
      {.name = "index_add",
       .parameters = "input, index, source",
       .call = [](const Args& in, Attrs& a) -> Result {
         const Scalar alpha = a.scalar("alpha", 1);
         return index_add(in[0], a.integer("dim"), in[1],
                          alpha.to_double() == 1 ? in[2] : mul(in[2], alpha));
       },
       .samples = {{{normal({5, 3}), integers(5, {7}), normal({7, 3})}, R"({"dim": 0})", 7}},
       .sums = true},
      {.name = "index_fill",
       .parameters = "input, index",
       .call = [](const Args& in, Attrs& a) -> Result {
         return index_fill(in[0], a.integer("dim"), in[1], a.scalar("value"));
       },
       .samples = {{{normal({5, 3}), integers(5, {2})}, R"({"dim": 0, "value": 1.5})"},
                   {{normal({2, 3, 4}), integers(3, {4})}, R"({"dim": -2, "value": -1})"},
                   {{normal({}), integers(1, {1})}, R"({"dim": 0, "value": 2})"}},
       .records = {"scatter"}},
      {.name = "index",
       .parameters = "input, indices*",
       .call = [](const Args& in, Attrs&) -> Result { return index(in[0], in.list()); },
       .samples = {{{normal({4, 5}), integers(4, {3}), integers(5, {3})}, "{}", 3},
                   {{normal({5, 3}), integers(5, {2, 2})}, "{}", 4},
                   {{normal({3, 5}), absent(), integers(5, {2})}, "{}", 2}}},
      {.name = "index_put",
       .parameters = "input, indices*, values",
       .call = [](const Args& in, Attrs& a) -> Result {
         return index_put(in[0], in.list(), in[2], a.flag("accumulate", false));
       },
       .samples = {{{normal({4, 5}), integers(4, {3}), integers(5, {3}), normal({3})},
                    R"({"accumulate": true})",
                    3},
                   {{normal({5, 3}), integers(1, {1}), normal({1, 3})}},
                   {{normal({3, 5}), absent(), integers(5, {2}), normal({3, 2})},
                    R"({"accumulate": true})",
                    2}}},
      {.name = "index_put_",
       .parameters = "input, indices*, values",
       .call = [](const Args& in, Attrs& a) -> Result {
         const Tensor x = clone(in[0]);
         index_put_(x, in.list(), in[2], a.flag("accumulate", false));
         return x;
       },
       .samples = {{{normal({4, 5}), integers(4, {3}), integers(5, {3}), normal({3})},
                    R"({"accumulate": true})",
                    3}}},
      {.name = "masked_select",
       .parameters = "input, mask",
       .call = [](const Args& in, Attrs&) -> Result { return masked_select(in[0], in[1]); },
       .samples = {{{normal({3, 4}), booleans({3, 4})}}, {{normal({3, 4}), booleans({4})}}},
       .value_dependent = true},
      {.name = "nonzero",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         a.only("as_tuple", false);
         return nonzero(in[0]);
       },
       .samples = {{{booleans({3, 4})}}, {{integers(3, {7})}}},
       .differentiable = kNo,
       .value_dependent = true},
      {.name = "tril",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         return tril(in[0], a.integer("diagonal", 0));
       },
       .samples = {{{normal({4, 4})}},
                   {{normal({2, 3, 5})}, R"({"diagonal": 1})"},
                   {{normal({5, 3})}, R"({"diagonal": -2})"}}},
      {.name = "triu",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         return triu(in[0], a.integer("diagonal", 0));
       },
       .samples = {{{normal({4, 4})}},
                   {{normal({2, 3, 5})}, R"({"diagonal": 1})"},
                   {{normal({5, 3})}, R"({"diagonal": -2})"}}},
      {.name = "sort",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         a.flag("stable", true);
         return sort(in[0], a.integer("dim", -1), a.flag("descending", false));
       },
       .samples = {{{distinct({3, 5})}},
                   {{distinct({4, 3})}, R"({"dim": 0, "descending": true})"},
                   {{distinct({0})}}},
       .perf = Sample{{normal({64, 4096})}}},
      {
          .name = "argsort",
          .parameters = "input",
          .call = [](const Args& in, Attrs& a) -> Result {
            a.flag("stable", true);
            return argsort(in[0], a.integer("dim", -1), a.flag("descending", false));
          },
          .samples = {{{distinct({3, 5})}}},
          .differentiable = kNo,
      },
      {.name = "topk",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         a.flag("sorted", true);
         return topk(in[0], a.integer("k"), a.integer("dim", -1), a.flag("largest", true));
       },
       .samples = {{{distinct({3, 7})}, R"({"k": 3})"},
                   {{distinct({6, 2})}, R"({"k": 2, "dim": 0, "largest": false})"}},
       .perf = Sample{{normal({64, 4096})}, R"({"k": 40})"}},
      {.name = "bincount",
       .parameters = "input, weights",
       .call = [](const Args& in, Attrs& a) -> Result {
         return bincount(in[0], in.optional(1), a.integer("minlength", 0));
       },
       .samples =
           {
               {{integers(6, {12})}},
               {{integers(3, {5})}, R"({"minlength": 8})"},
           },
       .differentiable = kNo,
       .value_dependent = true},
      {.name = "one_hot",
       .parameters = "tensor|input",
       .call = [](const Args& in, Attrs& a) -> Result {
         return one_hot(in[0], a.integer("num_classes", -1));
       },
       .samples = {{{integers(5, {2, 3})}, R"({"num_classes": 6})"}},
       .differentiable = kNo},
      {.name = "embedding",
       .parameters = "input, weight",
       .call = embedded,
       .samples = {{{integers(7, {5}), normal({7, 3})}, "{}", 5},
                   {{integers(6, {2, 6}), normal({7, 4})}, R"({"padding_idx": 6})", 12},
                   {{integers(7, {0}), normal({7, 3})}}},
       .perf = Sample{{integers(8192, {4096}), normal({8192, 512})}}},
      {.name = "embedding_add",
       .parameters = "input, weight, other",
       .call = [](const Args& in, Attrs& a) -> Result {
         return embedding_add(in[0], in[1], in[2], a.maybe_integer("padding_idx"));
       },
       .samples = {{{integers(7, {5}), normal({7, 3}), normal({5, 3})}, "{}", 5},
                   {{integers(6, {2, 6}), normal({7, 8}), normal({6, 8})}, R"({"padding_idx": 6})"},
                   {{integers(6, {2, 6}), normal({7, 8}), normal({8})}},
                   {{integers(6, {2, 3}), normal({7, 8}), normal({2, 3, 8})}},
                   {{integers(6, {2, 3}), normal({7, 8}), normal({2, 1, 8})}},
                   {{integers(7, {0}), normal({7, 3}), normal({3})}},
                   {{integers(6, {2, 3}), normal({7, 8}), normal({2, 1, 1})}}},
       .perf = Sample{{integers(8192, {8, 512}), normal({8192, 512}), normal({512, 512})}}},
      {.name = "rotary_embedding",
       .parameters = "input, cos, sin",
       .call = [](const Args& in, Attrs& a) -> Result {
         return rotary_embedding(in[0], in[1], in[2], a.flag("interleaved", false));
       },
       .samples = {{{normal({2, 3, 5, 6}), constant(normal({5, 3})), constant(normal({5, 3}))}},
                   {{normal({5, 4}), constant(normal({5, 2})), constant(normal({5, 2}))},
                    R"({"interleaved": true})"}},
       .perf = Sample{{normal({8, 6, 256, 64}), constant(normal({256, 32})),
                       constant(normal({256, 32}))}}},
  };
}

}  // namespace tessera::tests
