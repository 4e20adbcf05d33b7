// The op_runner program: results, gradients, and exit codes with an explanation.
// ctest own program: it starts another
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include <tessera/core/factory/factory.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/state/safetensors.h>

namespace tessera::test_ops_runner {
namespace {

class OpRunner : public testing::Test {
 protected:
  OpRunner()
      : folder_(std::filesystem::path(testing::TempDir()) /
                ("tessera_op_runner_" + std::to_string(getpid()))) {
    std::filesystem::create_directories(folder_);
    save_safetensors(path("in"), {{"x", tensor({1.0, -2.0, 3.0, 0.5})},
                                  {"z", tensor({1.0, 1.0, 1.0, 1.0})},
                                  {"g", tensor({1.0, 2.0, 3.0, 4.0})},
                                  {"short", tensor({1.0})},
                                  {"i", tensor(std::vector<int64_t>{0, 1, 0, 1}, {4})},
                                  {"mask", tensor({1.0, 0.0, 1.0, 0.0}, kBool)}});
  }
  ~OpRunner() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ / name; }
  std::string read(const std::string& name) const {
    std::ostringstream text;
    text << std::ifstream(path(name)).rdbuf();
    return text.str();
  }
  int execute(const std::string& options) const {
    const std::string command = std::string(TESSERA_OP_RUNNER) + " " + options + " >" +
                                path("stdout") + " 2>" + path("stderr");
    return WEXITSTATUS(std::system(command.c_str()));
  }
  int run(const std::string& spec, const std::string& out = "out") const {
    std::ofstream(path("spec")) << spec;
    return execute("--spec " + path("spec") + " --inputs " + path("in") + " --outputs " +
                   path(out));
  }
  std::vector<double> output(const std::string& name) const {
    return SafeTensorsFile(path("out")).load(name).to_vector();
  }
  // The spec is refused with this text, and nothing is written.
  void expect_refused(const std::string& spec, const std::string& reason) const {
    SCOPED_TRACE(spec);
    EXPECT_EQ(run(spec, "refused"), 2);
    EXPECT_NE(read("stderr").find(reason), std::string::npos) << read("stderr");
    EXPECT_FALSE(std::filesystem::exists(path("refused")));
  }

