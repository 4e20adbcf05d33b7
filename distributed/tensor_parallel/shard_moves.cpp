#include <tessera/distributed/tensor_parallel/shard_moves.h>

#include <algorithm>

namespace tessera::distributed {
namespace {

int64_t elements_between(const Shape& shape, int begin, int end) {
  return numel_of(shape.slice(begin, end));
}

}  // namespace

std::optional<Mark> viewed(const Mark& shard, const Shape& from, const Shape& to) {
  const int d = shard.dim;
  const int64_t blocks = shard.blocks;
  if (numel_of(from) == 0) {  // sizes do not tell dimensions apart
    return from == to ? std::optional(shard) : std::nullopt;
  }
  // The first dimension of the result behind as many elements as lie in front of the cut one.
  const auto behind = [&](int64_t outer) {
    int at = 0;
    int64_t passed = 1;
    while (at < to.size() && passed < outer) passed *= to[at++];
    return passed == outer ? at : -1;
  };
  if (int at = behind(elements_between(from, 0, d)); at >= 0) {
    // Dimensions of 1 in front of it stay in front.
    for (int k = d; k > 0 && from[k - 1] == 1 && at < to.size() && to[at] == 1; --k) ++at;
    if (at == to.size()) return {};
    if (blocks == 1) return Mark::shard(at);
    if (to[at] == from[d]) return Mark::shard(at, shard.blocks);
    if (to[at] == blocks && at + 1 < to.size()) return Mark::shard(at + 1);
    if (to[at] % blocks == 0) return Mark::shard(at, shard.blocks);
    return {};
  }
  if (blocks != 1) return {};
  // Joined with dimensions in front of it: those are the blocks.
  for (int first = d - 1; first >= 0; --first) {
    const int at = behind(elements_between(from, 0, first));
    if (at < 0 || at >= to.size()) continue;
    const int64_t made = elements_between(from, first, d);
    const int64_t inner = to[at] / std::max<int64_t>(made, 1);
    if (to[at] % made != 0 || inner == 0 || inner % from[d] != 0) return {};
    if (made > 256) return {};
    return Mark::shard(at, static_cast<int>(made));
  }
  return {};
}

std::optional<Mark> moved_by(const OpDims& op, const Mark& shard, int dims, const Shape& shape) {
  const auto wrapped = [](int64_t dim, int count) {
    return static_cast<int>(dim < 0 ? dim + count : dim);
  };
  const int d = shard.dim;
  Mark moved = shard;
  switch (op.kind) {
    case OpDims::Kind::kSame:
      return {};
    case OpDims::Kind::kAlong:
    case OpDims::Kind::kAway:
      for (const int64_t number : op.numbers) {
        const int gone = wrapped(number, dims);
        if (gone == d) return {};
        if (op.kind == OpDims::Kind::kAway && gone < d) --moved.dim;
      }
      return moved;
    case OpDims::Kind::kOrder:
      for (size_t i = 0; i < op.numbers.size(); ++i) {
        if (wrapped(op.numbers[i], dims) == d) moved.dim = static_cast<int>(i);
      }
      return moved;
    case OpDims::Kind::kSwap: {
      const int a = wrapped(op.numbers[0], dims), b = wrapped(op.numbers[1], dims);
      moved.dim = d == a ? b : d == b ? a : d;
      return moved;
    }
    case OpDims::Kind::kAdds:
      if (wrapped(op.numbers[0], dims + 1) <= d) ++moved.dim;
      return moved;
    case OpDims::Kind::kShape:
      return viewed(shard, shape, infer_shape(Shape(op.numbers), numel_of(shape), "view"));
    case OpDims::Kind::kExpand: {
      moved.dim = d + static_cast<int>(op.numbers.size()) - dims;
      const int64_t size = op.numbers[static_cast<size_t>(moved.dim)];
      return size == shape[d] || size == -1 ? std::optional(moved) : std::nullopt;
    }
  }
  return {};
}

}  // namespace tessera::distributed
