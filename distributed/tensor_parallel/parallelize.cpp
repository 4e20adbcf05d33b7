#include <tessera/distributed/tensor_parallel/parallelize.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <sstream>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/initial_values.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/backward/mutant.h>
#include <tessera/distributed/fully_shard/local_parts.h>
#include <tessera/distributed/mesh/divided_parameter.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/mesh/dtensor_inputs.h>
#include <tessera/distributed/tensor_parallel/compute_mesh.h>
#include <tessera/distributed/tensor_parallel/convert.h>
#include <tessera/distributed/tensor_parallel/gathered_again.h>
#include <tessera/distributed/tensor_parallel/vocabulary.h>
#include <tessera/nn/dropout.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/norm.h>

namespace tessera::distributed {
namespace {

using nn::ParallelStyle;
using nn::StyledModules;

constexpr const char* kWhere = "parallelize_module";

std::string_view style_name(ParallelStyle style) {
  switch (style) {
    case ParallelStyle::kWhole:
      return "kWhole";
    case ParallelStyle::kColumnwise:
      return "kColumnwise";
    case ParallelStyle::kRowwise:
      return "kRowwise";
    case ParallelStyle::kVocabulary:
      return "kVocabulary";
    case ParallelStyle::kLossHead:
      return "kLossHead";
    case ParallelStyle::kSequence:
      return "kSequence";
    case ParallelStyle::kHeads:
      return "kHeads";
  }
  return "?";
}

// ---- Boundaries ---------------------------------------------------------------------------------

class StyleBoundary : public nn::Boundary {
 public:
  StyleBoundary(std::string axis, bool sequence) : axis_(std::move(axis)), sequence_(sequence) {}

 protected:
  Tensor replicated(const Tensor& x) const {
    Tensor whole = convert(x, axis_, Mark::replicated());
    if (sequence_ && !whole.is(x)) note_gathered(whole, x, axis_);
    return whole;
  }
  // Between divided layers activations lie by tokens, or are whole.
  Tensor outside(const Tensor& y) const {
    return convert(y, axis_, sequence_ ? Mark::shard(y.dim() - 2) : Mark::invariant());
  }
  const std::string axis_;
  const bool sequence_;
};

class Columnwise final : public StyleBoundary {
 public:
  using StyleBoundary::StyleBoundary;
  Tensor enter(const Tensor& x) const override { return replicated(x); }
  bool enters_as_is() const override { return false; }
};

class Rowwise final : public StyleBoundary {
 public:
  using StyleBoundary::StyleBoundary;
  Tensor leave(const Tensor& y) const override { return outside(y); }
  bool leaves_as_is() const override { return false; }
  Tensor bias(const Tensor& bias) const override {
    return bias.defined() ? convert(bias, axis_, Mark::summand()) : bias;
  }
};

// Calculates with all tokens, and as one process does.
class Whole final : public StyleBoundary {
 public:
  using StyleBoundary::StyleBoundary;
  Tensor enter(const Tensor& x) const override { return convert(x, axis_, Mark::invariant()); }
  bool enters_as_is() const override { return false; }
};

class Sequence final : public StyleBoundary {
 public:
  Sequence(std::string axis, bool of_table)
      : StyleBoundary(std::move(axis), true), of_table_(of_table) {}
  Tensor enter(const Tensor& x) const override {
    // One index that stands for all tokens does so for a rank's.
    if (of_table_ && x.numel() == 1) return x;
    return convert(x, axis_, Mark::shard(x.dim() - (of_table_ ? 1 : 2)));
  }
  bool enters_as_is() const override { return false; }

 private:
  const bool of_table_;  // x is an index
};

class Vocabulary final : public StyleBoundary {
 public:
  Vocabulary(VocabularyPart part, bool sequence)
      : StyleBoundary(part.axis, sequence), part_(std::move(part)) {}
  Tensor embedding(const Tensor& index, const Tensor& weight,
                   std::optional<int64_t> padding_idx) const override {
    return distributed::embedding(part_, index, weight, padding_idx);
  }
  Tensor leave(const Tensor& y) const override { return outside(y); }
  bool leaves_as_is() const override { return false; }

