// The Accelerator where there are GPUs: what prepare() moves, which device is
// whose, and what is said where it cannot be.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string>
#include <vector>

#include <tessera/accelerate/accelerator.h>
#include <tessera/accelerate/process/rank_device.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/emulation/report.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/profile/nvtx.h>
#include <tessera/core/random.h>
#include <tessera/data/dataloader.h>
#include <tessera/distributed/transport/group.h>
#include <tessera/nn/container.h>
#include <tessera/nn/dropout.h>
#include <tessera/nn/linear.h>
#include <tessera/optim/graphed_step.h>
#include <tessera/optim/optimizers.h>

#include "../message_of.h"
#include "on_emulation.h"

namespace tessera::test_cuda_accelerator {
namespace {

using accelerate::rank_device;

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(RankDevice, IsTheGpuWithTheRanksNumberOnItsNode) {
  TS_NEEDS_DEVICES(2);
  EXPECT_EQ(rank_device("", "it", {0, 0, 1}), cuda(0));
  EXPECT_EQ(rank_device("cuda", "it", {5, 1, 2}), cuda(1));
  EXPECT_EQ(rank_device("cuda:1", "it", {0, 0, 1}), cuda(1));
  EXPECT_EQ(rank_device("cpu", "it", {7, 7, 8}), kCpu);
  EXPECT_EQ(rank_device("cuda", "it"), cuda(0));  // alone
}

TEST(RankDevice, SaysWhyThereIsNone) {
  TS_NEEDS_EMULATION("has two GPUs");
  const std::string many = message_of<DeviceError>([] { rank_device("cuda", "it", {6, 2, 4}); });
  EXPECT_TRUE(contains(many, "rank 6 is number 2 of its node, which has 2 GPUs; start fewer"))
      << many;
  const std::string shared = message_of<ConfigError>([] {
    rank_device("cuda:0", "--device", {0, 0, 2});
  });
  EXPECT_TRUE(contains(shared, "--device names cuda:0 and this node has 2 ranks")) << shared;
  const std::string beyond = message_of<DeviceError>([] { rank_device("cuda:2", "it", {}); });
  EXPECT_TRUE(contains(beyond, "cuda:0 to cuda:1")) << beyond;
  for (const char* name : {"gpu", "cuda:", "cuda:-1", "cuda:x", "meta"}) {
    const std::string text = message_of<ConfigError>([&] { rank_device(name, "the setting", {}); });
    EXPECT_TRUE(contains(text, "the setting is cpu, cuda or cuda:N; got")) << name << ": " << text;
  }
}

TEST(RankDevice, IsASettingOfTheAccelerator) {
  TS_NEEDS_DEVICES(2);
  EXPECT_EQ(Accelerator().device(), cuda(0));
  EXPECT_EQ(Accelerator({.cpu = true}).device(), kCpu);
  EXPECT_EQ(Accelerator({.device = "cuda:1"}).device(), cuda(1));
  ::setenv("TESSERA_DEVICE", "cuda:1", 1);
  EXPECT_EQ(Accelerator().device(), cuda(1));
  EXPECT_EQ(Accelerator({.device = "cpu"}).device(), kCpu);
  ::unsetenv("TESSERA_DEVICE");
  EXPECT_THROW(Accelerator({.cpu = true, .device = "cuda"}), ConfigError);
  const std::string text = message_of<ConfigError>([] { Accelerator({.device = "g"}).device(); });
  EXPECT_TRUE(contains(text, "the setting device (code)")) << text;
}

struct Rows : data::Dataset<std::array<Tensor, 2>> {
  int64_t size() const override { return 24; }
  std::array<Tensor, 2> get(int64_t index) const override {
    return {randn({6}, {}, RandomStream{3, static_cast<uint64_t>(index)}),
            raw::full({}, index % 4, kI64)};
  }
};

// The losses of two epochs. `steps_before`: on the CPU, before anything is prepared.
std::vector<double> losses_of(const AcceleratorOptions& options, const Device& device,
                              int steps_before = 0, int64_t accumulate = 1) {
  manual_seed(7);
  AcceleratorOptions all = options;
  all.gradient_accumulation_steps = accumulate;
  Accelerator accelerator(all);
  nn::Linear model(6, 4);
  optim::AdamW optimizer(model.named_parameters(), {.lr = 3e-2});
  const Tensor weight = model.parameters()[0];
  for (int step = 0; step < steps_before; ++step) {
    const Tensor y = model(randn({5, 6}));
    (y * y).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  const Rows rows;
  data::DataLoader loader(rows, {.batch_size = 4, .shuffle = true, .workers = 1});
  accelerator.prepare(optimizer, loader, model);
  EXPECT_TRUE(model.parameters()[0].is(weight)) << "the optimizer holds another tensor";
  EXPECT_EQ(weight.device(), device);
  std::vector<double> losses;
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (const auto& [inputs, targets] : loader) {
      EXPECT_EQ(inputs.device(), device);
      EXPECT_EQ(targets.device(), device);
      const auto micro = accelerator.accumulate(model);
      const Tensor loss = cross_entropy(model(inputs), targets);
      accelerator.backward(loss);
      accelerator.clip_grad_norm(model.parameters(), 0.5);
      optimizer.step();
      optimizer.zero_grad();
      losses.push_back(loss.item());
    }
  }
  return losses;
}

void expect_near(const std::vector<double>& got, const std::vector<double>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-5 * expected[i]) << i;
}

TEST(CudaAccelerator, TrainsOnTheGpuWhatItTrainsOnTheCpu) {
  const std::vector<double> expected = losses_of({.cpu = true}, kCpu);
  EXPECT_NE(expected.back(), expected.front());
  expect_near(losses_of({}, cuda(0)), expected);
  const Device last = gpu::last_device();
  expect_near(losses_of({.device = "cuda:" + std::to_string(last.index)}, last), expected);
}

// Clipping and loss scaling leave what they find beside the gradients.
TEST(CudaAccelerator, AStepMakesTheHostWaitForNothing) {
  TS_NEEDS_EMULATION("counts waits of the host");
  for (const Precision precision : {Precision::kNo, Precision::kBF16, Precision::kFP16}) {
    Accelerator accelerator(
        {.mixed_precision = precision,
         .loss_scale = {.on_device =
                            precision == Precision::kFP16 ? std::optional(true) : std::nullopt}});
    nn::Linear model(6, 4);
    optim::AdamW optimizer(model.named_parameters(), {.lr = 3e-2});
    accelerator.prepare(model, optimizer);
    const Tensor x = randn({4, 6}).to(cuda(0)), labels = zeros({4}).to(kI64).to(cuda(0));
    Tensor norm, first, last;
    for (int step = 0; step < 4; ++step) {
      const gpu::HostWaits waits;
      const auto micro = accelerator.accumulate(model);
      const Tensor loss = cross_entropy(model(x), labels);
      accelerator.backward(loss);
      norm = accelerator.clip_grad_norm(model.parameters(), 0.1);
      optimizer.step();
      optimizer.zero_grad();
      if (step == 0) first = loss.detach();
      EXPECT_TRUE(step == 0 || waits.count() == 0) << step;
      last = loss.detach();
    }
    EXPECT_LT(last.item(), first.item());
    EXPECT_GT(norm.item(), 0.1);
  }
}

TEST(CudaAccelerator, WindowsAreThoseOfTheCpu) {
  expect_near(losses_of({}, cuda(0), 0, 4), losses_of({.cpu = true}, kCpu, 0, 4));
}

TEST(CudaAccelerator, AnOptimizerThatHasSteppedTakesItsStateAlong) {
  expect_near(losses_of({}, cuda(0), 3), losses_of({.cpu = true}, kCpu, 3));
}

TEST(CudaAccelerator, ScaledAndReducedPrecisionRunThereToo) {
  for (const Precision precision : {Precision::kBF16, Precision::kFP16}) {
    const std::vector<double> expected =
        losses_of({.mixed_precision = precision, .cpu = true}, kCpu);
    const std::vector<double> got = losses_of({.mixed_precision = precision}, cuda(0));
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], expected[i], 2e-2) << i;
  }
}

