// The facade with parameters that are parts: clipping, loss scaling, and steps that are left out.
// ctest labels: threads
#include <limits>

#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/mesh/dtensor.h>

#include "accelerate/accelerator_fixture.h"

namespace tessera::test_accelerator_parts {
namespace {

using distributed::compared_ranks;
using distributed::full_tensor;
using distributed::is_dtensor;
using distributed::Mesh;
using distributed::Placements;
using distributed::Replicate;
using distributed::Shard;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

Tensor input(int step) { return randn({7, 5}, {}, RandomStream{3, static_cast<uint64_t>(step)}); }
Tensor whole_of(const Tensor& w) { return is_dtensor(w) ? full_tensor(w) : w; }

AcceleratorOptions options_of(Precision precision) {
  return {.mixed_precision = precision, .loss_scale = {.init_scale = 1024}};
}

// The norms and the weights after a few clipped steps.
struct ClippedRun {
  std::vector<double> norms;
  std::vector<float> weights;
};
ClippedRun clipped_steps(Precision precision, const Tensor& w) {
  Accelerator accelerator(options_of(precision));
  optim::AdamW optimizer({{"w", w}}, {.lr = 0.1});
  accelerator.prepare(optimizer);
  ClippedRun run;
  for (int step = 0; step < 3; ++step) {
    accelerator.backward(sum(whole_of(w) * whole_of(w) * input(step)));
    run.norms.push_back(accelerator.clip_grad_norm({w}, 0.5).item());
    // Another list of parameters than the optimizer's: gradients are clipped in their places.
    if (step == 1) run.norms.push_back(accelerator.clip_grad_norm({w, ones({2})}, 0.25).item());
    optimizer.step();
    optimizer.zero_grad();
  }
  run.weights = whole_of(w).detach().to_vector<float>();
  return run;
}

TEST(AcceleratorParts, ClippedStepsHaveTheBitsOfOneProcess) {
  for (const Precision precision : {Precision::kNo, Precision::kFP16}) {
    const ClippedRun expected = clipped_steps(precision, input(9).set_requires_grad());
    compared_ranks(4, [&](int) {
      Mesh mesh(distributed::world(), {{"dp_replicate", 2}, {"dp_shard", 2}});
      for (const Placements& by : {Placements{Replicate(), Shard(0)}, {Shard(0), Shard(1)}}) {
        const Tensor w = distribute_tensor(input(9), mesh, by).set_requires_grad();
        const ClippedRun run = clipped_steps(precision, w);
        EXPECT_EQ(run.norms, expected.norms) << describe(by);
        EXPECT_EQ(run.weights, expected.weights) << describe(by);
      }
    });
  }
}

TEST(AcceleratorParts, AnOverflowOnOneRankLeavesOutTheStepOfAll) {
  enum class Look { kAlone, kClipped, kClippedBefore };
  for (const Look look : {Look::kAlone, Look::kClipped, Look::kClippedBefore}) {
    compared_ranks(3, [&](int rank) {
      Mesh mesh(distributed::world());
      Accelerator accelerator(options_of(Precision::kFP16));
      const Tensor w = distribute_tensor(input(9), mesh, {Shard(0)}).set_requires_grad();
      optim::SGD optimizer({{"w", w}}, {.lr = 0.1});
      accelerator.prepare(optimizer);
      const auto step = [&](bool overflows) {
        accelerator.backward(sum(whole_of(w) * input(0)));
        const auto overflow = [&] {
          if (overflows && rank == 1) raw::alias(w.grad()).fill_(kInfinity);
        };
        if (look == Look::kClippedBefore) {
          EXPECT_TRUE(std::isfinite(accelerator.clip_grad_norm({w}, 0.5).item()));
        }
        overflow();
        if (look == Look::kClipped) {
          EXPECT_EQ(std::isfinite(accelerator.clip_grad_norm({w}, 0.5).item()), !overflows);
        }
        if (look == Look::kClippedBefore && overflows && rank == 1) w.set_grad(w.grad().detach());
        optimizer.step();
        optimizer.zero_grad();
        return !accelerator.optimizer_step_was_skipped();
      };
      EXPECT_FALSE(step(true));
      EXPECT_EQ(full_tensor(w).detach().to_vector(), input(9).to_vector()) << "no rank stepped";
      EXPECT_TRUE(step(false));
      EXPECT_EQ(accelerator.loss_scale(), 512) << "rank " << rank;
    });
  }
}

}  // namespace
}  // namespace tessera::test_accelerator_parts
