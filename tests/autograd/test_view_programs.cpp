// Random programs of views, writes in place and consumers, beside the same programs without any
// aliasing: there each base is one flat tensor that is never written, a view is a list of places in
// it, and a write makes the next version of the base. Values, gradients and second derivatives must
// agree. A failure prints the program.
#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>

namespace tessera::test_view_programs {
namespace {

using Places = std::vector<int64_t>;

// ---- The model ---------------------------------------------------------------------------------

struct Base {
  Tensor flat;           // the elements, a function of the leaves without any write
  int writes = 0;        // so far
  bool is_leaf = false;  // that requires grad: writes are refused
};

struct Value {
  Tensor real;  // as the library has it
  size_t base;
  Shape shape;
  Places places;  // of the elements in row-major order, in the base
};

bool repeats(const Places& places) {
  Places sorted = places;
  std::sort(sorted.begin(), sorted.end());
  return std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end();
}

Tensor indices(const Places& places) {
  return tensor(std::span<const int64_t>(places), {static_cast<int64_t>(places.size())});
}

// The places of a view: element `index` of it is element source(index) of x.
Places places_of_view(const Value& x, const Shape& shape,
                      const std::function<Shape(const Shape& index)>& source) {
  Places result;
  Shape index = Shape::filled(shape.size(), 0);
  for (int64_t i = 0; i < numel_of(shape); ++i) {
    const Shape from = source(index);
    int64_t at = 0;
    for (int d = 0; d < x.shape.size(); ++d) at = at * x.shape[d] + from[d];
    result.push_back(x.places[static_cast<size_t>(at)]);
    for (int d = shape.size() - 1; d >= 0; --d) {
      if (++index[d] < shape[d]) break;
      index[d] = 0;
    }
  }
  return result;
}

struct ProgramOptions {
  DType dtype = kF64;
  bool autocast = false;
  bool second = false;  // derivatives of the gradient, too
};

enum class Outcome {
  kAgreed,
  kRefused
};  // refused: something saved was written, and backward says so

// One program, made and run from its seed.
class Program {
 public:
  Program(uint64_t seed, const ProgramOptions& options)
      : random_(seed), stream_(seed), options_(options) {}

  Outcome run() {
    {
      std::optional<AutocastGuard> autocast;
      if (options_.autocast) autocast.emplace(kBF16);
      const int leaves = 1 + pick(2), steps = 4 + pick(10);
      for (int i = 0; i < leaves; ++i) make_leaf(i == 0 || pick(4) != 0);
      for (int i = 0; i < steps; ++i) step();
      for (Value& value : values_) expect_equal(value.real, read(value), "value");
    }
    return compare_gradients();
  }

  std::string text() const { return text_.str(); }

 private:
  int pick(int count) { return static_cast<int>(random_() % static_cast<uint64_t>(count)); }
  size_t pick_value() { return static_cast<size_t>(pick(static_cast<int>(values_.size()))); }
  Tensor random_tensor(const Shape& shape, DType dtype) {
    return randn(shape, {.dtype = dtype}, RandomStream{stream_, next_stream_++});
  }
  std::string name(size_t value) const { return "t" + std::to_string(value); }
  std::ostream& line() { return text_ << "\n  "; }

  // ---- Reading and writing without aliasing
  Tensor read(const Value& value) const {
    return reshape(index_select(bases_[value.base].flat, 0, indices(value.places)), value.shape);
  }
  void write(const Value& value, const Tensor& elements) {
    Base& base = bases_[value.base];
    Places order(static_cast<size_t>(base.flat.numel()));
    std::iota(order.begin(), order.end(), 0);
    for (size_t i = 0; i < value.places.size(); ++i) {
      order[static_cast<size_t>(value.places[i])] = base.flat.numel() + static_cast<int64_t>(i);
    }
    const Tensor given = reshape(to(elements, base.flat.dtype()), {elements.numel()});
    base.flat = index_select(cat({base.flat, given}, 0), 0, indices(order));
    ++base.writes;
  }

