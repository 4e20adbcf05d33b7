// Walks the table of ops: every row, every sample, seven checks. Then the tests of these tests.
// ctest own program: all ops of the program are held against the table
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/op.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/tensor/raw_views.h>

#include "autograd/op_checks.h"
#include "message_of.h"

namespace tessera::tests::test_ops {
namespace {

std::string joined(const Complaints& complaints) {
  std::string all;
  for (size_t i = 0; i < std::min<size_t>(complaints.size(), 6); ++i) all += complaints[i] + "\n";
  if (complaints.size() > 6) all += "and " + std::to_string(complaints.size() - 6) + " more\n";
  return all;
}

class Ops : public testing::TestWithParam<size_t> {
 protected:
  const OpRow& row() const { return op_rows()[GetParam()]; }
  void each_sample(Complaints (*check)(const OpRow&, const Sample&)) const {
    ASSERT_FALSE(row().samples.empty()) << row().name << " has no samples";
    for (const Sample& sample : row().samples) {
      const Complaints complaints = check(row(), sample);
      EXPECT_TRUE(complaints.empty()) << joined(complaints);
    }
  }
};

TEST_P(Ops, ForwardAndGradientsMatchF64InEveryDType) { each_sample(check_forward); }
TEST_P(Ops, GradientsMatchCentralDifferences) { each_sample(check_grad); }
TEST_P(Ops, AnySetOfInputsHasItsGradients) { each_sample(check_grad_of_some); }
TEST_P(Ops, AnyLayoutGivesTheSame) { each_sample(check_layout); }
TEST_P(Ops, MetaKnowsShapeAndDType) { each_sample(check_meta); }
TEST_P(Ops, OperandsOfTwoDevicesAreRefused) {
  for (const Sample& sample : row().samples) {
    const Complaints complaints = check_devices(row(), sample, kMeta);
    EXPECT_TRUE(complaints.empty()) << joined(complaints);
  }
}
TEST_P(Ops, AutocastFollowsTheRecord) {
  const Complaints complaints = check_autocast(row());
  EXPECT_TRUE(complaints.empty()) << joined(complaints);
}

INSTANTIATE_TEST_SUITE_P(Table, Ops, testing::Range<size_t>(0, op_rows().size()),
                         [](const auto& info) { return std::string(op_rows()[info.param].name); });

TEST(OpTable, EveryRecordHasARow) {
  // Steps that other ops take, whose rows exercise them; the records of full_like() and its kin,
  // which mark their results (test_ops_marks) and are no part of a tape; what hooks of modules stand on, which
  // test_module covers, touch() of a sharded unit, which test_fully_shard_states does, what stands
  // for ops of outlined models, which test_training_plan does; convert() of marked tensors, which
  // test_conversions does; linear layers in fp8, which are
  // no f64 within rounding and stand in test_fp8_linear and test_fp8_head; and the wrong variants
  // below.
  std::set<std::string_view> covered = {"as_strided_backward",
                                        "embedding_backward",
                                        "pad_backward",
                                        "slice_backward",
                                        "autocast_weight",
                                        "module_boundary",
                                        "touch",
                                        "convert",
                                        "full_like",
                                        "rand_like",
                                        "wrong_variant_of_the_tests",
                                        "listed_product",
                                        "listed_read",
                                        "listed_loss",
                                        "fp8_linear",
                                        "fp8_linear_cross_entropy",
                                        "fp8_linear_cross_entropy_whole",
                                        "fp8_linear_gelu_linear",
                                        "packed_linear"};
  for (const OpRow& row : op_rows()) {
    if (row.records.empty()) covered.insert(row.name);
    covered.insert(row.records.begin(), row.records.end());
  }
  for (const Op* op : all_ops()) {
    EXPECT_TRUE(covered.contains(op->name))
        << "op '" << op->name << "' has a record but no row in tests/op_samples_*.cpp; add one";
  }
}

TEST(OpTable, AnUndefinedArgumentIsAnErrorThatNamesTheOp) {
  for (const OpRow& row : op_rows()) {
    const TensorList inputs = make_inputs(row, row.samples[0], kF32);
    for (size_t i = 0; i < inputs.size(); ++i) {
      TensorList given = inputs;
      given[i] = Tensor();
      try {
        call_op(row, given, Attrs::parse(row.samples[0].attrs));  // absent ones may be allowed
      } catch (const Error& error) {
        EXPECT_EQ(std::string(error.what()).find("tensor: the tensor is undefined"),
                  std::string::npos)
            << row.name << " without input " << i << ": " << error.what();
      }
    }
  }
}

// A number of the CPU may stand before others, which have to lie on one device among themselves.
TEST(OpTable, ANumberBeforeTensorsOfTwoDevicesDoesNotHideThem) {
  const Tensor number = full({}, 0.5), list = full({2}, 1);
  const Tensor elsewhere = empty({2}, {.device = kMeta});
  const auto refused = [](const auto& call) {
    const std::string message = message_of<DeviceError>(call);
    EXPECT_NE(message.find("expects all tensors on one device"), std::string::npos) << message;
  };
  refused([&] { addcmul(number, list, elsewhere); });
  refused([&] { addcmul(list, number, elsewhere); });
  refused([&] { addcmul(list, elsewhere, number); });
  refused([&] { addcmul(elsewhere, number, list); });
  EXPECT_TRUE(addcmul(number, elsewhere, elsewhere).is_meta());
  EXPECT_TRUE(addcmul(elsewhere, number, elsewhere).is_meta());
  EXPECT_EQ(addcmul(number, list, list).to_vector(), (std::vector<double>{1.5, 1.5}));
}

TEST(OpTable, NamesAreUniqueAndFound) {
  std::set<std::string_view> names;
  for (const OpRow& row : op_rows()) {
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_EQ(find_op_row(row.name), &row);
  }
  EXPECT_EQ(find_op_row("concat"), find_op_row("cat"));
  EXPECT_EQ(find_op_row("no_such_op"), nullptr);
}

TEST(OpTable, AMisspeltKeywordIsRefusedByName) {
  const Tensor x = tensor({1.0, 2.0});
  const auto message = [&](const char* op, const TensorList& inputs,
                           const char* attrs) -> std::string {
    try {
      call_op(*find_op_row(op), inputs, Attrs::parse(attrs));
    } catch (const Error& error) {
      return error.what();
    }
    return "accepted";
  };
  EXPECT_NE(message("sum", {x}, R"({"dims": 0})").find("unknown keyword 'dims'"),
            std::string::npos);
  EXPECT_NE(message("sum", {x}, R"({"dim": "0"})").find("'dim' must be a list of integers"),
            std::string::npos);
  EXPECT_NE(message("sum", {x, x}, "{}").find("takes at most 1 tensors"), std::string::npos);
  EXPECT_NE(message("sum", {Tensor()}, "{}").find("expects a tensor for 'input'"),
            std::string::npos);
  EXPECT_NE(message("cumsum", {x}, "{}").find("'dim' is missing"), std::string::npos);
  EXPECT_EQ(message("sum", {x}, R"({"axis": 0, "keepdims": true, "dtype": null, "out": null})"),
            "accepted");
}

TEST(OpTable, KeywordsActAsTheyDoInTorch) {
  using Values = std::vector<double>;
  const Tensor x = tensor({0, 1, 2, 4, 8}).to(kF32).view({1, 1, 5});
  const auto call = [](const char* op, const Tensor& x, const char* attrs) {
    return call_op(*find_op_row(op), {x}, Attrs::parse(attrs)).tensors[0].to_vector();
  };
  EXPECT_EQ(call("interpolate", x, R"({"scale_factor": 1.19})"), (Values{0, 0, 1, 2, 4}));
  EXPECT_EQ(call("interpolate", x, R"({"scale_factor": 1.19, "recompute_scale_factor": true})"),
            (Values{0, 1, 2, 4, 8}));
  EXPECT_EQ(call("interpolate", x, R"({"scale_factor": 1.19, "mode": "linear"})"),
            (Values{0, 1, 2, 4, 8}));
  const Tensor y = tensor({1234.5678, -0.5, 0.0}, kF64);
  EXPECT_EQ(call("round", y, R"({"decimals": 2})"), (Values{1234.57, -0.5, 0}));
  EXPECT_EQ(call("round", y, R"({"decimals": -2})"), (Values{1200, -0.0, 0}));
  for (const char* far : {R"({"decimals": -1099511627776})", R"({"decimals": 400})"}) {
    for (const double value : call("round", y, far)) EXPECT_TRUE(std::isnan(value)) << far;
  }
  EXPECT_THROW(call("t", x, "{}"), ShapeError);
}

// ---- Deliberately wrong variants are caught ---------------------------------------------------

const Op kWrong{.name = "wrong_variant_of_the_tests"};

OpRow wrong_row(Result (*call)(const Args&, Attrs&), std::vector<Sample> samples) {
  return {
      .name = "wrong", .parameters = "input, other", .call = call, .samples = std::move(samples)};
}
// The elementwise product of values with a number, and its gradient times another.
Tensor scaled(const Tensor& x, double forward, double backward) {
  return differentiable(
      kWrong, {x}, [=](Inputs in) { return mul(in[0], forward); },
      [=](Grads dy, const Saved&) { return mul(dy[0], backward); });
}

TEST(TestsOfTheTests, ARightVariantPasses) {
  const OpRow row = wrong_row([](const Args& in, Attrs&) -> Result { return scaled(in[0], 2, 2); },
                              {{{normal({3, 5})}}});
  for (auto* check : {check_forward, check_grad, check_grad_of_some, check_layout, check_meta}) {
    const Complaints complaints = check(row, row.samples[0]);
    EXPECT_TRUE(complaints.empty()) << joined(complaints);
  }
}

TEST(TestsOfTheTests, AValueOffByAFewEpsIsCaught) {
  const OpRow row = wrong_row(
      [](const Args& in, Attrs&) -> Result {
        return scaled(in[0], in[0].dtype() == kF64 ? 2 : 2 * (1 + 16 * 0x1p-24), 2);
      },
      {{{normal({3, 5})}}});
  EXPECT_FALSE(check_forward(row, row.samples[0]).empty());
}

TEST(TestsOfTheTests, AWrongGradientIsCaught) {
  const OpRow row =
      wrong_row([](const Args& in, Attrs&) -> Result { return scaled(in[0], 2, 2.02); },
                {{{normal({3, 5})}}});
  EXPECT_FALSE(check_grad(row, row.samples[0]).empty());
}

TEST(TestsOfTheTests, AMissingGradientIsCaught) {
  const OpRow row =
      wrong_row([](const Args& in, Attrs&) -> Result { return add(in[0], detach(in[1])); },
                {{{normal({3}), normal({3})}}});
  EXPECT_FALSE(check_grad(row, row.samples[0]).empty());
}

TEST(TestsOfTheTests, ABackwardThatReadsWhatIsNotKeptForTheGradientsWantedIsCaught) {
  static const Op careless{.name = "wrong_variant_of_the_tests", .reads = {inputs(), inputs(1)}};
  const OpRow row = wrong_row(
      [](const Args& in, Attrs&) -> Result {
        return differentiable(
            careless, {in[0], in[1]}, [](Inputs x) { return add(x[0], square(x[1])); },
            [](Grads dy, const Saved& s) -> TensorList {
              return {dy[0], mul(dy[0], mul(s.input(1), 2))};
            });
      },
      {{{normal({3}), normal({3})}}});
  EXPECT_TRUE(check_grad(row, row.samples[0]).empty());
  EXPECT_EQ(check_grad_of_some(row, row.samples[0]).size(), 1U);
}

TEST(TestsOfTheTests, AGradientThatIgnoresItsIncomingStridesIsCaught) {
  const OpRow row = wrong_row(
      [](const Args& in, Attrs&) -> Result {
        return differentiable(
            kWrong, {in[0]}, [](Inputs x) { return mul(x[0], 2); },
            [](Grads dy, const Saved&) {  // reads memory in order, whatever the strides
              const Tensor& g = dy[0];
              if (g.storage()->bytes() < g.nbytes()) return mul(g, 2);
              return mul(raw::as_strided(g, g.shape(), contiguous_strides(g.shape()), 0), 2);
            });
      },
      {{{normal({3, 5})}}});
  EXPECT_FALSE(check_layout(row, row.samples[0]).empty());
}

TEST(TestsOfTheTests, AForwardThatIgnoresStridesIsCaught) {
  const OpRow row = wrong_row(
      [](const Args& in, Attrs&) -> Result {
        const Tensor& x = in[0];
        return mul(raw::as_strided(detach(x), x.shape(), contiguous_strides(x.shape()), x.offset()),
                   x);
      },
      {{{normal({3, 5})}}});
  EXPECT_TRUE(check_forward(row, row.samples[0]).size() > 0 ||
              !check_layout(row, row.samples[0]).empty());
  EXPECT_FALSE(check_layout(row, row.samples[0]).empty());
}

TEST(TestsOfTheTests, AnInputThatIsOverwrittenIsCaught) {
  OpRow row = wrong_row(
      [](const Args& in, Attrs&) -> Result {
        const Tensor y = mul(in[0], 2);
        in[0].fill_(0);
        return y;
      },
      {{{constant(normal({3}))}}});
  row.differentiable = Differentiable::kNo;
  EXPECT_FALSE(check_forward(row, row.samples[0]).empty());
}

TEST(TestsOfTheTests, AWrongShapeOnMetaIsCaught) {
  const OpRow row = wrong_row(
      [](const Args& in, Attrs&) -> Result {
        return in[0].is_meta() ? raw::empty({1}, kF32, kMeta) : mul(in[0], 2);
      },
      {{{normal({3, 5})}}});
  EXPECT_FALSE(check_meta(row, row.samples[0]).empty());
}

TEST(TestsOfTheTests, TheComparisonKnowsNanAndInfinity) {
  const double inf = std::numeric_limits<double>::infinity(),
               nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(difference(tensor({nan, inf, 1.0}), {nan, inf, 1.0}, 0), "");
  EXPECT_NE(difference(tensor({nan}), {1.0}, 100), "");
  EXPECT_NE(difference(tensor({inf}), {-inf}, 100), "");
  EXPECT_NE(difference(tensor({1.0}), {nan}, 100), "");
  EXPECT_NE(difference(tensor({1.0, 2.0}), {1.0}, 100), "");
  EXPECT_NE(difference(tensor(std::vector<int64_t>{3}, {1}), {4}, 100), "");
}

}  // namespace
}  // namespace tessera::tests::test_ops
