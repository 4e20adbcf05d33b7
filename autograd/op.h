// The record of an op, for autocast, the engine, the profiler, the tests and the benchmarks. An op
// is a function in ops.h and one block in ops/*.cpp: record, forward, backward.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace tessera {

// What autocast does with the floating inputs of an op.
enum class Autocast : uint8_t {
  kInputDtype,  // keeps the input's dtype; statistics are f32 inside
  kLow,         // casts to the autocast dtype: matrix products, convolutions, attention
  kFloat32,     // casts to f32: exp, log, pow, sums, softmax, losses
  kWidest,      // casts to the widest dtype among the inputs: add, cat, where
  kRefuse,      // an error with a remedy: unsafe in low precision
};

// What an op makes of operands that are marked as parts or summands of others along an axis of a
// compute mesh (mark_rules.h). Parts of operands alike give parts of the result wherever an op goes
// by elements, or along dimensions that are not cut; what differs is what becomes of summands.
enum class MarkRule : uint8_t {
  kNone,       // refuses marked operands
  kPointwise,  // by elements, not linear: no summands
  kLinear,     // linear in all operands together: summands of all give summands; add, casts, sums
  kProduct,    // by elements, linear in each operand: one of them may be a summand
  kAlongDims,  // not linear, along dimensions that must not be cut: softmax, norms, sort
  kMovement,   // moves elements, all of them alike: views, cat
  kSpecial,    // a rule of its own, by the op's name: products, attention, tables
};

// Sets of inputs or outputs: inputs(0, 2), outputs(0).
using IndexMask = uint32_t;
constexpr IndexMask inputs(auto... index) { return ((IndexMask{1} << index) | ... | 0u); }
constexpr IndexMask outputs(auto... index) { return ((IndexMask{1} << index) | ... | 0u); }

// The bit of an input or output; those from 31 on share the last one.
constexpr IndexMask index_bit(size_t index) { return IndexMask{1} << (index < 31 ? index : 31); }

// For each input i, the inputs that its gradient is calculated from; {} reads none. What no wanted
// gradient reads is not kept. The last mask serves all further inputs.
//     mul:  .reads = {inputs(1), inputs(0)}      gelu: .reads = {inputs(0)}
struct Reads {
  std::array<IndexMask, 4> masks{};
  int count = 0;
  constexpr Reads() = default;
  template <class... Masks>
  constexpr Reads(Masks... mask) : masks{static_cast<IndexMask>(mask)...}, count(sizeof...(mask)) {}
  constexpr IndexMask of(int input) const {
    return count == 0 ? 0 : masks[static_cast<size_t>(input < count ? input : count - 1)];
  }
};

struct Op;
namespace detail {
struct OpRegistration {
  explicit OpRegistration(const Op* op);
  ~OpRegistration();
  OpRegistration(const OpRegistration&) = delete;
  OpRegistration& operator=(const OpRegistration&) = delete;
};
}  // namespace detail

// Objects with static lifetime: `const Op kGelu{.name = "gelu", .reads = {inputs(0)}};`
struct Op {
  std::string_view name;  // torch's name of the function
  MarkRule marks = MarkRule::kNone;
  Autocast autocast = Autocast::kInputDtype;
  // Its kernel is elementwise: a zero-dimensional tensor of the CPU may stand beside others as a
  // number. Operands of other ops lie on one device.
  bool takes_numbers = false;
  Reads reads = {};             // inputs kept for backward
  IndexMask reads_outputs = 0;  // outputs kept for backward: outputs(0) for exp, softmax
  IndexMask reads_copies = 0;   // weights that are read as cached copies: weight_cache.h
  // Outputs are views of input 0: they share its version, and writing to them changes it.
  bool view = false;
  // False if backward runs kernels that have no gradient: requesting a second derivative is an
  // error that names the op. True: backward is made of ops.
  bool twice_differentiable = true;
  // The input whose gradient is the sum of the output's over all dimensions but the last; -1: none.
  // Backward may get it together with the gradient: Saved::column_sums().
  int bias = -1;
  // The composition of other ops that equals a fused op: its specification and its test.
  std::string_view composed = {};
  // Arithmetic for one element of the first output; products report theirs with count_flops().
  double flops_per_element = 1;
  detail::OpRegistration registration{this};
};

// Every record of the program, sorted by name.
std::vector<const Op*> all_ops();

// Floating point operations of products, convolutions and attention in the current context, while
// enabled; a backward pass counts where it runs. A multiplication and an addition are two.
struct FlopCounter {
  bool enabled = false;
  double total = 0;
};
void count_flops(double operations);

}  // namespace tessera
