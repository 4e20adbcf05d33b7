// GPT-2 on threads as ranks: losses and parameters are those of one process that accumulates.
// ctest labels: threads
// ctest ranks: 2 4
#include <tessera/core/random.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/optimizers.h>

#include "distributed/replicate_fixture.h"

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

}  // namespace
}  // namespace tessera::distributed::test_replicate_gpt2
