// Models, divisions and trainings that a list of integers describes, and what one process and the
// ranks of a mesh make of them. Half of the list is a smaller program: failures shrink by halving.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/context.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/parallel.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/distributed/fully_shard/fully_shard.h>
#include <tessera/distributed/mesh/divided_parameter.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/distributed/tensor_parallel/compute_mesh.h>
#include <tessera/distributed/tensor_parallel/convert.h>
#include <tessera/distributed/tensor_parallel/parallelize.h>
#include <tessera/nn/container.h>
#include <tessera/nn/dropout.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/fused.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/module.h>
#include <tessera/nn/norm.h>
#include <tessera/nn/parallel_style.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/optimizers.h>

#include "distributed/compared_ranks.h"

namespace tessera::tests {

using Numbers = std::vector<int>;

// One part of a model, of x [B, T, C].
struct PartSpec {
  enum class Kind : uint8_t { kMlp, kAttention, kNorm, kDropout };
  Kind kind = Kind::kMlp;
  int64_t hidden = 4;  // of a block; of attention: the width of a head
  int64_t blocks = 1;  // of the first layer's outputs, multiplied and added up; of attention the
                       // query's, the key and the value
  int64_t heads = 1;   // of attention: of a block
  bool bias = true, divided = true, rms = false, gelu = false;
  bool attends_in_groups() const { return kind == Kind::kAttention && blocks == 4; }
};

struct ProgramSpec {
  bool exact = true;  // small integers, linear ops and relu: every sum is exact in f64
  int tp = 2, dp = 1;
  bool sequence = false;
  bool tied = false, divides_table = true, divides_head = true, learned_positions = true;
  bool pooled = false;    // a loss of the first token; else of all
  bool averaged = false;  // pooled: of the mean of the tokens
  bool recompute = false, clip = false;
  int64_t samples = 2, tokens = 4, width = 4, vocabulary = 7;
  int accumulate = 1;
  double dropout = 0;
  std::vector<PartSpec> parts;
  uint64_t seed = 0;

  int ranks() const { return tp * dp; }
  std::string describe() const;
};
// Any list is a right program: what it says does divide.
ProgramSpec program_of(const Numbers& numbers);
Numbers random_numbers(uint64_t seed);

// A model with its table of styles.
struct Program {
  std::unique_ptr<nn::ModuleBase> model;
  std::vector<nn::StyledModules> styles;
  // The sum over all samples (and tokens) of a batch.
  std::function<Tensor(const Tensor& ids, const Tensor& targets)> loss;
  std::vector<std::shared_ptr<void>> kept = {};  // by what a test changes
};
Program make_program(const ProgramSpec& spec, double nudge = 0);

// What a training shows: losses, the whole gradients of each step and the whole parameters at the
// end, by names.
struct Outcome {
  std::vector<double> losses;
  std::map<std::string, std::vector<double>> values;
  std::string refusal;    // the message of the Error that ended it; else empty
  bool is_exact() const;  // no value is so large that a sum could have been rounded
};

// What a bug or mutant changes.
struct Changes {
  std::function<void(Program& program)> table = {};  // before it is divided
  std::function<void(Program& program, distributed::Mesh& tp)> divided = {};  // and behind
  // Instead of fully_shard().
  std::function<void(nn::ModuleBase& model, distributed::Mesh& data)> sharded = {};
  std::function<void(nn::ModuleBase& model)> reduced = {};  // behind the backwards of a step
  std::function<double(nn::ModuleBase& model)> norm = {};   // instead of clip_grad_norm()
};

// nudge: what parameters begin off by, relatively, up or down.
Outcome run_alone(const ProgramSpec& spec, double nudge = 0);
// Of rank 0. Threads as ranks.
Outcome run_divided(const ProgramSpec& spec, const Changes& changes = {});

// Empty where they agree: to the bit where it is exact, else within 1e-11, or as far as the training
// itself makes of 128 eps, up to a millionth.
std::string difference(const ProgramSpec& spec, const Outcome& got, const Outcome& expected);

using distributed::Mark;
using nn::ParallelStyle;
using Kind = PartSpec::Kind;

// ---- From numbers -------------------------------------------------------------------------------

class Reader {
 public:
  explicit Reader(const Numbers& numbers) : numbers_(numbers) {}
  // Of [0, range); 0 behind the list's end.
  int next(int range) { return at_ < numbers_.size() ? numbers_[at_++] % range : 0; }
  bool flag() { return next(2) != 0; }

