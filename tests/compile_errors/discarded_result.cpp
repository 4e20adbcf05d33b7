// error: ignoring return value of 'tessera::Tensor tessera::Tensor::relu() const'
#include <tessera/autograd/ops.h>

using namespace tessera;

void run(const Tensor& x) {
#ifdef RIGHT
  x.relu_();
#else
  x.relu();
#endif
}
