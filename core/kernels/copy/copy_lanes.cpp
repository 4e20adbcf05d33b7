#include <tessera/core/kernels/common/strided.h>
#include <tessera/core/kernels/copy/copy_loops.h>

namespace tessera::kernels {

LoadFunction load_function(DType dtype, Lane lane) {
  return TS_SIMD_CALL(load_function, dtype, lane);
}
StoreFunction store_function(Lane lane, DType dtype) {
  return TS_SIMD_CALL(store_function, lane, dtype);
}

}  // namespace tessera::kernels