  // ---- New tensors
  size_t add_base(const Tensor& real, const Tensor& elements, bool is_leaf) {
    Places places(static_cast<size_t>(real.numel()));
    std::iota(places.begin(), places.end(), 0);
    bases_.push_back({reshape(elements, {elements.numel()}), 0, is_leaf});
    values_.push_back({real, bases_.size() - 1, real.shape(), std::move(places)});
    return values_.size() - 1;
  }
  void make_leaf(bool requires_grad) {
    static const Shape kShapes[] = {{2, 3}, {3}, {4}, {2, 2}, {1, 3}, {3, 2, 2}, {}};
    const Shape shape = kShapes[pick(7)];
    const Tensor real = random_tensor(shape, options_.dtype);
    const Tensor copy = real.clone();
    real.set_requires_grad(requires_grad);
    copy.set_requires_grad(requires_grad);
    line() << name(add_base(real, copy, requires_grad)) << " = leaf(" << shape << ", requires_grad "
           << requires_grad << ")";
    if (!requires_grad) return;
    leaves_.push_back(real);
    model_leaves_.push_back(copy);
  }
  // What backward keeps of a tensor must not be written after.
  void keep(size_t value) { kept_.emplace_back(values_[value].base, writes(value)); }
  int writes(size_t value) const { return bases_[values_[value].base].writes; }

  void step() {
    const int kind = pick(10);
    if (kind < 4) {
      make_view(pick_value());
    } else if (kind < 8) {
      write_in_place(pick_value());
    } else {
      consume(pick_value());
    }
  }

  void add_view(size_t source, const Tensor& real, const Shape& shape, Places places,
                const std::string& what) {
    const size_t base = values_[source].base;
    ASSERT_EQ(real.shape(), shape);
    ASSERT_EQ(real.storage(), values_[source].real.storage());
    values_.push_back({real, base, shape, std::move(places)});
    line() << name(values_.size() - 1) << " = " << what;
  }

  void make_view(size_t at) {
    const Value x = values_[at];
    const int dims = x.shape.size();
    const int d = dims == 0 ? 0 : pick(dims);
    Shape shape = x.shape;
    switch (dims == 0 ? 0 : pick(8)) {
      case 0: {
        shape.insert(0, 1);
        return add_view(at, unsqueeze(x.real, 0), shape, x.places,
                        "unsqueeze(" + name(at) + ", 0)");
      }
      case 1: {  // a new dimension, or all that have one element
        shape.insert(0, 2);
        for (int i = 1; i < shape.size(); ++i) {
          if (shape[i] == 1) shape[i] = 2;
        }
        if (numel_of(shape) > 64) return;
        Places places = places_of_view(x, shape, [&](const Shape& index) {
          Shape from = index.slice(1, index.size());
          for (int i = 0; i < dims; ++i) {
            if (x.shape[i] == 1) from[i] = 0;
          }
          return from;
        });
        std::ostringstream what;
        what << "expand(" << name(at) << ", " << shape << ")";
        return add_view(at, expand(x.real, shape), shape, std::move(places), what.str());
      }
      case 2: {
        const int e = pick(dims);
        std::swap(shape[d], shape[e]);
        Places places = places_of_view(x, shape, [&](Shape index) {
          std::swap(index[d], index[e]);
          return index;
        });
        return add_view(
            at, transpose(x.real, d, e), shape, std::move(places),
            "transpose(" + name(at) + ", " + std::to_string(d) + ", " + std::to_string(e) + ")");
      }
      case 3: {
        const int64_t index_there = pick(static_cast<int>(shape[d]));
        shape.erase(d);
        Places places = places_of_view(x, shape, [&](Shape index) {
          index.insert(d, index_there);
          return index;
        });
        return add_view(at, select(x.real, d, index_there), shape, std::move(places),
                        "select(" + name(at) + ", " + std::to_string(d) + ", " +
                            std::to_string(index_there) + ")");
      }
      case 4: {
        const int64_t start = pick(static_cast<int>(shape[d])), step = 1 + pick(2);
        shape[d] = (shape[d] - start + step - 1) / step;
        Places places = places_of_view(x, shape, [&](Shape index) {
          index[d] = start + index[d] * step;
          return index;
        });
        return add_view(at, slice(x.real, d, start, {}, step), shape, std::move(places),
                        "slice(" + name(at) + ", " + std::to_string(d) + ", " +
                            std::to_string(start) + ", {}, " + std::to_string(step) + ")");
      }
      case 5: {
        const Tensor parts = narrow(x.real, d, shape[d] - 1, 1);
        const int64_t last = shape[d] - 1;
        shape[d] = 1;
        Places places = places_of_view(x, shape, [&](Shape index) {
          index[d] += last;
          return index;
        });
        return add_view(
            at, parts, shape, std::move(places),
            "narrow(" + name(at) + ", " + std::to_string(d) + ", " + std::to_string(last) + ", 1)");
      }
      case 6: {  // one of several outputs of an op
        const int64_t size = 1 + pick(static_cast<int>(shape[d]));
        const TensorList parts = split(x.real, size, d);
        const int part = pick(static_cast<int>(parts.size()));
        const int64_t start = part * size;
        shape[d] = std::min(size, shape[d] - start);
        Places places = places_of_view(x, shape, [&](Shape index) {
          index[d] += start;
          return index;
        });
        return add_view(at, parts[static_cast<size_t>(part)], shape, std::move(places),
                        "split(" + name(at) + ", " + std::to_string(size) + ", " +
                            std::to_string(d) + ")[" + std::to_string(part) + "]");
      }
      default: {
        const Tensor flat = reshape(x.real, {x.real.numel()});
        if (flat.storage() == x.real.storage()) {
          return add_view(at, flat, flat.shape(), x.places,
                          "reshape(" + name(at) + ", {-1}), a view");
        }
        const size_t made = add_base(flat, read(x), false);
        line() << name(made) << " = reshape(" << name(at) << ", {-1}), a copy";
      }
    }
  }