 private:
  const VocabularyPart part_;
};

class LossHead final : public StyleBoundary {
 public:
  LossHead(VocabularyPart part, bool sequence)
      : StyleBoundary(part.axis, sequence), part_(std::move(part)) {}
  Tensor enter(const Tensor& x) const override { return replicated(x); }
  bool enters_as_is() const override { return false; }
  Tensor leave(const Tensor& logits) const override {
    return convert(logits, axis_, Mark::invariant(), {.length = part_.whole});
  }
  bool leaves_as_is() const override { return false; }
  Tensor linear_cross_entropy(const Tensor& x, const Tensor& weight, const Tensor& target,
                              int64_t ignore_index, bool mean) const override {
    return distributed::linear_cross_entropy(part_, x, weight, target, ignore_index, mean);
  }

 private:
  const VocabularyPart part_;
};

// ---- Which modules ------------------------------------------------------------------------------

// * stands for any letters but a dot.
bool matches(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern[0] != '*') {
    return !name.empty() && name[0] == pattern[0] && matches(pattern.substr(1), name.substr(1));
  }
  for (size_t length = 0;; ++length) {
    if (matches(pattern.substr(1), name.substr(length))) return true;
    if (length == name.size() || name[length] == '.') return false;
  }
}

std::string some_of(const std::vector<std::string>& names) {
  constexpr size_t kMost = 20;
  std::string text;
  for (size_t i = 0; i < std::min(names.size(), kMost); ++i) text += (i ? ", " : "") + names[i];
  return names.size() > kMost ? text + ", ..." : text;
}

struct Styled {
  std::string name;
  nn::ModuleBase* module;
  StyledModules entry;
};

std::vector<StyledModules> table_of(nn::ModuleBase& model) {
  std::vector<StyledModules> table;
  for (const auto& [name, module] : model.named_modules()) {
    for (StyledModules entry : module->parallel_styles()) {
      if (!name.empty()) entry.pattern = name + "." + entry.pattern;
      table.push_back(std::move(entry));
    }
  }
  return table;
}

// Each module once, by the first entry that names it.
std::vector<Styled> styled_modules(nn::ModuleBase& model, const std::vector<StyledModules>& table) {
  TS_CHECK_AS(ConfigError, !table.empty(), kWhere, model.type_name(),
              " does not say how it may be divided; give .styles, or let it have "
              "parallel_styles()");
  std::vector<Styled> result;
  std::vector<bool> used(table.size(), false);
  std::vector<std::string> names;
  for (const auto& [name, module] : model.named_modules()) {
    names.push_back(name);
    bool found = false;
    for (size_t i = 0; i < table.size(); ++i) {
      if (!matches(table[i].pattern, name)) continue;
      used[i] = true;
      if (!found) result.push_back({name, module, table[i]});
      found = true;
    }
  }
  for (size_t i = 0; i < table.size(); ++i) {
    TS_CHECK_AS(ConfigError, used[i], kWhere, "no module is named '", table[i].pattern,
                "'; there are ", some_of(names));
  }
  return result;
}

// ---- What becomes of them -----------------------------------------------------------------------

class Division {
 public:
  Division(Mesh& mesh, bool sequence)
      : mesh_(mesh),
        axis_(mesh.axes()[0].name),
        position_(use_compute_mesh(mesh).position(axis_)),
        ranks_(mesh.size()),
        rank_(mesh.coordinate()),
        sequence_(sequence) {}

