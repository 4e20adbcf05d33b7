// Every op against PyTorch: values and gradients of tests/golden/ops_*.json.
#include <gtest/gtest.h>

#include "autograd/op_checks.h"
#include "golden_files.h"

namespace tessera::tests::test_golden_ops {
namespace {

class GoldenOps : public testing::TestWithParam<const char*> {};

TEST_P(GoldenOps, ValuesDTypesAndGradientsAreThoseOfTorch) {
  const std::string group = std::string("ops_") + GetParam();
  const nlohmann::json cases = golden_json(group + ".json");
  const SafeTensorsFile file(golden_path(group + ".safetensors"));
  ASSERT_FALSE(cases.empty());
  const char* only = std::getenv("TESSERA_GOLDEN_CASE");  // "gelu": that op alone, for debugging
  for (const nlohmann::json& golden : cases) {
    if (only && golden["spec"]["op"] != only) continue;
    for (const std::string& complaint : replay_op_case(golden, file)) ADD_FAILURE() << complaint;
  }
}

INSTANTIATE_TEST_SUITE_P(Groups, GoldenOps,
                         testing::Values("creation", "unary", "binary", "reduce", "matmul", "shape",
                                         "index", "normalise", "loss", "convolution", "attention",
                                         "inplace", "fused", "linalg", "layers", "special", "order",
                                         "rearrange"),
                         [](const auto& info) { return std::string(info.param); });

// The tests of this test: a case with a changed reference must fail.
TEST(GoldenOpsThemselves, AChangedReferenceIsCaught) {
  const nlohmann::json cases = golden_json("ops_unary.json");
  const SafeTensorsFile file(golden_path("ops_unary.safetensors"));
  nlohmann::json golden = cases[0];
  ASSERT_EQ(golden["name"], "neg.0.f32");
  EXPECT_TRUE(replay_op_case(golden, file).empty());
  golden["spec"]["op"] = "abs";
  EXPECT_EQ(replay_op_case(golden, file).size(), 2u);  // value and gradient
  golden = cases[0];
  golden["outputs"][0]["dtype"] = "bfloat16";
  EXPECT_EQ(replay_op_case(golden, file).size(), 1u);
}

}  // namespace
}  // namespace tessera::tests::test_golden_ops