// A graph would repeat what the device did without the windows, weights and random numbers.
TEST(CudaAccelerator, ACaptureIsRefusedAndTheTrainingGoesOn) {
  const auto train = [](bool tries_a_graph) {
    manual_seed(7);
    Accelerator accelerator({.gradient_accumulation_steps = 2});
    nn::Sequential model(nn::layer<nn::Linear>(6, 4), nn::layer<nn::Dropout>(0.5));
    optim::AdamW optimizer(model.named_parameters(), {.lr = 3e-2});
    accelerator.prepare(model, optimizer);
    const Tensor x = randn({5, 6}).to(cuda(0));
    const auto loss_of = [&](const TensorList& in) -> TensorList { return {model(in[0]).sum()}; };
    std::vector<double> losses;
    const auto micro_batch = [&](const TensorList& in) -> TensorList {
      const auto micro = accelerator.accumulate(model);
      const Tensor loss = loss_of(in)[0];
      accelerator.backward(loss);
      optimizer.step();
      optimizer.zero_grad();
      return {loss};
    };
    const auto refuses = [&](const char* what, const auto& work) {
      bool captures = false;
      optim::GraphedStep graph(
          cuda(0), [&](const TensorList& in) { return captures ? work(in) : TensorList(); },
          {.warmup = 1});
      graph({x});
      captures = true;
      const std::string text = message_of<UnsupportedError>([&] { graph({x}); });
      EXPECT_TRUE(contains(text, what)) << text;
      EXPECT_FALSE(graph.captured());
    };
    for (int i = 0; i < 5; ++i) {
      losses.push_back(micro_batch({x})[0].item());
      if (!tries_a_graph) continue;
      refuses("accumulate: cannot be captured", micro_batch);
      refuses("a recorded call of a prepared model: cannot be captured", loss_of);
      refuses("backward: cannot be captured", [&](const TensorList& in) -> TensorList {
        accelerator.backward(in[0].sum());
        return {};
      });
    }
    return losses;
  };
  EXPECT_EQ(train(true), train(false));
}