  // A tensor that broadcasts to `shape`: another value, or a constant.
  struct Operand {
    Tensor real, model;
    std::string text;
    std::optional<size_t> value;
  };
  Operand operand_for(const Shape& shape) {
    for (int attempt = 0; attempt < 3; ++attempt) {
      const size_t other = pick_value();
      if (!broadcastable_to(values_[other].shape, shape)) continue;
      return {values_[other].real, read(values_[other]), name(other), other};
    }
    const Tensor constant = random_tensor(shape, options_.dtype);
    return {constant, constant, "constant", {}};
  }

  void write_in_place(size_t at) {
    const Value x = values_[at];
    if (bases_[x.base].is_leaf) {
      EXPECT_THROW(neg_(x.real), AutogradError);
      return;
    }
    if (repeats(x.places)) {
      EXPECT_THROW(neg_(x.real), Error);
      return;
    }
    const Tensor before = read(x);
    const auto finish = [&](const Tensor& after, const std::string& what) {
      line() << what;
      write(x, after);
    };
    const std::string target = name(at);
    switch (pick(13)) {
      case 0:
        neg_(x.real);
        return finish(neg(before), "neg_(" + target + ")");
      case 1:
        mul_(x.real, 1.5);
        return finish(mul(before, 1.5), "mul_(" + target + ", 1.5)");
      case 2: {
        const Operand other = operand_for(x.shape);
        if (other.value && values_[*other.value].base != x.base) keep(*other.value);
        mul_(x.real, other.real);
        return finish(mul(before, other.model), "mul_(" + target + ", " + other.text + ")");
      }
      case 3: {
        const Operand other = operand_for(x.shape);
        add_(x.real, other.real, -0.5);
        return finish(add(before, other.model, -0.5),
                      "add_(" + target + ", " + other.text + ", -0.5)");
      }
      case 4: {
        const Operand other = operand_for(x.shape);
        sub_(x.real, other.real);
        return finish(sub(before, other.model), "sub_(" + target + ", " + other.text + ")");
      }
      case 5: {
        const Operand other = operand_for(x.shape);
        copy_(x.real, other.real);
        return finish(expand(other.model, x.shape), "copy_(" + target + ", " + other.text + ")");
      }
      case 6:
        fill_(x.real, 0.25);
        return finish(full_like(before, 0.25), "fill_(" + target + ", 0.25)");
      case 7:
        tanh_(x.real);
        finish(tanh(before), "tanh_(" + target + ")");
        return keep(at);
      case 8: {
        const Tensor mask = gt(random_tensor(x.shape, options_.dtype), 0);
        masked_fill_(x.real, mask, 0.5);
        return finish(masked_fill(before, mask, 0.5), "masked_fill_(" + target + ", mask, 0.5)");
      }
      case 9: {
        const Operand a = operand_for(x.shape), b = operand_for(x.shape);
        for (const Operand* other : {&a, &b}) {
          if (other->value && values_[*other->value].base != x.base) keep(*other->value);
        }
        addcmul_(x.real, a.real, b.real, 0.5);
        return finish(addcmul(before, a.model, b.model, 0.5),
                      "addcmul_(" + target + ", " + a.text + ", " + b.text + ", 0.5)");
      }
      case 10:
        relu_(x.real);
        finish(relu(before), "relu_(" + target + ")");
        return keep(at);
      case 11: {
        const Tensor divisor = add(square(random_tensor(x.shape, options_.dtype)), 0.5);
        div_(x.real, divisor);
        return finish(div(before, divisor), "div_(" + target + ", constant)");
      }
      default:
        clamp_(x.real, -1, 0.75);
        return finish(clamp(before, -1, 0.75), "clamp_(" + target + ", -1, 0.75)");
    }
  }

