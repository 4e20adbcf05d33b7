// The rules for marked operands, by the table of ops: whatever assignment of marks a call accepts,
// the parts that two ranks calculate apart put together are the whole, and so are the gradients.
// ctest labels: threads
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <set>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/op.h>
#include <tessera/core/factory/factory.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/distributed/mesh/placement.h>
#include <tessera/distributed/tensor_parallel/compute_mesh.h>
#include <tessera/distributed/tensor_parallel/convert.h>

#include "autograd/op_samples.h"
#include "distributed/fake_rank.h"

namespace tessera::distributed::test_ops_marks {
namespace {

using tests::OpRow;
using tests::Sample;
using Parts = std::array<Tensor, 2>;  // of two ranks; undefined where one has none

constexpr int kRanks = 2;
constexpr double kTolerance = 1e-9;

// A tensor as each rank would hold it under the mark. Summands are the whole less a part of it, and
// that part.
Parts parts_of(const Tensor& whole, const Mark& mark) {
  const NoGradGuard no_grad;
  if (!whole.defined()) return {};
  if (mark.is_shard()) return {chunk_at(whole, mark, kRanks, 0), chunk_at(whole, mark, kRanks, 1)};
  if (!mark.is_summand()) return {whole.clone(), whole.clone()};
  std::vector<double> values;
  for (int64_t i = 0; i < whole.numel(); ++i) values.push_back(0.25 * (i % 7) - 0.5);
  if (values.empty()) return {whole.clone(), whole.clone()};
  const Tensor part = tensor(std::span<const double>(values), whole.shape()).to(whole.dtype());
  return {whole - part, part};
}

std::string difference(const Tensor& got, const Tensor& expected) {
  if (!got.defined() || !expected.defined()) {
    return got.defined() == expected.defined() ? "" : "one is not there";
  }
  if (got.shape() != expected.shape()) return got.describe() + " for " + expected.describe();
  const std::vector<double> a = got.to_vector(), b = expected.to_vector();
  double scale = 1;
  for (const double value : b) {
    if (std::isfinite(value)) scale = std::max(scale, std::abs(value));
  }
  const double tolerance = expected.dtype() == kF64 ? kTolerance : 1e-6;
  for (size_t i = 0; i < a.size(); ++i) {
    const bool same = a[i] == b[i] || (std::isnan(a[i]) && std::isnan(b[i]));
    if (!same && !(std::abs(a[i] - b[i]) <= tolerance * scale)) {
      return std::to_string(a[i]) + " for " + std::to_string(b[i]) + " at " + std::to_string(i);
    }
  }
  return "";
}

// Empty where the ranks' tensors of this mark are those of the whole one.
std::string compared(const Parts& parts, const Tensor& whole, const Mark& mark) {
  const NoGradGuard no_grad;
  const CheckedMarks of_parts;
  for (size_t rank = 0; rank < kRanks; ++rank) {
    if (!parts[rank].defined() || !whole.defined()) return difference(parts[rank], whole);
  }
  if (mark.is_summand()) {
    if (parts[0].shape() != parts[1].shape()) return "summands of two shapes";
    return difference(parts[0] + parts[1], whole);
  }
  for (int rank = 0; rank < kRanks; ++rank) {
    const Tensor expected = mark.is_shard() ? chunk_at(whole, mark, kRanks, rank) : whole;
    const std::string text = difference(parts[static_cast<size_t>(rank)], expected);
    if (!text.empty()) return text;
  }
  return "";
}

struct Called {
  TensorList results, gradients;  // of floating results and inputs
};
// `seeds`: gradients of the results; without one, of ones and more.
Called called(const OpRow& row, const Sample& sample, const TensorList& inputs,
              const std::function<TensorList(const TensorList& results)>& seeds) {
  manual_seed(3);
  Called run;
  run.results = tests::call_op(row, inputs, tests::Attrs::parse(sample.attrs)).tensors;
  TensorList outputs, given;
  const TensorList all = seeds(run.results);
  for (size_t i = 0; i < run.results.size(); ++i) {
    if (!run.results[i].defined() || !run.results[i].requires_grad()) continue;
    outputs.push_back(run.results[i]);
    given.push_back(all[i]);
  }
  if (outputs.empty()) return run;
  TensorList leaves;
  for (const Tensor& input : inputs) {
    if (input.defined() && input.requires_grad()) leaves.push_back(input);
  }
  const TensorList gradients = grad(outputs, leaves, given, {.allow_unused = true});
  size_t next = 0;
  for (const Tensor& input : inputs) {
    const bool learns = input.defined() && input.requires_grad();
    run.gradients.push_back(learns ? gradients[next++] : Tensor());
  }
  return run;
}

Tensor seed_of(const Tensor& result) {
  if (!result.defined() || !is_floating(result.dtype())) return {};
  const NoGradGuard no_grad;
  const Tensor seed = zeros(result.shape(), {.dtype = result.dtype()});
  std::vector<double> values;
  for (int64_t i = 0; i < seed.numel(); ++i) values.push_back(0.5 + 0.125 * (i % 5));
  if (values.empty()) return seed;
  return tensor(std::span<const double>(values), result.shape()).to(result.dtype());
}

std::vector<Mark> marks_for(const Tensor& input) {
  if (!input.defined()) return {Mark::invariant()};
  std::vector<Mark> marks{Mark::invariant(), Mark::replicated()};
  if (input.dtype() == kF64) marks.push_back(Mark::summand());
  for (int dim = 0; dim < input.dim(); ++dim) {
    if (input.size(dim) % kRanks == 0 && input.size(dim) > 0) marks.push_back(Mark::shard(dim));
    for (const int blocks : {2, 3}) {
      if (input.size(dim) % (blocks * kRanks) == 0 && input.size(dim) > 0) {
        marks.push_back(Mark::shard(dim, blocks));
      }
    }
  }
  return marks;
}

// Contexts of the two ranks, each with the mesh.
class Ranks {
 public:
  Ranks() {
    for (size_t rank = 0; rank < kRanks; ++rank) {
      const ContextGuard guard(contexts_[rank]);
      become_fake_rank(static_cast<int>(rank), kRanks);
      use_compute_mesh(meshes_[rank].emplace(world(), std::vector<MeshAxis>{{"tp", kRanks}}));
    }
  }
  Context& operator[](size_t rank) { return contexts_[rank]; }