  void divide(const Styled& styled) {
    TS_CHECK_AS(ConfigError, styled.module->boundary() == nullptr, kWhere, "'", styled.name,
                "' is divided already");
    const StyledModules& entry = styled.entry;
    switch (entry.style) {
      case ParallelStyle::kWhole:
        if (sequence_) set(styled, std::make_shared<Whole>(axis_, sequence_));
        return;
      case ParallelStyle::kColumnwise: {
        const auto& layer = as<nn::Linear>(styled);
        check_divides(styled, "outputs", layer.out_features, entry.blocks);
        if (entry.heads > 0) check_divides(styled, "heads", entry.heads, 1);
        cut(styled, "weight", layer.weight, Mark::shard(0, static_cast<int>(entry.blocks)));
        cut(styled, "bias", layer.bias, Mark::shard(0, static_cast<int>(entry.blocks)));
        return set(styled, std::make_shared<Columnwise>(axis_, sequence_));
      }
      case ParallelStyle::kRowwise: {
        const auto& layer = as<nn::Linear>(styled);
        check_divides(styled, "inputs", layer.in_features, entry.blocks);
        cut(styled, "weight", layer.weight, Mark::shard(1, static_cast<int>(entry.blocks)));
        return set(styled, std::make_shared<Rowwise>(axis_, sequence_));
      }
      case ParallelStyle::kVocabulary: {
        const auto& table = as<nn::Embedding>(styled);
        const VocabularyPart part = part_of(styled, table.num_embeddings);
        cut(styled, "weight", table.weight, rows_of(part));
        return set(styled, std::make_shared<Vocabulary>(part, sequence_));
      }
      case ParallelStyle::kLossHead: {
        const auto& layer = as<nn::Linear>(styled);
        const VocabularyPart part = part_of(styled, layer.out_features);
        cut(styled, "weight", layer.weight, rows_of(part));
        cut(styled, "bias", layer.bias, rows_of(part));
        return set(styled, std::make_shared<LossHead>(part, sequence_));
      }
      case ParallelStyle::kSequence: {
        const bool is_table = dynamic_cast<nn::Embedding*>(styled.module) != nullptr;
        TS_CHECK_AS(ConfigError,
                    is_table || dynamic_cast<nn::LayerNorm*>(styled.module) != nullptr ||
                        dynamic_cast<nn::RMSNorm*>(styled.module) != nullptr ||
                        dynamic_cast<nn::Dropout*>(styled.module) != nullptr,
                    kWhere, "kSequence serves LayerNorm, RMSNorm, Dropout and Embedding; '",
                    styled.name, "' is a ", styled.module->type_name());
        if (!sequence_) return;
        replicate_parameters(styled);
        return set(styled, std::make_shared<Sequence>(axis_, is_table));
      }
      case ParallelStyle::kHeads:
        TS_CHECK_AS(ConfigError,
                    dynamic_cast<nn::LayerNorm*>(styled.module) != nullptr ||
                        dynamic_cast<nn::RMSNorm*>(styled.module) != nullptr,
                    kWhere, "kHeads serves LayerNorm and RMSNorm; '", styled.name, "' is a ",
                    styled.module->type_name());
        return replicate_parameters(styled);
    }
  }

  // What no style cuts: copies that all ranks read alike.
  void keep_rest(const nn::ModuleBase& model) const {
    for (const auto& [name, parameter] : model.named_parameters()) {
      if (divided_parameter(parameter) == nullptr) lay(name, parameter, Mark::invariant());
    }
  }

 private:
  template <class T>
  T& as(const Styled& styled) const {
    auto* module = dynamic_cast<T*>(styled.module);
    TS_CHECK_AS(ConfigError, module != nullptr, kWhere, style_name(styled.entry.style),
                " does not serve '", styled.name, "', a ", styled.module->type_name());
    return *module;
  }

  void check_divides(const Styled& styled, const char* what, int64_t size, int64_t blocks) const {
    TS_CHECK_AS(ConfigError, blocks >= 1 && size % (blocks * ranks_) == 0, kWhere, "the ", size,
                " ", what, " of '", styled.name, "' do not divide among ", ranks_, " ranks in ",
                blocks, " blocks; ", what, " that are a multiple of ", blocks * ranks_,
                " would, or another number of ranks");
  }