  // A tensor with elements of its own, made of others.
  void consume(size_t at) {
    const Value x = values_[at];
    const Tensor model = read(x);
    const auto finish = [&](const Tensor& real, const Tensor& expected, const std::string& what) {
      const size_t made = add_base(real, expected, false);
      line() << name(made) << " = " << what;
      return made;
    };
    switch (pick(8)) {
      case 0:
        finish(mul(x.real, 2), mul(model, 2), "mul(" + name(at) + ", 2)");
        return;
      case 1: {
        const Operand other = operand_for(x.shape);
        finish(add(x.real, other.real), add(model, other.model),
               "add(" + name(at) + ", " + other.text + ")");
        return;
      }
      case 2: {
        const Operand other = operand_for(x.shape);
        keep(at);
        if (other.value) keep(*other.value);
        finish(mul(x.real, other.real), mul(model, other.model),
               "mul(" + name(at) + ", " + other.text + ")");
        return;
      }
      case 3:
        keep(finish(tanh(x.real), tanh(model), "tanh(" + name(at) + ")"));
        return;
      case 4: {
        if (x.shape.empty()) return;
        finish(sum(x.real, {0}), sum(model, {0}), "sum(" + name(at) + ", {0})");
        return;
      }
      case 5: {
        const Operand other = operand_for(x.shape);
        if (x.shape.empty() || !(other.real.shape() == x.shape)) return;
        finish(cat({x.real, other.real}, 0), cat({model, other.model}, 0),
               "cat({" + name(at) + ", " + other.text + "}, 0)");
        return;
      }
      case 6:
        if (x.shape.empty()) return;
        keep(finish(softmax(x.real, 0), softmax(model, 0), "softmax(" + name(at) + ", 0)"));
        return;
      default: {
        if (x.shape.size() != 2) return;
        const Tensor weight = random_tensor({x.shape[1], 2}, options_.dtype);
        finish(matmul(x.real, weight), matmul(model, weight), "matmul(" + name(at) + ", constant)");
        return;
      }
    }
  }

  // ---- The end: every tensor is used once more, also the views that were made before writes
  Tensor loss_of(const std::vector<Tensor>& all) {
    Tensor total;
    for (size_t i = 0; i < all.size(); ++i) {
      const Tensor part = sum(mul(to(all[i], options_.dtype), weights_[i]));
      total = total.defined() ? add(total, part) : part;
    }
    // Its gradient depends on the values: that of a linear loss would have no derivative to see.
    return options_.second ? mul(total, tanh(total)) : total;
  }

