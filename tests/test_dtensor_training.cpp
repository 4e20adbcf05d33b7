// DTensors in training: gradients, optimizers, loss scaling and state dictionaries of parts.
// ctest labels: threads
#include <limits>

#include <tessera/core/raw_views.h>
#include <tessera/core/state_dict.h>
#include <tessera/distributed/shard/replicate.h>
#include <tessera/nn/module.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/optimizers.h>
#include <tessera/precision/grad_scaler.h>

#include "dtensor_fixture.h"

namespace tessera::distributed {
namespace {

TEST(DTensorTraining, GradientsOfLeavesAreDTensorsAndAddUp) {
  compared_ranks(3, [&](int) {
    Mesh mesh(world());
    const Shape shape = {7, 2};
    const Tensor w = distribute_tensor(numbered(shape), mesh, {Shard(0)}).set_requires_grad();
    const auto loss = [&] { return sum(full_tensor(w) * numbered(shape)); };
    loss().backward();
    EXPECT_EQ(describe(w.grad()), describe(w));
    expect_equal(full_tensor(w.grad()), numbered(shape), "grad");
    loss().backward();
    expect_equal(full_tensor(w.grad()), numbered(shape) * Scalar(2), "twice");
    w.zero_grad(false);
    EXPECT_TRUE(is_dtensor(w.grad()));
    expect_equal(full_tensor(w.grad()), zeros(shape), "zeroed");
    w.zero_grad();
    EXPECT_FALSE(w.grad().defined());
    const Tensor inputs[] = {w};
    const Tensor gradient = grad(loss(), inputs)[0];
    EXPECT_EQ(describe(gradient), describe(w));
    // A hook gets the part.
    auto hook = register_hook(w, [&](const Tensor& part) { return part * Scalar(3); });
    loss().backward();
    expect_equal(full_tensor(w.grad()), numbered(shape) * Scalar(3), "hook");
    hook.remove();
    EXPECT_THROW(optim::clip_grad_norm({w}, 1), UnsupportedError);
    optim::clip_grad_value({w}, 2);
    expect_equal(full_tensor(w.grad()), full(shape, 2.0), "clipped");
    w.zero_grad();
    loss().backward({}, false, true);
    EXPECT_EQ(describe(w.grad()), describe(w)) << "with create_graph";
    EXPECT_THROW(loss().backward({}, false, true), UnsupportedError);
    EXPECT_THROW(w.backward(), UnsupportedError);
    EXPECT_THROW(retain_grad(redistribute(w, {Replicate()})), UnsupportedError);
  });
}

TEST(DTensorTraining, TheLocalPartIsAViewWhoseWritesAreSeen) {
  compared_ranks(2, [&](int) {
    Mesh mesh(world());
    const Tensor w = distribute_tensor(numbered({4}), mesh, {Shard(0)}).set_requires_grad();
    const Tensor part = to_local(w);
    EXPECT_EQ(part.storage(), w.storage());
    EXPECT_THROW(part.mul_(2), AutogradError) << "a leaf that requires grad";
    const Tensor square = sum(part * part);
    const uint32_t version = w.version();
    {
      const NoGradGuard no_grad;
      part.mul_(2);
    }
    EXPECT_EQ(w.version(), version + 1) << "one counter for both";
    expect_equal(full_tensor(w).detach(), numbered({4}) * Scalar(2), "written");
    EXPECT_THROW(square.backward(), AutogradError) << "what was saved has been written";
    // Through another handle: version and history follow.
    sum(to_local(w) * to_local(w)).backward();
    expect_equal(full_tensor(w.grad()), numbered({4}) * Scalar(4), "2x");
  });
}

// Each rank has its share of a batch; the weights lie in three ways.
TEST(DTensorTraining, TrainingOnPartsIsTrainingOnTheWhole) {
  compared_ranks(4, [&](int rank) {
    Mesh mesh(world(), {{"dp_replicate", 2}, {"dp_shard", 2}});
    const Tensor start = numbered({5, 3}) * Scalar(0.125);
    const auto batch = [&](int r) { return numbered({2, 5}, r) * Scalar(0.25); };
    const auto loss_of = [&](const Tensor& w, const Tensor& x) {
      const Tensor y = matmul(x, w);
      return sum(y * y);
    };
    const Tensor plain = start.clone().set_requires_grad();
    optim::AdamW expected({{"w", plain}}, {.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      expected.zero_grad();
      Tensor loss = loss_of(plain, batch(0));
      for (int r = 1; r < 4; ++r) loss = loss + loss_of(plain, batch(r));
      loss.backward();
      expected.step();
    }
    const Placements partial = {Partial(), Partial()};
    const std::pair<Placements, const char*> ways[] = {
        {{Replicate(), Shard(0)}, "reduce_scatter all_reduce"},
        {{Shard(1), Shard(0)}, "reduce_scatter reduce_scatter"},
        {{Replicate(), Replicate()}, "all_reduce all_reduce"},
    };
    for (const auto& [placements, calls] : ways) {
      const Tensor w = distribute_tensor(start, mesh, placements).set_requires_grad();
      optim::AdamW optimizer({{"w", w}}, {.lr = 0.1});
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        const Tensor loss = loss_of(full_tensor(w, {.grad_placements = partial}), batch(rank));
        EXPECT_EQ(calls_of([&] { loss.backward(); }), calls);
        const uint32_t version = w.version();
        optimizer.step();
        EXPECT_GT(w.version(), version);
      }
      const std::vector<double> got = full_tensor(w).to_vector(), wanted = plain.to_vector();
      for (size_t i = 0; i < got.size(); ++i) {
        EXPECT_NEAR(got[i], wanted[i], 1e-5) << describe(w);  // sums of four in another order
      }
      // States are parts, and go from one optimizer to the next as such.
      const StateDict state = optimizer.state_dict();
      const std::string name = "state.w." + std::string("exp_avg");
      EXPECT_EQ(describe(state.at(name)), describe(w));
      optim::AdamW next({{"w", w}}, {.lr = 0.5});
      next.load_state_dict(state);
      expect_equal(to_local(next.state_dict().at(name)), to_local(state.at(name)), "loaded");
      StateDict other = state;
      other.set(name, to_local(state.at(name)));
      EXPECT_THROW(next.load_state_dict(other), ValueError) << "a plain tensor for a part";
    }
  });
}

TEST(DTensorTraining, AParameterThatIsASummandIsNotUpdated) {
  compared_ranks(2, [&](int) {
    Mesh mesh(world());
    const Tensor w = from_local(numbered({3}), mesh, {Partial()}).set_requires_grad();
    sum(full_tensor(w)).backward();
    EXPECT_EQ(placements_of(w.grad()), Placements{Replicate()});
    optim::SGD optimizer({{"w", w}}, {.lr = 0.1});
    EXPECT_THROW(optimizer.step(), UnsupportedError);
    const Tensor plain = numbered({3}).set_requires_grad();
    plain.set_grad(distribute_tensor(numbered({6}), mesh, {Shard(0)}));
    optim::SGD other({{"w", plain}}, {.lr = 0.1});
    EXPECT_THROW(other.step(), UnsupportedError);
  });
}

TEST(DTensorTraining, ALossScalerMustAgreeAmongTheRanks) {
  compared_ranks(2, [&](int rank) {
    Mesh mesh(world());
    const Tensor w = distribute_tensor(numbered({4}), mesh, {Shard(0)}).set_requires_grad();
    optim::SGD optimizer({{"w", w}}, {.lr = 0.1});
    const auto step = [&](precision::GradScaler& scaler) {
      optimizer.zero_grad();
      sum(full_tensor(w)).backward();
      if (rank == 1) raw::alias(w.grad()).mul_(Scalar(std::numeric_limits<double>::infinity()));
      return scaler.step(optimizer);
    };
    precision::GradScaler alone;
    EXPECT_THROW(step(alone), UnsupportedError);
    precision::GradScaler together;
    together.set_agreement([](const Tensor& found) { all_reduce(found, ReduceOp::kMax); });
    EXPECT_FALSE(step(together));
    expect_equal(full_tensor(w).detach(), numbered({4}), "no rank stepped");
  });
}

struct OneWeight : nn::Module<OneWeight> {
  explicit OneWeight(const Tensor& value) : weight(parameter("weight", value)) {}
  Tensor forward(const Tensor& x) { return matmul(x, full_tensor(weight)); }
  const Tensor& weight;
};

TEST(DTensorTraining, AStateDictHoldsItAsItIs) {
  compared_ranks(2, [&](int) {
    Mesh mesh(world());
    const Tensor w = distribute_tensor(numbered({5}), mesh, {Shard(0)});
    StateDict state;
    state.set("w", w);
    const StateDict snapshot = state.clone();
    EXPECT_EQ(describe(snapshot.at("w")), describe(w));
    {
      const NoGradGuard no_grad;
      to_local(w).mul_(2);
    }
    expect_equal(full_tensor(state.at("w")), numbered({5}) * Scalar(2), "alive");
    expect_equal(full_tensor(snapshot.at("w")), numbered({5}), "snapshot");
    EXPECT_EQ(describe(w.detach()), describe(w));
    // A module whose parameters are parts loads parts of the same placements.
    const Tensor part = distribute_tensor(numbered({3, 4}), mesh, {Shard(0)});
    OneWeight module(part);
    StateDict parts = module.state_dict().clone();
    EXPECT_EQ(describe(parts.at("weight")), describe(part));
    {
      const NoGradGuard no_grad;
      to_local(part).zero_();
    }
    module.load_state_dict(parts);
    expect_equal(full_tensor(part), numbered({3, 4}), "loaded");
    parts.set("weight", distribute_tensor(zeros({3, 4}), mesh, {Replicate()}));
    EXPECT_THROW(module.load_state_dict(parts), Error);
    parts.set("weight", to_local(part));
    EXPECT_THROW(module.load_state_dict(parts), UnsupportedError);
    EXPECT_THROW(replicate(module, mesh), UnsupportedError);
  });
}

}  // namespace
}  // namespace tessera::distributed
