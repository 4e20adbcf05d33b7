// Optimizers on a GPU: parameters and states have the bits that they have on the CPU.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/muon.h>

#include "../optim/master_writes.h"
#include "../optim/optimizer_kinds.h"
#include "on_emulation.h"

namespace tessera::optim::test_cuda_optim {
namespace {

Tensor wave(const Shape& shape, DType dtype, double phase) {
  std::vector<double> values(static_cast<size_t>(numel_of(shape)));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = std::sin(0.7 * static_cast<double>(i) + phase);
  }
  return tensor(values, shape, kF64).to(dtype);
}

// The same elements from an address that no vector begins at.
Tensor shifted(const Tensor& x) {
  const Tensor longer = zeros({x.numel() + 1}, {.dtype = x.dtype(), .device = x.device()});
  const Tensor place = longer.narrow(0, 1, x.numel());
  place.copy_(x.reshape({x.numel()}));
  return place.reshape(x.shape());
}

// A parameter of each dtype, some of them longer than a chunk, and some between vectors.
NamedTensors parameters_on(const Device& device) {
  NamedTensors parameters;
  const auto add = [&](const char* name, const Tensor& values) {
    parameters.push_back({name, values.to(device).set_requires_grad()});
  };
  add("long", wave({17003}, kF32, 0));
  add("bf16", wave({3, 5}, kBF16, 1));
  add("f16", wave({7}, kF16, 2));
  add("f64", wave({3, 3}, kF64, 3));
  add("f32", wave({1}, kF32, 4));
  for (const DType dtype : {kF32, kBF16, kF64}) {
    const Tensor values = wave({16390}, dtype, static_cast<double>(parameters.size()));
    parameters.push_back({"shifted " + std::string(name_of(dtype)),
                          shifted(values.to(device)).detach().set_requires_grad()});
  }
  return parameters;
}

void set_gradients(const NamedTensors& parameters, int step) {
  for (const auto& [name, parameter] : parameters) {
    const Tensor gradient = wave(parameter.shape(), parameter.dtype(), 10.0 + step);
    const Tensor there = gradient.to(parameter.device());
    parameter.set_grad(step == 1 ? shifted(there) : there);
  }
}

void expect_same(const Tensor& got, const Tensor& expected, const std::string& name) {
  ASSERT_EQ(got.dtype(), expected.dtype()) << name;
  if (expected.dtype() == kF64 && !gpu::on_emulation()) {
    // Some rules raise to a power, on a GPU by CUDA's library: within 2 units of the last place.
    const std::vector<double> a = got.to_vector(), b = expected.to_vector();
    ASSERT_EQ(a.size(), b.size()) << name;
    for (size_t i = 0; i < a.size(); ++i)
      ASSERT_NEAR(a[i], b[i], 0x1p-48 * (1 + std::fabs(b[i]))) << name;
    return;
  }
  ASSERT_EQ(got.to_vector(), expected.to_vector()) << name;
}

// Three steps here and there. make(parameters) gives the optimizer.
template <class Make>
void expect_the_bits_of_the_cpu(const Make& make) {
  const NamedTensors here = parameters_on(kCpu), there = parameters_on(cuda(0));
  auto cpu = make(here);
  auto gpu = make(there);
  for (int step = 0; step < 3; ++step) {
    set_gradients(here, step);
    set_gradients(there, step);
    ASSERT_TRUE(cpu->step());
    ASSERT_TRUE(gpu->step());
  }
  for (size_t i = 0; i < here.size(); ++i) {
    EXPECT_TRUE(there[i].tensor.device().is_cuda());
    expect_same(there[i].tensor, here[i].tensor, here[i].name);
    EXPECT_NE(
        here[i].tensor.to_vector(),
        wave(here[i].tensor.shape(), here[i].tensor.dtype(), static_cast<double>(i)).to_vector());
  }
  const StateDict expected = cpu->state_dict(), got = gpu->state_dict();
  for (const auto& [name, value] : expected) expect_same(got.at(name), value, name);
}

template <class T>
class EveryCudaOptimizer : public testing::Test {};
TYPED_TEST_SUITE(EveryCudaOptimizer, OptimizerKinds);

TYPED_TEST(EveryCudaOptimizer, HasTheBitsOfTheCpu) {
  for (const auto& options : kOptions<TypeParam>) {
    expect_the_bits_of_the_cpu([&](const NamedTensors& parameters) {
      return std::make_unique<TypeParam>(parameters, options);
    });
  }
}

// Parameters of more than one chunk, between vectors, permuted in memory: noise by the place in the
// whole. Not of f64, which rounds nothing.
NamedTensors rounded_parameters_on(const Device& device) {
  NamedTensors parameters;
  for (auto& named : parameters_on(device)) {
    if (named.tensor.dtype() != kF64) parameters.push_back(named);
  }
  const Tensor values = wave({37, 21}, kF32, 6).to(device).transpose(0, 1);
  parameters.push_back({"permuted", values.detach().set_requires_grad()});
  return parameters;
}

template <class Kind>
void expect_rounded_bits_of_the_cpu(const NamedTensors& here, const NamedTensors& there,
                                    const typename Kind::Options& options) {
  Kind cpu(here, options), gpu(there, options);
  for (int step = 0; step < 3; ++step) {
    set_gradients(here, step);
    set_gradients(there, step);
    ASSERT_TRUE(cpu.step());
    ASSERT_TRUE(gpu.step());
  }
  const StateDict expected = cpu.state_dict(), got = gpu.state_dict();
  int rounded = 0;
  for (const auto& [name, value] : expected) {
    expect_same(got.at(name), value, name);
    rounded += value.dtype() == kBF16;
  }
  EXPECT_GT(rounded, 0);
  for (size_t i = 0; i < here.size(); ++i) {
    expect_same(there[i].tensor, here[i].tensor, here[i].name);
  }
}

TEST(CudaOptimizers, StatesOf16BitsAreRoundedToTheBitsOfTheCpu) {
  expect_rounded_bits_of_the_cpu<AdamW>(rounded_parameters_on(kCpu), rounded_parameters_on(cuda(0)),
                                        {.lr = 0.1, .state_dtype = kBF16});
  expect_rounded_bits_of_the_cpu<Adam>(rounded_parameters_on(kCpu), rounded_parameters_on(cuda(0)),
                                       {.lr = 0.1, .state_dtype = kBF16});
}

// Momentum and update have the bits of the CPU; products of bf16 may round otherwise on each, so
// that the parameters come near.
TEST(CudaOptimizers, MuonIsThatOfTheCpu) {
  for (const DType state : {kF32, kBF16}) {
    const auto make = [](const Device& device) {
      NamedTensors parameters;
      for (const Shape& shape : {Shape{9, 24}, Shape{40, 8}, Shape{1, 7}}) {
        parameters.push_back({"w" + std::to_string(parameters.size()),
                              wave(shape, kF32, 1).to(device).set_requires_grad()});
      }
      return parameters;
    };
    const NamedTensors here = make(kCpu), there = make(cuda(0));
    Muon cpu(here, {.lr = 0.1, .state_dtype = state}),
        gpu(there, {.lr = 0.1, .state_dtype = state});
    for (int step = 0; step < 3; ++step) {
      set_gradients(here, step);
      set_gradients(there, step);
      ASSERT_TRUE(cpu.step());
      ASSERT_TRUE(gpu.step());
    }
    for (size_t i = 0; i < here.size(); ++i) {
      const std::string key = "state." + here[i].name + ".momentum_buffer";
      expect_same(gpu.state_dict().at(key), cpu.state_dict().at(key), key);
      const std::vector<double> got = there[i].tensor.to_vector();
      const std::vector<double> expected = here[i].tensor.to_vector();
      const auto tall =
          static_cast<double>(here[i].tensor.size(0)) / static_cast<double>(here[i].tensor.size(1));
      const double of_a_step = 0.1 * std::sqrt(std::max(1.0, tall)) * 0x1p-8;
      for (size_t j = 0; j < got.size(); ++j) {
        ASSERT_NEAR(got[j], expected[j], 3 * 4 * of_a_step) << key << ' ' << j;
      }
    }
  }
}

// ---- Many parameters: tables of launches beyond what drivers stage -----------------------------

NamedTensors many_parameters(int count, const Shape& shape) {
  NamedTensors parameters;
  for (int i = 0; i < count; ++i) {
    const Tensor values = zeros(shape, {.device = cuda(0)});
    parameters.push_back({"w" + std::to_string(i), values.set_requires_grad()});
    parameters.back().tensor.set_grad(ones(shape, {.device = cuda(0)}));
  }
  return parameters;
}

TYPED_TEST(EveryCudaOptimizer, NeverMakesTheHostWait) {
  TS_NEEDS_EMULATION("counts waits of the host");
  for (const auto& options : kOptions<TypeParam>) {
    TypeParam optimizer(many_parameters(2000, {3}), options);
    const gpu::HostWaits waits;
    for (int step = 0; step < 2; ++step) {
      optimizer.step();
      optimizer.zero_grad(false);
    }
    EXPECT_EQ(waits.count(), 0);
  }
}

TEST(CudaOptimizers, WhatStandsAroundAStepNeverMakesTheHostWait) {
  TS_NEEDS_EMULATION("counts waits of the host");
  for (const double p : {2.0, 1.0}) {
    const NamedTensors parameters = many_parameters(p == 2 ? 2000 : 700, {3});
    const TensorList tensors = tensors_of(parameters);
    AdamW optimizer(parameters, {.lr = 0.1});
    EMA average(parameters, {.decay = 0.9});
    const gpu::HostWaits waits;
    const Tensor norm = clip_grad_norm(tensors, 1, {.norm_type = p, .fold_into = &optimizer});
    optimizer.step();
    average.update();
    clip_grad_value(tensors, 0.5);
    EXPECT_EQ(waits.count(), 0);
    EXPECT_NEAR(norm.item(), p == 2 ? std::sqrt(6000.0) : 2100, 1e-9);
  }
}

// Above 585 the table of one launch is longer than 64 KiB.
TEST(CudaOptimizers, MuonNeverMakesTheHostWait) {
  TS_NEEDS_EMULATION("counts waits of the host");
  Muon muon(many_parameters(700, {2, 2}), {.lr = 0.1, .ns_steps = 1});
  const gpu::HostWaits waits;
  muon.step();
  muon.zero_grad(false);
  EXPECT_EQ(waits.count(), 0);
}

TYPED_TEST(EveryCudaOptimizer, MastersFollowWritesOfTheirParameters) {
  for (const Write& write : writes()) expect_to_follow<TypeParam>(write, cuda(0));
}

TEST(CudaOptimizers, AveragesAndClampedGradients) {
  const NamedTensors here = parameters_on(kCpu), there = parameters_on(cuda(0));
  for (const double decay : {0.9, 0.25}) {  // both ends of the interpolation
    EMA cpu(here, {.decay = decay}), gpu(there, {.decay = decay});
    for (const NamedTensors* parameters : {&here, &there}) {
      for (const auto& [name, parameter] : *parameters) {
        parameter.set_data(wave(parameter.shape(), parameter.dtype(), 5).to(parameter.device()));
      }
    }
    cpu.update();
    gpu.update();
    const StateDict expected = cpu.state_dict(), got = gpu.state_dict();
    for (const auto& [name, value] : expected) expect_same(got.at(name), value, name);
  }
  set_gradients(here, 0);
  set_gradients(there, 0);
  TensorList clamped[2];
  for (const auto& [name, parameter] : here) clamped[0].push_back(parameter);
  for (const auto& [name, parameter] : there) clamped[1].push_back(parameter);
  clip_grad_value(clamped[0], 0.3);
  clip_grad_value(clamped[1], 0.3);
  for (size_t i = 0; i < here.size(); ++i) {
    expect_same(there[i].tensor.grad(), here[i].tensor.grad(), here[i].name);
  }
}

TEST(CudaOptimizers, NormsHaveTheSameBitsAtAnyAddress) {
  for (const DType dtype : {kF32, kBF16, kF16, kF64}) {
    for (const int64_t size : {1, 5, 16384, 20003}) {
      const Tensor x = wave({size}, dtype, 1).to(cuda(0)), y = shifted(x);
      for (const double p : {2.0, 3.0, HUGE_VAL}) {
        EXPECT_EQ(kernels::multi_tensor_norm({&x, 1}, p), kernels::multi_tensor_norm({&y, 1}, p))
            << dtype << ' ' << size << ' ' << p;
      }
    }
  }
}

// ---- Views at any address ----------------------------------------------------------------------

// Elements that begin where a vector may not, within memory that nobody else may write to.
struct Framed {
  Tensor memory, view;
};
Framed framed(DType dtype, int64_t offset, int64_t count, double phase, double mean,
              const Device& device) {
  std::vector<double> values(static_cast<size_t>(offset + count + 5));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = mean + 0.5 * std::sin(0.7 * static_cast<double>(i) + phase);
  }
  const Tensor memory = tensor(values, {offset + count + 5}, kF64).to(dtype).to(device);
  return {memory, memory.narrow(0, offset, count)};
}