 private:
  const Numbers& numbers_;
  size_t at_ = 0;
};

inline PartSpec part_of(Reader& reader, const ProgramSpec& program) {
  PartSpec part;
  const int kind = reader.next(program.exact ? 3 : 8);
  if (kind == 1 || kind == 7) {
    part.kind = Kind::kDropout;
  } else if (kind == 3 || kind == 4) {
    part.kind = Kind::kNorm;
  } else if (kind == 5 || kind == 6) {
    part.kind = Kind::kAttention;
  }
  part.heads = program.tp * (1 + reader.next(2));
  const bool attends = part.kind == Kind::kAttention;
  part.blocks = attends ? 3 : 1 + reader.next(3);
  // One number of each of several blocks could be the blocks as well (shard_moves.h).
  part.hidden =
      attends ? 2 + reader.next(3) : program.tp * (1 + reader.next(3) + (part.blocks > 1 ? 1 : 0));
  part.bias = !reader.flag();
  part.rms = reader.flag();
  part.gelu = !program.exact && !reader.flag();
  if (attends && !part.rms && part.gelu) ++part.blocks;  // two queries of a key and a value
  part.divided = !reader.flag() || program.sequence;
  return part;
}

// ---- The model ----------------------------------------------------------------------------------

struct Part : nn::Module<Part> {
  Part(const PartSpec& spec, const ProgramSpec& program) : spec(spec) {
    const int64_t C = program.width;
    const int64_t inner = spec.kind == Kind::kAttention ? spec.heads * spec.hidden : spec.hidden;
    switch (spec.kind) {
      case Kind::kMlp:
      case Kind::kAttention:
        in = &add<nn::Linear>("in", C, inner * spec.blocks, nn::LinearOptions{.bias = spec.bias});
        out = &add<nn::Linear>("out", spec.attends_in_groups() ? 2 * inner : inner, C,
                               nn::LinearOptions{.bias = spec.bias});
        break;
      case Kind::kNorm:
        if (spec.rms) {
          rms = &add<nn::RMSNorm>("norm", C);
        } else {
          norm = &add<nn::LayerNorm>("norm", C);
        }
        break;
      case Kind::kDropout:
        drop = &add<nn::Dropout>("drop", program.dropout > 0 ? program.dropout : 0.5);
    }
    attention_dropout = program.dropout;
  }

  Tensor forward(const Tensor& x) {
    switch (spec.kind) {
      case Kind::kMlp: {
        Tensor h = (*in)(x);
        if (spec.blocks > 1) {  // h0 * h1 + h2: columns of a block belong together
          const Tensor blocks = h.view({h.size(0), h.size(1), spec.blocks, -1});
          h = blocks.select(2, 0) * blocks.select(2, 1);
          if (spec.blocks > 2) h = h + blocks.select(2, 2);
        }
        return x + (*out)(spec.gelu ? gelu(h) : relu(h));
      }
      case Kind::kAttention: {
        const Tensor packed = (*in)(x);
        const Shape shape{packed.size(0), packed.size(1), spec.blocks, -1, spec.hidden};
        const AttentionOptions options{
            .dropout = attention_dropout, .causal = true, .enable_gqa = spec.attends_in_groups()};
        if (spec.rms) return x + (*out)(packed_attention(packed.view(shape), options));
        const Tensor all = packed.view(shape);
        const auto heads = [&](int64_t i) { return all.select(2, i).transpose(1, 2); };
        Tensor query = heads(0);
        if (spec.attends_in_groups()) {  // heads 2 g and 2 g + 1 read key and value g
          const Tensor pairs = cat({query.unsqueeze(2), heads(3).unsqueeze(2)}, 2);
          query = pairs.reshape({pairs.size(0), -1, pairs.size(3), spec.hidden});
        }
        const Tensor y = scaled_dot_product_attention(query, heads(1), heads(2), options);
        return x + (*out)(y.transpose(1, 2).reshape({y.size(0), y.size(2), -1}));
      }
      case Kind::kNorm:
        return rms != nullptr ? (*rms)(x) : (*norm)(x);
      case Kind::kDropout:
        return (*drop)(x);
    }
    return x;
  }

