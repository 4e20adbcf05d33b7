// error: add makes modules
#include <tessera/nn/linear.h>

using namespace tessera;

struct Model : nn::Module<Model> {
#ifdef RIGHT
  Model() { add<nn::Linear>("w", 2, 2); }
#else
  Model() { add<Tensor>("w"); }
#endif
};
