// Random models that ranks calculate together, held against one process: right ones are equal,
// mutants of them are refused or equal, and seeded bugs are noticed. TESSERA_PROGRAMS=10000 runs so
// many of each, from TESSERA_PROGRAM_SEED on (docs/testing.md).
// ctest labels: threads
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include <tessera/autograd/ops.h>
#include <tessera/core/context.h>
#include <tessera/distributed/mesh/placement.h>
#include <tessera/distributed/tensor_parallel/vocabulary.h>

#include "parallel/random_program.h"

namespace tessera::tests::test_random_programs {
namespace {

using distributed::Mark;
using nn::ParallelStyle;

uint64_t number_from(const char* variable, uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

// ---- Shrinking ----------------------------------------------------------------------------------

using Complaint = std::function<std::string(const Numbers& numbers)>;

// The smallest list that halving, and then taking numbers away one by one, still finds a complaint
// for.
Numbers shrunk(Numbers numbers, const Complaint& complaint) {
  for (size_t size = numbers.size() / 2; size > 0; size /= 2) {
    for (size_t begin = 0; begin + size <= numbers.size();) {
      Numbers fewer = numbers;
      fewer.erase(fewer.begin() + static_cast<std::ptrdiff_t>(begin),
                  fewer.begin() + static_cast<std::ptrdiff_t>(begin + size));
      if (complaint(fewer).empty()) {
        begin += size;
      } else {
        numbers = fewer;
      }
    }
  }
  for (int& number : numbers) {
    const int before = std::exchange(number, 0);
    if (complaint(numbers).empty()) number = before;
  }
  return numbers;
}

using Describe = std::function<std::string(const Numbers& numbers)>;
std::string described(const Numbers& numbers) { return program_of(numbers).describe(); }

void report(uint64_t seed, const Complaint& complaint, const Describe& describe) {
  const Numbers smallest = shrunk(random_numbers(seed), complaint);
  std::string list;
  for (const int number : smallest) list += (list.empty() ? "" : ", ") + std::to_string(number);
  ADD_FAILURE() << "seed " << seed << ", shrunk to {" << list << "}: " << describe(smallest)
                << "\n  " << complaint(smallest);
}

// `count` programs, the first failures shrunk.
void for_programs(uint64_t count, const Complaint& complaint,
                  const Describe& describe = described) {
  constexpr int kMostFailures = 3;
  const uint64_t first = number_from("TESSERA_PROGRAM_SEED", 1);
  count = number_from("TESSERA_PROGRAMS", count);
  int failures = 0;
  for (uint64_t seed = first; seed < first + count && failures < kMostFailures; ++seed) {
    if (complaint(random_numbers(seed)).empty()) continue;
    report(seed, complaint, describe);
    ++failures;
  }
}

TEST(RandomPrograms, AListShrinksToTheNumbersThatMatter) {
  const Complaint has_seven = [](const Numbers& numbers) {
    return std::ranges::find(numbers, 7) == numbers.end() ? "" : "7";
  };
  EXPECT_EQ(shrunk({3, 9, 7, 2, 5, 1, 8}, has_seven), Numbers{7});
  const Numbers numbers = random_numbers(5);
  EXPECT_EQ(numbers, random_numbers(5));
  EXPECT_EQ(program_of({}).describe(), program_of({0, 0, 0}).describe());
}

// However far one process goes from itself.
TEST(RandomPrograms, WhatATrainingMakesOfRoundingPermitsAtMostAMillionthOfATensor) {
  const auto outcome = [](double loss, double value) {
    return Outcome{.losses = {loss}, .values = {{"parameter w", {100, value}}}, .refusal = {}};
  };
  const Outcome expected = outcome(1, 2), nudged = outcome(1 + 1e-8, 2 + 50);
  const auto differs = [&](double loss, double value) {
    return difference_within(1e-11, outcome(loss, value), expected, &nudged);
  };
  EXPECT_EQ(differs(1 + 7.9e-8, 2 + 0.99e-4), "");
  EXPECT_NE(differs(1 + 8.1e-8, 2), "");
  EXPECT_NE(differs(1, 2 + 1.01e-4), "");
}

// ---- Right programs -----------------------------------------------------------------------------

TEST(RandomPrograms, RightOnesGiveWhatOneProcessGives) {
  std::set<std::string> kinds;
  int64_t exact = 0, rounded = 0, in_groups = 0;
  for_programs(250, [&](const Numbers& numbers) -> std::string {
    const ProgramSpec spec = program_of(numbers);
    const Outcome expected = run_alone(spec);
    if (spec.exact && !expected.is_exact()) {
      ++rounded;
      return "";
    }
    exact += spec.exact;
    in_groups += std::ranges::any_of(spec.parts, &PartSpec::attends_in_groups);
    kinds.insert(std::string(spec.sequence ? "sequence" : "whole") + (spec.tied ? " tied" : "") +
                 (spec.pooled ? " pooled" : ""));
    return difference(spec, run_divided(spec), expected);
  });
  std::printf("%lld exact programs, %lld too large to be so\n", static_cast<long long>(exact),
              static_cast<long long>(rounded));
  EXPECT_GE(kinds.size(), 8u);
  EXPECT_LT(rounded, exact);
  EXPECT_GT(in_groups, 0);
}

// ---- Mutants ------------------------------------------------------------------------------------

// What a module does at its borders, of which a part is something else. `own`: of a program that
// was divided alike, as the one that stands here goes with the module's.
class Altered : public nn::Boundary {
 public:
  struct Change {
    std::function<Tensor(const nn::Boundary&own, const Tensor&x)> enter = {}, leave = {};
    std::function<Tensor(const Tensor& bias)> bias = {};
    std::function<Tensor(const Tensor& index, const Tensor& weight)> embedding = {};
    std::function<Tensor(const Tensor& x, const Tensor& weight, const Tensor& target)> loss = {};
  };
  Altered(const nn::Boundary& own, Change change) : own_(own), change_(std::move(change)) {}
  Tensor enter(const Tensor& x) const override {
    return change_.enter ? change_.enter(own_, x) : own_.enter(x);
  }
  Tensor leave(const Tensor& y) const override {
    return change_.leave ? change_.leave(own_, y) : own_.leave(y);
  }
  bool enters_as_is() const override { return !change_.enter && own_.enters_as_is(); }
  bool leaves_as_is() const override { return !change_.leave && own_.leaves_as_is(); }
  Tensor bias(const Tensor& bias) const override {
    return change_.bias ? change_.bias(bias) : own_.bias(bias);
  }
  Tensor embedding(const Tensor& index, const Tensor& weight,
                   std::optional<int64_t> padding_idx) const override {
    return change_.embedding ? change_.embedding(index, weight)
                             : own_.embedding(index, weight, padding_idx);
  }
  Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& target,
                              int64_t ignore_index, bool mean) const override {
    return change_.loss ? change_.loss(x, weight, target)
                        : own_.linear_cross_entropy(x, weight, target, ignore_index, mean);
  }

 private:
  const nn::Boundary& own_;
  const Change change_;
};

// Puts a change at the boundaries of all modules whose names end in `name`.
std::function<void(Program&, distributed::Mesh&)> altering(const ProgramSpec& spec,
                                                           const std::string& name,
                                                           const Altered::Change& change) {
  return [spec, name, change](Program& program, distributed::Mesh& tp) {
    auto donor = std::make_shared<Program>(make_program(spec));
    distributed::parallelize_module(*donor->model, tp,
                                    {.styles = donor->styles, .sequence = spec.sequence});
    for (const auto& [own, module] : program.model->named_modules()) {
      const nn::Boundary* boundary = nullptr;
      for (const auto& [other, twin] : donor->model->named_modules()) {
        if (other == own) boundary = twin->boundary();
      }
      if (own.ends_with(name) && boundary != nullptr) {
        module->set_boundary(std::make_shared<Altered>(*boundary, change));
      }
    }
    program.kept.push_back(donor);
  };
}

// One conversion dropped, one style exchanged or left out, or a conversion to any mark in addition.
Changes mutant_of(const ProgramSpec& spec, const Numbers& numbers) {
  const auto choice = [&](size_t at) {
    return static_cast<size_t>(at < numbers.size() ? numbers[numbers.size() - 1 - at] : 0);
  };
  const std::vector<nn::StyledModules> styles = styles_of(spec);
  const size_t entry = choice(0) % styles.size(), other = choice(1) % styles.size();
  const bool enters = choice(2) % 2 == 0;
  Altered::Change change;
  auto& end = enters ? change.enter : change.leave;
  switch (choice(3) % 4) {
    case 0:
      return {.table = [entry](Program& program) {
        program.styles.erase(program.styles.begin() + static_cast<std::ptrdiff_t>(entry));
        if (program.styles.empty()) program.styles.push_back({"parts", ParallelStyle::kWhole});
      }};
    case 1:
      return {.table = [entry, other](Program& program) {
        std::swap(program.styles[entry].style, program.styles[other].style);
      }};
    case 2:
      end = [](const nn::Boundary&, const Tensor& x) { return x; };
      break;
    default: {
      const size_t mark = choice(4) % 5, dim = choice(5) % 3;
      end = [enters, mark, dim](const nn::Boundary& own, const Tensor& given) {
        Tensor x = enters ? given : own.leave(given);
        const Mark marks[] = {Mark::invariant(), Mark::replicated(), Mark::summand(),
                              Mark::shard(static_cast<int>(dim)),
                              Mark::shard(static_cast<int>(dim))};
        if (!marks[mark].is_shard() || static_cast<int>(dim) < x.dim()) {
          x = distributed::convert(x, "tp", marks[mark]);
        }
        return enters ? own.enter(x) : x;
      };
    }
  }
  return {.divided = altering(spec, styles[entry].pattern, change)};
}

TEST(RandomPrograms, MutantsAreRefusedOrGiveWhatOneProcessGives) {
  int64_t refused = 0, equal = 0;
  for_programs(250, [&](const Numbers& numbers) -> std::string {
    const ProgramSpec spec = program_of(numbers);
    const Outcome expected = run_alone(spec);
    if (spec.exact && !expected.is_exact()) return "";
    const Outcome got = run_divided(spec, mutant_of(spec, numbers));
    if (!got.refusal.empty()) {
      ++refused;
      return "";
    }
    ++equal;
    return difference(spec, got, expected);
  });
  std::printf("%lld mutants were refused, %lld were equal\n", static_cast<long long>(refused),
              static_cast<long long>(equal));
  EXPECT_GT(refused, 0);
  EXPECT_GT(equal, 0);
}

// ---- Conversions anywhere -----------------------------------------------------------------------

// A calculation with small integers, before each operand of which a conversion to any mark may
// stand: what the rules accept is what one process calculates, gradients too.
struct Step {
  int op = 0;
  size_t operands[2] = {};
  std::optional<Mark> marks[2] = {};
};
struct Calculation {
  int ranks = 2;
  uint64_t seed = 0;
  std::vector<Step> steps;
  std::string describe() const;
};
constexpr size_t kLeaves = 3;
constexpr const char* kOps[] = {"add", "sub", "mul", "linear", "matmul",     "relu",
                                "neg", "sum", "cat", "t",      "transposed", "narrow"};

Calculation calculation_of(const Numbers& numbers) {
  Reader reader(numbers);
  Calculation result;
  result.ranks = reader.next(4) == 3 ? 4 : 2;
  result.seed = static_cast<uint64_t>(reader.next(1000));
  const int steps = 1 + reader.next(7);
  for (int i = 0; i < steps; ++i) {
    Step step{.op = reader.next(std::size(kOps))};
    for (size_t k = 0; k < 2; ++k) {
      // The last one more often than others: what was calculated goes on.
      const auto known = static_cast<int>(kLeaves) + i;
      const int at = reader.next(2 * known);
      step.operands[k] = static_cast<size_t>(k == 0 && at >= known ? known - 1 : at % known);
      const Mark marks[] = {Mark::replicated(), Mark::summand(),   Mark::shard(0),
                            Mark::shard(1),     Mark::shard(0, 2), Mark::shard(1, 2),
                            Mark::replicated(), Mark::invariant()};
      const int mark = reader.next(12);
      if (mark < 8) step.marks[k] = marks[mark];
    }
    result.steps.push_back(step);
  }
  return result;
}

std::string Calculation::describe() const {
  std::string text = std::to_string(ranks) + " ranks, seed " + std::to_string(seed);
  for (size_t i = 0; i < steps.size(); ++i) {
    text += "; " + std::to_string(kLeaves + i) + " = " + kOps[steps[i].op];
    for (size_t k = 0; k < 2; ++k) {
      text += (k == 0 ? " of " : ", ") + std::to_string(steps[i].operands[k]);
      if (steps[i].marks[k]) text += " as " + distributed::describe(*steps[i].marks[k]);
    }
  }
  return text;
}

Tensor calculated(int op, const Tensor& a, const Tensor& b) {
  switch (op) {
    case 0:
      return a + b;
    case 1:
      return a - b;
    case 2:
      return a * b;
    case 3:
      return linear(a, b);
    case 4:
      return matmul(a, b);
    case 5:
      return relu(a);
    case 6:
      return neg(a);
    case 7:
      return sum(a, {1}, true);
    case 8:
      return cat({a, b}, 1);
    case 9:
      return a.transpose(0, 1);
    case 10:
      return a.transpose(0, 1).contiguous() + b;
    default:
      return a.narrow(0, 0, a.size(0) / 2);
  }
}

// `possible`: which steps have shapes that fit, which one process finds out.
Outcome run_calculation(const Calculation& calculation, std::vector<bool>& possible, bool alone) {
  Outcome outcome;
  const auto convert_to = [&](const Tensor& x, const Mark& mark) {
    return alone ? x : distributed::convert(x, "tp", mark);
  };
  const int64_t side = 4L * calculation.ranks;
  TensorList known, leaves;
  for (size_t i = 0; i < kLeaves; ++i) {
    const RandomStream stream{calculation.seed, i};
    leaves.push_back(randint(-2, 3, {side, side}, kI64, stream).to(kF64).set_requires_grad());
  }
  known = leaves;
  try {
    for (size_t i = 0; i < calculation.steps.size(); ++i) {
      const Step& step = calculation.steps[i];
      Tensor operands[2], result = known.back();
      if (alone) possible.push_back(true);
      if (possible[i]) {
        for (size_t k = 0; k < 2; ++k) {
          operands[k] = known[step.operands[k]];
          if (step.marks[k]) operands[k] = convert_to(operands[k], *step.marks[k]);
        }
        try {
          result = calculated(step.op, operands[0], operands[1]);
        } catch (const ShapeError&) {
          if (!alone) throw;
          possible[i] = false;
        }
      }
      known.push_back(result);
      const NoGradGuard no_grad;
      if (alone && possible[i] && !(abs(result).max().item() < kMostExact)) {
        outcome.refusal = "too large";
        return outcome;
      }
    }
    const Tensor whole = convert_to(known.back(), Mark::invariant());
    const Tensor loss =
        sum(whole * randint(-2, 3, whole.shape(), kI64, RandomStream{7, 7}).to(kF64));
    loss.backward();
    outcome.losses.push_back(loss.item());
    outcome.values["result"] = whole.to_vector();
    for (size_t i = 0; i < kLeaves; ++i) {
      const Tensor& grad = leaves[i].grad();
      outcome.values["gradient of " + std::to_string(i)] =
          grad.defined() ? grad.to_vector() : std::vector<double>(static_cast<size_t>(side * side));
    }
  } catch (const Error& error) {
    outcome.refusal = error.what();
  }
  return outcome;
}

TEST(RandomPrograms, ConversionsThatAreAcceptedCalculateWhatOneProcessDoes) {
  int64_t refused = 0, equal = 0, marked = 0;
  for_programs(
      2000,
      [&](const Numbers& numbers) -> std::string {
        const Calculation calculation = calculation_of(numbers);
        std::vector<bool> possible;
        Outcome expected;
        {
          Context context;
          const ContextGuard guard(context);
          expected = run_calculation(calculation, possible, true);
        }
        if (!expected.refusal.empty() || !expected.is_exact()) return "";
        Outcome of_ranks;
        std::vector<std::string> problems(static_cast<size_t>(calculation.ranks));
        distributed::compared_ranks(calculation.ranks, [&](int rank) {
          distributed::Mesh mesh(distributed::world(), {{"tp", calculation.ranks}});
          distributed::use_compute_mesh(mesh);
          std::vector<bool> steps = possible;
          const Outcome own = run_calculation(calculation, steps, false);
          // Every rank has the whole result and the whole gradients, or all refuse.
          const Tensor refuses = tensor({own.refusal.empty() ? 0.0 : 1.0}, kF64);
          distributed::all_reduce(refuses);
          std::string& problem = problems[static_cast<size_t>(rank)];
          if (own.refusal.empty()) problem = difference({}, own, expected);
          if (refuses.item() != 0 && refuses.item() != calculation.ranks) {
            problem = "refused by some ranks alone: " + own.refusal;
          }
          if (rank == 0) of_ranks = own;
        });
        for (size_t rank = 0; rank < problems.size(); ++rank) {
          if (!problems[rank].empty())
            return "rank " + std::to_string(rank) + ": " + problems[rank];
        }
        ++(of_ranks.refusal.empty() ? equal : refused);
        marked += of_ranks.refusal.empty() &&
                  std::ranges::any_of(calculation.steps, [](const Step& step) {
                    return step.marks[0] && !step.marks[0]->is_invariant();
                  });
        return "";
      },
      [](const Numbers& numbers) { return calculation_of(numbers).describe(); });
  std::printf("%lld calculations were refused, %lld equal, %lld of these with marks\n",
              static_cast<long long>(refused), static_cast<long long>(equal),
              static_cast<long long>(marked));
  EXPECT_GT(refused, 0);
  EXPECT_GT(10 * marked, refused);
}

// ---- Seeded bugs --------------------------------------------------------------------------------

// What code might do that does not ask the rules.
Tensor marked(const Tensor& x, const Mark& mark) {
  const CheckedMarks scope;
  const Tensor result = mul(x, 1.0);
  distributed::set_mark(result, 0, mark);
  return result;
}

// Rules whose places of parts are wrong.
class WrongPlaces : public MarkRules {
 public:
  using Change = std::function<std::vector<DimCut>(const Tensor& x, std::vector<DimCut> cuts)>;
  WrongPlaces(const MarkRules& own, Change change) : own_(own), change_(std::move(change)) {}
  uint64_t of_results(const OpCall& call, std::span<const Tensor> inputs) const override {
    return own_.of_results(call, inputs);
  }
  void check_whole(const Op& op, std::string_view name, const Tensor& x) const override {
    own_.check_whole(op, name, x);
  }
  std::vector<DimCut> cuts_of(const Op& op, const Tensor& x) const override {
    return change_(x, own_.cuts_of(op, x));
  }