  const PartSpec spec;
  double attention_dropout = 0;
  nn::Linear *in = nullptr, *out = nullptr;
  nn::LayerNorm* norm = nullptr;
  nn::RMSNorm* rms = nullptr;
  nn::Dropout* drop = nullptr;
};

// Of the first token, or of all of them, which a rank of sequence shards must be given.
struct Pool : nn::Module<Pool> {
  static constexpr int64_t kClasses = 3;
  Pool(int64_t width, bool averages_in)
      : averages(averages_in), dense(add<nn::Linear>("dense", width, kClasses)) {}
  Tensor forward(const Tensor& x) { return dense(averages ? mean(x, {1}) : x.select(1, 0)); }
  const bool averages;
  nn::Linear& dense;
};

struct Chain : nn::Module<Chain> {
  explicit Chain(const ProgramSpec& spec)
      : spec(spec),
        table(add<nn::Embedding>("table", spec.vocabulary, spec.width)),
        positions(add<nn::Embedding>("positions", spec.tokens, spec.width)),
        parts(add<nn::ModuleList>("parts")) {
    for (const PartSpec& part : spec.parts) parts.append<Part>(part, spec);
    if (spec.pooled) {
      pool = &add<Pool>("pool", spec.width, spec.averaged);
    } else {
      head =
          &add<nn::Linear>("head", spec.width, spec.vocabulary, nn::LinearOptions{.bias = false});
      if (spec.tied) head->share_parameter("weight", table.weight);
    }
  }

  Tensor forward(const Tensor& ids, const Tensor& targets) {
    Tensor x = table(ids);
    if (spec.learned_positions) x = x + positions(arange(0, ids.size(1), 1, kI64));
    for (size_t i = 0; i < parts.size(); ++i) x = parts.at<Part>(i)(x);
    if (spec.pooled) return summed((*pool)(x), targets.select(1, 0).remainder(Pool::kClasses));
    if (spec.exact) return summed((*head)(x), targets);
    return nn::linear_cross_entropy(*head, x, targets.reshape({targets.numel()}), -100,
                                    Reduction::kSum);
  }
  // Exact: sums of logits by weights that the targets give. Else the cross-entropy.
  Tensor summed(const Tensor& logits, const Tensor& targets) const {
    const int64_t classes = spec.pooled ? Pool::kClasses : spec.vocabulary;
    if (spec.exact) {
      return sum(logits *
                 (targets.unsqueeze(-1) + arange(0, classes, 1, kI64)).remainder(3).to(kF64));
    }
    return cross_entropy(logits.reshape({targets.numel(), classes}),
                         targets.reshape({targets.numel()}), {.reduction = Reduction::kSum});
  }