  std::filesystem::path folder_;
};

using Values = std::vector<double>;

TEST_F(OpRunner, GivesValuesAndGradients) {
  ASSERT_EQ(
      run(R"({"op": "mul", "inputs": ["x", "z"], "attrs": {}, "grad_of": ["x", "z"], "grad_output": "g", "device": "cpu"})"),
      0)
      << read("stderr");
  EXPECT_EQ(output("y"), (Values{1, -2, 3, 0.5}));
  EXPECT_EQ(output("grad.x"), (Values{1, 2, 3, 4}));
  EXPECT_EQ(output("grad.z"), (Values{1, -4, 9, 2}));
}

TEST_F(OpRunner, TheSameTensorTwiceGetsTheSumOfItsGradients) {
  ASSERT_EQ(run(R"({"op": "mul", "inputs": ["x", "x"], "grad_of": ["x"], "grad_output": "g"})"), 0)
      << read("stderr");
  EXPECT_EQ(output("grad.x"), (Values{2, -8, 18, 4}));
}

TEST_F(OpRunner, SeveralOutputsAreNumbered) {
  ASSERT_EQ(run(R"({"op": "sort", "inputs": ["x"], "attrs": {"descending": true}})"), 0)
      << read("stderr");
  EXPECT_EQ(output("y0"), (Values{3, 1, 0.5, -2}));
  EXPECT_EQ(output("y1"), (Values{2, 0, 3, 1}));
}

TEST_F(OpRunner, AnAbsentInputIsNullAndAnUnusedOneHasAZeroGradient) {
  ASSERT_EQ(run(R"({"op": "where", "inputs": ["mask", "x", null], "attrs": {"other": -Infinity}})"),
            0)
      << read("stderr");
  EXPECT_EQ(output("y"), (Values{1, -INFINITY, 3, -INFINITY}));
  ASSERT_EQ(
      run(R"({"op": "where", "inputs": ["mask", "x", "z"], "grad_of": ["z"], "grad_output": "g"})"),
      0)
      << read("stderr");
  EXPECT_EQ(output("grad.z"), (Values{0, 2, 0, 4}));
}

TEST_F(OpRunner, AScalarResultNeedsNoGradOutput) {
  ASSERT_EQ(run(R"({"op": "sum", "inputs": ["x"], "grad_of": ["x"], "attrs": null})"), 0)
      << read("stderr");
  EXPECT_EQ(output("grad.x"), (Values{1, 1, 1, 1}));
}

TEST_F(OpRunner, DivisionTowardsZeroIsThatOfIntegers) {
  constexpr int64_t kLarge = (int64_t{1} << 53) + 1;
  save_safetensors(path("in"), {{"a", tensor(std::vector<int64_t>{kLarge, -7, 7}, {3})},
                                {"b", tensor(std::vector<int64_t>{1, 2, -2}, {3})},
                                {"zero_dim", raw::full({}, 7, kI64)},
                                {"narrow", tensor({2, 3}, kI32)},
                                {"f", tensor({-7.5, 7.5})}});
  const auto y = [&](const std::string& spec) {
    EXPECT_EQ(run(spec), 0) << read("stderr");
    return SafeTensorsFile(path("out")).load("y");
  };
  const std::string attrs = R"("attrs": {"rounding_mode": "trunc"}})";
  EXPECT_EQ(y(R"({"op": "div", "inputs": ["a", "b"], )" + attrs).to_vector<int64_t>(),
            (std::vector<int64_t>{kLarge, -3, -3}));
  EXPECT_EQ(y(R"({"op": "div", "inputs": ["zero_dim", "narrow"], )" + attrs).dtype(), kI32);
  EXPECT_EQ(y(R"({"op": "div", "inputs": ["f"], "attrs": {"other": 2, "rounding_mode": "trunc"}})")
                .to_vector(),
            (Values{-3, 3}));
}

TEST_F(OpRunner, RunningSumsAndProductsHaveTheDtypeThatIsAskedFor) {
  for (const char* op : {"prod", "cumsum", "cumprod", "sum"}) {
    for (const auto& [name, dtype] : {std::pair{"int32", kI32}, std::pair{"int64", kI64}}) {
      ASSERT_EQ(run(R"({"op": ")" + std::string(op) +
                    R"(", "inputs": ["i"], "attrs": {"dim": 0, "dtype": ")" + name + R"("}})"),
                0)
          << read("stderr");
      EXPECT_EQ(SafeTensorsFile(path("out")).load("y").dtype(), dtype) << op;
    }
  }
}

TEST_F(OpRunner, CreationNeedsNoInputs) {
  std::ofstream(path("spec"))
      << R"({"op": "full", "inputs": [], "attrs": {"size": [2], "fill_value": 3, "dtype": "bfloat16", "device": "cpu"}})";
  ASSERT_EQ(execute("--spec " + path("spec") + " --outputs " + path("out")), 0) << read("stderr");
  EXPECT_EQ(output("y"), (Values{3, 3}));
  EXPECT_EQ(SafeTensorsFile(path("out")).entry("y").dtype, kBF16);
}

TEST_F(OpRunner, TheDeviceCudaIsAGpuOrItsEmulationAndTheOutputSaysWhich) {
  const std::string spec =
      R"({"op": "mul", "inputs": ["x", "z"], "grad_of": ["x"], "grad_output": "g", "device": "cuda"})";
  if (!std::filesystem::exists(std::string(TESSERA_OP_RUNNER) + "_emulated") &&
      gpu::device_count() == 0) {
    expect_refused(spec, "op_runner_emulated");
    GTEST_SKIP() << "there is no GPU, and its emulation was not built";
  }
  ASSERT_EQ(run(spec), 0) << read("stderr");
  EXPECT_EQ(output("y"), (Values{1, -2, 3, 0.5}));
  EXPECT_EQ(output("grad.x"), (Values{1, 2, 3, 4}));
  const std::string device = SafeTensorsFile(path("out")).metadata().at("device");
  EXPECT_EQ(device.starts_with("emulated on the CPU"), gpu::device_count() == 0) << device;
  EXPECT_EQ(read("stderr").find(device) != std::string::npos, gpu::device_count() == 0);
  ASSERT_EQ(run(R"({"op": "full", "inputs": [], "attrs": {"size": [2], "fill_value": 3},
                    "device": "cuda:0"})"),
            0)
      << read("stderr");
  EXPECT_EQ(output("y"), (Values{3, 3}));
  expect_refused(R"({"op": "relu", "inputs": ["x"], "device": "cuda:99"})", "cuda:99");
}

