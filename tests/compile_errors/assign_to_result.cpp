// error: use of deleted function
#include <tessera/autograd/ops.h>

using namespace tessera;

void run(const Tensor& x, const Tensor& y) {
#ifdef RIGHT
  x[0] = y;
#else
  relu(x) = y;
#endif
}
