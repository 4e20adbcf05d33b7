// What a training step of one's own costs on a GPU that is not there: linked to the dry device, it
// runs all but the kernels.
//
//     price h100.json
#include <cstdio>

#include <tessera.h>

#include <tessera/core/cuda/dry/price.h>

using namespace tessera;
namespace dry = gpu::dry;

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const dry::Machine machine = dry::Machine::read(argv[1]);

  const nn::ParameterDefaultsGuard on_device({.device = cuda(0)});
  nn::Linear line(1024, 1024);
  optim::SGD optimizer(line.named_parameters(), {.lr = 0.2});
  const Tensor x = zeros({4096, 1024}, {.device = cuda(0)});
  const auto step = [&] {
    const Tensor y = line(x);
    (y * y).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  step();
  const dry::Recording recording = dry::record(step);
  const dry::Bill bill = dry::price(recording.launches, machine);
  std::fputs(dry::table(bill).c_str(), stdout);
  // Forward and the gradient of the weight.
  return bill.flops == 2 * 2.0 * 4096 * 1024 * 1024 && bill.seconds > bill.floor_seconds ? 0 : 1;
}
