// GPT-2 on threads as ranks: losses and parameters are those of one process that accumulates, and in
// every mode those that were recorded of PyTorch.
// ctest labels: threads
// ctest ranks: 2 4
#include <tessera/core/random.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/optimizers.h>

#include "distributed/sharded_fixture.h"
#include "golden_files.h"

namespace tessera::distributed::test_replicate_gpt2 {
namespace {

constexpr nn::models::GptConfig kTiny{
    .vocab_size = 50, .context = 16, .width = 32, .layers = 2, .heads = 2};
constexpr int kSteps = 4;

struct Training {
  std::vector<double> losses, norms;
  std::vector<std::vector<float>> parameters;
};

// Trains on micro-batches index, index + stride... of each step; `replica` and `sum_losses` where
// there are ranks.
template <class Synchronise>
Training train(nn::models::Gpt& model, int first, int stride, int micro_batches,
               const Synchronise& synchronise) {
  optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
  Training run;
  for (int step = 0; step < kSteps; ++step) {
    double loss = 0;
    for (int micro = first; micro < micro_batches; micro += stride) {
      const RandomStream stream{5, static_cast<uint64_t>(micro)};
      const Tensor tokens = randint(0, kTiny.vocab_size, {2, 17}, kI64, stream);
      const Tensor inputs = tokens.narrow(1, 0, 16).contiguous();
      const Tensor targets = tokens.narrow(1, 1, 16).contiguous();
      const Tensor out = model(inputs, targets).loss;
      out.backward();
      loss += out.item();
    }
    run.losses.push_back(synchronise(loss));
    run.norms.push_back(
        optim::clip_grad_norm(model.parameters(), 0.5, {.fold_into = &optimizer}).item());
    optimizer.step();
    optimizer.zero_grad();
  }
  run.parameters = values_of(model);
  return run;
}

TEST(ReplicateGpt2, D2_LossesNormsAndParametersAreThoseOfOneProcess) {
  for (const int size : {2, 4}) {
    Training expected;
    {
      Context context;
      const ContextGuard guard(context);
      set_num_threads(1);
      manual_seed(1);
      nn::models::Gpt model(kTiny);
      expected = train(model, 0, 1, size, [&](double loss) {
        const NoGradGuard no_grad;
        for (const Tensor& parameter : model.parameters()) {
          mul_(parameter.grad(), Scalar(1.0 / size));
        }
        return loss / size;
      });
    }
    on_ranks(size, [&](int rank) {
      manual_seed(static_cast<uint64_t>(1 + rank));  // rank 0's weights become everybody's
      nn::models::Gpt model(kTiny);
      Mesh mesh(world());
      ReplicateOptions options;
      options.first_bucket_bytes = options.bucket_bytes = 20000;
      const Replica replica = replicate(model, mesh, options);
      const Training own = train(model, rank, size, size, [&](double loss) {
        const Tensor sum = tensor({loss}, kF64);
        world().all_reduce(sum).wait();
        return sum.item() / size;
      });
      EXPECT_EQ(own.losses, expected.losses);
      EXPECT_EQ(own.norms, expected.norms);
      EXPECT_EQ(own.parameters, expected.parameters);
      EXPECT_LT(own.losses.back(), own.losses.front());
      EXPECT_GT(replica.report().buckets.size(), 3u);
    });
  }
}

// Each of two ranks has one of the two rows of a batch.
Training train_as_recorded(Way way, int rank, const nlohmann::json& record) {
  const auto& options = record["steps"];
  const auto model = nn::models::Gpt::from_pretrained(tests::golden_path("gpt2"));
  optim::ParameterGroup<optim::AdamWOptions> decayed, others;
  decayed.options = {.lr = options["lr"],
                     .betas = {options["betas"][0], options["betas"][1]},
                     .eps = options["eps"],
                     .weight_decay = options["weight_decay"]};
  others.options = decayed.options;
  others.options.weight_decay = 0;
  for (const auto& one : model->named_parameters()) {
    (one.tensor.dim() >= 2 ? decayed : others).parameters.push_back(one);
  }
  optim::AdamW optimizer({decayed, others});
  Mesh mesh(world());
  std::unique_ptr<DataParallelModel> parallel;
  if (way == Way::kFully || way == Way::kFullyKept || way == Way::kZero3) {
    std::optional<bool> reshard;
    if (way != Way::kFully) reshard = way == Way::kZero3;
    nn::ModuleList& blocks = model->transformer.h;
    for (size_t i = 0; i < blocks.num_children(); ++i) {
      fully_shard(blocks.child(i), mesh, {.reshard_after_forward = reshard});
    }
    fully_shard(*model, mesh, {.reshard_after_forward = reshard});
    parallel = std::make_unique<ShardedModel>(sharded_model(*model));
  } else {
    parallel = shard_in(way, *model, mesh, {.bucket_bytes = 20000});
  }
  Training run;
  const Tensor batches = SafeTensorsFile(tests::golden_path("gpt2.safetensors")).load("batches");
  for (int64_t step = 0; step < batches.size(0); ++step) {
    const Tensor tokens = batches.narrow(0, step, 1).narrow(1, rank, 1).reshape({1, -1});
    const int64_t last = tokens.size(1) - 1;
    const Tensor loss =
        (*model)(tokens.narrow(1, 0, last).contiguous(), tokens.narrow(1, 1, last).contiguous())
            .loss;
    loss.backward();
    const Tensor sum = tensor({loss.item()}, kF64);
    world().all_reduce(sum).wait();
    run.losses.push_back(sum.item() / 2);
    run.norms.push_back(optim::clip_grad_norm(model->parameters(), options["max_norm"]).item());
    optimizer.step();
    optimizer.zero_grad();
  }
  for (const auto& [name, values] : whole_values(*model)) run.parameters.push_back(values);
  return run;
}

TEST(RecordedGpt2, EveryModeFollowsTorchAndItself) {
  const nlohmann::json record = tests::golden_json("gpt2.json");
  const std::vector<double> losses = record["losses"], norms = record["norms"];
  for (const Way way :
       {Way::kReplicate, Way::kZero1, Way::kZero2, Way::kFully, Way::kFullyKept, Way::kZero3}) {
    SCOPED_TRACE(name_of(way));
    on_ranks(2, [&](int rank) {
      const Training run = train_as_recorded(way, rank, record);
      ASSERT_EQ(run.losses.size(), losses.size());
      for (size_t step = 0; step < losses.size(); ++step) {
        EXPECT_NEAR(run.losses[step], losses[step], 1e-5 * losses[step]) << "step " << step;
        EXPECT_NEAR(run.norms[step], norms[step], 1e-5 * norms[step]) << "step " << step;
      }
      const Training again = train_as_recorded(way, rank, record);
      EXPECT_EQ(again.losses, run.losses);
      EXPECT_EQ(again.norms, run.norms);
      EXPECT_EQ(again.parameters, run.parameters);
    });
  }
}

}  // namespace
}  // namespace tessera::distributed::test_replicate_gpt2
