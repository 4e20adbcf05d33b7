// Conversions between marks: their values, and that each one's backward is its transposed.
// ctest labels: threads
#include <gtest/gtest.h>

#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/distributed/mesh/placement.h>
#include <tessera/distributed/tensor_parallel/compute_mesh.h>
#include <tessera/distributed/tensor_parallel/convert.h>

#include "distributed/compared_ranks.h"
#include "message_of.h"

namespace tessera::distributed::test_conversions {
namespace {

const Mark kInvariant = Mark::invariant(), kReplicated = Mark::replicated(),
           kSummand = Mark::summand();

// Integers in [-3, 3] that a seed and a rank give; those of one seed are equal on ranks that give
// the same number.
Tensor integers(const Shape& shape, int seed, int rank) {
  const RandomStream stream{static_cast<uint64_t>(seed), static_cast<uint64_t>(rank)};
  return randint(-3, 4, shape, kI64, stream).to(kF64);
}

struct Ranks {
  int size, own;
  bool equal_on_all(const Mark& mark) const { return mark.is_invariant() || mark.is_replicated(); }
};

// A tensor of the whole's shape and this mark, as a rank holds it.
Tensor made(const Mark& mark, const Shape& whole, int seed, const Ranks& ranks) {
  Shape shape = whole;
  if (mark.is_shard()) {
    const auto [begin, end] = chunk_of(whole[mark.dim] / mark.blocks, ranks.size, ranks.own);
    shape[mark.dim] = (end - begin) * mark.blocks;
  }
  const Tensor x = integers(shape, seed, ranks.equal_on_all(mark) ? 0 : ranks.own);
  set_mark(x, 0, mark);
  return x;
}

double over_ranks(double number) {
  const Tensor sum = tensor({number}, kF64);
  all_reduce(sum);
  return sum.item();
}
double dot_of(const Tensor& a, const Tensor& b) {
  const NoGradGuard no_grad;
  double sum = 0;
  const std::vector<double> left = a.detach().to_vector(), right = b.detach().to_vector();
  EXPECT_EQ(left.size(), right.size());
  for (size_t i = 0; i < std::min(left.size(), right.size()); ++i) sum += left[i] * right[i];
  return sum;
}
// What a value and a gradient of it give, where the value has this mark: an invariant pair is the
// whole one on each rank, of others each rank has a term.
double paired(const Mark& mark, const Tensor& value, const Tensor& gradient) {
  const double own = dot_of(value, gradient);
  return mark.is_invariant() ? over_ranks(rank() == 0 ? own : 0) : over_ranks(own);
}
// The value that all ranks' tensors stand for.
Tensor whole_of(const Mark& mark, const Tensor& marked, const Shape& whole, const Ranks& ranks) {
  const NoGradGuard no_grad;
  const Tensor x = marked.detach();
  x.impl()->marks = 0;
  if (ranks.equal_on_all(mark)) return x;
  Tensor sum = x.clone();
  if (mark.is_shard()) {  // each rank's elements at their places, by hand
    Shape shape = whole;
    sum = zeros(shape, {.dtype = kF64});
    const int64_t length = whole[mark.dim] / mark.blocks;
    const auto [begin, end] = chunk_of(length, ranks.size, ranks.own);
    for (int64_t b = 0; b < mark.blocks; ++b) {
      for (int64_t i = begin; i < end; ++i) {
        sum.select(mark.dim, b * length + i)
            .copy_(x.select(mark.dim, b * (end - begin) + i - begin));
      }
    }
  }
  all_reduce(sum);
  return sum;
}

struct Row {
  Mark from, to;
  int collectives;  // of the ranks, forward
};
std::vector<Row> rows(int dims) {
  std::vector<Row> result{{kInvariant, kReplicated, 0}, {kReplicated, kInvariant, 0},
                          {kSummand, kReplicated, 1},   {kSummand, kInvariant, 1},
                          {kInvariant, kSummand, 0},    {kReplicated, kSummand, 0}};
  for (int dim = 0; dim < dims; ++dim) {
    for (const int blocks : {1, 2, 3}) {
      const Mark shard = Mark::shard(dim, blocks);
      for (const Mark& other : {kInvariant, kReplicated, kSummand}) {
        result.push_back({shard, other, other.is_summand() ? 0 : 1});
        result.push_back({other, shard, other.is_summand() ? 1 : 0});
      }
      for (int target = 0; target < dims; ++target) {
        if (target != dim) result.push_back({shard, Mark::shard(target, 1), 1});
      }
    }
  }
  return result;
}

void check_row(const Row& row, const Shape& whole, const Ranks& ranks) {
  const auto& [from, to, collectives] = row;
  SCOPED_TRACE(describe(from) + " to " + describe(to) + ", " + std::to_string(ranks.size) +
               " ranks");
  const ConvertOptions options{
      .length = from.is_shard() ? std::optional(whole[from.dim]) : std::nullopt, .uneven = true};
  const Tensor x = made(from, whole, 1, ranks);
  x.set_requires_grad();
  Tensor z;
  {
    const CommTrace::Scope scope(*rank_context().trace);
    z = convert(x, "tp", to, options);
    EXPECT_EQ(std::ssize(scope.records()), collectives);
  }
  EXPECT_EQ(mark_of(z, 0), to);
  EXPECT_EQ(whole_of(to, z, whole, ranks).to_vector(), whole_of(from, x, whole, ranks).to_vector());

  const Tensor y = made(dual(to), whole, 2, ranks);
  EXPECT_EQ(y.shape(), z.shape());
  y.set_requires_grad();
  const Tensor back = grad(z, x, y, {.create_graph = true})[0];
  EXPECT_EQ(paired(to, z, y), paired(from, x, back));
  if (ranks.equal_on_all(dual(from))) {
    EXPECT_EQ(over_ranks(dot_of(back, integers(back.shape(), 7, 0))),
              ranks.size * dot_of(back, integers(back.shape(), 7, 0)))
        << "not the same on all ranks";
  }
  // The transposed of the transposed is the conversion.
  const Tensor u = made(from, whole, 3, ranks);
  const Tensor twice = grad(back, y, u)[0];
  EXPECT_EQ(twice.to_vector(), convert(u, "tp", to, options).to_vector());
}

TEST(Convert, EachRowIsTheTransposedOfItsBackwardExactly) {
  for (const int size : {2, 3, 4}) {
    compared_ranks(size, [size](int rank) {
      Mesh mesh(world(), {{"tp", size}});
      use_compute_mesh(mesh);
      for (int64_t extra = 0; extra < 3; ++extra) {
        const int64_t block = 3 * size + extra;
        for (const Row& row : rows(3)) {
          Shape whole{2, 3, 2};
          for (const Mark& mark : {row.from, row.to}) {
            if (mark.is_shard()) whole[mark.dim] = block * mark.blocks;
          }
          check_row(row, whole, {size, rank});
        }
      }
    });
  }
}

TEST(Convert, RefusesWhatHasNoWayBack) {
  compared_ranks(2, [](int) {
    Mesh mesh(world(), {{"tp", 2}});
    use_compute_mesh(mesh);
    const Tensor x = zeros({3, 4});
    EXPECT_TRUE(mentions(message_of([&] { convert(x, "tp", Mark::shard(0)); }),
                         "dimension 0 of f32[3, 4] cpu does not divide among 2 ranks"));
    EXPECT_TRUE(mentions(message_of([&] { convert(x, "tp", Mark::shard(1, 3)); }),
                         "is not 3 equal blocks"));
    EXPECT_THROW(convert(x, "tp", Mark::shard(2)), IndexError);
    EXPECT_THROW(convert(x, "cp", Mark::replicated()), ConfigError);
    const Tensor shard = convert(x, "tp", Mark::shard(1));
    EXPECT_THROW(convert(shard, "tp", Mark::shard(1, 2)), UnsupportedError);
    EXPECT_TRUE(convert(shard, "tp", Mark::shard(1)).is(shard));
  });
}

TEST(Convert, MarksOfOtherAxesStay) {
  compared_ranks(4, [](int) {
    Mesh mesh(world(), {{"cp", 2}, {"tp", 2}});
    use_compute_mesh(mesh);
    const Tensor tokens = convert(zeros({4, 6}), "cp", Mark::shard(0));
    const Tensor both = convert(convert(tokens, "tp", Mark::replicated()), "tp", Mark::shard(1));
    EXPECT_EQ(both.shape(), (Shape{2, 3}));
    EXPECT_EQ(mark_of(both, 0), Mark::shard(0));
    EXPECT_EQ(mark_of(both, 1), Mark::shard(1));
    EXPECT_EQ(convert(both, "cp", Mark::replicated()).shape(), (Shape{4, 3}));
  });
}

}  // namespace
}  // namespace tessera::distributed::test_conversions
