// Memory: the largest batch that fits, agreed by all ranks, and where the bytes are.
#include <iostream>

#include <tessera.h>

using namespace tessera;

int main(int argc, char** argv) {
  int64_t found = 0;
  const int failed = run(argc, argv, [&](std::span<const std::string>) {
    Accelerator accelerator;
    set_cpu_memory_limit(int64_t{24} << 20);  // a machine with little memory
    const auto report = find_executable_batch_size(
        accelerator, 2048,
        [&](int64_t batch_size) {
          found = batch_size;
          MemoryTracker memory;
          nn::Sequential model(nn::layer<nn::Linear>(1024, 1024), nn::layer<nn::ReLU>(),
                               nn::layer<nn::Linear>(1024, 1024), nn::layer<nn::ReLU>(),
                               nn::layer<nn::Linear>(1024, 8));
          optim::SGD optimizer(model.named_parameters(), {.lr = 1e-3});
          model(ones({batch_size, 1024})).sum().backward();
          optimizer.step();
          return memory.stop();
        },
        {.on_failure = [](int64_t size, const std::string&) {
          std::cout << "a batch of " << size << " does not fit" << std::endl;
        }});
    accelerator.print("a batch of ", found, " fits");
    accelerator.print(report.table());
  });
  return failed || found <= 0 || found >= 2048;
}