  Outcome compare_gradients() {
    std::vector<Tensor> real, model;
    for (const Value& value : values_) {
      real.push_back(value.real);
      model.push_back(read(value));
      weights_.push_back(random_tensor(value.shape, options_.dtype));
    }
    TensorList got, expected;
    try {
      got = derivatives(loss_of(real), leaves_);
    } catch (const AutogradError& error) {
      const bool written = std::ranges::any_of(
          kept_, [&](const auto& kept) { return bases_[kept.first].writes != kept.second; });
      EXPECT_TRUE(written &&
                  std::string(error.what()).find("written in place") != std::string::npos)
          << "refused without a reason: " << error.what();
      return Outcome::kRefused;
    }
    expected = derivatives(loss_of(model), model_leaves_);
    for (size_t i = 0; i < got.size(); ++i) expect_equal(got[i], expected[i], "gradient");
    return Outcome::kAgreed;
  }

  TensorList derivatives(const Tensor& loss, const TensorList& leaves) {
    TensorList first =
        grad(loss, leaves, {}, {.create_graph = options_.second, .allow_unused = true});
    for (size_t i = 0; i < first.size(); ++i) {
      if (!first[i].defined()) first[i] = zeros_like(leaves[i].detach());
    }
    if (!options_.second) return first;
    Tensor total;
    for (const Tensor& gradient : first) {
      const Tensor part = sum(square(gradient));
      total = total.defined() ? add(total, part) : part;
    }
    TensorList all = first;
    if (!total.requires_grad()) return all;
    for (Tensor& gradient : grad(total, leaves, {}, {.allow_unused = true})) {
      all.push_back(gradient.defined() ? gradient : zeros({}, {.dtype = options_.dtype}));
    }
    return all;
  }

  void expect_equal(const Tensor& got, const Tensor& expected, const char* what) {
    ASSERT_EQ(got.shape(), expected.shape()) << what;
    const std::vector<double> a = got.to_vector(), b = expected.to_vector();
    double scale = 1;
    for (const double x : b) scale = std::max(scale, std::abs(x));
    // Sums of some tens of terms, squared and added up once more for second derivatives; under
    // autocast contributions meet in bf16.
    const double tolerance = options_.autocast ? 16 * epsilon_of(kBF16)
                             : options_.second ? 4096 * epsilon_of(kF64)
                                               : 64 * epsilon_of(kF64);
    for (size_t i = 0; i < a.size(); ++i) {
      ASSERT_NEAR(a[i], b[i], tolerance * scale) << what << " element " << i;
    }
  }

  std::mt19937_64 random_;
  uint64_t stream_, next_stream_ = 0;
  ProgramOptions options_;
  std::vector<Base> bases_;
  std::vector<Value> values_;
  TensorList leaves_, model_leaves_;
  std::vector<Tensor> weights_;
  std::vector<std::pair<size_t, int>> kept_;  // base, its writes when something of it was saved
  std::ostringstream text_;
};

void run_programs(uint64_t first, int count, const ProgramOptions& options) {
  int agreed = 0;
  for (int i = 0; i < count && !testing::Test::HasFailure(); ++i) {
    Program program(first + static_cast<uint64_t>(i), options);
    try {
      agreed += program.run() == Outcome::kAgreed;
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
    if (testing::Test::HasFailure()) {
      ADD_FAILURE() << "in program " << first + static_cast<uint64_t>(i) << ":" << program.text();
    }
  }
  // Most programs must get to the comparison.
  EXPECT_TRUE(testing::Test::HasFailure() || agreed > count / 2) << agreed << " of " << count;
}

TEST(ViewPrograms, GiveTheValuesAndGradientsOfProgramsWithoutAliasing) {
  run_programs(1, 3000, {});
}
TEST(ViewPrograms, HaveTheirSecondDerivatives) { run_programs(10'000, 600, {.second = true}); }
TEST(ViewPrograms, AgreeUnderAutocast) {
  run_programs(20'000, 600, {.dtype = kF32, .autocast = true});
}

}  // namespace
}  // namespace tessera::test_view_programs
