// Quantized bases that ranks keep parts of: adapters learn the same bits as on replicas.
// ctest labels: threads
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include <tessera/nn/lora/lora.h>
#include <tessera/nn/quantize/quantize.h>
#include <tessera/optim/optimizers.h>

#include "distributed/sharded_fixture.h"

namespace tessera::nn::test_quantized_ranks {
namespace {

using distributed::Way;

// Rows that no block divides, so that blocks reach over the ends of rows and of ranks' parts.
struct Adapted : Module<Adapted> {
  Adapted()
      : first(add<Linear>("first", 8, 33)),
        second(add<Linear>("second", 33, 16)),
        third(add<Linear>("third", 16, 12)) {}
  Tensor forward(const Tensor& x) { return third(relu(second(relu(first(x))))); }
  Linear& first;
  Linear& second;
  Linear& third;
};

std::map<std::string, std::vector<float>> trained(int ranks, Way way,
                                                  const QuantizeOptions& options) {
  std::map<std::string, std::vector<float>> result;
  distributed::compared_ranks(ranks, [&](int rank) {
    manual_seed(3);
    Adapted model;
    quantize(model, options);
    add_lora(model, {.names = {"first", "third"}, .rank = 3});
    distributed::Mesh mesh(distributed::world());
    const auto parallel = distributed::shard_in(way, model, mesh);
    optim::AdamW optimizer(trainable_parameters(model), {.lr = 1e-2, .weight_decay = 0.1});
    for (int step = 0; step < 3; ++step) {
      parallel->set_plan(distributed::StepPlan::of(0, 1));
      distributed::loss_of(model, step * ranks + rank).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    const auto values = distributed::whole_values(model);
    if (rank == 0) result = values;
  });
  return result;
}

TEST(QuantizedRanks, EveryShardedModeHasTheBitsOfReplicas) {
  for (const QuantizeOptions& options :
       {QuantizeOptions{.format = QuantizeFormat::kInt8},
        QuantizeOptions{.format = QuantizeFormat::kNf4, .double_quantize = true}}) {
    for (const int ranks : {2, 3}) {
      const auto expected = trained(ranks, Way::kReplicate, options);
      manual_seed(3);
      Adapted start;
      quantize(start, options);
      EXPECT_EQ(expected.at("second.weight"),
                start.get_parameter("second.weight").to_vector<float>());
      EXPECT_NE(expected.at("third.lora_B.weight"), std::vector<float>(12 * 3, 0.0f));
      for (const Way way : {Way::kZero1, Way::kZero2, Way::kFully, Way::kFullyKept, Way::kZero3}) {
        SCOPED_TRACE(std::string(kernels::name_of(options.format)) + " " +
                     distributed::name_of(way) + " " + std::to_string(ranks));
        EXPECT_EQ(trained(ranks, way, options), expected);
      }
    }
  }
}

}  // namespace
}  // namespace tessera::nn::test_quantized_ranks
