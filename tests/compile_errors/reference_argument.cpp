// error: this struct passes through a module: give it a member
#include <tessera/nn/module.h>

using namespace tessera;

struct Batch {
  Tensor ids, mask;
#ifdef RIGHT
  void visit_tensors(auto&& visit) { visit(ids), visit(mask); }
#endif
};
struct Model : nn::Module<Model> {
  Tensor forward(const Batch& batch) { return batch.ids; }
};
Tensor run(Model& model, const Batch& batch) { return model(batch); }