TEST_F(OpRunner, TheCpuIsNamedToo) {
  ASSERT_EQ(run(R"({"op": "relu", "inputs": ["x"]})"), 0) << read("stderr");
  EXPECT_EQ(SafeTensorsFile(path("out")).metadata().at("device"), "cpu");
  EXPECT_EQ(read("stderr"), "");
}

TEST_F(OpRunner, ListNamesEveryOp) {
  ASSERT_EQ(execute("--list"), 0);
  const std::string list = "\n" + read("stdout");
  for (const char* name : {"add", "scaled_dot_product_attention", "zeros_like", "index_put",
                           "one_hot", "interpolate"}) {
    EXPECT_NE(list.find("\n" + std::string(name) + "\n"), std::string::npos) << name;
  }
}

TEST_F(OpRunner, AWrongSpecificationIsExplainedWithExitCodeTwo) {
  expect_refused(R"({"op": "frobnicate", "inputs": ["x"]})", "no op 'frobnicate'");
  expect_refused(R"({"inputs": ["x"]})", "'op' is missing");
  expect_refused(R"({"op": "relu", "inputs": ["x"], "attrs": {"slope": 1}})",
                 "unknown keyword 'slope'");
  expect_refused(R"({"op": "relu", "inputs": ["x"], "attrs": [1]})", "expects an object");
  expect_refused(R"({"op": "relu", "inputs": ["nope"]})", "no tensor 'nope'");
  expect_refused(R"({"op": "relu", "inputs": "x"})", "'inputs' must be a list");
  expect_refused(R"({"op": "relu", "inputs": [1]})", "tensor names and null");
  expect_refused(R"({"op": "relu", "inputs": []})", "expects a tensor for 'input'");
  expect_refused(R"({"op": "relu", "inputs": [null]})", "expects a tensor for 'input'");
  expect_refused(R"({"op": "relu", "inputs": ["x", "x"]})", "at most 1 tensors");
  expect_refused(R"({"op": "relu", "inputs": ["x"], "device": "tpu"})", "'device'");
  expect_refused(R"({"op": "relu", "inputs": ["x"], "colour": 1})", "unknown field 'colour'");
  expect_refused(R"({"op": "relu", "inputs": ["x"]")", "not valid JSON");
  expect_refused("[]", "must hold an object");
  expect_refused("", "not valid JSON");
  expect_refused(R"({"op": "sum", "inputs": ["x"], "attrs": {"dim": 3}})", "sum");
  expect_refused(R"({"op": "sum", "inputs": ["x"], "attrs": {"dtype": "float99"}})", "dtype");
  expect_refused(R"({"op": "matmul", "inputs": ["x", "short"]})", "one length");
  expect_refused(R"({"op": "add", "inputs": ["x", "z"], "attrs": {"other": 1}})", "as a keyword");
  expect_refused(R"({"op": "relu", "inputs": ["x"], "grad_of": ["z"], "grad_output": "g"})",
                 "names inputs");
  expect_refused(R"({"op": "relu", "inputs": ["x"], "grad_of": ["x"], "grad_output": "short"})",
                 "shape of the output");
  expect_refused(R"({"op": "relu", "inputs": ["x"], "grad_of": ["x"]})",
                 "'grad_output' is missing");
  expect_refused(R"({"op": "one_hot", "inputs": ["i"], "grad_of": ["i"], "grad_output": "g"})",
                 "floating input");
  expect_refused(R"({"op": "eq", "inputs": ["x", "z"], "grad_of": ["x"], "grad_output": "g"})",
                 "has no gradient");
  expect_refused(R"({"op": "embedding", "inputs": ["i", "i"]})", "embedding");
}

TEST_F(OpRunner, DamagedFilesAreExplainedWithExitCodeTwo) {
  std::ofstream(path("in")) << "no safetensors";
  EXPECT_EQ(run(R"({"op": "relu", "inputs": ["x"]})"), 2);
  EXPECT_NE(read("stderr").find("safetensors"), std::string::npos);
  EXPECT_EQ(execute("--spec " + path("missing") + " --inputs " + path("in") + " --outputs " +
                    path("out")),
            2);
  EXPECT_EQ(execute("--spec"), 2);
  EXPECT_EQ(execute("--verbose"), 2);
  EXPECT_EQ(execute(""), 2);
}

TEST_F(OpRunner, AnOutputThatCannotBeWrittenIsExitCodeOne) {
  EXPECT_EQ(run(R"({"op": "relu", "inputs": ["x"]})", "no/such/folder"), 1);
}

}  // namespace
}  // namespace tessera::test_ops_runner