  VocabularyPart part_of(const Styled& styled, int64_t entries) const {
    const auto [begin, end] = chunk_of(entries, ranks_, ranks_ - 1);
    TS_CHECK_AS(ConfigError, end > begin, kWhere, "the ", entries, " entries of '", styled.name,
                "' are too few for ", ranks_, " ranks");
    return {axis_, chunk_of(entries, ranks_, rank_).first, entries};
  }

  void replicate_parameters(const Styled& styled) const {
    for (const auto& [name, parameter] : styled.module->named_parameters()) {
      lay(joined(styled.name, name), parameter, Mark::replicated());
    }
  }

  Mark rows_of(const VocabularyPart& part) const {
    Mark rows = Mark::shard(0);
    rows.uneven = part.whole % ranks_ != 0;
    return rows;
  }

  static std::string joined(const std::string& module, const std::string& name) {
    return module.empty() ? name : module + "." + name;
  }

  // A tied one was laid under its first name.
  void cut(const Styled& styled, const std::string& name, const Tensor& parameter,
           const Mark& shard) const {
    if (parameter.defined()) lay(joined(styled.name, name), parameter, shard);
  }

  // Makes a parameter a DTensor along the axis, in place: the one function that knows how a divided
  // parameter is kept. `mark`: what its part is in calls.
  void lay(const std::string& name, const Tensor& parameter, const Mark& mark) const {
    if (const DividedParameter* divided = divided_parameter(parameter)) {
      const Mark before = decoded(divided->marks, position_);
      TS_CHECK_AS(ConfigError, before == mark, kWhere, "'", name,
                  "' is tied to a parameter that is ", describe(before), " and would be ",
                  describe(mark), "; give both modules styles that cut alike");
      return;
    }
    TS_CHECK_AS(ConfigError, element_guard(parameter) == nullptr && !parameter.grad().defined(),
                kWhere, "'", name, "' is sharded or has a gradient; divide the model first");
    Placement placement = Replicate();
    if (mark.is_shard()) {
      const bool one = mark.blocks == 1 || TS_MUTANT(kOneBlock);
      placement = one ? Placement(Shard(mark.dim)) : BlockShard(mark.dim, mark.blocks);
    }
    const DTensorSpec spec = DTensorSpec{&mesh_, {placement}, parameter.shape()}.checked(kWhere);
    const NoGradGuard no_grad;
    Tensor part = raw::alias(parameter);
    if (mark.is_shard()) {
      const MemoryCategoryGuard category(MemoryCategory::kParameter);
      part = parameter.is_meta()
                 ? raw::empty(spec.local_shape(), parameter.dtype(), parameter.device())
                 : contiguous(clone(part_of_whole(part, spec)));
    }
    const Tensor model = from_local(part, mesh_, spec.placements, {.shape = spec.shape});
    if (mark.is_shard()) {
      pass_initial_values(parameter, model);
      parameter.set_data(part);
      parameter.bump_version("a cut into parts");
    }
    copy_guard(model, parameter);
    if (mark.is_replicated() && !TS_MUTANT(kNoSummands)) {
      set_grad_placements(parameter, {Partial()});
    }
    note_divided(parameter, name, encoded(mark, position_));
  }

  void set(const Styled& styled, std::shared_ptr<const nn::Boundary> boundary) const {
    styled.module->set_boundary(std::move(boundary));
  }

  Mesh& mesh_;
  const std::string axis_;
  const size_t position_;
  const int ranks_, rank_;
  const bool sequence_;
};

}  // namespace

