// error: add: the module has no constructor for the arguments after the name
#include <tessera/nn/linear.h>

using namespace tessera;

struct Model : nn::Module<Model> {
#ifdef RIGHT
  Model() : fc(add<nn::Linear>("fc", 4, 8, {.bias = false})) {}
#else
  Model() : fc(add<nn::Linear>("fc", 4, "relu")) {}
#endif
  nn::Linear& fc;
};
