// Quantized bases that ranks keep parts of: adapters learn the same bits as on replicas.
// ctest labels: threads
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include <tessera/nn/quantize/quantize.h>

#include "nn/adapted_ranks.h"

namespace tessera::nn::test_quantized_ranks {
namespace {

using distributed::Way;

std::map<std::string, std::vector<float>> trained(int ranks, Way way,
                                                  const QuantizeOptions& options) {
  return trained_by_ranks(ranks, way, [&](Adapted& model) {
    quantize(model, options);
    add_lora(model, {.names = {"first", "third"}, .rank = 3});
  });
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