  const ProgramSpec spec;
  nn::Embedding &table, &positions;
  nn::ModuleList& parts;
  Pool* pool = nullptr;
  nn::Linear* head = nullptr;
};

inline std::vector<nn::StyledModules> styles_of(const ProgramSpec& spec) {
  using enum ParallelStyle;
  std::vector<nn::StyledModules> styles;
  if (spec.divides_table) styles.push_back({"table", kVocabulary});
  styles.push_back({"positions", kSequence});
  for (size_t i = 0; i < spec.parts.size(); ++i) {
    const PartSpec& part = spec.parts[i];
    const std::string name = "parts." + std::to_string(i) + ".";
    if (part.kind == Kind::kNorm) styles.push_back({name + "norm", kSequence});
    if (part.kind == Kind::kDropout) styles.push_back({name + "drop", kSequence});
    if (!part.divided || part.kind == Kind::kNorm || part.kind == Kind::kDropout) continue;
    const int64_t heads = part.kind == Kind::kAttention ? part.heads : 0;
    styles.push_back({name + "in", kColumnwise, part.blocks, heads});
    styles.push_back({name + "out", kRowwise});
  }
  if (spec.pooled) styles.push_back({"pool", kWhole});
  if (!spec.pooled && spec.divides_head) styles.push_back({"head", kLossHead});
  return styles;
}

inline void fill(const ProgramSpec& spec, nn::ModuleBase& model, double nudge) {
  const NoGradGuard no_grad;
  uint64_t number = 0;
  for (const auto& [name, parameter] : model.named_parameters()) {
    const RandomStream stream{spec.seed, number++};
    const bool of_norm = name.ends_with("norm.weight");
    parameter.copy_(spec.exact ? randint(-1, 2, parameter.shape(), kI64, stream).to(kF64)
                               : randn(parameter.shape(), {.dtype = kF64}, stream) * 0.4 +
                                     (of_norm ? 1.0 : 0.0));
    if (nudge == 0) continue;
    const RandomStream signs{spec.seed + 2, number};
    parameter.mul_(randint(-1, 2, parameter.shape(), kI64, signs).to(kF64) * nudge + 1.0);
  }
}

// ---- Training -----------------------------------------------------------------------------------

struct Batch {
  Tensor ids, targets;
};
inline Batch batch_of(const ProgramSpec& spec, int step, int micro) {
  const RandomStream stream{spec.seed + 1, static_cast<uint64_t>(step * 100 + micro)};
  const Tensor all = randint(0, spec.vocabulary, {spec.samples, 2 * spec.tokens}, kI64, stream);
  return {all.narrow(1, 0, spec.tokens).contiguous(),
          all.narrow(1, spec.tokens, spec.tokens).contiguous()};
}

// The whole tensors, on every rank.
inline void note(Outcome& outcome, const nn::ModuleBase& model, const std::string& prefix,
                 bool of_gradients) {
  const NoGradGuard no_grad;
  for (const auto& [name, parameter] : model.named_parameters()) {
    const Tensor x = of_gradients ? parameter.grad() : parameter;
    outcome.values[prefix + name] =
        x.defined() ? (distributed::is_dtensor(x) ? distributed::full_tensor(x) : x).to_vector()
                    : std::vector<double>(static_cast<size_t>(numel_of(whole_shape(parameter))));
  }
}

// `ranks`: this one's place among those with batches of their own; null: one process.
inline void train(const ProgramSpec& spec, Program& program, distributed::Group* ranks,
                  const Changes& changes, Outcome& outcome) {
  optim::SGD optimizer(program.model->named_parameters(),
                       {.lr = spec.exact ? 0.125 : 0.02, .momentum = spec.exact ? 0 : 0.9});
  const bool alone = ranks == nullptr;
  const int own = alone ? spec.accumulate * spec.dp : spec.accumulate;
  for (int step = 0; step < (spec.exact ? 1 : 2); ++step) {
    const Tensor total = zeros({}, {.dtype = kF64});
    for (int micro = 0; micro < own; ++micro) {
      const int number = alone ? micro : micro * spec.dp + ranks->rank();
      const Batch batch = batch_of(spec, step, number);
      manual_seed(spec.seed + static_cast<uint64_t>(1000 * step + number));
      Tensor loss = program.loss(batch.ids, batch.targets);
      if (!alone && distributed::mark_of(loss, 0) != Mark::invariant()) {
        loss = distributed::convert(loss, "tp", Mark::invariant());
      }
      // Ranks with batches of their own have the mean of their gradients.
      (alone ? loss * (1.0 / spec.dp) : loss).backward();
      total.add_(loss.detach());
    }
    if (changes.reduced) changes.reduced(*program.model);
    if (!alone) distributed::all_reduce(total, distributed::ReduceOp::kSum, *ranks);
    outcome.losses.push_back(total.item());
    note(outcome, *program.model, "gradient " + std::to_string(step) + " of ", true);
    if (spec.clip) {
      outcome.losses.push_back(
          changes.norm ? changes.norm(*program.model)
                       : optim::clip_grad_norm(program.model->parameters(), 0.5).item());
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  note(outcome, *program.model, "parameter ", false);
}

inline ProgramSpec program_of(const Numbers& numbers) {
  constexpr std::pair<int, int> kMeshes[] = {{2, 1}, {2, 2}, {3, 1}, {4, 1}, {2, 4}, {4, 2}};
  Reader reader(numbers);
  ProgramSpec spec;
  spec.exact = reader.flag();
  // Rarely many ranks, which are slow on few cores.
  const int mesh = reader.next(12);
  std::tie(spec.tp, spec.dp) = kMeshes[mesh < 6 ? mesh : mesh < 10 ? 0 : 1];
  spec.sequence = reader.flag();
  const int parts = reader.next(4);
  spec.tied = reader.flag();
  spec.pooled = reader.next(4) == 3;
  spec.divides_head = !reader.flag() || spec.sequence || spec.tied;
  spec.divides_table = !reader.flag() || spec.sequence || (spec.tied && !spec.pooled);
  spec.learned_positions = !reader.flag();
  spec.recompute = reader.flag();
  spec.clip = reader.flag() && !spec.exact;
  spec.samples = 1 + reader.next(3);
  spec.tokens = spec.sequence ? spec.tp * (1 + reader.next(3)) : 1 + reader.next(5);
  spec.width = 1 + reader.next(6);
  spec.vocabulary = spec.tp + reader.next(9);
  // Each rank has some.
  while ((spec.vocabulary + spec.tp - 1) / spec.tp * (spec.tp - 1) >= spec.vocabulary) {
    ++spec.vocabulary;
  }
  spec.accumulate = 1 + reader.next(3);
  spec.dropout = reader.next(3) == 2 ? 0.5 : 0;
  spec.averaged = reader.flag() && spec.pooled && !spec.exact;
  spec.seed = static_cast<uint64_t>(reader.next(1000));
  for (int i = 0; i < parts; ++i) spec.parts.push_back(part_of(reader, spec));
  return spec;
}

inline Numbers random_numbers(uint64_t seed) {
  constexpr int64_t kCount = 48;
  Numbers numbers;
  for (const int64_t number :
       randint(0, 1 << 20, {kCount}, kI64, RandomStream{seed, 77}).to_vector<int64_t>()) {
    numbers.push_back(static_cast<int>(number));
  }
  return numbers;
}

inline std::string ProgramSpec::describe() const {
  PlainText<std::ostringstream> out;
  out << (exact ? "exact" : "smooth") << ", tp " << tp << ", dp " << dp
      << (sequence ? ", sequence" : "") << (tied ? ", tied" : "") << (pooled ? ", pooled" : "")
      << (averaged ? " of the mean" : "") << (recompute ? ", recompute" : "")
      << (clip ? ", clip" : "") << ", [" << samples << ", " << tokens << ", " << width
      << "], vocabulary " << vocabulary << ", windows of " << accumulate << ", dropout " << dropout
      << ", divided:" << (divides_table ? " table" : "") << (divides_head ? " head" : "");
  constexpr const char* kNames[] = {"mlp", "attention", "norm", "dropout"};
  for (const PartSpec& part : parts) {
    out << "; " << kNames[static_cast<size_t>(part.kind)] << " hidden " << part.hidden << " blocks "
        << part.blocks << " heads " << part.heads << (part.bias ? " bias" : "")
        << (part.divided ? " divided" : "") << (part.rms ? " rms" : "")
        << (part.gelu ? " gelu" : "");
  }
  return out.str();
}

inline Program make_program(const ProgramSpec& spec, double nudge) {
  auto model = std::make_unique<Chain>(spec);
  model->to(kF64);
  fill(spec, *model, nudge);
  Chain& chain = *model;
  return {std::move(model), styles_of(spec),
          [&chain](const Tensor& ids, const Tensor& targets) { return chain(ids, targets); }};
}

// Sums of so many numbers below it are exact in f64.
inline constexpr double kMostExact = 0x1p45;

inline bool Outcome::is_exact() const {
  for (const auto& [name, numbers] : values) {
    for (const double number : numbers) {
      if (!(std::abs(number) < kMostExact)) return false;
    }
  }
  return std::ranges::all_of(losses, [](double loss) { return std::abs(loss) < kMostExact; });
}

inline Outcome run_alone(const ProgramSpec& spec, double nudge) {
  Context context;
  const ContextGuard guard(context);
  set_num_threads(1);
  Program program = make_program(spec, nudge);
  Outcome outcome;
  train(spec, program, nullptr, {}, outcome);
  return outcome;
}

inline Outcome run_divided(const ProgramSpec& spec, const Changes& changes) {
  Outcome of_first;
  distributed::compared_ranks(spec.ranks(), [&](int rank) {
    distributed::Mesh mesh(distributed::world(), {{"dp", spec.dp}, {"tp", spec.tp}});
    Outcome outcome;
    try {
      Program program = make_program(spec);
      if (changes.table) changes.table(program);
      distributed::Mesh& tp = mesh["tp"];
      distributed::parallelize_module(*program.model, tp,
                                      {.styles = program.styles, .sequence = spec.sequence});
      if (changes.divided) changes.divided(program, tp);
      std::vector<HookHandle> checkpoints;
      for (const auto& [name, module] : program.model->named_modules()) {
        if (spec.recompute && module->type_name() == "Part") {
          checkpoints.push_back(module->checkpoint_calls());
        }
      }
      if (changes.sharded) {
        changes.sharded(*program.model, mesh["dp"]);
      } else if (spec.dp > 1) {
        distributed::fully_shard(*program.model, mesh["dp"]);
      }
      train(spec, program, &mesh.group("dp"), changes, outcome);
    } catch (const Error& error) {
      outcome.refusal = error.what();
    }
    if (rank == 0) of_first = outcome;
  });
  return of_first;
}

// Of a tensor's largest number: a training that makes more of 128 eps says nothing about its division,
// and counts as different.
inline constexpr double kMostOfRounding = 1e-6;

// `nudged`: where it is given, a number may be off by eight times what one process is off by in that
// tensor (two roundings of many do not grow alike).
inline std::string difference_within(double tolerance, const Outcome& got, const Outcome& expected,
                                     const Outcome* nudged) {
  const auto compare = [&](const std::string& name, const std::vector<double>& a,
                           const std::vector<double>& b,
                           const std::vector<double>* off) -> std::string {
    if (a.size() != b.size()) return name + " has another size";
    double scale = 1, most = 0;
    for (const double number : b) scale = std::max(scale, std::abs(number));
    for (size_t i = 0; off != nullptr && i < b.size(); ++i) {
      most = std::max(most, std::abs(off->at(i) - b[i]));
    }
    const double permitted =
        std::max(tolerance * scale, std::min(8 * most, kMostOfRounding * scale));
    for (size_t i = 0; i < a.size(); ++i) {
      if (std::abs(a[i] - b[i]) <= permitted) continue;
      PlainText<std::ostringstream> out;
      out.precision(17);
      out << name << " at " << i << ": " << a[i] << " for " << b[i];
      return out.str();
    }
    return "";
  };
  std::string text =
      compare("loss", got.losses, expected.losses, nudged != nullptr ? &nudged->losses : nullptr);
  for (const auto& [name, numbers] : expected.values) {
    if (!text.empty()) break;
    const auto found = got.values.find(name);
    text = found == got.values.end()
               ? name + " is missing"
               : compare(name, found->second, numbers,
                         nudged != nullptr ? &nudged->values.at(name) : nullptr);
  }
  return text;
}

// A training that diverges makes much of rounding: there one process whose parameters begin off by
// 128 eps says how much.
inline std::string difference(const ProgramSpec& spec, const Outcome& got,
                              const Outcome& expected) {
  if (!got.refusal.empty()) return "refused: " + got.refusal;
  const std::string text = difference_within(spec.exact ? 0 : 1e-11, got, expected, nullptr);
  if (spec.exact || text.empty()) return text;
  const Outcome nudged = run_alone(spec, 0x1p-45);
  return difference_within(1e-11, got, expected, &nudged);
}

}  // namespace tessera::tests
