// Losses and gradient norms of pipelines beside those that torch's pipelines gave, from equal weights.
// ctest labels: threads
#include <tessera/nn/container.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/norm.h>

#include "golden_files.h"
#include "parallel/golden_numbers.h"
#include "parallel/pipeline_training.h"

namespace tessera::test_pipeline_torch {
namespace {

using namespace test_pipeline;

constexpr int64_t kWidth = 8;
constexpr double kTolerance = 1e-11;  // f64

struct Residual : nn::Module<Residual> {
  explicit Residual(int64_t index)
      : norm(add<nn::LayerNorm>("norm", kWidth)),
        fc(add<nn::Linear>("fc", kWidth, 2 * kWidth)),
        proj(add<nn::Linear>("proj", 2 * kWidth, kWidth)) {
    to(kF64);
    const NoGradGuard no_grad;
    int64_t salt = 10 * index;
    for (const Tensor& parameter : parameters()) {
      parameter.copy_(tests::golden_numbers(parameter.shape(), ++salt));
    }
  }
  Tensor forward(const Tensor& x) { return x + proj(gelu(fc(norm(x)))); }
  nn::LayerNorm& norm;
  nn::Linear &fc, &proj;
};
struct Residuals : nn::Module<Residuals> {
  Residuals() : blocks(add<nn::ModuleList>("blocks")) {
    for (int64_t i = 0; i < 4; ++i) blocks.append<Residual>(i);
  }
  Tensor forward(const Tensor& inputs, const Tensor& targets) {
    Tensor x = inputs;
    for (size_t i = 0; i < blocks.size(); ++i) x = blocks.at<Residual>(i)(x);
    return mean(square(x - targets));
  }
  nn::ModuleList& blocks;
};

TEST(PipelineTorch, LossesAndNormsAreThoseOfTorchsPipelines) {
  const nlohmann::json cases = tests::golden_json("pipeline.json")["cases"];
  ASSERT_EQ(cases.size(), 3u);
  for (const nlohmann::json& golden : cases) {
    const auto losses = golden["losses"].get<std::vector<double>>();
    const auto norms = golden["norms"].get<std::vector<double>>();
    const int per_rank = golden["stages_per_rank"];
    const bool fills = golden["schedule"] == "gpipe";
    for (const int data_ranks : {1, 2}) {
      SCOPED_TRACE(golden["schedule"].get<std::string>() + ", " + std::to_string(per_rank) +
                   " stages per rank, " + std::to_string(data_ranks) + " data ranks");
      compared_ranks(2 * data_ranks, [&](int) {
        Accelerator accelerator(
            settings_of({.pp = 2,
                         .stages_per_rank = per_rank,
                         .micro_batches = 4 / data_ranks,
                         .schedule = fills ? distributed::PipelineSchedule::kGPipe
                                           : distributed::PipelineSchedule::kOneFOneB,
                         .sharding = data_ranks > 1 ? Sharding::kFsdp : Sharding::kDdp}));
        Residuals model;
        Pipeline pipeline = accelerator.pipeline(
            model,
            {.cuts = per_rank == 1 ? std::vector<std::string>{"blocks.2"}
                                   : std::vector<std::string>{"blocks.1", "blocks.2", "blocks.3"}});
        optim::SGD optimizer(model.named_parameters(), {.lr = 0.005, .momentum = 0.9});
        accelerator.prepare(optimizer);
        for (size_t step = 0; step < losses.size(); ++step) {
          const Shape shape = {8, 3, kWidth};
          const Tensor inputs = tests::golden_numbers(shape, 100 + static_cast<int64_t>(step));
          const Tensor targets = tests::golden_numbers(shape, 200 + static_cast<int64_t>(step));
          std::vector<Batch> window;
          for (int64_t i = accelerator.data_ranks().rank(); i < 4; i += data_ranks) {
            window.push_back({inputs.narrow(0, 2 * i, 2), targets.narrow(0, 2 * i, 2)});
          }
          const Tensor own = pipeline.step(window, [&](const Batch& batch) -> Tensor {
            return model(batch.inputs, batch.targets);
          });
          EXPECT_NEAR(accelerator.reduce(own.clone()).item(), losses[step],
                      kTolerance * losses[step]);
          EXPECT_NEAR(accelerator.clip_grad_norm(model.parameters(), 1e6).item(), norms[step],
                      kTolerance * norms[step]);
          optimizer.step();
          optimizer.zero_grad();
        }
      });
    }
  }
}

}  // namespace
}  // namespace tessera::test_pipeline_torch