 private:
  const MarkRules& own_;
  const Change change_;
};
std::function<void(Program&, distributed::Mesh&)> with_places(const WrongPlaces::Change& change) {
  return [change](Program& program, distributed::Mesh&) {
    MarkRulesSlot& slot = Context::current().slot<MarkRulesSlot>();
    auto rules = std::make_shared<WrongPlaces>(*slot.rules, change);
    slot.rules = rules.get();
    program.kept.push_back(rules);
  };
}

// Of gradients that ranks have added up of their summands.
void change_sums(nn::ModuleBase& model, const std::function<Tensor(const Tensor& sum)>& change) {
  const NoGradGuard no_grad;
  for (const Tensor& parameter : model.parameters()) {
    const auto* divided = distributed::divided_parameter(parameter);
    if (divided == nullptr || !distributed::decoded(divided->marks, 0).is_replicated()) continue;
    if (!parameter.grad().defined()) continue;
    const Tensor own = distributed::to_local(parameter.grad());
    own.copy_(change(own));
  }
}

bool has_part(const ProgramSpec& spec, PartSpec::Kind kind) {
  return std::ranges::any_of(spec.parts, [=](const PartSpec& part) { return part.kind == kind; });
}

struct Bug {
  const char* name;
  std::function<Changes(const ProgramSpec& spec)> changes;
  bool by_numbers = false;  // the rules cannot see it
  // Programs that it could show in; of one data rank if nothing is said, which are fast.
  bool (*concerns)(const ProgramSpec& spec) = [](const ProgramSpec& spec) { return spec.dp == 1; };
};

std::vector<Bug> bugs() {
  const auto at = [](const std::string& name, const Altered::Change& change) {
    return [=](const ProgramSpec& spec) -> Changes {
      return {.divided = altering(spec, name, change)};
    };
  };
  const auto as_it_is = [](const nn::Boundary&, const Tensor& x) { return x; };
  const auto averages_shards = [](const ProgramSpec& spec) {
    return spec.dp == 1 && spec.sequence && spec.averaged;
  };
  const auto without = [](const std::string& name) {
    return [=](const ProgramSpec&) -> Changes {
      return {.table = [=](Program& program) {
        std::erase_if(program.styles, [&](const nn::StyledModules& entry) {
          return entry.pattern.ends_with(name);
        });
        if (program.styles.empty()) program.styles.push_back({"parts", ParallelStyle::kWhole});
      }};
    };
  };
  const auto changing_sums = [](const std::function<Tensor(const Tensor&)>& change) {
    return [=](const ProgramSpec&) -> Changes {
      return {.reduced = [=](nn::ModuleBase& model) { change_sums(model, change); }};
    };
  };
  return {
      // Types
      {"columns take x without a conversion", at("in", {.enter = as_it_is})},
      {"columns take x as equal, and its gradients as whole",
       at("in", {.enter =
                     [](const nn::Boundary&, const Tensor& x) {
                       const Tensor whole = distributed::convert(x, "tp", Mark::invariant());
                       return marked(whole, Mark::replicated());
                     }}),
       true},
      {"a summand leaves rows, and relu follows",
       at("out", {.leave = [](const nn::Boundary&, const Tensor& y) { return relu(y); }})},
      {"all ranks add the bias of rows", at("out", {.bias = [](const Tensor& b) { return b; }})},
      {"rows leave as a shard of the samples",
       at("out", {.leave =
                      [](const nn::Boundary& own, const Tensor& y) {
                        const int ranks = distributed::compute_mesh().group(0).size();
                        return y.size(0) % ranks != 0
                                   ? own.leave(y)
                                   : distributed::convert(y, "tp", Mark::shard(0));
                      }})},
      {"norms have no style", without("norm"), false,
       [](const ProgramSpec& spec) {
         return spec.dp == 1 && spec.sequence && has_part(spec, PartSpec::Kind::kNorm);
       }},
      {"the table of positions is not cut", without("positions")},
      {"a chunk stands for the whole of rows' results",
       at("out", {.leave =
                      [](const nn::Boundary& own, const Tensor& y) {
                        const Tensor x = own.leave(y);
                        return distributed::mark_of(x, 0).is_shard() ? x
                                                                     : marked(y, Mark::invariant());
                      }}),
       true},
      // R to S whose backward is an all-gather.
      {"a chunk of what all ranks have, whose gradient is gathered instead of added up",
       at("out", {.leave =
                      [](const nn::Boundary& own, const Tensor& y) {
                        if (!distributed::mark_of(own.leave(y), 0).is_shard()) return own.leave(y);
                        const Tensor whole = distributed::convert(y, "tp", Mark::replicated());
                        return distributed::convert(marked(whole, Mark::invariant()), "tp",
                                                    Mark::shard(y.dim() - 2));
                      }}),
       true,
       [](const ProgramSpec& spec) {
         return spec.dp == 1 && spec.sequence &&
                (has_part(spec, PartSpec::Kind::kMlp) ||
                 has_part(spec, PartSpec::Kind::kAttention));
       }},
      {"the mean of a rank's tokens, which nothing has gathered", at("pool", {.enter = as_it_is}),
       false, averages_shards},
      {"the mean of a rank's tokens stands for that of all",
       at("pool", {.enter = [](const nn::Boundary&,
                               const Tensor& x) { return marked(x, Mark::invariant()); }}),
       true, averages_shards},
      {"the softmax of a rank's classes",
       at("head", {.loss =
                       [](const Tensor& x, const Tensor& weight, const Tensor& target) {
                         const CheckedMarks scope;
                         const Tensor loss = linear_cross_entropy(
                             x, weight, target.remainder(weight.size(0)), -100, Reduction::kSum);
                         return marked(loss, Mark::invariant());
                       }}),
       true},
      {"rows of the table by the local number",
       at("table", {.embedding =
                        [](const Tensor& index, const Tensor& weight) {
                          const CheckedMarks scope;
                          return marked(embedding(index.remainder(weight.size(0)), weight),
                                        Mark::summand());
                        }}),
       true},
      // Geometry
      {"side by side columns are cut as one block",
       [](const ProgramSpec&) -> Changes {
         return {.table = [](Program& program) {
           for (nn::StyledModules& entry : program.styles) entry.blocks = 1;
         }};
       }},
      {"the chunk of another rank",
       [](const ProgramSpec&) -> Changes {
         return {.divided = [](Program& program, distributed::Mesh& tp) {
           const NoGradGuard no_grad;
           const int ranks = tp.size(), other = (tp.coordinate() + 1) % ranks;
           for (const auto& [name, parameter] : program.model->named_parameters()) {
             if (!name.ends_with("in.weight") || !distributed::is_dtensor(parameter)) continue;
             const auto* divided = distributed::divided_parameter(parameter);
             const Mark mark = distributed::decoded(divided->marks, 0);
             if (!mark.is_shard()) continue;
             distributed::to_local(parameter,
                                   {.grad_placements = distributed::placements_of(parameter)})
                 .copy_(distributed::chunk_at(distributed::full_tensor(parameter), mark, ranks,
                                              other));
           }
         }};
       },
       true},
      {"queries read the key and value of the next group of heads",
       [](const ProgramSpec& spec) -> Changes {
         return {.divided = [spec](Program& program, distributed::Mesh& tp) {
           const NoGradGuard no_grad;
           for (const auto& [name, parameter] : program.model->named_parameters()) {
             const auto* divided = distributed::divided_parameter(parameter);
             const Mark mark = distributed::decoded(divided->marks, 0);
             if (!mark.is_shard() || name.find(".in.") == name.npos) continue;
             const PartSpec& part = spec.parts[std::stoul(name.substr(std::strlen("parts.")))];
             if (part.kind != PartSpec::Kind::kAttention) continue;
             TensorList blocks = distributed::full_tensor(parameter).chunk(part.blocks, 0);
             for (const size_t block : {1, 2}) {  // the key and the value
               const Tensor& own = blocks[block];
               const int64_t rest = own.size(0) - part.hidden;
               blocks[block] =
                   cat({own.narrow(0, part.hidden, rest), own.narrow(0, 0, part.hidden)});
             }
             distributed::to_local(parameter,
                                   {.grad_placements = distributed::placements_of(parameter)})
                 .copy_(distributed::chunk_at(cat(blocks), mark, tp.size(), tp.coordinate()));
           }
         }};
       },
       true,
       [](const ProgramSpec& spec) {
         return spec.dp == 1 && std::ranges::any_of(spec.parts, &PartSpec::attends_in_groups);
       }},
      {"chunks of a vocabulary that does not divide are padded, and the padding counts",
       [](const ProgramSpec& spec) -> Changes {
         const auto loss = [words = spec.vocabulary](const Tensor& x, const Tensor& weight,
                                                     const Tensor& target) {
           const distributed::Group& ranks = distributed::compute_mesh().group(0);
           const int64_t most = distributed::chunk_of(words, ranks.size(), 0).second;
           const int64_t first = distributed::chunk_of(words, ranks.size(), ranks.rank()).first;
           Tensor padded;
           {
             const CheckedMarks scope;
             padded =
                 cat({weight, zeros({most - weight.size(0), weight.size(1)}, {.dtype = kF64})});
             distributed::set_mark(padded, 0, Mark::shard(0));
           }
           return distributed::linear_cross_entropy({"tp", first, words}, x, padded, target, -100,
                                                    false);
         };
         return {.divided = altering(spec, "head", {.loss = loss})};
       },
       true,
       [](const ProgramSpec& spec) {
         return spec.dp == 1 && !spec.exact && !spec.pooled && spec.divides_head &&
                spec.vocabulary % spec.tp != 0;
       }},
      // Reductions
      {"summands of gradients stay apart",
       [](const ProgramSpec&) -> Changes {
         return {.divided = [](Program& program, distributed::Mesh&) {
           for (const Tensor& parameter : program.model->parameters()) {
             if (distributed::grad_placements_of(parameter) == nullptr) continue;
             distributed::set_grad_placements(parameter, {distributed::Replicate()});
           }
         }};
       },
       true, [](const ProgramSpec& spec) { return spec.dp == 2 && spec.tp == 2 && spec.sequence; }},
      {"summands of gradients are added twice",
       changing_sums([](const Tensor& sum) { return sum * 2.0; }), true},
      {"summands of gradients are averaged", changing_sums([](const Tensor& sum) {
         return sum * (1.0 / distributed::compute_mesh().group(0).size());
       }),
       true},
      {"summands of gradients are added up in bf16",
       changing_sums([](const Tensor& sum) { return sum.to(kBF16).to(kF64); }), true},
      {"results of rows are averaged",
       at("out", {.leave =
                      [](const nn::Boundary& own, const Tensor& y) {
                        return own.leave(y * (1.0 / distributed::compute_mesh().group(0).size()));
                      }}),
       true},
      {"a norm counts the copies of each rank",
       [](const ProgramSpec&) -> Changes {
         return {.norm = [](nn::ModuleBase& model) {
           const NoGradGuard no_grad;
           const Tensor squares = zeros({1}, {.dtype = kF64});
           for (const Tensor& parameter : model.parameters()) {
             if (!parameter.grad().defined()) continue;
             squares.add_(square(distributed::to_local(parameter.grad())).sum());
           }
           distributed::all_reduce(squares, distributed::ReduceOp::kSum,
                                   distributed::compute_mesh().group(0));
           return std::sqrt(squares.item());
         }};
       },
       true, [](const ProgramSpec& spec) { return spec.dp == 1 && spec.clip; }},
      // Random numbers
      {"one mask on all shards",
       [](const ProgramSpec&) -> Changes {
         return {.divided = with_places(
                     [](const Tensor&, std::vector<DimCut>) { return std::vector<DimCut>(); })};
       },
       true},
      {"heads by their local number",
       [](const ProgramSpec&) -> Changes {
         return {.divided = with_places([](const Tensor& x, std::vector<DimCut> cuts) {
                   for (DimCut& cut : cuts) {
                     if (x.dim() > 3) cut.part = 0;
                   }
                   return cuts;
                 })};
       },
       true,
       [](const ProgramSpec& spec) {
         return spec.dp == 1 && spec.dropout > 0 && has_part(spec, PartSpec::Kind::kAttention);
       }},
      {"tokens by the place of another rank",
       [](const ProgramSpec&) -> Changes {
         return {.divided = with_places([](const Tensor& x, std::vector<DimCut> cuts) {
                   for (DimCut& cut : cuts) {
                     if (x.dim() == 3) cut.part = (cut.part + 1) % cut.parts;
                   }
                   return cuts;
                 })};
       },
       true},
  };
}

// How often programs refuse it or are another one's numbers.
TEST(RandomPrograms, SeededBugsAreNoticed) {
  const uint64_t most = number_from("TESSERA_PROGRAMS", 1000);
  std::printf("%-50s %5s %8s %8s  %s\n", "bug", "of", "refused", "differ", "the first");
  for (const Bug& bug : bugs()) {
    int64_t programs = 0, refused = 0, differ = 0;
    std::string first;  // what was noticed
    const auto is_enough = [&] { return (bug.by_numbers ? differ : refused + differ) >= 2; };
    for (uint64_t seed = 1; seed <= most && programs < 40 && !is_enough(); ++seed) {
      const ProgramSpec spec = program_of(random_numbers(seed));
      if (!bug.concerns(spec)) continue;
      const Outcome expected = run_alone(spec);
      if (spec.exact && !expected.is_exact()) continue;
      ++programs;
      const Outcome got = run_divided(spec, bug.changes(spec));
      const std::string noticed = difference(spec, got, expected);
      refused += !got.refusal.empty();
      differ += got.refusal.empty() && !noticed.empty();
      const bool wanted = !bug.by_numbers || got.refusal.empty();
      if (first.empty() && !noticed.empty() && wanted) first = noticed;
    }
    std::printf("%-50s %5lld %8lld %8lld  %.90s\n", bug.name, static_cast<long long>(programs),
                static_cast<long long>(refused), static_cast<long long>(differ), first.c_str());
    EXPECT_GT(bug.by_numbers ? differ : refused + differ, 0) << bug.name;
  }
}

}  // namespace
}  // namespace tessera::tests::test_random_programs
