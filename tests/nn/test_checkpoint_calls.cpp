// Modules whose calls keep their inputs alone: the same bits from less memory, whatever a call is
// given, and an error where it cannot be kept.
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/checkpoint.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/random.h>
#include <tessera/nn/container.h>
#include <tessera/nn/dropout.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/norm.h>
#include <tessera/nn/parametrizations.h>
#include <tessera/precision/autocast.h>

#include "message_of.h"

namespace tessera::test_checkpoint_calls {
namespace {

struct Step : nn::Module<Step> {
  explicit Step(int64_t width)
      : up(add<nn::Linear>("up", width, 2 * width)),
        dropout(add<nn::Dropout>("dropout", 0.3)),
        down(add<nn::Linear>("down", 2 * width, width)) {}
  Tensor forward(const Tensor& x) {
    ++runs;
    return x + down(dropout(gelu(up(x))));
  }
  nn::Linear& up;
  nn::Dropout& dropout;
  nn::Linear& down;
  int runs = 0;
};

struct Steps : nn::Module<Steps> {
  Steps(int64_t width, int count) {
    for (int i = 0; i < count; ++i) steps.push_back(&add<Step>("s" + std::to_string(i), width));
  }
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (Step* step : steps) y = (*step)(y);
    return y;
  }
  std::vector<Step*> steps;
};

std::vector<HookHandle> checkpoint_all(Steps& model) {
  std::vector<HookHandle> handles;
  for (Step* step : model.steps) handles.push_back(step->checkpoint_calls());
  return handles;
}

// The loss, then all gradients.
std::vector<float> loss_and_gradients(Steps& model, const Tensor& x) {
  manual_seed(9);
  model.zero_grad();
  const Tensor loss = (model(x) * model(x)).mean();
  std::vector<float> values = loss.to(kF32).reshape({1}).to_vector<float>();
  loss.backward();
  for (const Tensor& parameter : model.parameters()) {
    for (const float one : parameter.grad().to(kF32).to_vector<float>()) values.push_back(one);
  }
  return values;
}

TEST(CheckpointCalls, HaveTheBitsOfCallsThatKeepEverythingAndCanBeUndone) {
  manual_seed(3);
  Steps model(8, 3);
  const Tensor x = randn({5, 8}, {}, RandomStream{1, 1});
  const std::vector<float> kept = loss_and_gradients(model, x);
  std::vector<HookHandle> handles = checkpoint_all(model);
  model.steps[0]->runs = 0;
  EXPECT_EQ(loss_and_gradients(model, x), kept);
  EXPECT_EQ(model.steps[0]->runs, 4) << "two calls, each once more";
  EXPECT_TRUE(model.steps[0]->has_hooks());
  handles[0].remove();
  handles[0].remove();
  model.steps[0]->runs = 0;
  EXPECT_EQ(loss_and_gradients(model, x), kept);
  EXPECT_EQ(model.steps[0]->runs, 2);
  EXPECT_FALSE(model.steps[0]->has_hooks());
}

TEST(CheckpointCalls, KeepTheirInputsAlone) {
  Steps model(256, 4);
  const Tensor x = randn({64, 256});
  const auto kept_bytes = [&] {
    const int64_t before = memory_stats()->current();
    const Tensor y = model(x);
    return memory_stats()->current() - before;
  };
  const int64_t all = kept_bytes();
  const auto handles = checkpoint_all(model);
  const int64_t row = x.nbytes();
  // The output of each block is the input of the next one.
  EXPECT_LE(kept_bytes(), 4 * row + 4096);
  EXPECT_GE(all, 4 * 5 * row);
  memory_stats()->reset_peak();
  const int64_t before = memory_stats()->current();
  model(x).sum().backward();
  // One block's own at a time, beside the inputs and the gradients of weights.
  int64_t weights = 0;
  for (const Tensor& parameter : model.parameters()) weights += parameter.nbytes();
  EXPECT_LE(memory_stats()->peak() - before, weights + all / 4 + 12 * row);
}

TEST(CheckpointCalls, InsideOfOneAnotherAndUnderAutocastHaveTheSameBits) {
  manual_seed(3);
  Steps model(8, 2);
  const Tensor x = randn({5, 8}, {}, RandomStream{1, 1});
  for (const bool low : {false, true}) {
    precision::AppliedPolicy policy;
    if (low) policy = precision::apply(model, precision::Policy::autocast(kBF16));
    const std::vector<float> kept = loss_and_gradients(model, x);
    auto handles = checkpoint_all(model);
    EXPECT_EQ(loss_and_gradients(model, x), kept);
    handles.push_back(model.checkpoint_calls());
    EXPECT_EQ(loss_and_gradients(model, x), kept);
    handles.push_back(model.steps[1]->up.checkpoint_calls());
    EXPECT_EQ(loss_and_gradients(model, x), kept);
    for (HookHandle& handle : handles) handle.remove();
    policy.remove();
  }
}

TEST(CheckpointCalls, HooksOfTheModuleRunOnceAndSecondBackwardsRunItAgain) {
  manual_seed(3);
  Steps model(4, 1);
  Step& step = *model.steps[0];
  const HookHandle handle = step.checkpoint_calls();
  int before = 0, after = 0, backward = 0, scopes = 0, open = 0;
  step.register_call_scope([&](nn::ModuleBase&) {
    ++scopes, ++open;
    return std::shared_ptr<void>(&open, [](void* count) { --*static_cast<int*>(count); });
  });
  step.register_forward_pre_hook([&](nn::ModuleBase&, nn::TensorRefs inputs) {
    ++before;
    *inputs[0] = *inputs[0] * 2.0;
  });
  step.register_forward_hook([&](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs) { ++after; });
  step.register_full_backward_hook(
      [&](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs) { ++backward; });
  const Tensor x = randn({3, 4}).set_requires_grad();
  const Tensor loss = (step(x) * step.up.weight.sum()).sum();
  loss.backward({}, true);
  const std::vector<float> first = x.grad().to_vector<float>();
  x.zero_grad();
  loss.backward();
  EXPECT_EQ(x.grad().to_vector<float>(), first);
  EXPECT_EQ(before, 1);
  EXPECT_EQ(after, 1);
  EXPECT_EQ(backward, 2);
  EXPECT_EQ(scopes, 3) << "around forward and both recomputations";
  EXPECT_EQ(open, 0);
  EXPECT_EQ(step.runs, 3);
}

struct WrittenCache {
  int writes = 0;
  void visit_tensors(auto&&) {}
};
struct TensorPair {
  Tensor left, right;
  void visit_tensors(auto&& visit) { visit(left), visit(right); }
};
struct Choosy : nn::Module<Choosy> {
  Choosy() : fc(add<nn::Linear>("fc", 4, 4)) {}
  TensorPair forward(const TensorPair& pair, const WrittenCache* cache, double factor) {
    TensorPair result;
    result.left = fc(pair.left) * factor;
    if (pair.right.defined()) result.right = fc(pair.right).tanh();
    if (cache != nullptr) result.left = result.left * 2.0;
    return result;
  }
  Tensor forward(const Tensor& x, WrittenCache& cache) {
    ++cache.writes;
    return fc(x).tanh();
  }
  Tensor forward(std::span<Tensor> list) { return fc(list[0]).tanh(); }
  nn::Linear& fc;
};

TEST(CheckpointCalls, TakeStructsAbsentTensorsAndNumbers) {
  manual_seed(3);
  Choosy model;
  const auto run = [&](bool both) {
    model.zero_grad();
    TensorPair pair{.left = randn({2, 4}, {}, RandomStream{1, 1}).set_requires_grad(), .right = {}};
    if (both) pair.right = randn({2, 4}, {}, RandomStream{1, 2});
    const TensorPair out = model(pair, nullptr, 1.5);
    (both ? out.left.sum() + out.right.sum() : out.left.sum()).backward();
    std::vector<float> values = pair.left.grad().to_vector<float>();
    for (const float one : model.fc.weight.grad().to_vector<float>()) values.push_back(one);
    return values;
  };
  const std::vector<float> one = run(false), two = run(true);
  const HookHandle handle = model.checkpoint_calls();
  EXPECT_EQ(run(false), one);
  EXPECT_EQ(run(true), two);
}

TEST(CheckpointCalls, RefuseWhatCannotBeKeptAndRunItWithoutGradients) {
  Choosy model;
  const HookHandle handle = model.checkpoint_calls();
  const Tensor x = ones({2, 4});
  WrittenCache cache;
  std::vector<Tensor> list = {x};
  const TensorPair pair{.left = x, .right = {}};
  const auto refused = [](const std::string& message, const char* argument) {
    EXPECT_NE(message.find("checkpoint_calls: argument " + std::string(argument)),
              std::string::npos)
        << message;
    EXPECT_NE(message.find("Choosy"), std::string::npos) << message;
  };
  refused(message_of<UnsupportedError>([&] { model(x, cache); }), "2");
  refused(message_of<UnsupportedError>([&] { model(pair, &cache, 1.0); }), "2");
  refused(message_of<UnsupportedError>([&] { model(std::span<Tensor>(list)); }), "1");
  EXPECT_EQ(cache.writes, 0);
  const NoGradGuard no_grad;
  model(x, cache);
  model(pair, &cache, 1.0);
  model(std::span<Tensor>(list));
  EXPECT_EQ(cache.writes, 1);
}

TEST(CheckpointCalls, AModuleThatIsGoneBeforeItsBackwardIsAnError) {
  Tensor loss;
  {
    Steps model(4, 1);
    const HookHandle handle = model.steps[0]->checkpoint_calls();
    loss = model(ones({2, 4})).sum();
  }
  const std::string message = message_of<AutogradError>([&] { loss.backward(); });
  EXPECT_NE(message.find("a Step whose call is calculated again in backward is gone"),
            std::string::npos)
      << message;
}

// Every module whose forward writes buffers, in two steps: without recomputation, by
// checkpoint_calls(), by checkpoint() around the call, and with one in the other.
template <class Make>
void expect_state_written_once(const char* name, const Make& make, const Tensor& x) {
  const auto state_of = [&](bool calls, bool around) {
    manual_seed(7);
    const auto model = make();
    HookHandle handle;
    if (calls) handle = model->checkpoint_calls();
    std::vector<std::vector<double>> values;
    for (int step = 0; step < 2; ++step) {
      const auto run = [&](const Tensor& in) { return tanh((*model)(in)); };
      const Tensor in = (x * (1.0 + step)).set_requires_grad();
      square(around ? checkpoint(run, in) : run(in)).sum().backward();
      values.push_back(in.grad().to_vector());
    }
    for (const auto& [key, value] : model->state_dict()) values.push_back(value.to_vector());
    return values;
  };
  const auto once = state_of(false, false);
  EXPECT_EQ(state_of(true, false), once) << name << " by checkpoint_calls()";
  EXPECT_EQ(state_of(false, true), once) << name << " by checkpoint()";
  EXPECT_EQ(state_of(true, true), once) << name << " by both";
}

TEST(CheckpointCalls, WriteTheBuffersOfAForwardOnce) {
  const Tensor rows = randn({6, 4, 5}, {}, RandomStream{1, 1});
  const Tensor image = randn({3, 4, 5, 2}, {}, RandomStream{1, 2});
  for (const std::optional<double> momentum : {std::optional(0.1), std::optional<double>()}) {
    const nn::BatchNormOptions options{.momentum = momentum};
    expect_state_written_once(
        "BatchNorm1d", [&] { return std::make_unique<nn::BatchNorm1d>(4, options); }, rows);
    expect_state_written_once(
        "BatchNorm2d", [&] { return std::make_unique<nn::BatchNorm2d>(4, options); }, image);
  }
  const nn::InstanceNormOptions tracked{.affine = true, .track_running_stats = true};
  expect_state_written_once(
      "InstanceNorm1d", [&] { return std::make_unique<nn::InstanceNorm1d>(4, tracked); }, rows);
  expect_state_written_once(
      "InstanceNorm2d", [&] { return std::make_unique<nn::InstanceNorm2d>(4, tracked); }, image);
  expect_state_written_once(
      "spectral_norm",
      [] {
        auto model = std::make_unique<nn::Linear>(5, 3);
        nn::spectral_norm(*model);
        return model;
      },
      rows);
}

TEST(CheckpointCalls, RunningStatisticsOfTheFunctionalNormsFollowABatchOnce) {
  const Tensor x = randn({6, 4, 5}, {}, RandomStream{1, 1});
  for (const bool instance : {false, true}) {
    const auto statistics = [&](bool again) {
      const Tensor running_mean = zeros({4}), running_var = ones({4});
      const auto run = [&](const Tensor& in) {
        return tanh(instance ? instance_norm(in, running_mean, running_var)
                             : batch_norm(in, running_mean, running_var, {}, {}, true));
      };
      const Tensor in = (x * 2.0).set_requires_grad();
      const Tensor loss = square(again ? checkpoint(run, in) : run(in)).sum();
      loss.backward({}, true);
      loss.backward();
      return std::pair(running_mean.to_vector(), running_var.to_vector());
    };
    EXPECT_EQ(statistics(true), statistics(false)) << (instance ? "instance" : "batch");
  }
}

}  // namespace
}  // namespace tessera::test_checkpoint_calls
