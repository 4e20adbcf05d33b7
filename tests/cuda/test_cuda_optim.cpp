// Optimizers on the emulated device: parameters and states have the bits that they have on the CPU.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/factory.h>
#include <tessera/optim/adagrad.h>
#include <tessera/optim/adamw.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/lion.h>
#include <tessera/optim/rmsprop.h>
#include <tessera/optim/sgd.h>

namespace tessera::optim {
namespace {

Tensor wave(const Shape& shape, DType dtype, double phase) {
  std::vector<double> values(static_cast<size_t>(numel_of(shape)));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = std::sin(0.7 * static_cast<double>(i) + phase);
  }
  return tensor(values, shape, kF64).to(dtype);
}

// A parameter of each dtype, one of them longer than a chunk.
NamedTensors parameters_on(const Device& device) {
  NamedTensors parameters;
  const auto add = [&](const char* name, const Tensor& values) {
    parameters.push_back({name, values.to(device).set_requires_grad()});
  };
  add("long", wave({17000}, kF32, 0));
  add("bf16", wave({3, 5}, kBF16, 1));
  add("f16", wave({7}, kF16, 2));
  add("f64", wave({4, 2}, kF64, 3));
  add("f32", wave({1}, kF32, 4));
  return parameters;
}

void set_gradients(const NamedTensors& parameters, int step) {
  for (const auto& [name, parameter] : parameters) {
    const Tensor gradient = wave(parameter.shape(), parameter.dtype(), 10.0 + step);
    parameter.set_grad(gradient.to(parameter.device()));
  }
}

void expect_same(const Tensor& got, const Tensor& expected, const std::string& name) {
  ASSERT_EQ(got.dtype(), expected.dtype()) << name;
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

template <class T, class Options>
auto maker(const Options& options) {
  return [options](const NamedTensors& parameters) {
    return std::make_unique<T>(parameters, options);
  };
}

TEST(CudaOptimizers, Sgd) {
  expect_the_bits_of_the_cpu(maker<SGD>(SGDOptions{.lr = 0.1}));
  expect_the_bits_of_the_cpu(
      maker<SGD>(SGDOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true}));
  expect_the_bits_of_the_cpu(
      maker<SGD>(SGDOptions{.lr = 0.1, .momentum = 0.9, .dampening = 0.5, .maximize = true}));
}

TEST(CudaOptimizers, Lion) {
  expect_the_bits_of_the_cpu(maker<Lion>(LionOptions{.lr = 0.01, .weight_decay = 0.1}));
}

TEST(CudaOptimizers, Adagrad) {
  expect_the_bits_of_the_cpu(maker<Adagrad>(AdagradOptions{
      .lr = 0.1, .lr_decay = 0.2, .weight_decay = 0.01, .initial_accumulator_value = 0.5}));
}

TEST(CudaOptimizers, Rmsprop) {
  expect_the_bits_of_the_cpu(maker<RMSprop>(RMSpropOptions{.lr = 0.01}));
  expect_the_bits_of_the_cpu(maker<RMSprop>(
      RMSpropOptions{.lr = 0.01, .weight_decay = 0.1, .momentum = 0.9, .centered = true}));
}

TEST(CudaOptimizers, AdamAndAdamW) {
  expect_the_bits_of_the_cpu(maker<Adam>(AdamOptions{.lr = 0.01, .weight_decay = 0.1}));
  expect_the_bits_of_the_cpu(maker<AdamW>(AdamWOptions{.lr = 0.01, .amsgrad = true}));
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

}  // namespace
}  // namespace tessera::optim
