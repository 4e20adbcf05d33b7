// Two ways to the place where a NaN comes from: in forward, by a hook on every module; in backward,
// by AnomalyMode.
#include <cstdio>

#include <tessera.h>

using namespace tessera;

// Has two mistakes: the logarithm of what may be 0, and the root of what may be 0, whose slope is
// infinite there.
struct Model : nn::Module<Model> {
  Model()
      : scale(add<nn::Linear>("scale", 2, 2, nn::LinearOptions{.bias = false})),
        logs(add<Logarithm>("logs")) {}
  struct Logarithm : nn::Module<Logarithm> {
    Tensor forward(const Tensor& x) { return log(x); }
  };
  Tensor forward(const Tensor& x) { return logs(relu(scale(x))); }
  Tensor length(const Tensor& x) { return sqrt(square(scale(x)).sum({1})); }
  nn::Linear& scale;
  Logarithm& logs;
};

// From now on an error, with its name, at the first module whose result is not finite. (Hooks stay
// until their handle's remove(); this program wants them for good.)
void check_forward(nn::ModuleBase& model) {
  for (const nn::NamedModule& each : model.named_modules()) {
    each.module->register_forward_hook([](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs results) {
      for (const Tensor* result : results) {
        TS_CHECK(all(isfinite(*result)).item() != 0, "check_forward",
                 "gave a number that is not finite: ", *result);
      }
    });
  }
}

int main() {
  Model model;
  int found = 0;
  try {
    check_forward(model);
    model(zeros({4, 2}));
  } catch (const Error& error) {
    std::printf("forward: %s\n", error.what());
    ++found;
  }
  try {
    const AnomalyMode anomaly;  // costs time: for a run that went wrong
    model.call(&Model::length, zeros({4, 2})).sum().backward();
  } catch (const Error& error) {
    std::printf("backward: %s\n", error.what());
    ++found;
  }
  return found == 2 ? 0 : 1;
}
