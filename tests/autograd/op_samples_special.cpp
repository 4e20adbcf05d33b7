// Rows of the elementwise ops beyond arithmetic: special functions, angles, remainders and bits.
#include "autograd/op_samples.h"

namespace tessera::tests {
namespace {

using enum Differentiable;

Input inside_one(const Shape& shape) { return uniform(-0.9, 0.9, shape); }
Input narrow_angle(const Shape& shape) { return uniform(-1.3, 1.3, shape); }

// A matrix, a 0-d tensor, an empty one, and a length beyond one vector with a rest.
OpRow special(std::string_view name, Result (*call)(const Args&, Attrs&),
              Input (*make)(const Shape&), double tolerance = 4) {
  return {.name = name,
          .parameters = "input",
          .call = call,
          .samples = {{{make({3, 5})}}, {{make({})}}, {{make({2, 0})}}, {{make({2, 3, 11})}}},
          .tolerance = tolerance,
          .perf = Sample{{make({1 << 22})}}};
}

#define SPECIAL(op, ...) \
  special(               \
      #op, [](const Args& in, Attrs&) -> Result { return op(in[0]); }, __VA_ARGS__)

// Either operand may be a number, as in torch.
#define BITWISE(op)                                                     \
  [](const Args& in, Attrs& a) -> Result {                              \
    if (!in.has(0)) return op(in[1], a.scalar("input|self"));           \
    return in.has(1) ? op(in[0], in[1]) : op(in[0], a.scalar("other")); \
  }

OpRow bits(std::string_view name, Result (*call)(const Args&, Attrs&)) {
  return {.name = name,
          .parameters = "input|self, other",
          .call = call,
          .samples = {{{integers(99, {3, 5}), integers(99, {3, 5})}},
                      {{booleans({3, 1}), booleans({4})}},
                      {{integers(9, {2, 3}), booleans({})}},
                      {{integers(9, {7})}, R"({"other": -3})"},
                      {{integers(9, {0, 3}), integers(9, {1})}}},
          .differentiable = kNo,
          .perf = Sample{{integers(99, {1 << 22}), integers(99, {1 << 22})}}};
}

}  // namespace

std::vector<OpRow> special_rows() {
  return {
      SPECIAL(log2, positive),
      SPECIAL(log10, positive),
      SPECIAL(tan, narrow_angle, 16),  // 1 + y^2 magnifies the error of the rounded result
      SPECIAL(erfinv, inside_one, 16),
      SPECIAL(lgamma, positive, 8),
      SPECIAL(digamma, positive, 8),
      SPECIAL(trunc, away),
      {.name = "polygamma",
       .parameters = "input",
       .call = [](const Args& in, Attrs& a) -> Result { return polygamma(a.integer("n"), in[0]); },
       .samples = {{{positive({3, 5})}, R"({"n": 1})"},
                   {{uniform(-0.75, -0.25, {2, 4})}, R"({"n": 2})"},
                   {{positive({})}, R"({"n": 0})"},
                   {{positive({0, 2})}, R"({"n": 1})"}},
       .tolerance = 16},
      {.name = "fmod",
       .parameters = "input|self, other",
       .call = [](const Args& in, Attrs& a) -> Result {
         return in.has(1) ? fmod(in[0], in[1]) : fmod(in[0], a.scalar("other"));
       },
       .samples = {{{away({3, 4})}, R"({"other": 3.0})"},
                   {{away({5}), constant(uniform(2.5, 3, {2, 1}))}, "{}", 2},
                   {{constant(uniform(2.125, 2.5, {5})), uniform(0.85, 1.05, {2, 1})}, "{}", 5},
                   {{away({0, 3})}, R"({"other": 2})"}}},
      {.name = "atan2",
       .parameters = "input, other",
       .call = [](const Args& in, Attrs&) -> Result { return atan2(in[0], in[1]); },
       .samples = {{{away({3, 5}), away({3, 5})}},
                   {{away({2, 3, 5}), away({5})}, "{}", 6},
                   {{away({3, 1}), away({1, 4})}, "{}", 4},
                   {{away({}), away({2, 3})}, "{}", 6},
                   {{away({0, 3}), away({1})}}},
       .perf = Sample{{away({1 << 22}), away({1 << 22})}}},
      bits("bitwise_and", BITWISE(bitwise_and)),
      bits("bitwise_or", BITWISE(bitwise_or)),
      bits("bitwise_xor", BITWISE(bitwise_xor)),
      {.name = "bitwise_not",
       .parameters = "input",
       .call = [](const Args& in, Attrs&) -> Result { return bitwise_not(in[0]); },
       .samples = {{{integers(99, {3, 5})}},
                   {{booleans({2, 7})}},
                   {{integers(9, {})}},
                   {{booleans({0, 2})}}},
       .differentiable = kNo},
  };
}

}  // namespace tessera::tests