void parallelize_module(nn::ModuleBase& model, Mesh& mesh, const ParallelizeOptions& options) {
  TS_CHECK_AS(ConfigError, mesh.axes().size() == 1, kWhere,
              "divides a model along one axis, such as mesh[\"tp\"]; got ", mesh.describe());
  const std::vector<StyledModules> table =
      options.styles.empty() ? table_of(model) : options.styles;
  const std::vector<Styled> modules = styled_modules(model, table);
  Division division(mesh, options.sequence);
  for (const Styled& styled : modules) division.divide(styled);
  division.keep_rest(model);
  keep_local_parts(model, mesh);
  if (options.sequence) {
    model.register_call_scope([](nn::ModuleBase&) { return keep_parts_of_gathered(); });
  }
}

// ---- Told ---------------------------------------------------------------------------------------

namespace {

// "h.11.fc" and "h.2.fc" alike: "h.*.fc".
std::string without_numbers(const std::string& name) {
  std::string text;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    const std::string part = name.substr(begin, end - begin);
    const bool number = !part.empty() && part.find_first_not_of("0123456789") == part.npos;
    text += (begin == 0 ? "" : ".") + (number ? std::string("*") : part);
    begin = end + 1;
  }
  return text;
}

struct PartOfWhole {
  Shape shape;
  std::string marks;
};
PartOfWhole part_along_axes(const Tensor& parameter, const DividedParameter& divided,
                            const ComputeMesh& mesh) {
  PartOfWhole part{whole_shape(parameter), {}};
  for (size_t axis = 0; axis < mesh.axes(); ++axis) {
    const Mark mark = decoded(divided.marks, axis);
    part.marks += ", " + describe(mark);
    if (mark.is_replicated()) part.marks += ": its gradients are summands";
    if (!mark.is_shard()) continue;
    const Group& ranks = mesh.group(axis);
    int64_t& length = part.shape[mark.dim];
    const auto [begin, end] = chunk_of(length / mark.blocks, ranks.size(), ranks.rank());
    length = (end - begin) * mark.blocks;
  }
  return part;
}

}  // namespace

std::string describe_layers(const nn::ModuleBase& model) {
  struct Line {
    std::string name, text;
    int count;
  };
  std::vector<Line> lines;
  int64_t own = 0, all = 0;
  for (const auto& [name, parameter] : model.named_parameters()) {
    const DividedParameter* const divided = divided_parameter(parameter);
    if (divided == nullptr) continue;
    const Shape whole = whole_shape(parameter);
    const PartOfWhole part = part_along_axes(parameter, *divided, compute_mesh());
    own += numel_of(part.shape);
    all += numel_of(whole);
    using tessera::detail::concatenate;
    const std::string of = part.shape == whole ? "" : concatenate(" of ", whole);
    const Line line{without_numbers(name), concatenate(part.shape, of, part.marks), 1};
    const auto known = std::ranges::find_if(
        lines, [&](const Line& one) { return one.name == line.name && one.text == line.text; });
    if (known == lines.end()) {
      lines.push_back(line);
    } else {
      ++known->count;
    }
  }
  if (lines.empty()) return {};
  const ComputeMesh& mesh = compute_mesh();
  std::string axes;
  for (size_t axis = 0; axis < mesh.axes(); ++axis) {
    axes +=
        (axis == 0 ? "" : ", ") + mesh.name(axis) + "=" + std::to_string(mesh.group(axis).size());
  }
  size_t width = 0;
  for (const Line& line : lines) width = std::max(width, line.name.size());
  PlainText<std::ostringstream> text;
  text << "layers along " << axes << ": this rank has " << own << " of " << all << " elements\n";
  for (const Line& line : lines) {
    std::string count = line.count == 1 ? "" : "x " + std::to_string(line.count);
    count.resize(std::max<size_t>(count.size(), 5), ' ');
    text << "  " << line.name << std::string(width - line.name.size() + 2, ' ') << count << " "
         << line.text << "\n";
  }
  return text.str();
}

}  // namespace tessera::distributed
