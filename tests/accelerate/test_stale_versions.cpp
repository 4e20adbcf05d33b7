// Whoever writes a tensor in place says so by its version: else autograd would go on with saved
// values that are no longer there, and autocast with copies of weights that are stale.
// ctest labels: threads
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include <tessera/accelerate/state/model_io.h>
#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/distributed/data_parallel/replicate.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/nn/init.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/norm.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/optimizers.h>

#include "distributed/compared_ranks.h"
#include "finished_process.h"
#include "optim/optimizer_kinds.h"

namespace tessera::test_stale_versions {
namespace {

// `write` changes `tensor`: its version moves, also seen through a view and by whoever saved it.
void expect_said(const char* what, const Tensor& tensor, const std::function<void()>& write) {
  SCOPED_TRACE(what);
  const Tensor factor = ones(tensor.shape()).to(tensor.dtype()).set_requires_grad();
  const Tensor product = factor * tensor.detach();  // saves the tensor
  const Tensor view = tensor.detach().view({-1});
  const auto version = tensor.version(), of_view = view.version();
  write();
  EXPECT_NE(tensor.version(), version);
  EXPECT_NE(view.version(), of_view);
  EXPECT_THROW(product.sum().backward(), AutogradError);
}

struct Parameters {
  explicit Parameters(DType dtype = kF32) {
    for (const char* name : {"a", "b"}) {
      named.push_back({name, full({4, 4}, 0.5).to(dtype).detach().clone().set_requires_grad()});
      named.back().tensor.set_grad(full({4, 4}, 2).to(dtype));
    }
  }
  const Tensor& first() const { return named[0].tensor; }
  TensorList list() const { return {named[0].tensor, named[1].tensor}; }
  NamedTensors named;
};

template <class T>
class StaleVersionsOfOptimizers : public testing::Test {};
TYPED_TEST_SUITE(StaleVersionsOfOptimizers, optim::OptimizerKinds);

TYPED_TEST(StaleVersionsOfOptimizers, EveryStep) {
  for (const auto& options : optim::kOptions<TypeParam>) {
    for (const DType dtype : {kF32, kBF16}) {
      const Parameters parameters(dtype);
      TypeParam optimizer(parameters.named, options);
      for (int step = 0; step < 2; ++step) {
        for (const auto& [name, tensor] : parameters.named) {
          expect_said(TypeParam::kName, tensor, [&] { optimizer.step(); });
        }
      }
    }
  }
}

TEST(StaleVersions, GradientsThatAreClippedZeroedOrAddedTo) {
  const Parameters parameters;
  for (const Tensor& parameter : parameters.list()) {
    const Tensor gradient = parameter.grad();
    fill_(gradient, 2);
    expect_said("clip_grad_norm", gradient, [&] { optim::clip_grad_norm(parameters.list(), 0.1); });
    expect_said("clip_grad_value", gradient,
                [&] { optim::clip_grad_value(parameters.list(), 0.01); });
    expect_said("zero_grad", gradient,
                [&] { optim::SGD(parameters.named, {.lr = 0.1}).zero_grad(false); });
  }
  const Parameters waiting;
  const Tensor loss = (waiting.first() * 3.0).sum();
  expect_said("accumulation", waiting.first().grad(), [&] { loss.backward(); });
}

TEST(StaleVersions, AveragesAndTheirScope) {
  for (const DType dtype : {kF32, kBF16}) {
    const Parameters parameters(dtype);
    optim::EMA average(parameters.named, {.decay = 0.5});
    const auto change = [&] {
      const NoGradGuard no_grad;
      for (const Tensor& parameter : parameters.list()) add_(parameter, 1);
    };
    change();
    expect_said("update", average.averages()[1].tensor, [&] { average.update(); });
    for (const Tensor& parameter : parameters.list()) {
      std::optional<optim::EMA::Scope> scope;
      expect_said("a scope begins", parameter, [&] { scope.emplace(average); });
      expect_said("a scope ends", parameter, [&] { scope.reset(); });
      expect_said("copy_to_parameters", parameter, [&] { average.copy_to_parameters(); });
      change();
    }
  }
}

// The copies of weights that autocast keeps follow every writer.
TEST(StaleVersions, UnderAutocastTheNextForwardSeesWhatWasWritten) {
  nn::Linear layer(4, 4, {.bias = false});
  optim::EMA average(layer.named_parameters(), {.decay = 0.5});
  optim::SGD optimizer(layer.named_parameters(), {.lr = 0.5});
  const Tensor x = ones({1, 4});
  const auto output = [&] {
    const AutocastGuard autocast(kBF16);
    return layer(x).to(kF32).detach().clone();
  };
  const auto is_fresh = [&](const char* what) {
    const Tensor expected =
        matmul(x, layer.weight.detach().to(kBF16).to(kF32).t()).to(kBF16).to(kF32);
    EXPECT_EQ(output().to_vector(), expected.to_vector()) << what;
  };
  is_fresh("at first");
  {
    const AutocastGuard autocast(kBF16);
    layer(x).sum().backward();
  }
  optimizer.step();
  is_fresh("after a step");
  average.update();
  {
    const optim::EMA::Scope scope(average);
    is_fresh("in the scope of averages");
  }
  is_fresh("after it");
  average.copy_to_parameters();
  is_fresh("with the averages");
  const NoGradGuard no_grad;
  nn::init::constant(layer.weight, 3);
  is_fresh("initialised anew");
  layer.load_state_dict(nn::Linear(4, 4, {.bias = false}).state_dict());
  is_fresh("loaded");
  layer.weight.set_data(full({4, 4}, 2));
  is_fresh("with other memory");
  mul_(layer.weight.detach().narrow(0, 1, 1), 5);
  is_fresh("written through a view");
}

TEST(StaleVersions, InitialValuesAndStatesThatAreLoaded) {
  const NoGradGuard no_grad;
  nn::Linear layer(4, 4), other(4, 4);
  const Tensor& weight = layer.weight;
  const auto with_grad = [](const std::function<void()>& write) {
    return [write] {
      const NoGradGuard inner;
      write();
    };
  };
  const EnableGradGuard grad;
  using namespace nn::init;
  expect_said("constant", weight, with_grad([&] { constant(weight, 2); }));
  expect_said("zeros", weight, with_grad([&] { nn::init::zeros(weight); }));
  expect_said("ones", weight, with_grad([&] { nn::init::ones(weight); }));
  expect_said("uniform", weight, with_grad([&] { uniform(weight); }));
  expect_said("normal", weight, with_grad([&] { normal(weight); }));
  expect_said("trunc_normal", weight, with_grad([&] { trunc_normal(weight); }));
  expect_said("eye", weight, with_grad([&] { nn::init::eye(weight); }));
  expect_said("xavier_uniform", weight, with_grad([&] { xavier_uniform(weight); }));
  expect_said("xavier_normal", weight, with_grad([&] { xavier_normal(weight); }));
  expect_said("kaiming_uniform", weight, with_grad([&] { kaiming_uniform(weight); }));
  expect_said("kaiming_normal", weight, with_grad([&] { kaiming_normal(weight); }));
  expect_said("orthogonal", weight, with_grad([&] { orthogonal(weight); }));
  expect_said("sparse", weight, with_grad([&] { sparse(weight, 0.5); }));
  expect_said("load_state_dict", weight, [&] { layer.load_state_dict(other.state_dict()); });
  const TestFolder folder;
  accelerate::save_model(other, folder.path("model"));
  expect_said("load_model", weight, [&] { accelerate::load_model(layer, folder.path("model")); });
}

TEST(StaleVersions, StatisticsOfABatchNorm) {
  nn::BatchNorm1d norm(4);
  for (const Tensor& statistic : {norm.running_mean, norm.running_var}) {
    expect_said("training", statistic, [&] { norm(randn({8, 4})); });
  }
  norm.eval();
  const auto version = norm.running_mean.version();
  norm(randn({8, 4}));
  EXPECT_EQ(norm.running_mean.version(), version) << "evaluation writes nothing";
}

TEST(StaleVersions, WhatCollectivesReceive) {
  using namespace distributed;
  compared_ranks(2, [](int rank) {
    Group& ranks = world();
    const Tensor x = full({4}, rank + 1.0), y = full({4}, 1.0), both = full({8}, 1.0);
    expect_said("all_reduce", x, [&] { ranks.all_reduce(x).wait(); });
    if (rank == 1) {
      expect_said("broadcast", x, [&] { ranks.broadcast(x, 0).wait(); });
    } else {
      ranks.broadcast(x, 0).wait();
    }
    expect_said("all_gather", both, [&] { ranks.all_gather(both, x).wait(); });
    const std::vector<Tensor> parts = {full({4}, 0.0), full({4}, 0.0)};
    expect_said("all_gather of a list", parts[1 - rank],
                [&] { ranks.all_gather(parts, x).wait(); });
    expect_said("reduce_scatter", y, [&] { ranks.reduce_scatter(y, both).wait(); });
    expect_said("reduce_scatter_onto", y, [&] { ranks.reduce_scatter_onto(y, both).wait(); });
    const std::vector<Tensor> given = {x, x};
    expect_said("all_to_all", parts[0], [&] { ranks.all_to_all(parts, given).wait(); });
    expect_said("scatter", y,
                [&] { ranks.scatter(y, rank == 0 ? given : std::vector<Tensor>(), 0).wait(); });
    if (rank == 0) {
      expect_said("gather", parts[1], [&] { ranks.gather(parts, x, 0).wait(); });
      ranks.send(x, 1).wait();
    } else {
      ranks.gather({}, x, 0).wait();
      expect_said("recv", y, [&] { ranks.recv(y, 0).wait(); });
    }
  });
}

TEST(StaleVersions, WhatReplicateMakesEqualAndReduces) {
  using namespace distributed;
  compared_ranks(2, [](int rank) {
    manual_seed(static_cast<uint64_t>(rank));
    nn::Linear layer(4, 4);
    Mesh mesh(world());
    std::optional<Replica> replica;
    if (rank == 1) {
      expect_said("initial values", layer.weight, [&] { replica.emplace(replicate(layer, mesh)); });
    } else {
      replica.emplace(replicate(layer, mesh));
    }
    const Tensor own = full({4, 4}, 1.0);
    layer.weight.set_grad(own);
    layer(full({1, 4}, rank + 1.0)).sum().backward();
    const Tensor gradient = layer.weight.grad();
    optim::SGD(layer.named_parameters(), {.lr = 0.1}).step();
    layer.zero_grad(false);
    expect_said("reduction", gradient, [&] { layer(full({1, 4}, rank + 1.0)).sum().backward(); });
  });
}

}  // namespace
}  // namespace tessera::test_stale_versions
