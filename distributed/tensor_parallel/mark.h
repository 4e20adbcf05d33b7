// What a tensor is along an axis of the compute mesh, whose ranks calculate one model together: a
// type that ops check (rules.cpp) and conversions change (convert.h). It says what the values of
// all ranks have to do with those of one process, and what their gradients have:
//
// | mark            | values of the ranks            | gradients      |
// |-----------------|--------------------------------|----------------|
// | invariant       | equal                          | equal, whole   |
// | replicated      | equal                          | summands       |
// | summand         | add up to the value            | equal, whole   |
// | Shard(d)        | chunks of dimension d          | chunks         |
//
// A tensor that never met an axis is invariant, so that code of one process is typed as it stands.
// An invariant tensor that requires no gradient may stand for a replicated one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include <tessera/core/tensor/tensor.h>

namespace tessera::distributed {

struct Mark {
  enum class Kind : uint8_t { kInvariant, kReplicated, kSummand, kShard };
  Kind kind = Kind::kInvariant;
  int dim = 0;     // of a shard
  int blocks = 1;  // of a shard: the dimension is so many equal blocks, of each of which it has a
                   // chunk: 3 where query, key and value lie side by side
  bool uneven = false;  // of a shard: its chunks differ in length, which the mark does not know

  static constexpr Mark invariant() { return {}; }
  static constexpr Mark replicated() { return {Kind::kReplicated}; }
  static constexpr Mark summand() { return {Kind::kSummand}; }
  static constexpr Mark shard(int dim, int blocks = 1) { return {Kind::kShard, dim, blocks}; }

  constexpr bool is_invariant() const { return kind == Kind::kInvariant; }
  constexpr bool is_replicated() const { return kind == Kind::kReplicated; }
  constexpr bool is_summand() const { return kind == Kind::kSummand; }
  constexpr bool is_shard() const { return kind == Kind::kShard; }
  // Of the same kind; chunks of equal and of other lengths alike.
  friend constexpr bool operator==(const Mark& a, const Mark& b) {
    return a.kind == b.kind && a.dim == b.dim && a.blocks == b.blocks;
  }
};

// The mark of the gradient.
constexpr Mark dual(const Mark& mark) {
  if (mark.is_replicated()) return Mark::summand();
  if (mark.is_summand()) return Mark::replicated();
  return mark;
}

std::string describe(
    const Mark& mark);  // "invariant", "a summand", "Shard(1)", "Shard(2) of 3 blocks"

// As TensorImpl::marks keeps them, 16 bits for each axis.
inline constexpr size_t kMaxAxes = 4;
uint64_t encoded(const Mark& mark, size_t axis);
Mark decoded(uint64_t marks, size_t axis);
inline Mark mark_of(const Tensor& x, size_t axis) { return decoded(x.impl()->marks, axis); }
void set_mark(const Tensor& x, size_t axis, const Mark& mark);

}  // namespace tessera::distributed