TEST(CudaAccelerator, InferenceOfAPreparedModelIsCaptured) {
  Accelerator accelerator;
  nn::Linear model(6, 4);
  accelerator.prepare(model);
  optim::GraphedStep graph(cuda(0),
                           [&](const TensorList& in) -> TensorList {
                             const NoGradGuard no_grad;
                             return {model(in[0])};
                           },
                           {.warmup = 1});
  const Tensor x = randn({5, 6}).to(cuda(0));
  graph({x});
  const Tensor twice = x * 2.0;
  EXPECT_EQ(graph({twice})[0].to_vector(), model(twice).to_vector());
  EXPECT_TRUE(graph.captured());
}

// What NVIDIA's tools are told of a step, which the emulation records.
TEST(CudaTimeline, HasTheRangesOfAStepWhereItIsAskedFor) {
  TS_NEEDS_EMULATION("records ranges");
  const Rows rows;
  data::DataLoader loader(rows, {.batch_size = 4, .device = cuda(0)});
  nn::Linear model(6, 4);
  model.to(cuda(0));
  optim::SGD optimizer(model.named_parameters(), {.lr = 1e-2});
  const auto step = [&] {
    const auto batch = loader.next().value();
    const Tensor loss = cross_entropy(model(batch[0]), batch[1]);
    loss.backward();
    optimizer.step();
    distributed::world().all_reduce(loss.detach()).wait();
  };
  gpu::emulation::take_ranges();
  step();
  EXPECT_TRUE(gpu::emulation::take_ranges().empty()) << "off, nothing is marked";
  std::string marks;
  {
    const NvtxScope scope;
    const TimelineRange mine("mine");
    step();
    for (const std::string& name : gpu::emulation::take_ranges()) marks += name + "\n";
  }
  for (const char* part :
       {"mine\n>next batch\n>>copy batch\n", ">Linear\n>>linear\n", ">cross_entropy\n",
        ">linear backward\n", ">optimizer step\n", ">all_reduce\n"}) {
    EXPECT_NE(marks.find(part), std::string::npos) << part << "in\n" << marks;
  }
  step();
  EXPECT_TRUE(gpu::emulation::take_ranges().empty()) << "off again";
}

// A profiler's table has the ops as before, and the timeline all.
TEST(CudaTimeline, GoesBesideAProfiler) {
  TS_NEEDS_EMULATION("records ranges");
  Profiler profiler;
  {
    const NvtxScope scope;
    const ProfilerScope profiled(profiler);
    nn::Linear(2, 2)(zeros({1, 2}));
  }
  EXPECT_TRUE(profiler.entries().contains("linear"));
  EXPECT_FALSE(profiler.entries().contains("Linear"));
  EXPECT_FALSE(profiler.in_range());
  const std::vector<std::string> marks = gpu::emulation::take_ranges();
  EXPECT_NE(std::find(marks.begin(), marks.end(), ">linear"), marks.end());
}

TEST(CudaAccelerator, AModelThatIsOnAGpuIsRefusedWhereTheCpuIsAskedFor) {
  nn::Linear model(2, 2);
  model.to(cuda(0));
  Accelerator accelerator({.cpu = true});
  const std::string text = message_of<ConfigError>([&] { accelerator.prepare(model); });
  EXPECT_TRUE(contains(text, "the setting cpu (code) asks for the CPU")) << text;
}

}  // namespace
}  // namespace tessera::test_cuda_accelerator
