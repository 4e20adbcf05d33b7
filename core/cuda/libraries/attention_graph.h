// Attention by cuDNN's fused kernels, as data: what is asked for, whether the library serves it,
// and the graph of operations in the order that its patterns know. Pure functions, tested on the
// CPU; core/kernels/attention/attention.cu asks here first and runs its own tiles where the answer
// is no.
//
// Query, key and value are read in place by their strides (also out of one packed [B, T, 3, H, E]),
// gradients are written the same way, and nothing of size T S exists. What differs from own
// kernels:
//
// - Probabilities are rounded to the operands' dtype before they meet the values, as tensor cores
//   take them.
// - The gradient of the query is added up by atomics, in an order that changes from run to run,
//   unless kernels::AttentionPolicy::deterministic asks for the other form: slower, and with a
//   workspace of 2 B H T S bytes.
// - A row without keys is NaN, and rows beyond a sample's length hold anything:
//   core/kernels/attention/attention_library.cu has what to do about it.
// - Dropout draws other numbers than the CPU (the library's generator, with a seed made of seed and
//   stream); forward and backward agree, and no two streams share numbers.
//   kernels::AttentionPolicy::equal_dropout asks for the CPU's.
#pragma once

#include <cstdint>
#include <string>

#include <tessera/core/cuda/libraries/library_graph.h>

namespace tessera::gpu {

// [B, heads, rows, columns], strides in elements.
struct AttentionOperand {
  int64_t batch = 0, head = 0, row = 0, column = 1;
  void* data = nullptr;
};

// What is added to the scores: [B, H, T, S], each of the first three may be 1 for all of them.
struct AttentionBias {
  DType dtype = kF32;
  int64_t B = 1, H = 1, T = 1;
  int64_t batch = 0, head = 0, row = 0;  // strides in elements
  void* data = nullptr;                  // nullptr: there is none
};

struct AttentionProblem {
  DType dtype = kBF16;
  int64_t B = 0, H = 0, Hk = 0, T = 0, S = 0, E = 0, Ev = 0;  // as in kernels/attention.h
  double scale = 1;
  bool causal = false;
  double dropout = 0;
  AttentionBias bias = {};
  bool has_lengths = false;  // sample b has lengths[b] queries and keys, i32 each
  AttentionOperand query = {}, key = {}, value = {}, output = {};
  void* log_sums = nullptr;  // f32 [B, H, T]; nullptr forward: not wanted
  // Backward only.
  bool backward = false, deterministic = false;
  AttentionOperand grad_output = {}, grad_query = {}, grad_key = {}, grad_value = {};
};

// Empty where this release of the library serves the problem, else the reason why not.
std::string validate(const AttentionProblem& problem, int version);
// Its backward, with gradients that lie as the operands do.
AttentionProblem backward_of(AttentionProblem problem);

// [Note: lengths of attention] A plan is for exact sizes, takes up to a second, and stays. So
// of each form (all that a problem is but for its lengths T and S and the strides that follow from
// them) the first kOwnLengths pairs of lengths that come up have plans of their own, as a
// training needs that has one and another for its last batch. All others go up to
// attention_length(): operands are copied into longer ones, zeros behind them, and what is beyond
// is hidden. A step reads and writes its operands once more for that. A pair once exact stays so,
// and once rounded too, so that forward and backward, which must draw the same dropout, agree.
inline constexpr int kOwnLengths = 4;
// Up to a multiple of 64, and beyond 512 to three significant bits: 64, 128 ... 512, 640, 768 ...
int64_t attention_length(int64_t length);
// Whether the lengths of the problem, of which T, S, dtype, sizes and options are read, have a plan
// of their own. Notes them where there is room. Thread-safe, for the whole process.
bool takes_lengths(const AttentionProblem& problem, bool has_mask);

// Slots of the graph's memory.
enum AttentionSlot : int {
  kQuerySlot,
  kKeySlot,
  kValueSlot,
  kOutputSlot,
  kLogSumsSlot,
  kSeedSlot,    // i64 on the device, for dropout
  kOffsetSlot,  // the same
  kQueryLengthsSlot,
  kKeyLengthsSlot,
  kBiasSlot,
  kGradOutputSlot,
  kGradQuerySlot,
  kGradKeySlot,
  kGradValueSlot,
  kAttentionSlots
};

// For a problem that validate() accepts.
LibraryGraph attention_graph(const AttentionProblem& problem);

// All that the graph depends on but addresses.
std::string describe(const AttentionProblem& problem);

GraphRequest attention_request(const AttentionProblem& problem);

}  // namespace tessera::gpu