 private:
  std::array<Context, kRanks> contexts_;
  std::array<std::optional<Mesh>, kRanks> meshes_;
};

struct Outcome {
  bool accepted = false, cut = false, summands = false;
  std::string complaint;
};

Outcome check(const OpRow& row, const Sample& sample, const TensorList& wholes,
              const std::vector<Mark>& marks, Ranks& contexts) {
  Outcome outcome;
  for (const Mark& mark : marks) {
    outcome.cut |= mark.is_shard();
    outcome.summands |= mark.is_summand();
  }
  std::array<TensorList, kRanks> inputs;
  for (size_t i = 0; i < wholes.size(); ++i) {
    const Parts parts = parts_of(wholes[i], marks[i]);
    for (size_t rank = 0; rank < kRanks; ++rank) {
      inputs[rank].push_back(parts[rank]);
      if (!parts[rank].defined()) continue;
      if (wholes[i].requires_grad()) parts[rank].set_requires_grad();
      parts[rank].impl()->marks = 0;
      set_mark(parts[rank], 0, marks[i]);
    }
  }
  // The whole one, whose seeds the ranks get parts of.
  TensorList seeds;
  const Called whole = called(row, sample, wholes, [&](const TensorList& results) {
    for (const Tensor& result : results) seeds.push_back(seed_of(result));
    return seeds;
  });
  std::array<Called, kRanks> ranks;
  for (size_t rank = 0; rank < kRanks; ++rank) {
    bool runs_backward = false;
    try {
      const ContextGuard guard(contexts[rank]);
      ranks[rank] = called(row, sample, inputs[rank], [&](const TensorList& results) {
        runs_backward = true;
        TensorList own;
        for (size_t i = 0; i < results.size(); ++i) {
          if (!results[i].defined() || !results[i].requires_grad()) {
            own.emplace_back();
            continue;
          }
          own.push_back(parts_of(seeds[i], dual(mark_of(results[i], 0)))[rank]);
          own.back().impl()->marks = 0;
        }
        return own;
      });
    } catch (const Error& error) {
      // What forward has accepted is not refused later: a mark that does not fit would look so.
      if (runs_backward)
        outcome.complaint = std::string("the backward fails: ") + error.what();
      else if (rank == 1)
        outcome.complaint = "refused by one rank alone";
      return outcome;
    }
  }
  outcome.accepted = true;
  const auto complain = [&](const std::string& what, const Mark& mark, const std::string& text) {
    if (!text.empty()) outcome.complaint += " " + what + " is " + describe(mark) + ": " + text;
  };
  for (size_t i = 0; i < whole.results.size(); ++i) {
    if (!whole.results[i].defined()) continue;
    const Mark mark = mark_of(ranks[0].results[i], 0);
    complain("result " + std::to_string(i), mark,
             compared({ranks[0].results[i], ranks[1].results[i]}, whole.results[i], mark));
  }
  for (size_t i = 0; i < whole.gradients.size(); ++i) {
    if (!whole.gradients[i].defined() && !ranks[0].gradients[i].defined()) continue;
    const Mark mark = dual(marks[i]);
    complain("gradient " + std::to_string(i), mark,
             compared({ranks[0].gradients[i], ranks[1].gradients[i]}, whole.gradients[i], mark));
  }
  return outcome;
}

std::string described(const OpRow& row, const Sample& sample, const TensorList& inputs,
                      const std::vector<Mark>& marks) {
  std::string text = std::string(row.name) + " " + sample.attrs;
  for (size_t i = 0; i < marks.size(); ++i)
    text += ", " + inputs[i].describe() + " " + describe(marks[i]);
  return text;
}

// Whose results are not a function of values and attributes alone, or whose attributes name sizes:
// those of parts are others.
bool is_left_out(const OpRow& row, const Sample& sample) {
  const std::string_view attributes = sample.attrs;
  return row.name == "empty_like" || ((row.name == "view" || row.name == "reshape") &&
                                      attributes.find("-1") != attributes.npos);
}

TEST(OpsMarks, WhatIsAcceptedIsTheWhole) {
  on_fake_rank(0, kRanks, [] {
    Ranks contexts;
    constexpr size_t kMostAssignments = 200;
    std::set<std::string_view> accepting, cutting, adding;
    int64_t accepted = 0, tried = 0;
    for (const OpRow& row : tests::op_rows()) {
      for (const Sample& sample : row.samples) {
        if (is_left_out(row, sample)) continue;
        const TensorList wholes = tests::make_inputs(row, sample, kF64);
        for (size_t i = 0; i < wholes.size(); ++i) {
          const bool learns = row.differentiable != tests::Differentiable::kNo;
          if (learns && sample.inputs[i].grad && wholes[i].defined() &&
              is_floating(wholes[i].dtype())) {
            wholes[i].set_requires_grad();
          }
        }
        std::vector<std::vector<Mark>> choices;
        size_t assignments = 1;
        for (const Tensor& input : wholes) {
          choices.push_back(marks_for(input));
          assignments *= choices.back().size();
        }
        // A stride that is prime to all numbers of choices goes through a part of many.
        const size_t stride = assignments > kMostAssignments ? 10007 : 1;
        for (size_t n = 0; n < std::min(assignments, kMostAssignments); ++n) {
          std::vector<Mark> marks;
          size_t number = n * stride % assignments;
          for (const auto& each : choices) {
            marks.push_back(each[number % each.size()]);
            number /= each.size();
          }
          const bool any =
              std::ranges::any_of(marks, [](const Mark& mark) { return !mark.is_invariant(); });
          if (!any) continue;
          ++tried;
          const Outcome outcome = check(row, sample, wholes, marks, contexts);
          EXPECT_EQ(outcome.complaint, "") << described(row, sample, wholes, marks);
          if (!outcome.accepted) continue;
          ++accepted;
          accepting.insert(row.name);
          if (outcome.cut) cutting.insert(row.name);
          if (outcome.summands) adding.insert(row.name);
        }
      }
    }
    const auto rows = static_cast<double>(tests::op_rows().size());
    std::printf("%zu of %.0f rows accept marks, %zu shards, %zu summands; %lld of %lld calls\n",
                accepting.size(), rows, cutting.size(), adding.size(),
                static_cast<long long>(accepted), static_cast<long long>(tried));
    EXPECT_GE(static_cast<double>(accepting.size()), 0.8 * rows);
    EXPECT_GE(cutting.size(), 100u);
    EXPECT_GE(adding.size(), 20u);
  });
}

// A new record needs a rule, or its name here: what runs in backward alone or on memory as it lies,
// random numbers in place, linear layers in fp8 and of
// packed weights, and what stands for ops of plans.
TEST(OpsMarks, RecordsWithoutARuleAreKnown) {
  const std::set<std::string_view> known = {"as_strided",
                                            "as_strided_backward",
                                            "bernoulli_",
                                            "convert",
                                            "cross_entropy_inplace",
                                            "embedding_backward",
                                            "index_put_",
                                            "multinomial",
                                            "normal_",
                                            "pad_backward",
                                            "slice_backward",
                                            "sum_to",
                                            "uniform_",
                                            "autocast_weight",
                                            "fp8_linear",
                                            "packed_linear",
                                            "touch",
                                            "listed_product",
                                            "fp8_linear_cross_entropy",
                                            "listed_read",
                                            "listed_loss",
                                            "fp8_linear_cross_entropy_whole",
                                            "fp8_linear_gelu_linear"};
  for (const tessera::Op* op : all_ops()) {
    if (op->marks != MarkRule::kNone || op->name.starts_with("test_")) continue;
    EXPECT_TRUE(known.contains(op->name)) << op->name << " has no rule for marked operands";
  }
}

}  // namespace
}  // namespace tessera::distributed::test_ops_marks
