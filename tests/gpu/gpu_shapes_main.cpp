// gpu_shapes: the library's products and attention and own kernels against f64 on the device, at
// the shapes of real steps. scripts run it on a GPU; gpu_shapes_emulated is the same with small
// shapes on the emulation, which tries the program itself.
//
// On an H100 some 20 s, estimated: products are 48 TFLOP a dtype for one pass of GPT-2 124M's
// shapes over 65536 tokens, below 0.1 s in 16 bits and 1 s in f32, of which a variant each is asked
// for with four epilogues (6 s of f32); their references take one row in 128 (0.1 s each);
// attention some 20 plans of cuDNN, up to 0.5 s each; tensors of 2^31 elements move 100 GB (0.1 s);
// AdamW 124M parameters in f64 (0.1 s). The rest is loading the library.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>

#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/cuda/libraries/library_graph.h>
#include <tessera/core/gpu/backend.h>

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (GTEST_FLAG_GET(list_tests)) return RUN_ALL_TESTS();
  if (tessera::gpu::device_count() == 0) {
    std::printf("there is no GPU: %s\n", tessera::gpu::unavailable_reason().c_str());
    return 77;
  }
  // Each product once, not 128 times to find its fastest algorithm, unless a table is named.
  ::setenv("TESSERA_GEMM_TABLE", "", 0);
  std::printf("%s; %s; %s\n", tessera::gpu::describe_device(0).c_str(),
              tessera::gpu::gemm_library().c_str(), tessera::gpu::graph_library().c_str());
  return RUN_ALL_TESTS();
}
