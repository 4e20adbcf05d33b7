// Learns to tell points inside a circle from points outside.
#include <tessera.h>
#include <cstdio>
using namespace tessera;

struct Classifier : nn::Module<Classifier> {
  explicit Classifier(int64_t width)
      : hidden(add<nn::Linear>("hidden", 2, width)), output(add<nn::Linear>("output", width, 2)) {}
  Tensor forward(const Tensor& points) { return output(gelu(hidden(points))); }
  nn::Linear& hidden;
  nn::Linear& output;
};

int main() {
  Classifier model(64);
  optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2});
  for (int step = 1; step <= 300; ++step) {
    Tensor points = rand({256, 2}) * 2 - 1;
    Tensor inside = to(lt(square(points).sum({1}), 0.5), kI64);
    Tensor logits = model(points);
    Tensor loss = cross_entropy(logits, inside);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (step % 50 != 0) continue;
    Tensor right = to(logits.argmax(1).eq(inside), kF32).mean();
    std::printf("step %3d  loss %.4f  accuracy %.3f\n", step, loss.item(), right.item());
  }
}