constexpr size_t kModelCopy = 5;  // after parameter, gradient and three states
struct Entry {
  std::vector<Framed> framed;
  Tensor operator[](size_t i) const { return framed[i].view; }
};

// Each dtype of parameters, gradients and model copies; every fourth entry is aligned.
std::vector<Entry> entries_on(const Device& device) {
  constexpr int64_t kCounts[] = {1, 6, 4, 3, 1031, 7, 5, 8, 2};
  std::vector<Entry> entries;
  for (const DType param : {kF32, kBF16, kF16, kF64}) {
    for (const DType grad : {kF32, kBF16, kF16, kF64}) {
      for (const DType model_copy : {kF32, kBF16, kF16, kF64}) {
        const auto i = static_cast<int64_t>(entries.size());
        const int64_t count = i % 31 == 0 ? kernels::kMultiTensorChunk + 1 + i % 4 : kCounts[i % 9];
        const DType state = param == kF64 ? kF64 : kF32;
        Entry entry;
        for (const DType dtype : {param, grad, state, state, state, model_copy}) {
          const auto role = static_cast<int64_t>(entry.framed.size());
          entry.framed.push_back(framed(dtype, i % 4 == 0 ? 0 : (i + 2 * role) % 5, count,
                                        static_cast<double>(i + role),
                                        role == 2 ? 1.8 : 0.6,  // a centered variance is positive
                                        device));
        }
        entries.push_back(std::move(entry));
      }
    }
  }
  return entries;
}

