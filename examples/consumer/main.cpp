// Fits a line with an installed tessera. Uses a part of every library, so that a missing link
// dependency of the package shows.
#include <cmath>
#include <cstdio>

#include <tessera.h>

using namespace tessera;

int main() {
  const Tensor x = linspace(-1, 1, 64).view({64, 1});
  const Tensor y = x * 3 - 0.5;

  nn::Linear line(1, 1);
  optim::SGD optimizer(line.named_parameters(), {.lr = 0.2});
  for (int step = 0; step < 200; ++step) {
    const Tensor loss = mse_loss(line(x), y);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  const double slope = line.weight.item(), intercept = line.bias.item();
  std::printf("slope %.4f, intercept %.4f\n", slope, intercept);

  const data::ByteTokenizer tokenizer;
  const std::string text = tokenizer.decode(tokenizer.encode("tessera"));
  bool refused = false;
  try {
    data::read_idx("no such file.gz");
  } catch (const IoError&) {
    refused = true;
  }
  const bool right = std::abs(slope - 3) < 1e-3 && std::abs(intercept + 0.5) < 1e-3;
  return right && refused && text == "tessera" ? 0 : 1;
}
