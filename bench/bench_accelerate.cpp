// What the Accelerator costs: a training step of a model with next to nothing in it, as a plain
// loop and through the facade. The difference of a pair is the facade's.
//     bench_accelerate
#include <benchmark/benchmark.h>

#include <tessera.h>

namespace tessera {
namespace {

struct Nothing : nn::Module<Nothing> {
  Nothing() : weight(parameter("weight", ones({1}))) {}
  Tensor forward(const Tensor& x) { return x * weight; }
  const Tensor& weight;
};

auto points() { return std::make_shared<data::TensorDataset<1>>(ones({4096, 1})); }

void plain_step(benchmark::State& state) {
  data::DataLoader loader(points(), {.batch_size = 1});
  Nothing model;
  optim::SGD optimizer(model.named_parameters(), {.lr = 1e-6});
  optim::CosineSchedule schedule(optimizer, {.total = int64_t{1} << 40});
  for (auto _ : state) {
    const auto batch = loader.next();
    if (!batch) continue;
    model((*batch)[0]).sum().backward();
    optim::clip_grad_norm(model.parameters(), 1.0);
    optimizer.step();
    schedule.step();
    optimizer.zero_grad();
  }
}
BENCHMARK(plain_step);

void facade(benchmark::State& state, const AcceleratorOptions& options) {
  Accelerator accelerator(options);
  data::DataLoader loader(points(), {.batch_size = 1});
  Nothing model;
  optim::SGD optimizer(model.named_parameters(), {.lr = 1e-6});
  optim::CosineSchedule schedule(optimizer, {.total = int64_t{1} << 40});
  accelerator.prepare(model, optimizer, loader, schedule);
  for (auto _ : state) {
    const auto batch = loader.next();
    if (!batch) continue;
    const auto micro = accelerator.accumulate(model);
    accelerator.backward(model((*batch)[0]).sum());
    accelerator.clip_grad_norm(model.parameters(), 1.0);
    optimizer.step();
    schedule.step();
    optimizer.zero_grad();
  }
}
void facade_step(benchmark::State& state) { facade(state, {.config_file = ""}); }
void facade_step_bf16(benchmark::State& state) {
  facade(state, {.mixed_precision = Precision::kBF16, .config_file = ""});
}
void facade_step_fp16(benchmark::State& state) {
  facade(state, {.mixed_precision = Precision::kFP16, .config_file = ""});
}
BENCHMARK(facade_step);
BENCHMARK(facade_step_bf16);
BENCHMARK(facade_step_fp16);

}  // namespace
}  // namespace tessera

BENCHMARK_MAIN();
