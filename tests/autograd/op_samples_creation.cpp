// Rows of ops/creation.cpp and ops/random.cpp.
#include "autograd/op_samples.h"

namespace tessera::tests {
namespace {

using enum Differentiable;

TensorOptions options_of(Attrs& a, DType natural = kF32) {
  return {.dtype = a.dtype().value_or(natural), .device = a.device()};
}

Tensor like(const Args& in, Attrs& a, Tensor (*make)(const Tensor&)) {
  const std::optional<DType> dtype = a.dtype();
  return make(dtype ? raw::empty_like(in[0], *dtype) : in[0]);
}

OpRow creation(std::string_view name, Result (*call)(const Args&, Attrs&),
               std::vector<Sample> samples, bool random = false) {
  return {.name = name,
          .parameters = name.ends_with("_like") ? "input" : "",
          .call = call,
          .samples = std::move(samples),
          .differentiable = kNo,
          .random = random,
          .records = {""}};
}

constexpr const char* kSize = R"({"size": [2, 3]})";

}  // namespace

std::vector<OpRow> creation_rows() {
  std::vector<OpRow> rows = {
      creation(
          "zeros",
          [](const Args&, Attrs& a) -> Result { return zeros(a.integers("size"), options_of(a)); },
          {{{}, kSize}, {{}, R"({"size": [], "dtype": "bool"})"}}),
      creation(
          "ones",
          [](const Args&, Attrs& a) -> Result { return ones(a.integers("size"), options_of(a)); },
          {{{}, kSize}, {{}, R"({"size": [0, 2], "dtype": "int64"})"}}),
      creation(
          "empty",
          [](const Args&, Attrs& a) -> Result { return empty(a.integers("size"), options_of(a)); },
          {{{}, kSize}}, true),
      creation("full",
               [](const Args&, Attrs& a) -> Result {
                 const Scalar value = a.scalar("fill_value");
                 const DType natural = value.kind() == Scalar::Kind::kBool  ? kBool
                                       : value.kind() == Scalar::Kind::kInt ? kI64
                                                                            : kF32;
                 return full(a.integers("size"), value, options_of(a, natural));
               },
               {{{}, R"({"size": [2, 3], "fill_value": 1.5})"},
                {{}, R"({"size": [3], "fill_value": 7})"}}),
      creation("arange",
               [](const Args&, Attrs& a) -> Result {
                 return arange(a.scalar("start", 0), a.scalar("end"), a.scalar("step", 1),
                               a.dtype(), a.device());
               },
               {{{}, R"({"end": 7})"}, {{}, R"({"start": 1, "end": -2.5, "step": -0.5})"}}),
      creation("linspace",
               [](const Args&, Attrs& a) -> Result {
                 return linspace(a.number("start"), a.number("end"), a.integer("steps"),
                                 options_of(a));
               },
               {{{}, R"({"start": -1, "end": 2.0, "steps": 7})"}}),
      creation("eye",
               [](const Args&, Attrs& a) -> Result {
                 return eye(a.integer("n"), a.maybe_integer("m"), options_of(a));
               },
               {{{}, R"({"n": 3})"}, {{}, R"({"n": 2, "m": 4, "dtype": "int64"})"}}),
      creation("zeros_like",
               [](const Args& in, Attrs& a) -> Result { return like(in, a, zeros_like); },
               {{{normal({2, 3})}}}),
      creation("ones_like",
               [](const Args& in, Attrs& a) -> Result { return like(in, a, ones_like); },
               {{{normal({2, 3})}}}),
      creation(
          "empty_like",
          [](const Args& in, Attrs& a) -> Result {
            return like(in, a, [](const Tensor& x) { return empty_like(x); });
          },
          {{{normal({2, 3})}}}, true),
      creation("full_like",
               [](const Args& in, Attrs& a) -> Result {
                 const std::optional<DType> dtype = a.dtype();
                 return full_like(dtype ? raw::empty_like(in[0], *dtype) : in[0],
                                  a.scalar("fill_value"));
               },
               {{{normal({2, 3})}, R"({"fill_value": 2.5})"}}),
      creation(
          "rand",
          [](const Args&, Attrs& a) -> Result { return rand(a.integers("size"), options_of(a)); },
          {{{}, kSize}}, true),
      creation(
          "randn",
          [](const Args&, Attrs& a) -> Result { return randn(a.integers("size"), options_of(a)); },
          {{{}, kSize}}, true),
      creation(
          "rand_like", [](const Args& in, Attrs& a) -> Result { return like(in, a, rand_like); },
          {{{normal({2, 3})}}}, true),
      creation(
          "randn_like", [](const Args& in, Attrs& a) -> Result { return like(in, a, randn_like); },
          {{{normal({2, 3})}}}, true),
      creation(
          "randint",
          [](const Args&, Attrs& a) -> Result {
            const Tensor numbers = randint(a.integer("low", 0), a.integer("high"),
                                           a.integers("size"), a.dtype().value_or(kI64));
            return numbers.to(a.device());
          },
          {{{}, R"({"high": 9, "size": [2, 3]})"}}, true),
      creation(
          "randperm",
          [](const Args&, Attrs& a) -> Result {
            const Tensor order = randperm(a.integer("n")).to(a.device());
            const std::optional<DType> dtype = a.dtype();
            return dtype ? to(order, *dtype) : order;
          },
          {{{}, R"({"n": 9})"}}, true),
      {.name = "multinomial",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         return multinomial(in[0], a.integer("num_samples"), a.flag("replacement", false));
       },
       .samples = {{{positive({3, 5})}, R"({"num_samples": 2})"},
                   {{positive({5})}, R"({"num_samples": 9, "replacement": true})"}},
       .differentiable = kNo,
       .random = true},
      {.name = "dropout",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         return dropout(in[0], a.number("p", 0.5), a.flag("training|train", true));
       },
       .samples = {{{normal({4, 7})}, R"({"p": 0.4})"},
                   {{normal({3, 5})}, R"({"p": 0.4, "training": false})"},
                   {{normal({5})}, R"({"p": 0.0})"},
                   {{normal({0})}}},
       .random = true,
       .perf = Sample{{normal({1 << 22})}, R"({"p": 0.1})"}},
      {.name = "bernoulli_",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         return bernoulli_(clone(detach(in[0])), a.number("p", 0.5));
       },
       .samples = {{{constant(normal({4, 7}))}, R"({"p": 0.4})"}},
       .differentiable = kNo,
       .random = true},
      {.name = "uniform_",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         return uniform_(clone(detach(in[0])), a.number("from", 0), a.number("to", 1));
       },
       .samples = {{{constant(normal({4, 7}))}}},
       .differentiable = kNo,
       .random = true},
      {.name = "normal_",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result {
         return normal_(clone(detach(in[0])), a.number("mean", 0), a.number("std", 1));
       },
       .samples = {{{constant(normal({4, 7}))}}},
       .differentiable = kNo,
       .random = true},
  };
  return rows;
}

}  // namespace tessera::tests
