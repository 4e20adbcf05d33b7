#include <tessera/distributed/tensor_parallel/vocabulary.h>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/mark_rules.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/context.h>
#include <tessera/distributed/tensor_parallel/compute_mesh.h>
#include <tessera/distributed/tensor_parallel/convert.h>
#include <tessera/distributed/transport/rank_context.h>

namespace tessera::distributed {
namespace {

// What is made of ops that do not know of the parts says itself what it is.
Tensor as(const Mark& mark, const std::string& axis, const Tensor& x) {
  set_mark(x, compute_mesh().position(axis), mark);
  return x;
}

// The ops below are not asked for: what they are given must be the same on all ranks of the axis, and
// no part along others.
void check_given(const VocabularyPart& part, const char* where, const char* name, const Tensor& x) {
  const ComputeMesh& mesh = compute_mesh();
  for (size_t axis = 0; axis < mesh.axes(); ++axis) {
    const Mark mark = mark_of(x, axis);
    const bool own = mesh.name(axis) == part.axis;
    TS_CHECK_AS(UnsupportedError, mark.is_invariant() || (own && mark.is_replicated()), where,
                "along '", mesh.name(axis), "' the ", name, " ", x, " is ", describe(mark),
                ", and each rank looks its entries up among all of them; convert it to ",
                own ? "replicated" : "invariant");
  }
}

// Entries as this rank's kernels take them: its own ones by their place here, 0 for those of others
// and for `ignored` ones. What no rank has is outside here, too, so that the kernels refuse it.
struct Entries {
  Tensor here;     // i64
  Tensor foreign;  // bool: not this rank's
};
Entries entries_here(const VocabularyPart& part, int64_t rows, const Tensor& given,
                     const Tensor& ignored) {
  const Tensor own = logical_and(ge(given, part.first), lt(given, part.first + rows));
  Tensor foreign = logical_and(logical_and(ge(given, 0), lt(given, part.whole)), logical_not(own));
  if (ignored.defined()) foreign = logical_or(foreign, ignored);
  return {masked_fill(sub(to(given, kI64), part.first), foreign, 0), foreign};
}

}  // namespace

Tensor embedding(const VocabularyPart& part, const Tensor& index, const Tensor& weight,
                 std::optional<int64_t> padding_idx) {
  check_given(part, "embedding", "index", index);
  const CheckedMarks scope;
  std::optional<int64_t> padding_here;
  if (padding_idx) {
    const int64_t row = *padding_idx - part.first;
    if (row >= 0 && row < weight.size(0)) padding_here = row;
  }
  const auto [here, foreign] = entries_here(part, weight.size(0), index, {});
  const Tensor rows = tessera::embedding(here, weight, padding_here);
  return as(Mark::summand(), part.axis, masked_fill(rows, unsqueeze(foreign, -1), 0));
}

Tensor linear_cross_entropy(const VocabularyPart& part, const Tensor& x, const Tensor& weight,
                            const Tensor& target, int64_t ignore_index, bool mean) {
  check_given(part, "linear_cross_entropy", "x", x);
  check_given(part, "linear_cross_entropy", "target", target);
  const Tensor given = linear(x, weight);  // checked: x is whole, and a shard of classes comes
  const CheckedMarks scope;
  const Tensor logits = given.dtype() == kF64 ? given : to(given, kF32);
  const Tensor ignored = eq(target, ignore_index);
  const auto [here, foreign] = entries_here(part, weight.size(0), target, ignored);

  ComputeMesh& mesh = compute_mesh();
  const Tensor top = amax(detach(logits), {1}, true);  // [N, 1]
  const PhaseScope phase(current_backward() == 0 ? "forward" : "backward");
  Group& ranks = mesh.group(mesh.position(part.axis));
  if (!top.is_meta() || !ranks.backend().moves_data()) {  // else of another stage of a pipeline
    ranks
        .all_reduce(top, ReduceOp::kMax,
                    {.channel = Channel::kModule, .tag = "loss", .waits = true})
        .wait();
  }
  const auto total = [&](const Tensor& summand) {
    return convert(as(Mark::summand(), part.axis, summand), part.axis, Mark::invariant());
  };
  const Tensor sums = total(sum(exp(sub(logits, top)), {1}));
  const Tensor picked = squeeze(gather(logits, 1, unsqueeze(here, 1)), 1);
  const Tensor chosen = total(masked_fill(picked, foreign, 0));
  const Tensor losses = masked_fill(sub(add(log(sums), squeeze(top, 1)), chosen), ignored, 0);
  const Tensor loss = sum(losses);
  return mean ? div(loss, sum(to(logical_not(ignored), loss.dtype()))) : loss;
}

}  // namespace tessera::distributed
