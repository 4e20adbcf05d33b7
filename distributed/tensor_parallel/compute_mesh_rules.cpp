// What ops make of marked operands, along each axis alone (see autograd/mark_rules.h):
//
// | operands along an axis                          | result                                    |
// |-------------------------------------------------|-------------------------------------------|
// | all invariant                                   | invariant                                 |
// | an invariant one that requires grad, and others | refused: its gradient would be a summand  |
// | replicated ones                                 | replicated                                |
// | shards of the same dimension, and replicated    | a shard of that dimension, if the op does |
// | ones that broadcast along it                    | not go along it                           |
// | summands alone, of a linear op                  | a summand                                 |
// | one summand of a product, others replicated     | a summand                                 |
// | shards of the inner dimension of a product,     | a summand                                 |
// | a sum over the dimension of a shard             |                                           |
//
// All else is an UnsupportedError, which names the op, the axis, the operands with their marks and
// what would do. Random numbers go by the places of elements in the whole (dropout), which chunks of
// different lengths do not tell: those are refused.
#include <tessera/distributed/tensor_parallel/compute_mesh.h>

#include <algorithm>
#include <array>
#include <deque>
#include <unordered_set>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/node.h>
#include <tessera/distributed/mesh/divided_parameter.h>
#include <tessera/distributed/tensor_parallel/shard_moves.h>

