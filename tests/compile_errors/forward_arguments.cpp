// error: the module called here has no public forward() that takes these arguments
#include <tessera/nn/linear.h>

using namespace tessera;

void run(nn::Linear& model, const Tensor& x) {
#ifdef RIGHT
  model(x);
#else
  model(x, 3);
#endif
}
