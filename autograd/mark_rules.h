// Who checks marked tensors. A mark says what a tensor is along an axis of a compute mesh, on which
// several ranks calculate one model: equal everywhere, a part, a summand. Autograd knows no ranks; it
// asks the rules of the context for the marks of a result, and knows of an op which kind of rule is
// its own (Op::marks) and what it does with dimensions.
//
// Forward is checked, also where a checkpoint runs it again. Backward is not: what it calculates
// follows from forward, and conversions between marks know both of their ends.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <tessera/autograd/op.h>
#include <tessera/core/context.h>
#include <tessera/core/kernels/random/draw_place.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

// What a call of an op does with dimensions, beside broadcasting them. The numbers live as long as
// the call; negative ones count from the end of the first operand's dimensions.
struct OpDims {
  enum class Kind : uint8_t {
    kSame,    // what its operands have
    kAlong,   // it reads along these, whose sizes may change
    kAway,    // and has none of them in the result
    kOrder,   // the result's dimension i is the operand's of number i of the list
    kSwap,    // two change places
    kAdds,    // a new one stands at this place of the result
    kShape,   // the same elements, row by row, in this shape
    kExpand,  // broadcast to this shape
  };
  Kind kind = Kind::kSame;
  bool affine = false;  // a constant other than 0 is added: no summand passes
  std::span<const int64_t> numbers = {};
};

struct OpCall {
  // NOLINTNEXTLINE(google-explicit-constructor): most calls say no more
  OpCall(const Op& op_in) : op(op_in) {}
  OpCall(const Op& op_in, const OpDims& dims_in) : op(op_in), dims(dims_in) {}
  const Op& op;
  OpDims dims;
};

//     differentiable(along(kSoftmax, dim), {x}, ...)
inline OpCall along(const Op& op, const Shape& dims, bool keepdim = true) {
  return {op, {.kind = keepdim ? OpDims::Kind::kAlong : OpDims::Kind::kAway, .numbers = dims}};
}
inline OpCall along(const Op& op, const int64_t& dim, bool keepdim = true) {
  return {op, {.kind = keepdim ? OpDims::Kind::kAlong : OpDims::Kind::kAway, .numbers = {&dim, 1}}};
}
inline OpCall ordered(const Op& op, const Shape& dims) {
  return {op, {.kind = OpDims::Kind::kOrder, .numbers = dims}};
}
inline OpCall swapping(const Op& op, const std::array<int64_t, 2>& dims) {
  return {op, {.kind = OpDims::Kind::kSwap, .numbers = dims}};
}
inline OpCall adding(const Op& op, const int64_t& dim) {
  return {op, {.kind = OpDims::Kind::kAdds, .numbers = {&dim, 1}}};
}
inline OpCall shaped(const Op& op, const Shape& shape) {
  return {op, {.kind = OpDims::Kind::kShape, .numbers = shape}};
}
inline OpCall expanding(const Op& op, const Shape& shape) {
  return {op, {.kind = OpDims::Kind::kExpand, .numbers = shape}};
}
inline OpCall affine(const Op& op, bool adds = true) { return {op, {.affine = adds}}; }

class MarkRules {
 public:
  virtual ~MarkRules() = default;
  // The marks of all results of a call, before it runs. Throws for what has no meaning.
  virtual uint64_t of_results(const OpCall& call, std::span<const Tensor> inputs) const = 0;
  // For what an op reads beside its operands, a mask or weights of classes: throws unless it is the
  // same on all ranks, and its mark says so.
  virtual void check_whole(const Op& op, std::string_view name, const Tensor& x) const = 0;
  // The dimensions of which x has a chunk; for ops that go by the places of elements in the whole.
  // Throws where the mark does not say where the chunk lies.
  virtual std::vector<DimCut> cuts_of(const Op& op, const Tensor& x) const = 0;
};

// The current context's. Without rules an op refuses marked operands: their mesh is another
// context's. In code that somebody has checked as a whole, the inner ops of an op, backward and
// conversions, marks are not looked at, and results have none.
struct MarkRulesSlot {
  const MarkRules* rules = nullptr;
  bool checked = false;
};
class CheckedMarks {
 public:
  CheckedMarks() : scope_(Context::current().slot<MarkRulesSlot>().checked, true) {}

 private:
  ScopedValue<bool> scope_;
};

// For an op with marked operands: the rules to ask; nullptr in checked code. UnsupportedError where
// the context has none.
const MarkRules* mark_rules_for(const Op& op);

// Of x in the whole that it is a part of; empty where it is whole.
inline std::vector<DimCut> cuts_of(const Op& op, const Tensor& x) {
  if (x.impl()->marks == 0) [[likely]]
    return {};
  const MarkRules* rules = mark_rules_for(op);
  return rules == nullptr ? std::vector<DimCut>() : rules->cuts_of(op, x);
}

inline uint64_t all_marks(std::span<const Tensor> tensors) {
  uint64_t marks = 0;
  for (const Tensor& tensor : tensors) {
    if (const TensorImpl* impl = tensor.impl()) marks |= impl->marks;
  }
  return marks;
}

}  // namespace tessera