// run(entries) writes the same bits here and there, and nothing beside them.
template <class Run>
void expect_the_memory_of_the_cpu(const std::string& name, const Run& run) {
  const std::vector<Entry> here = entries_on(kCpu), there = entries_on(cuda(0));
  run(here);
  run(there);
  for (size_t i = 0; i < here.size(); ++i) {
    for (size_t role = 0; role < here[i].framed.size(); ++role) {
      const Framed& expected = here[i].framed[role];
      expect_same(there[i].framed[role].memory, expected.memory,
                  name + ", entry " + std::to_string(i) + ", role " + std::to_string(role));
    }
  }
}

// Some entries do without a model copy.
template <class MakeTensors>
auto updates(const std::vector<Entry>& entries, const MakeTensors& make) {
  std::vector<decltype(make(entries[0], size_t{0}))> tensors;
  for (size_t i = 0; i < entries.size(); ++i) {
    tensors.push_back(make(entries[i], i));
    if (i % 5 != 2) tensors.back().model_copy = entries[i][kModelCopy];
  }
  return tensors;
}

// Some entries do without the states that only some options need.
template <class Rule>
void expect_updates_of_views(const typename Rule::Options& options, double step) {
  const double scalars[kernels::kNumStepScalars] = {0.01, step, 0.5, 0};
  expect_the_memory_of_the_cpu(Rule::kName, [&](const std::vector<Entry>& entries) {
    kernels::multi_tensor_update<Rule>(
        updates(entries,
                [&](const Entry& x, size_t i) {
                  kernels::UpdateTensors one{x[0], x[1]};
                  for (int s = 0; s < kernels::rules::kNumStates<Rule>; ++s) {
                    const auto state = static_cast<size_t>(s);
                    const bool optional = !kernels::rules::uses_state<Rule>(options, s);
                    if (!optional || i % 2 != 0) one.states[state] = x[2 + state];
                  }
                  return one;
                }),
        options, scalars);
  });
}

