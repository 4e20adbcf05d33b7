// How a model may be divided among ranks that calculate it together, said by the model, which knows
// no ranks: a table of its modules' names (distributed/tensor_parallel/parallelize.h applies it).
//
//     using enum nn::ParallelStyle;
//     const std::vector<nn::StyledModules> of_mlp = {{"fc", kColumnwise}, {"proj", kRowwise}};
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <tessera/core/tensor/tensor.h>

namespace tessera::nn {

enum class ParallelStyle : uint8_t {
  kWhole,       // all ranks calculate alike, of all tokens
  kColumnwise,  // Linear: its outputs are cut, in `blocks` equal blocks each
  kRowwise,     // Linear: its inputs are cut; the result is a summand until it leaves the module
  kVocabulary,  // Embedding: the rows are cut
  kLossHead,    // Linear of a loss: the logits are cut, and stay so for linear_cross_entropy
  kSequence,    // norms, dropout, tables of positions: each rank its tokens
  kHeads,       // norms over the width of a head: each rank those of its heads
};

struct StyledModules {
  std::string pattern;  // a dotted name; * stands for one part of it, also within: "h.*.ln_*"
  ParallelStyle style = ParallelStyle::kWhole;
  int64_t blocks = 1;  // kColumnwise: 3 for query, key and value side by side
  int64_t heads = 0;   // of attention among the outputs of a block, which stay whole; 0: none
};

// What a call of a module does at its borders, outside of its hooks: made by who divides a model.
// Fused functions (fused.h) call enter() of the first module that they stand for and leave() of the
// last one, where those between do neither.
class Boundary {
 public:
  virtual ~Boundary() = default;
  virtual Tensor enter(const Tensor& x) const { return x; }
  virtual Tensor leave(const Tensor& y) const { return y; }
  // Whether they do nothing.
  virtual bool enters_as_is() const { return true; }
  virtual bool leaves_as_is() const { return true; }
  // What a Linear adds to its product: of a product that is a summand one rank adds it.
  virtual Tensor bias(const Tensor& bias) const { return bias; }
  // Rows of a table that this rank has a part of. index: any shape, of the whole table's rows.
  virtual Tensor embedding(const Tensor& index, const Tensor& weight,
                           std::optional<int64_t> padding_idx) const;
  // The loss of a head of which this rank has some classes. x: [N, C], target: [N], of all classes.
  virtual Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& target,
                                      int64_t ignore_index, bool mean) const;
};

}  // namespace tessera::nn
