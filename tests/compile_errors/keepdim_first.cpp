// error: use of deleted function 'tessera::Shape::Shape(bool)'
#include <tessera/autograd/ops.h>

using namespace tessera;

Tensor run(const Tensor& x) {
#ifdef RIGHT
  return x.sum(1, true);
#else
  return x.sum(true);
#endif
}
