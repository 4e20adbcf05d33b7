#include <tessera/core/cuda/kernel_list.h>

namespace tessera {
namespace kernels {

// One for each .cu file.
void register_attention();
void register_cast_tiles();
void register_cast_transpose();
void register_channel_norm();
void register_conv();
void register_copy();
void register_cross_entropy();
void register_cross_entropy_in_place();
void register_elementwise_unary();
void register_elementwise_gradient();
void register_elementwise_binary();
void register_elementwise_ternary();
void register_embedding();
void register_fp8_matmul();
void register_index();
void register_linear_fused();
void register_matmul();
void register_multi_tensor();
void register_multi_tensor_copy();
void register_multi_tensor_square_sum();
void register_multi_tensor_updates();
void register_norm();
void register_norm_gradient();
void register_part_labels();
void register_pool();
void register_random_fill();
void register_reduce();
void register_restride();
void register_scale_history();
void register_scan();
void register_shape();
void register_sort();
void register_softmax();

}  // namespace kernels

void gpu::register_kernels() {
  kernels::register_attention();
  kernels::register_cast_tiles();
  kernels::register_cast_transpose();
  kernels::register_channel_norm();
  kernels::register_conv();
  kernels::register_copy();
  kernels::register_cross_entropy();
  kernels::register_cross_entropy_in_place();
  kernels::register_elementwise_unary();
  kernels::register_elementwise_gradient();
  kernels::register_elementwise_binary();
  kernels::register_elementwise_ternary();
  kernels::register_embedding();
  kernels::register_fp8_matmul();
  kernels::register_index();
  kernels::register_linear_fused();
  kernels::register_matmul();
  kernels::register_multi_tensor();
  kernels::register_multi_tensor_copy();
  kernels::register_multi_tensor_square_sum();
  kernels::register_multi_tensor_updates();
  kernels::register_norm();
  kernels::register_norm_gradient();
  kernels::register_part_labels();
  kernels::register_pool();
  kernels::register_random_fill();
  kernels::register_reduce();
  kernels::register_restride();
  kernels::register_scale_history();
  kernels::register_scan();
  kernels::register_shape();
  kernels::register_sort();
  kernels::register_softmax();
}

}  // namespace tessera
