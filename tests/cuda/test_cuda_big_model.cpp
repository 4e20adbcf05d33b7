// Models whose weights lie on emulated GPUs, in the processor's memory and on the disk (accelerate/big_model).
#include <gtest/gtest.h>

#include <tessera/accelerate/big_model/dispatch.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/state/weight_files.h>
#include <tessera/nn/container.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/norm.h>

#include "finished_process.h"
#include "on_emulation.h"

namespace tessera::test_cuda_big_model {
namespace {

using namespace accelerate;

struct Block : nn::Module<Block> {
  Block() : norm(add<nn::LayerNorm>("norm", 24)), fc(add<nn::Linear>("fc", 24, 24)) {}
  Tensor forward(const Tensor& x) { return x + fc(norm(x)); }
  nn::LayerNorm& norm;
  nn::Linear& fc;
};
struct Net : nn::Module<Net> {
  Net() : blocks(add<nn::ModuleList>("blocks")), head(add<nn::Linear>("head", 24, 7)) {
    for (int i = 0; i < 4; ++i) blocks.append<Block>();
  }
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (size_t i = 0; i < blocks.size(); ++i) y = blocks.at<Block>(i)(y);
    return head(y);
  }
  nn::ModuleList& blocks;
  nn::Linear& head;
};

Tensor run(Net& model, const Tensor& x) {
  const NoGradGuard no_grad;
  return model(x).to(kCpu);
}

void expect_equal(const Tensor& a, const Tensor& b) {
  ASSERT_EQ(a.shape(), b.shape());
  for (int64_t i = 0; i < a.numel(); ++i) {
    ASSERT_EQ(a.data_as<float>()[i], b.data_as<float>()[i]) << "at " << i;
  }
}

TEST(CudaBigModel, WeightsOnTheHostAndTheDiskGiveTheBitsOfThoseOnTheDevice) {
  TestFolder folder;
  const Tensor x = randn({3, 24}, {}, RandomStream{1, 2});
  Tensor expected;
  {
    Net model;
    save_weights(model.state_dict(), folder.path("net"));
    model.to(cuda(0));
    expected = run(model, x.to(cuda(0)));
  }
  const WeightPlace disk = WeightPlace::disk();
  for (const DeviceMap& map : {DeviceMap{{"", cuda(0)}, {"blocks.1", kCpu}, {"blocks.2", disk}},
                               DeviceMap{{"blocks", disk}, {"head", cuda(0)}},
                               DeviceMap{{"blocks", kCpu}, {"head", cuda(0)}}}) {
    const nn::ParameterDefaultsGuard without_memory({.device = kMeta, .initialise = false});
    Net model;
    const Dispatched dispatched =
        load_checkpoint_and_dispatch(model, folder.path("net"), {.device_map = map});
    expect_equal(run(model, x), expected);
    expect_equal(run(model, x.to(cuda(0))), expected);
    for (const auto& [name, place] : map) {
      if (name.empty()) continue;
      const Device lies_on = place.is_disk() ? kCpu : place.device();
      for (const auto& [inner, weight] : model.submodule(name).named_parameters()) {
        EXPECT_EQ(weight.device(), lies_on) << name << '.' << inner << " between calls";
      }
    }
  }
}

TEST(CudaBigModel, BlocksOnTwoDevicesPassTheirInputsOn) {
  TS_NEEDS_DEVICES(2);
  const Tensor x = randn({3, 24}, {}, RandomStream{1, 2});
  Net model;
  const Tensor expected = [&] {
    const auto copy = std::make_unique<Net>();
    copy->load_state_dict(model.state_dict());
    copy->to(cuda(0));
    return run(*copy, x.to(cuda(0)));
  }();
  HookHandle handle = dispatch_model(
      model, {{"", cuda(0)}, {"blocks.2", cuda(1)}, {"blocks.3", kCpu}, {"head", cuda(1)}});
  expect_equal(run(model, x), expected);
  EXPECT_EQ(model.blocks[2].named_parameters()[0].tensor.device(), cuda(1));
}

TEST(CudaBigModel, OnlyTheBlockThatRunsIsOnTheDevice) {
  Net model;
  HookHandle handle = cpu_offload(model, cuda(0));
  std::vector<int> on_device;
  for (size_t i = 0; i < model.blocks.size(); ++i) {
    model.blocks[i].register_forward_hook([&](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs) {
      int count = 0;
      for (const auto& [name, weight] : model.named_parameters())
        count += weight.device().is_cuda();
      on_device.push_back(count);
    });
  }
  run(model, randn({2, 24}));
  EXPECT_EQ(on_device, (std::vector<int>{4, 4, 4, 4})) << "a norm's and a layer's tensors";
}

TEST(CudaBigModel, AModelOfAPipelineStaysOnTheDeviceUntilTheNextOneComes) {
  Net first, second;
  const Tensor x = randn({2, 24}, {}, RandomStream{1, 2});
  const Tensor expected = run(first, x);
  CpuOffloadHook one = cpu_offload_with_hook(first, cuda(0));
  CpuOffloadHook two = cpu_offload_with_hook(second, cuda(0), &one);
  const auto on_device = [](Net& model) { return model.head.weight.device().is_cuda(); };
  EXPECT_FALSE(on_device(first) || on_device(second));
  run(first, x);
  run(first, x);
  EXPECT_TRUE(on_device(first) && !on_device(second));
  run(second, x);
  EXPECT_TRUE(!on_device(first) && on_device(second));
  two.offload();
  EXPECT_FALSE(on_device(second));
  one.remove();
  expect_equal(run(first, x), expected);
}

}  // namespace
}  // namespace tessera::test_cuda_big_model
