#include <tessera/distributed/tensor_parallel/mark.h>

namespace tessera::distributed {
namespace {

// Three bits of kind, four of the dimension, one of unevenness, eight of the blocks less one.
constexpr int kBits = 16, kDimBits = 3, kUnevenBit = 7, kBlockBits = 8;
constexpr int kMaxBlocks = 256;
static_assert(kMaxDims <= 16);

}  // namespace

std::string describe(const Mark& mark) {
  if (mark.is_invariant()) return "invariant";
  if (mark.is_replicated()) return "replicated";
  if (mark.is_summand()) return "a summand";
  const std::string shard = "Shard(" + std::to_string(mark.dim) + ")";
  return mark.blocks == 1 ? shard : shard + " of " + std::to_string(mark.blocks) + " blocks";
}

uint64_t encoded(const Mark& mark, size_t axis) {
  uint64_t bits = static_cast<uint64_t>(mark.kind);
  if (mark.is_shard()) {
    TS_CHECK_AS(UnsupportedError, mark.blocks >= 1 && mark.blocks <= kMaxBlocks, "marks",
                "a dimension is cut in at most ", kMaxBlocks, " blocks; got ", mark.blocks);
    bits |= static_cast<uint64_t>(mark.dim) << kDimBits;
    bits |= static_cast<uint64_t>(mark.uneven) << kUnevenBit;
    bits |= static_cast<uint64_t>(mark.blocks - 1) << kBlockBits;
  }
  return bits << (kBits * axis);
}

Mark decoded(uint64_t marks, size_t axis) {
  const uint64_t bits = marks >> (kBits * axis);
  Mark mark{static_cast<Mark::Kind>(bits & 7)};
  if (mark.is_shard()) {
    mark.dim = static_cast<int>((bits >> kDimBits) & 15);
    mark.uneven = ((bits >> kUnevenBit) & 1) != 0;
    mark.blocks = static_cast<int>((bits >> kBlockBits) & 255) + 1;
  }
  return mark;
}

void set_mark(const Tensor& x, size_t axis, const Mark& mark) {
  const uint64_t others = x.impl()->marks & ~(uint64_t{0xffff} << (kBits * axis));
  x.impl()->marks = others | encoded(mark, axis);
}

}  // namespace tessera::distributed
