// error: this struct passes through a module: give it a member
#include <tessera/nn/module.h>

using namespace tessera;

struct Output {
  Tensor logits;
#ifdef RIGHT
  void visit_tensors(auto&& visit) { visit(logits); }
#endif
};
struct Model : nn::Module<Model> {
  Output forward(const Tensor& x) { return {x}; }
};
void run(Model& model, const Tensor& x) { model(x); }
