// DTensors in training: gradients, optimizers, loss scaling and state dictionaries of parts.
// ctest labels: threads
#include <limits>

#include <tessera/core/state/state_dict.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/data_parallel/replicate.h>
#include <tessera/nn/module.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/optimizers.h>
#include <tessera/precision/grad_scaler.h>

#include "distributed/dtensor_fixture.h"

namespace tessera::distributed::test_dtensor_training {
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
      // So does the whole; another tensor of the part's shape does not.
      StateDict other = state;
      other.set(name, full_tensor(state.at(name)));
      optim::AdamW last({{"w", w}}, {.lr = 0.5});
      last.load_state_dict(other);
      expect_equal(to_local(last.state_dict().at(name)), to_local(state.at(name)), "of the whole");
      if (w.numel() == start.numel()) continue;
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
    // A module whose parameters are parts loads parts of the same placements, and of whole tensors
    // its part.
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
    EXPECT_EQ(message_of<ValueError>([&] { module.load_state_dict(parts); }),
              "load_state_dict: the state does not fit OneWeight:\n  of another shape (1):\n    "
              "weight: the module has f32[3, 4] on mesh(dp=2): [Shard(0)], the state has f32[3, 4] "
              "on mesh(dp=2): [Replicate]\n  a tensor of another shape cannot be loaded; make the "
              "module of the shape that the state has, or remove the tensor from the state");
    parts.set("weight", to_local(part));
    EXPECT_THROW(module.load_state_dict(parts), ValueError) << "the part is not the whole";
    for (const Placement& placement : {Placement(Shard(1)), Placement(FlatShard{4, 9})}) {
      const Tensor other = distribute_tensor(numbered({3, 4}), mesh, {placement});
      OneWeight target(other);
      parts.set("weight", numbered({3, 4}, 70).to(kF64));
      target.load_state_dict(parts);
      expect_equal(full_tensor(other), numbered({3, 4}, 70), describe(other));
      parts.set("weight", transpose(numbered({4, 3}), 0, 1));
      target.load_state_dict(parts);
      expect_equal(full_tensor(other), transpose(numbered({4, 3}), 0, 1), "not in order");
    }
    // One without elements takes those of its part.
    const Tensor meta =
        distribute_tensor(zeros({3, 4}, {.device = kMeta}), mesh, {FlatShard{1, 7}});
    OneWeight empty(meta);
    parts.set("weight", numbered({3, 4}));
    empty.load_state_dict(parts);
    EXPECT_FALSE(meta.is_meta());
    expect_equal(full_tensor(meta), numbered({3, 4}), describe(meta));
    EXPECT_THROW(replicate(module, mesh), UnsupportedError);
  });
}

// Element by element: each rank's averages are its part of those of whole parameters.
TEST(DTensorTraining, AveragesOfPartsAreThePartsOfAverages) {
  compared_ranks(3, [&](int) {
    Mesh mesh(world());
    const Shape shape = {7, 2};
    for (const Placements& way : {Placements{Shard(0)}, Placements{Shard(1)}}) {
      const Tensor whole = numbered(shape).set_requires_grad();
      const Tensor part = distribute_tensor(whole, mesh, way);
      const auto fill_both = [&](double value) {
        const NoGradGuard no_grad;
        fill_(whole, value);
        fill_(raw::alias(part), value);
      };
      optim::EMA expected({{"w", whole}}, {.decay = 0.75}), average({{"w", part}}, {.decay = 0.75});
      EXPECT_EQ(calls_of([&] {
                  fill_both(3);
                  average.update();
                }),
                "");
      expected.update();
      const Tensor held = average.averages()[0].tensor;
      EXPECT_EQ(describe(held), describe(part));
      expect_equal(full_tensor(held), expected.averages()[0].tensor, describe(part));
      const std::vector<double> values = expected.averages()[0].tensor.to_vector();
      {
        const optim::EMA::Scope scope(average);
        EXPECT_TRUE(is_dtensor(part));
        EXPECT_EQ(full_tensor(part).to_vector(), values);
      }
      EXPECT_EQ(full_tensor(part).to_vector(), std::vector<double>(14, 3));
      // States of the same parts go round; others are refused and change nothing.
      const StateDict saved = average.state_dict().clone();
      fill_both(9);
      average.update();
      average.load_state_dict(saved);
      EXPECT_EQ(full_tensor(held).to_vector(), values);
      EXPECT_THROW(average.load_state_dict(expected.state_dict()), Error);
      EXPECT_THROW(average.rebind({{"w", distribute_tensor(whole, mesh, {Replicate()})}}), Error);
      const Tensor plain = zeros(part.shape());
      EXPECT_THROW(average.rebind({{"w", plain}}), ValueError) << "a whole of the part's shape";
      StateDict whole_of_shape = saved.clone();
      whole_of_shape.set("average.w", plain);
      EXPECT_THROW(average.load_state_dict(whole_of_shape), ValueError);
      EXPECT_EQ(full_tensor(held).to_vector(), values);
      average.copy_to_parameters();
      EXPECT_EQ(full_tensor(part).to_vector(), values);
    }
    const Tensor summand = from_local(numbered({4}), mesh, {Partial()});
    EXPECT_THROW(optim::EMA({{"w", summand}}), UnsupportedError);
  });
}

}  // namespace
}  // namespace tessera::distributed::test_dtensor_training
