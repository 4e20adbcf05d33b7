// ctest labels: threads
#include <gtest/gtest.h>

#include <cmath>
#include <thread>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/checkpoint.h>
#include <tessera/autograd/function.h>
#include <tessera/autograd/gradcheck.h>
#include <tessera/autograd/node.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/tensor/raw_views.h>

#include "message_of.h"
#include "thinned.h"

namespace tessera::test_autograd {
namespace {

using Values = std::vector<double>;

Tensor leaf(std::initializer_list<double> values, DType dtype = kF64) {
  return tensor(values, dtype).set_requires_grad();
}

TEST(Backward, FollowsTheChainRuleAndAccumulates) {
  const Tensor x = leaf({1, 2, 3});
  (x * x * 2.0).sum().backward();
  EXPECT_EQ(x.grad().to_vector(), (Values{4, 8, 12}));
  (x * 3.0).sum().backward();
  EXPECT_EQ(x.grad().to_vector(), (Values{7, 11, 15}));
  x.zero_grad();
  EXPECT_FALSE(x.grad().defined());
}

TEST(Backward, SumsGradientsToTheShapeThatWasBroadcast) {
  const Tensor a = leaf({1, 2, 3});
  const Tensor b = tensor({1.0, 2.0}, kF64).view({2, 1}).set_requires_grad();
  (a * b).sum().backward();
  EXPECT_EQ(a.grad().to_vector(), (Values{3, 3, 3}));
  EXPECT_EQ(b.grad().to_vector(), (Values{6, 6}));
  EXPECT_EQ(b.grad().shape(), (Shape{2, 1}));
}

TEST(Backward, ATensorUsedTwiceGetsBothContributionsAtOnce) {
  const Tensor x = leaf({2});
  int calls = 0;
  register_post_accumulate_hook(x, [&](const Tensor&) { ++calls; });
  const Tensor y = x * x + x * 3.0 + x;
  y.backward();
  EXPECT_EQ(x.grad().item(), 8);
  EXPECT_EQ(calls, 1);
}

// Both reshapes hand on the gradient of their sum as views of one storage. The one that waits for
// `scaled` must not change when `a` gets its second contribution.
TEST(Backward, AGradientThatSharesItsStorageIsNotAddedToInPlace) {
  const Tensor a = leaf({1, 2}), w = leaf({3, 4});
  const Tensor scaled = w * 1.0;  // the oldest call: its gradient waits longest
  const Tensor second = a * 3.0;
  const Tensor sum = a.reshape({2, 1}) + scaled.reshape({2, 1});
  ((sum * 2.0).sum() + second.sum()).backward();
  EXPECT_EQ(a.grad().to_vector(), (Values{5, 5}));
  EXPECT_EQ(w.grad().to_vector(), (Values{2, 2}));
}

// Weights that are put together for one product: each gradient is its part of the product's.
TEST(Backward, PartsOfAGradientBecomeThoseOfLeavesWithoutACopy) {
  const auto matrix = [](int64_t rows, int64_t columns) {
    return arange(1, rows * columns + 1, 1, kF64).view({rows, columns}).clone().set_requires_grad();
  };
  const auto leaves = [&] { return TensorList{matrix(2, 3), matrix(1, 3), matrix(4, 3)}; };
  const auto address = [](const Tensor& x) { return static_cast<const char*>(x.data()); };
  const Tensor factors = matrix(7, 3).detach();
  const auto check = [&](const TensorList& x, bool parts) {
    EXPECT_EQ(address(x[0].grad()) + 48 == address(x[1].grad()) &&
                  address(x[1].grad()) + 24 == address(x[2].grad()),
              parts);
    EXPECT_EQ(cat({x[0].grad(), x[1].grad(), x[2].grad()}, 0).to_vector(), factors.to_vector());
  };
  const TensorList x = leaves();
  mul(cat(x, 0), factors).sum().backward();
  check(x, true);
  EXPECT_NE(address(x[0].grad()), address(factors));
  // One part is written; the others, and versions of them, stay.
  const uint32_t before = x[1].grad().version();
  mul_(x[0].grad(), 2);
  EXPECT_EQ(x[1].grad().version(), before);
  EXPECT_EQ(x[1].grad().to_vector(), factors.slice(0, 2, 3).to_vector());
  mul_(x[0].grad(), 0.5);
  // A second backward adds.
  mul(cat(x, 0), factors).sum().backward();
  EXPECT_EQ(x[2].grad().to_vector(), mul(factors.slice(0, 3, 7), 2).to_vector());

  const TensorList given = leaves();  // the caller's tensor is nobody's gradient
  cat(given, 0).backward(factors);
  check(given, false);
  EXPECT_NE(address(given[0].grad()), address(factors));

  const TensorList kept = leaves();  // somebody holds the whole
  const Tensor joined = cat(kept, 0);
  joined.retain_grad();
  mul(joined, factors).sum().backward();
  check(kept, false);

  const TensorList seen = leaves();  // a hook may hold a part
  Tensor held;
  register_hook(seen[1], [&](const Tensor& gradient) {
    held = gradient.detach();
    return Tensor();
  });
  mul(cat(seen, 0), factors).sum().backward();
  check(seen, false);
  mul_(seen[1].grad(), 2);
  EXPECT_EQ(held.to_vector(), factors.slice(0, 2, 3).to_vector());

  const TensorList columns = {matrix(2, 3), matrix(2, 1)};  // not in one piece
  mul(cat(columns, 1), factors.slice(0, 0, 2).narrow(1, 0, 1)).sum().backward();
  EXPECT_TRUE(columns[0].grad().is_contiguous());

  const Tensor twice = matrix(2, 3);  // what meets is added up
  mul(cat({twice, twice}, 0), factors.slice(0, 0, 4)).sum().backward();
  EXPECT_EQ(twice.grad().to_vector(),
            add(factors.slice(0, 0, 2), factors.slice(0, 2, 4)).to_vector());

  const Tensor alone = matrix(1, 3);  // a large gradient is not kept for a small part of it
  mul(cat({alone, matrix(6, 3).detach()}, 0), factors).sum().backward();
  EXPECT_EQ(alone.grad().storage()->bytes(), alone.grad().nbytes());
}

TEST(Backward, NeedsAGraph) {
  EXPECT_THROW(tensor({1.0}).backward(), AutogradError);
  const Tensor x = leaf({1, 2});
  EXPECT_THROW((x * 2.0).backward(), AutogradError);  // two elements, no gradient given
  Tensor y;
  {
    NoGradGuard no_grad;
    y = x * 2.0;
  }
  EXPECT_FALSE(y.requires_grad());
  EXPECT_FALSE(x.detach().requires_grad());
  EXPECT_THROW(tensor({1.0}, kI64).set_requires_grad(), DTypeError);
}

TEST(Backward, FreesSavedTensorsUnlessToldToRetain) {
  const Tensor x = leaf({3});
  const Tensor y = x * x;
  y.backward({}, true);
  y.backward();
  EXPECT_EQ(x.grad().item(), 12);
  // The usual mistake is a state of an earlier step: to keep its graph would be the wrong remedy.
  const std::string message = message_of([&] { y.backward(); });
  EXPECT_NE(message.find("detach()"), std::string::npos) << message;
  EXPECT_NE(message.find("retain_graph"), std::string::npos) << message;
}

TEST(Grad, GivesGradientsOfInnerTensorsWithoutTouchingLeaves) {
  const Tensor x = leaf({2});
  const Tensor y = x * x;
  const Tensor z = y * y;
  const TensorList gradients = grad(z, TensorList{y, x});
  EXPECT_EQ(gradients[0].item(), 8);
  EXPECT_EQ(gradients[1].item(), 32);
  EXPECT_FALSE(x.grad().defined());
  const Tensor unused = leaf({1});
  EXPECT_THROW(grad(x * x, TensorList{unused}), AutogradError);
  EXPECT_FALSE(grad(x * x, TensorList{unused}, {}, {.allow_unused = true})[0].defined());
}

TEST(Grad, OfAGradientIsTheSecondDerivative) {
  const Tensor x = leaf({3});
  const Tensor y = x * x * x;
  const Tensor first = grad(y, TensorList{x}, {}, {.create_graph = true})[0];
  EXPECT_EQ(first.item(), 27);
  const Tensor second = grad(first, TensorList{x}, {}, {.create_graph = true})[0];
  EXPECT_EQ(second.item(), 18);
  EXPECT_EQ(grad(second, TensorList{x})[0].item(), 6);
}

TEST(InPlace, KeepsTheHistoryOfTheOldValue) {
  const Tensor x = leaf({1, 2});
  Tensor y = x * 2.0;
  y.mul_(y.detach().clone());  // y <- y * c
  y.add_(x);
  y.sum().backward();
  EXPECT_EQ(x.grad().to_vector(), (Values{2 * 2 + 1, 2 * 4 + 1}));
}

TEST(InPlace, OnALeafThatRequiresGradIsRefused) {
  const Tensor x = leaf({1});
  EXPECT_EQ(message_of([&] { x.add_(1.0); }).substr(0, 44),
            "add_: writes to f64[1] cpu, a leaf that requ");
  EXPECT_EQ(message_of([&] { fill_(x.view({1}), 0); }).substr(0, 36),
            "fill_: writes to a view of f64[1] cp");
  NoGradGuard no_grad;
  x.add_(1.0);
  EXPECT_EQ(x.item(), 2);
}

TEST(InPlace, AfterATensorWasSavedIsFoundInBackward) {
  const Tensor x = leaf({1, 2});
  const Tensor y = x * 1.0;
  const Tensor z = y * y;
  y.add_(1.0);
  const std::string message = message_of([&] { z.sum().backward(); });
  EXPECT_EQ(message.substr(0, 10), "mul: input") << message;
  EXPECT_NE(message.find("written in place since the call, the last time by add_ (version 1"),
            std::string::npos)
      << message;
}

TEST(InPlace, ThroughAViewChangesTheHistoryOfTheBase) {
  const Tensor x = leaf({1, 2, 3});
  const Tensor w = leaf({10});
  Tensor base = x * 1.0;
  base.narrow(0, 1, 1).mul_(w);  // base = [x0, x1 * w, x2]
  (base * base).sum().backward();
  EXPECT_EQ(x.grad().to_vector(), (Values{2, 2 * 20 * 10, 6}));
  EXPECT_EQ(w.grad().item(), 2 * 20 * 2);
}

// A base that is a part of a larger buffer: places are counted from its own first element.
TEST(InPlace, ThroughAViewOfABaseThatLiesWithinABuffer) {
  const Tensor buffer = tensor({9, 9, 9, 9, 1, 2, 3, 4, 5, 6, 9, 9}, kF64);
  const auto part = [&] { return buffer.narrow(0, 4, 6).detach().view({2, 3}).detach(); };
  const std::vector<double> was = buffer.to_vector();
  const Tensor w = leaf({10, 100});
  Tensor base = part();
  ASSERT_EQ(base.offset(), 4);
  const Tensor row = base[1];                 // [4, 5, 6], made before it is written
  base.narrow(1, 1, 1).mul_(w.view({2, 1}));  // the column [2, 5]
  EXPECT_EQ(buffer.to_vector(), (Values{9, 9, 9, 9, 1, 20, 3, 4, 500, 6, 9, 9}));
  const TensorList first = grad((base * base).sum(), TensorList{w}, {}, {.retain_graph = true});
  EXPECT_EQ(first[0].to_vector(), (Values{2 * 20 * 2, 2 * 500 * 5}));
  EXPECT_EQ(grad((row * row).sum(), TensorList{w})[0].to_vector(), (Values{0, 2 * 500 * 5}));
  // A view of a view, and a parameter whose values are such a part.
  base = part();
  base[1].narrow(0, 0, 2).mul_(w);  // [4, 500]
  EXPECT_EQ(grad(base.sum(), TensorList{w})[0].to_vector(), (Values{4, 500}));
  const Tensor x = leaf({0, 0, 0});
  x.set_data(buffer.narrow(0, 3, 3).detach());
  const Tensor y = x * 1.0;
  y.narrow(0, 2, 1).mul_(w.narrow(0, 0, 1));
  (y * y).sum().backward();
  const double middle = x.to_vector()[2];
  EXPECT_EQ(x.grad().to_vector(), (Values{18, 2 * x.to_vector()[1], 200 * middle}));
}

TEST(InPlace, IntoATensorThatRequiredNoGradMakesItRequireOne) {
  const Tensor w = leaf({2, 3});
  const Tensor buffer = zeros({2, 2}, {.dtype = kF64});
  const Tensor row = buffer[0];
  row.copy_(w);
  EXPECT_TRUE(buffer.requires_grad());
  (buffer * 5.0).sum().backward();
  EXPECT_EQ(w.grad().to_vector(), (Values{5, 5}));
}

TEST(InPlace, OnTheBaseReachesViewsMadeBefore) {
  const Tensor x = leaf({1, 2});
  const Tensor base = x * 1.0;
  const Tensor view = base.narrow(0, 0, 1);
  base.mul_(3.0);
  view.sum().backward();
  EXPECT_EQ(x.grad().to_vector(), (Values{3, 0}));
}

TEST(InPlace, OnTheBaseAddsUpWhatAViewShowsTwice) {
  const Tensor x = leaf({1, 2, 3});
  const Tensor base = x * 1.0;
  const Tensor rows = base.expand({2, 3}), windows = as_strided(base, {2, 2}, {1, 1}, 0);
  neg_(base);
  EXPECT_EQ(grad(rows.sum(), TensorList{x}, {}, {.retain_graph = true})[0].to_vector(),
            (Values{-2, -2, -2}));
  EXPECT_EQ(grad(windows.sum(), TensorList{x})[0].to_vector(), (Values{-1, -2, -1}));
}

TEST(InPlace, SecondDerivativesPassWritesThroughViews) {
  const auto stale_view = [](const TensorList& in) -> TensorList {
    const Tensor base = in[0] * in[0];
    const Tensor part = base.narrow(0, 1, 2), rows = base.expand({2, 3});
    base.mul_(in[1]);
    return {part * part, rows * rows * rows};
  };
  const auto written_view = [](const TensorList& in) -> TensorList {
    const Tensor base = in[0] * in[0];
    base.narrow(0, 1, 2).mul_(in[1]);
    base.narrow(0, 0, 1).copy_(in[2]);
    return {base * base * base};
  };
  for (const auto& function : {std::function<TensorList(const TensorList&)>(stale_view),
                               std::function<TensorList(const TensorList&)>(written_view)}) {
    const TensorList inputs = {leaf({1.5, -0.5, 2}), leaf({0.75}), leaf({-1.25})};
    EXPECT_TRUE(gradcheck(function, inputs).ok) << gradcheck(function, inputs).message;
    EXPECT_TRUE(gradgradcheck(function, inputs).ok) << gradgradcheck(function, inputs).message;
  }
}

TEST(Hooks, SeeAndReplaceGradients) {
  const Tensor x = leaf({1, 2});
  const Tensor y = x * 3.0;
  Values seen;
  HookHandle first = register_hook(y, [&](const Tensor& gradient) {
    seen = gradient.to_vector();
    return gradient * 2.0;
  });
  HookHandle on_leaf = register_hook(x, [](const Tensor& gradient) { return gradient + 1.0; });
  y.sum().backward();
  EXPECT_EQ(seen, (Values{1, 1}));
  EXPECT_EQ(x.grad().to_vector(), (Values{7, 7}));
  on_leaf.remove();
  x.zero_grad();
  (x * 1.0).sum().backward();
  EXPECT_EQ(x.grad().to_vector(), (Values{1, 1}));
}

TEST(Hooks, OnALeafOutliveTheGraph) {
  const Tensor x = leaf({1});
  int calls = 0;
  register_hook(x, [&](const Tensor&) {
    ++calls;
    return Tensor();
  });
  for (int i = 0; i < 3; ++i) (x * 2.0).backward();
  EXPECT_EQ(calls, 3);
}

TEST(Hooks, CallbacksRunAtTheEndAndContributionsCountDown) {
  const Tensor x = leaf({1});
  std::vector<int> owed;
  bool finished = false;
  Tensor a = x * 2.0, b = x * 3.0;
  const auto watch = [&](const Tensor&) {
    owed.push_back(pending_contributions(x));
    queue_backward_callback([&] { finished = true; });
    EXPECT_FALSE(finished);
    return Tensor();
  };
  register_hook(a, watch);
  register_hook(b, watch);
  (a + b).backward();
  EXPECT_EQ(owed, (std::vector<int>{2, 1}));
  EXPECT_TRUE(finished);
  EXPECT_EQ(pending_contributions(x), 0);
  EXPECT_THROW(queue_backward_callback([] {}), AutogradError);
}

TEST(Hooks, ALeafTellsWhetherTheBackwardUnderWayReachesIt) {
  const Tensor x = leaf({1}), y = leaf({2}), unused = leaf({3});
  std::vector<bool> reached;
  std::vector<uint64_t> numbers;
  const Tensor kept_alive = unused * 2.0;  // part of a graph, not of this one
  const HookHandle hook = register_post_accumulate_hook(y, [&](const Tensor&) {
    reached = {backward_reaches(x), backward_reaches(y), backward_reaches(unused)};
    numbers.push_back(current_backward());
  });
  const Tensor sum = x + y * y;
  sum.backward({}, true);
  EXPECT_EQ(reached, (std::vector<bool>{true, true, false}));
  sum.backward();
  ASSERT_EQ(numbers.size(), 2u);
  EXPECT_NE(numbers[0], numbers[1]);
  EXPECT_EQ(current_backward(), 0u);
  EXPECT_FALSE(backward_reaches(y));
}

TEST(Hooks, ABackwardInsideAnotherBelongsToIt) {
  const Tensor x = leaf({1});
  const Tensor y = x * x;
  uint64_t outer = 0, inner = 0;
  bool outer_ended = false, called = false;
  register_hook(y, [&](const Tensor&) {
    outer = current_backward();
    const Tensor z = leaf({2});
    register_post_accumulate_hook(z, [&](const Tensor&) {
      inner = current_backward();
      queue_backward_callback([&] {
        called = true;
        EXPECT_TRUE(outer_ended);
      });
    });
    EnableGradGuard grad;
    (z * 2.0).backward();
    return Tensor();
  });
  register_post_accumulate_hook(x, [&](const Tensor&) { outer_ended = true; });
  y.backward();
  EXPECT_NE(outer, 0u);
  EXPECT_EQ(inner, outer);
  EXPECT_TRUE(called);
}

TEST(Hooks, GradTouchesNoLeafAndSaysSo) {
  const Tensor x = leaf({1});
  const Tensor y = x * x;
  uint64_t number = 1;
  register_hook(y, [&](const Tensor&) {
    number = current_backward();
    return Tensor();
  });
  const Tensor inputs[] = {x};
  grad((y * 2.0), inputs);
  EXPECT_EQ(number, 0u);
}

TEST(Backward, AGradientIsKeptInItsHome) {
  const Tensor flat = raw::full({5}, 9, kF64);
  const Tensor x = leaf({1, 2}), y = leaf({1, 2, 3});
  set_main_grad(x, raw::as_parameter(raw::narrow(flat, 0, 0, 2)));
  set_main_grad(y, raw::as_parameter(raw::narrow(flat, 0, 2, 3)));
  ((x * x).sum() + (y * 5.0).sum() + (y * 1.0).sum()).backward();
  EXPECT_EQ(flat.to_vector(), (Values{2, 4, 6, 6, 6}));
  EXPECT_EQ(x.grad().data(), flat.data());
  (x * 3.0).sum().backward();  // added in place
  EXPECT_EQ(flat.to_vector(), (Values{5, 7, 6, 6, 6}));
  x.zero_grad();
  EXPECT_FALSE(x.grad().defined());
  (x * 4.0).sum().backward();  // the old elements do not count
  EXPECT_EQ(flat.to_vector(), (Values{4, 4, 6, 6, 6}));
  set_main_grad(x, Tensor());
  x.zero_grad();
  (x * 1.0).sum().backward();
  EXPECT_NE(x.grad().data(), flat.data());
  EXPECT_THROW(set_main_grad(x, flat), ShapeError);
  EXPECT_THROW(set_main_grad(x * 2.0, tensor({0, 0}, kF64)), AutogradError);
}

TEST(Backward, AHomeMayBeWiderThanItsLeaf) {
  const Tensor x = leaf({1}, kBF16);
  const Tensor home = raw::full({1}, 0, kF32);
  set_main_grad(x, home);
  for (double factor : {256.0, 1.0, 1.0}) (x * factor).sum().backward();
  EXPECT_EQ(home.item(), 258);  // bf16 has no 257
  EXPECT_TRUE(x.grad().is(home));
}

TEST(Hooks, RetainGradKeepsTheGradientOfAnInnerTensor) {
  const Tensor x = leaf({2});
  const Tensor y = x * x;
  retain_grad(y);
  (y * 3.0).backward();
  EXPECT_EQ(y.grad().item(), 3);
}

TEST(Hooks, SavedTensorsCanBeKeptElsewhere) {
  const Tensor x = leaf({3});
  int packed = 0, unpacked = 0;
  Tensor y;
  {
    SavedTensorHooks hooks(
        [&](const Tensor& saved) {
          ++packed;
          return std::any(saved.to_vector());
        },
        [&](const std::any& saved) {
          ++unpacked;
          return tensor(std::span<const double>(std::any_cast<const Values&>(saved)), {1}, kF64);
        });
    y = (x * 1.0) * (x * 2.0);
  }
  y.backward();
  EXPECT_EQ(x.grad().item(), 12);
  EXPECT_EQ(packed, unpacked);
  EXPECT_GE(packed, 2);
}

struct Cube : Function<Cube> {
  static constexpr const char* kName = "test_cube";
  static Tensor forward(FunctionContext& context, const Tensor& x) {
    context.save(x.detach());
    return x * x * x;
  }
  static TensorList backward(FunctionContext& context, Grads dy, const Saved& saved) {
    EXPECT_EQ(context.saved(0).numel(), saved.input(0).numel());
    return {dy[0] * saved.input(0) * saved.input(0) * 3.0};
  }
};

TEST(CustomFunction, HasFirstAndSecondDerivatives) {
  const Tensor x = leaf({2, -1});
  const auto cube = [](const TensorList& in) { return TensorList{Cube::apply(in[0])}; };
  EXPECT_TRUE(gradcheck(cube, {x}).ok);
  EXPECT_TRUE(gradgradcheck(cube, {x}).ok);
}

struct WrongSquare : Function<WrongSquare> {
  static constexpr const char* kName = "test_wrong_square";
  static Tensor forward(FunctionContext&, const Tensor& x) { return x * x; }
  static TensorList backward(FunctionContext&, Grads dy, const Saved& saved) {
    return {dy[0] * saved.input(0) * 2.02};
  }
};

TEST(Gradcheck, FindsAWrongGradientAndNamesTheElement) {
  const GradcheckResult result = gradcheck(
      [](const TensorList& in) { return TensorList{WrongSquare::apply(in[0])}; }, {leaf({1, 5})});
  EXPECT_FALSE(result.ok);
  EXPECT_NE(result.message.find("d output 0[1] / d input 0[1]"), std::string::npos)
      << result.message;
}

const Op kKernelSquare{
    .name = "test_kernel_square", .reads = {inputs(0)}, .twice_differentiable = false};
Tensor kernel_square(const Tensor& x) {
  return differentiable(
      kKernelSquare, {x}, [](Inputs in) { return in[0] * in[0]; },
      [](Grads dy, const Saved& saved) { return dy[0] * saved.input(0) * 2.0; });
}

TEST(Gradcheck, WithoutAnInputThatRequiresGradIsAnError) {
  const auto square = [](const TensorList& in) -> TensorList { return {in[0] * in[0]}; };
  const Tensor x = tensor({1.0, 2.0}, kF64);
  EXPECT_EQ(message_of([&] { gradcheck(square, {x}); }).substr(0, 33),
            "gradcheck: no input requires grad");
  EXPECT_EQ(message_of([&] { gradgradcheck(square, {x}); }).substr(0, 37),
            "gradgradcheck: no input requires grad");
}

TEST(Kernels, AskingForASecondDerivativeNamesTheOp) {
  const Tensor x = leaf({3});
  const Tensor first = grad(kernel_square(x), TensorList{x}, {}, {.create_graph = true})[0];
  EXPECT_EQ(first.item(), 6);
  const std::string message = message_of([&] { grad(first, TensorList{x}); });
  EXPECT_NE(message.find("test_kernel_square"), std::string::npos) << message;
}

const Op kForgetful{.name = "test_forgetful"};

TEST(Saved, ReadingWhatTheRecordDoesNotNameIsAnError) {
  const Tensor x = leaf({3});
  const Tensor y = differentiable(
      kForgetful, {x}, [](Inputs in) { return in[0] * 1.0; },
      [](Grads dy, const Saved& saved) { return dy[0] * saved.input(0); });
  EXPECT_NE(message_of([&] { y.backward(); }).find("does not name"), std::string::npos);
}

TEST(Anomaly, NamesTheForwardCallAndTheModule) {
  const AnomalyMode anomaly;
  call_site() = "model.head";
  const Tensor x = leaf({-1});
  const Tensor y = (x * 2.0).sqrt();
  call_site() = "";
  const std::string message = message_of([&] { y.backward(); });
  EXPECT_NE(message.find("model.head"), std::string::npos) << message;
  EXPECT_NE(message.find("sqrt"), std::string::npos) << message;
}

// A node of one's own that gives back too few, too many, or what has another shape.
TEST(Graph, ANodeThatGivesTheWrongGradientsIsNamed) {
  struct Wrong final : Node {
    explicit Wrong(TensorList given) : given(std::move(given)) {}
    TensorList apply(TensorList) override { return given; }
    std::string name() const override { return "wrong_node"; }
    TensorList given;
  };
  const auto run = [](TensorList given) {
    const Tensor x = leaf({1, 2}), y = tensor({3.0, 4.0}, kF64);
    const auto node = std::make_shared<Wrong>(std::move(given));
    node->next_edges = {gradient_edge(x)};
    node->output_metas = {TensorMeta::of(y)};
    node->take_sequence();
    set_history(y, node, 0);
    y.sum().backward();
    return x.grad();
  };
  EXPECT_EQ(run({tensor({5.0, 6.0}, kF64)}).to_vector(), (Values{5, 6}));
  EXPECT_FALSE(run({Tensor()}).defined());
  const std::string none = message_of([&] { run({}); });
  EXPECT_NE(none.find("wrong_node"), std::string::npos) << none;
  EXPECT_NE(none.find("0 gradients for 1"), std::string::npos) << none;
  EXPECT_THROW(run({Tensor(), Tensor()}), AutogradError);
  EXPECT_THROW(run({tensor({5.0, 6.0, 7.0}, kF64)}), Error);
}

TEST(Graph, OfAMillionNodesIsFreedAndRunWithoutDeepRecursion) {
  const int length = tests::sanitized() ? 100000 : 1000000;
  const Tensor x = leaf({1});
  Tensor y = x;
  for (int i = 0; i < length; ++i) y = y.view({1});
  y.backward();
  EXPECT_EQ(x.grad().item(), 1);
  Tensor z = x;
  for (int i = 0; i < length; ++i) z = z.view({1});
  z = Tensor();  // freed without ever being run
}

TEST(Threads, RunBackwardToTheSameLeavesAtOnce) {
  const Tensor x = leaf({1, 1, 1, 1});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) (x * 2.0).sum().backward();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(x.grad().to_vector(), (Values{400, 400, 400, 400}));
}

// Trap 20: what is recomputed draws other random numbers.
TEST(Checkpoint, GivesTheSameGradientsFromLessMemory) {
  const Tensor weight = leaf({0.5, -0.25, 1.5});
  const auto block = [&](const Tensor& x) {
    return dropout((x * weight).tanh() * x.exp(), 0.5, true) * weight;
  };
  const auto run = [&](bool recompute) {
    manual_seed(7);
    weight.zero_grad();
    const Tensor x = leaf({0.1, 0.2, 0.3});
    Tensor y = x;
    for (int i = 0; i < 3; ++i) y = recompute ? checkpoint(block, y) : block(y);
    y.sum().backward();
    Values result = x.grad().to_vector();
    const Values of_weight = weight.grad().to_vector();
    result.insert(result.end(), of_weight.begin(), of_weight.end());
    return result;
  };
  EXPECT_EQ(run(true), run(false));
  const auto saved_bytes = [&](bool recompute) {
    const Tensor x = ones({1 << 16}, {.dtype = kF32}).set_requires_grad();
    const auto chain = [](const Tensor& in) {
      Tensor y = in;
      for (int i = 0; i < 8; ++i) y = y.tanh();
      return y;
    };
    const int64_t before = memory_stats()->current();
    const Tensor y = recompute ? checkpoint(chain, x) : chain(x);
    return memory_stats()->current() - before;
  };
  EXPECT_LE(saved_bytes(true), int64_t{1} << 18);  // the result alone
  EXPECT_GE(saved_bytes(false), int64_t{8} << 18);
}

TEST(Modes, AreRestoredWhenAnExceptionPasses) {
  try {
    NoGradGuard no_grad;
    throw ValueError("x");
  } catch (const ValueError&) {
  }
  EXPECT_TRUE(grad_enabled());
}

TEST(SetData, OfALeafIsWhatTheNextBackwardSees) {
  const Tensor x = leaf({1, 2});
  (x * 2.0).sum().backward();
  x.set_data(tensor({1, 2, 3}, kF32));
  x.zero_grad();
  (x * 2.0).sum().backward();
  EXPECT_EQ(x.grad().describe(), "f32[3] cpu");
}

}  // namespace
}  // namespace tessera::test_autograd
