// error: replace: the module has no constructor for the arguments after the name
#include <tessera/nn/linear.h>

using namespace tessera;

void run(nn::ModuleBase& model) {
#ifdef RIGHT
  model.replace<nn::Linear>("head", 512, 10);
#else
  model.replace<nn::Linear>("head", "512");
#endif
}