namespace tessera::distributed {
namespace {

std::string name_of(const Tensor& parameter) {
  const DividedParameter* const divided = divided_parameter(parameter);
  return divided == nullptr ? std::string() : divided->name;
}

// The name of a parameter that a tensor was calculated from: the nearest one.
std::string origin_of(const Tensor& x) {
  constexpr size_t kMostNodes = 64;
  std::deque<const Node*> queue;
  std::unordered_set<const Node*> seen;
  const Edge history = gradient_edge(x);
  if (history.node) queue.push_back(history.node.get());
  while (!queue.empty() && seen.size() < kMostNodes) {
    const Node* node = queue.front();
    queue.pop_front();
    if (!seen.insert(node).second) continue;
    if (const auto* leaf = dynamic_cast<const AccumulateGrad*>(node)) {
      if (std::string name = name_of(leaf->leaf()); !name.empty()) return name;
    }
    for (const Edge& edge : node->next_edges) {
      if (edge.node) queue.push_back(edge.node.get());
    }
  }
  return {};
}

struct Operand {
  Mark mark;
  const Tensor* tensor = nullptr;
  size_t input = 0;
  bool stands_for_replicated = false;  // invariant, and requires no gradient
  bool is_whole() const { return mark.is_replicated() || stands_for_replicated; }
};

// One call along one axis.
class Along {
 public:
  Along(const OpCall& call, std::span<const Tensor> inputs, const ComputeMesh& mesh, size_t axis)
      : call_(call), mesh_(mesh), axis_(axis) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].defined()) continue;
      const Mark mark = mark_of(inputs[i], axis);
      operands_.push_back({mark, &inputs[i], i, mark.is_invariant() && !requires_grad(inputs[i])});
    }
  }

  Mark result() const {
    const auto is_marked = [](const Operand& x) { return !x.mark.is_invariant(); };
    if (std::ranges::none_of(operands_, is_marked)) return Mark::invariant();
    const Operand& marked = *std::ranges::find_if(operands_, is_marked);
    if (call_.op.marks == MarkRule::kNone) {
      refuse(marked, "the op has no rule for that",
             "convert it to replicated, or write the step as ops that have one");
    }
    refuse_invariant(marked);
    if (std::ranges::all_of(operands_, [](const Operand& x) { return x.is_whole(); })) {
      return Mark::replicated();
    }
    switch (call_.op.marks) {
      case MarkRule::kPointwise:
        refuse_summands("the op is not linear");
        return shard_of(operands_);
      case MarkRule::kLinear:
        if (has_summand()) return sum_of_summands();
        return moved_shard(shard_of(operands_));
      case MarkRule::kProduct:
        return has_summand() ? product_with_summand() : shard_of(operands_);
      case MarkRule::kAlongDims:
        refuse_summands("the op is not linear");
        return moved_shard(shard_of(operands_));
      case MarkRule::kMovement:
        return movement();
      default:
        return special();
    }
  }

 private:
  // ---- Refusals
  std::string who(const Operand& x) const {
    std::string name = name_of(*x.tensor);
    if (!name.empty() && !x.mark.is_summand()) return "'" + name + "'";
    name = x.mark.is_summand() ? origin_of(*x.tensor) : std::string();
    return "input " + std::to_string(x.input) + (name.empty() ? "" : " (of '" + name + "')");
  }
  std::string said(const Operand& x) const {
    return who(x) + " " + x.tensor->describe() + " is " + describe(x.mark);
  }
  [[noreturn]] void refuse(const Operand& x, const std::string& why,
                           const std::string& remedy) const {
    TS_THROW(UnsupportedError, call_.op, "along '", mesh_.name(axis_), "' ", said(x), ": ", why,
             "; ", remedy);
  }
  [[noreturn]] void refuse(const Operand& a, const Operand& b, const std::string& why,
                           const std::string& remedy) const {
    TS_THROW(UnsupportedError, call_.op, "along '", mesh_.name(axis_), "' ", said(a), " and ",
             said(b), ": ", why, "; ", remedy);
  }

  // An invariant operand that learns, beside others.
  void refuse_invariant(const Operand& marked) const {
    for (const Operand& x : operands_) {
      if (!x.mark.is_invariant() || x.stands_for_replicated) continue;
      if (marked.mark.is_summand()) {
        refuse(marked, x,
               "the sum would count it " + std::to_string(mesh_.group(axis_).size()) + " times",
               "let one rank add it: convert it to a summand; the style kRowwise does so with a "
               "bias");
      }
      refuse(x, marked, "its gradient would be a summand that nobody adds",
             "convert it to replicated; the style kSequence does so with a norm's parameters");
    }
  }
  bool has_summand() const {
    return std::ranges::any_of(operands_, [](const Operand& x) { return x.mark.is_summand(); });
  }
  void refuse_summands(const std::string& why) const {
    for (const Operand& x : operands_) {
      if (x.mark.is_summand()) refuse(x, why, "convert it to replicated or to a shard first");
    }
  }

  // ---- Summands
  Mark sum_of_summands() const {
    for (const Operand& x : operands_) {
      if (x.mark.is_summand()) continue;
      const Operand& summand = *std::ranges::find_if(
          operands_, [](const Operand& other) { return other.mark.is_summand(); });
      refuse(summand, x, "they do not add up to the result of the whole ones",
             "convert one of them, so that all are summands or none is");
    }
    if (call_.dims.affine) {
      refuse(operands_[0], "each rank would add the constant, or round its part",
             "convert it to replicated or to a shard first");
    }
    return Mark::summand();
  }
  // Linear in each operand alone.
  Mark product_with_summand() const {
    const Operand* summand = nullptr;
    for (const Operand& x : operands_) {
      if (x.is_whole()) continue;
      if (summand != nullptr || !x.mark.is_summand()) {
        refuse(x, "a product of it and a part or summand is neither",
               "convert one of them to replicated first");
      }
      summand = &x;
    }
    return Mark::summand();
  }

  // ---- Shards
  // Of operands that broadcast: the dimension of the result that they cut. All others are whole.
  Mark shard_of(std::span<const Operand> operands) const {
    int dims = 0;
    const Operand* cut = nullptr;
    for (const Operand& x : operands) {
      dims = std::max(dims, x.tensor->dim());
      if (x.mark.is_shard()) cut = &x;
    }
    if (cut == nullptr) return Mark::replicated();
    const int from_end = cut->mark.dim - cut->tensor->dim();
    const int64_t size = cut->tensor->size(cut->mark.dim);
    for (const Operand& x : operands) {
      const bool has_dim = -from_end <= x.tensor->dim();
      if (x.mark.is_shard()) {
        const bool alike = x.mark.dim - x.tensor->dim() == from_end &&
                           x.mark.blocks == cut->mark.blocks && x.tensor->size(x.mark.dim) == size;
        if (!alike) {
          refuse(*cut, x, "they are parts of different dimensions",
                 "convert one of them so that both cut the same one");
        }
      } else if (has_dim && x.tensor->size(from_end) != 1) {
        refuse(*cut, x, "one rank has a part and the other tensor is whole there",
               "convert one of them; a table or mask of positions must be cut as the tokens are");
      }
    }
    return Mark::shard(dims + from_end, cut->mark.blocks);
  }

  // Through what the op does with dimensions.
  Mark moved_shard(const Mark& mark) const {
    if (!mark.is_shard()) return mark;
    const Operand& cut =
        *std::ranges::find_if(operands_, [](const Operand& x) { return x.mark.is_shard(); });
    const bool elementwise =
        call_.op.marks == MarkRule::kLinear && call_.dims.kind == OpDims::Kind::kSame;
    if (elementwise) return mark;
    int dims = 0;
    for (const Operand& x : operands_) dims = std::max(dims, x.tensor->dim());
    const Shape shape = operands_[0].tensor->shape();
    const auto moved = moved_by(call_.dims, mark, dims, shape);
    if (!moved) {
      refuse(cut, "the op goes along the dimension that is cut",
             "convert it to replicated, or to a shard of another dimension");
    }
    return *moved;
  }

  Mark movement() const {
    const Operand& first = operands_[0];
    for (const Operand& x : operands_) {
      const bool alike = x.mark == first.mark || (x.is_whole() && first.is_whole());
      if (!alike) refuse(first, x, "they lie differently", "convert one of them");
    }
    if (first.mark.is_summand()) return sum_of_summands();
    return moved_shard(first.mark);
  }

  // ---- Ops with rules of their own
  Mark special() const {
    const std::string_view name = call_.op.name;
    if (name == "sum") return sum();
    if (name == "div") {
      for (const Operand& x : operands_) {
        if (x.mark.is_summand() && x.input != 0) {
          refuse(x, "a quotient is not linear in its divisor", "convert it to replicated first");
        }
      }
      return has_summand() ? product_with_summand() : shard_of(operands_);
    }
    if (name == "linear") return linear(at(0), at(1), at(2), at(3));
    if (name == "linear_gelu") return not_summand(linear(at(0), at(1), at(2), {}));
    if (name == "linear_gelu_linear") {
      Operand hidden = at(0);  // of x's dimensions
      hidden.mark = not_summand(linear(at(0), at(1), at(2), {}));
      return linear(hidden, at(3), at(4), at(5));
    }
    if (name == "matmul" || name == "dot") return matmul(at(0), at(1));
    if (name == "addmm") return added(at(0), matmul(at(1), at(2)), 2);
    if (name == "embedding") return embedding(at(0), at(1));
    if (name == "embedding_add")
      return added(at(2), embedding(at(0), at(1)), at(0).tensor->dim() + 1);
    if (name == "scaled_dot_product_attention") return attention();
    if (name == "packed_attention") return packed_attention();
    refuse(operands_[0], "the op has no rule", "convert it to replicated");
  }

  // Operand i, or an empty one.
  Operand at(size_t input) const {
    for (const Operand& x : operands_) {
      if (x.input == input) return x;
    }
    return {};
  }

  Mark sum() const {
    const Operand& x = operands_[0];
    if (x.mark.is_summand()) return x.mark;
    return moved_by(call_.dims, x.mark, x.tensor->dim(), x.tensor->shape())
        .value_or(Mark::summand());
  }

  Mark not_summand(const Mark& mark) const {
    if (mark.is_summand()) {
      refuse(at(0), "the products are summands, and what follows is not linear",
             "convert them to replicated first, or cut the layer's outputs (style kColumnwise)");
    }
    return mark;
  }

  // Of x W^T + bias + residual. W: [out, in].
  Mark linear(const Operand& x, const Operand& weight, const Operand& bias,
              const Operand& residual) const {
    const int last = x.tensor->dim() - 1;
    const bool inner = x.mark.is_shard() && x.mark.dim == last;
    Mark result = Mark::replicated(), of_bias = Mark::replicated();
    if (weight.mark == Mark::shard(1, weight.mark.blocks)) {
      if (x.mark != Mark::shard(last, weight.mark.blocks)) {
        refuse(x, weight, "the inner dimensions are cut differently",
               "give the layer in front the style kColumnwise, or convert x to a shard");
      }
      result = of_bias = Mark::summand();
    } else if (weight.mark == Mark::shard(0, weight.mark.blocks)) {
      if (!x.is_whole()) {
        refuse(x, weight, "each rank needs all of x for its outputs",
               "convert x to replicated; the style kColumnwise does so");
      }
      result = Mark::shard(last, weight.mark.blocks);
      of_bias = Mark::shard(0, weight.mark.blocks);
    } else if (inner || (x.mark.is_summand() && !weight.is_whole()) ||
               (weight.mark.is_summand() && !x.is_whole())) {
      refuse(x, weight, "they are not parts of one product",
             "give the layer a style, or convert x to replicated");
    } else if (x.mark.is_summand() || weight.mark.is_summand()) {
      result = of_bias = Mark::summand();
    } else {
      result = x.mark.is_shard() ? x.mark : Mark::replicated();
    }
    const auto check = [&](const Operand& other, const Mark& wanted) {
      if (other.tensor == nullptr || other.mark == wanted) return;
      if (wanted.is_replicated() && other.is_whole()) return;
      refuse(other, "what is added to the products has to be " + describe(wanted), "convert it");
    };
    check(bias, of_bias);
    check(residual, result);
    return result;
  }

  // [..., M, K] [..., K, N], or two vectors.
  Mark matmul(const Operand& a, const Operand& b) const {
    if (a.mark.is_summand() || b.mark.is_summand()) return product_of(a, b);
    const bool vectors = a.tensor->dim() == 1;
    const int rows = vectors ? -2 : a.tensor->dim() - 2, inner_a = a.tensor->dim() - 1;
    const int inner_b = vectors ? 0 : b.tensor->dim() - 2, columns = inner_b + 1;
    const int dims = std::max(a.tensor->dim(), b.tensor->dim());
    const bool cuts_a = a.mark.is_shard() && a.mark.dim == inner_a;
    const bool cuts_b = b.mark.is_shard() && b.mark.dim == inner_b;
    if (cuts_a || cuts_b) {
      if (cuts_a && cuts_b && a.mark.blocks == b.mark.blocks) return Mark::summand();
      refuse(a, b, "the inner dimensions are cut differently", "convert one of them");
    }
    if (a.mark.is_shard() && a.mark.dim == rows && b.is_whole()) {
      return Mark::shard(dims - 2, a.mark.blocks);
    }
    if (b.mark.is_shard() && b.mark.dim == columns && a.is_whole()) {
      return Mark::shard(dims - 1, b.mark.blocks);
    }
    const auto in_batch = [](const Operand& x, int first) {
      return !x.mark.is_shard() || x.mark.dim < first;
    };
    if (!in_batch(a, rows) || !in_batch(b, inner_b)) {
      refuse(a, b, "they are not parts of one product", "convert one of them to replicated");
    }
    const std::array<Operand, 2> both{a, b};
    return shard_of(both);
  }
  Mark product_of(const Operand& a, const Operand& b) const {
    if (!(a.mark.is_summand() ? b : a).is_whole()) {
      refuse(a, b, "a product of a summand and a part or summand is neither",
             "convert one of them to replicated first");
    }
    return Mark::summand();
  }

  // x, broadcast, plus what has a mark and so many dimensions.
  Mark added(const Operand& x, const Mark& mark, int dims) const {
    if (x.mark == mark || (x.is_whole() && mark.is_replicated())) {
      if (!mark.is_shard()) return mark;
    }
    if (mark.is_shard() && !x.mark.is_summand()) {
      const int from_end = mark.dim - dims, dim = x.tensor->dim() + from_end;
      const bool broadcast = x.is_whole() && (dim < 0 || x.tensor->size(dim) == 1);
      if (broadcast || x.mark == Mark::shard(dim, mark.blocks)) return mark;
    }
    refuse(x, "what it is added to is " + describe(mark), "convert one of them");
  }

  Mark embedding(const Operand& index, const Operand& weight) const {
    if (weight.mark == Mark::shard(0)) {
      refuse(weight, "each rank has some rows, and the index may name any",
             "give the module the style kVocabulary");
    }
    if (index.mark.is_shard()) {
      if (weight.is_whole()) return index.mark;
      refuse(index, weight, "both are cut", "convert one of them to replicated");
    }
    if (index.mark.is_summand()) refuse(index, "an index does not add up", "convert it");
    if (weight.mark.is_shard()) {
      return Mark::shard(index.tensor->dim(), weight.mark.blocks);
    }
    return weight.mark.is_summand() ? weight.mark : Mark::replicated();
  }

  Mark attention() const {
    const Mark mark = operands_[0].mark;
    const bool fits = mark == Mark::shard(0) || mark == Mark::shard(1);
    for (const Operand& x : operands_) {
      if (!fits || x.mark != mark) {
        refuse(operands_[0], x, "attention goes along tokens and widths",
               "cut query, key and value alike by samples or by heads");
      }
    }
    return mark;
  }
  Mark packed_attention() const {
    const Operand& packed = operands_[0];
    if (packed.mark == Mark::shard(0)) return packed.mark;
    if (packed.mark == Mark::shard(3)) return Mark::shard(2);
    refuse(packed, "attention goes along tokens and widths", "cut it by samples or by heads");
  }

  const OpCall& call_;
  const ComputeMesh& mesh_;
  const size_t axis_;
  std::vector<Operand> operands_;
};