TYPED_TEST(EveryCudaOptimizer, UpdatesViewsWithTheBitsOfTheCpuAndKeepsToThem) {
  for (const auto& options : kOptions<TypeParam>) {
    for (const double step : {1, 3}) {
      expect_updates_of_views<typename TypeParam::Rule>(options, step);
    }
  }
}

TEST(CudaOptimizers, WhatIsDoneInPlaceKeepsToTheView) {
  const auto all = [](const std::vector<Entry>& entries, size_t role) {
    TensorList tensors;
    for (const Entry& entry : entries) tensors.push_back(entry[role]);
    return tensors;
  };
  expect_the_memory_of_the_cpu("in place", [&](const std::vector<Entry>& entries) {
    const double factor = 0.37;
    kernels::multi_tensor_scale(all(entries, 0), &factor);
    kernels::multi_tensor_clamp(all(entries, 1), 0.5);
    kernels::multi_tensor_lerp(all(entries, 2), all(entries, kModelCopy), 0.3);
  });
}

// A launch would read the other device's addresses.
TEST(CudaOptimizers, TensorsOfTwoDevicesAreRefusedBeforeAnythingIsWritten) {
  std::vector<Device> others = {kCpu};
  if (gpu::device_count() > 1) others.push_back(cuda(1));
  for (const Device& other : others) {
    const TensorList two = {wave({5}, kF32, 0).to(cuda(0)), wave({5}, kF32, 1).to(other)};
    std::vector<kernels::UpdateTensors> entries;
    for (const Tensor& x : two) entries.push_back({x, x, {}});
    const double scalars[kernels::kNumStepScalars] = {0.1, 1, 1, 0}, factor = 2;
    EXPECT_THROW(kernels::multi_tensor_update<kernels::rules::SGD>(entries, {}, scalars),
                 DeviceError);
    EXPECT_THROW(kernels::multi_tensor_scale(two, &factor), DeviceError);
    EXPECT_THROW(kernels::multi_tensor_clamp(two, 0.1), DeviceError);
    EXPECT_THROW(kernels::multi_tensor_lerp(two, two, 0.1), DeviceError);
    EXPECT_THROW(kernels::multi_tensor_norm(two), DeviceError);
    expect_same(two[0], wave({5}, kF32, 0), "on cuda:0");
  }
}

}  // namespace
}  // namespace tessera::optim::test_cuda_optim