class TypeRules final : public MarkRules {
 public:
  explicit TypeRules(const ComputeMesh& mesh) : mesh_(mesh) {}

  uint64_t of_results(const OpCall& call, std::span<const Tensor> inputs) const override {
    uint64_t marks = 0;
    for (size_t axis = 0; axis < mesh_.axes(); ++axis) {
      Mark mark = Along(call, inputs, mesh_, axis).result();
      for (const Tensor& input : inputs) {
        if (mark.is_shard() && input.defined()) mark.uneven |= mark_of(input, axis).uneven;
      }
      marks |= encoded(mark, axis);
    }
    return marks;
  }

  std::vector<DimCut> cuts_of(const Op& op, const Tensor& x) const override {
    std::vector<DimCut> cuts;
    for (size_t axis = 0; axis < mesh_.axes(); ++axis) {
      const Mark mark = mark_of(x, axis);
      if (!mark.is_shard()) continue;
      const auto refused = [&](const char* why) {
        TS_THROW(UnsupportedError, op, "along '", mesh_.name(axis), "' ", x, " is ", describe(mark),
                 ": random numbers go by the place of an element in the whole, and ", why,
                 "; leave dropout out, or apply it where the tensor is whole");
      };
      if (mark.uneven) refused("its chunks differ in length");
      for (const DimCut& other : cuts) {
        if (other.dim == mark.dim) refused("another axis cuts the same dimension");
      }
      cuts.push_back({mark.dim, mark.blocks, mesh_.group(axis).size(), mesh_.group(axis).rank()});
    }
    return cuts;
  }

  void check_whole(const Op& op, std::string_view name, const Tensor& x) const override {
    for (size_t axis = 0; axis < mesh_.axes(); ++axis) {
      const Mark mark = mark_of(x, axis);
      TS_CHECK_AS(UnsupportedError, mark.is_invariant(), op, "along '", mesh_.name(axis), "' ",
                  name, " ", x, " is ", describe(mark),
                  ": the op reads it beside its operands, as one of all ranks; convert it to "
                  "invariant");
    }
  }

 private:
  const ComputeMesh& mesh_;
};

}  // namespace

std::unique_ptr<MarkRules> make_rules(const ComputeMesh& mesh) {
  return std::make_unique<TypeRules>(mesh);
}

}  // namespace tessera::distributed
