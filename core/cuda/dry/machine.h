// The rates of a GPU, as a JSON file states them.
//
//     {"name": "made up", "bandwidth": 4.0e12,
//      "gemm": {"bf16": 7.0e14, "fp8": 1.2e15, "f32": 5.0e13},
//      "attention": {"forward": 2.9e14, "backward": 2.3e14},
//      "gelu_epilogue": 1.2e12, "launch_gap": 1.0e-6,
//      "sources": {"bandwidth": "what it comes from", "gemm.bf16": "..."}}
//
// All in SI units: bytes, seconds, bytes a second, operations a second (a multiplication and an
// addition are two). Rates are what kernels reach, not peaks: a price is no better than they are.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include <tessera/core/dtype.h>

namespace tessera::gpu::dry {

struct Machine {
  std::string name;
  double bandwidth = 0;  // bytes a second between memory and kernels
  // Operations a second of products that fill the machine, by "bf16", "f16", "fp8", "f32", "tf32",
  // "f64". Those of f16 are those of bf16 where nothing else is said.
  std::map<std::string, double, std::less<>> gemm = {};
  double attention_forward = 0, attention_backward = 0;  // the same, of pairs that no mask hides
  double gelu_epilogue = 0;  // results a second that GELU makes behind a product, beside its time
  double launch_gap = 0;     // between launches, in seconds
  int64_t memory_bytes = int64_t{80} << 30;                 // optional: "memory_bytes"
  std::map<std::string, std::string, std::less<>> sources;  // optional, by key: "gemm.bf16"

  // FormatError names the file and the key that is missing, unknown or no positive number; IoError
  // the file.
  static Machine read(const std::string& path);
  // Throws UnsupportedError where the machine has no rate.
  double gemm_rate(DType dtype, bool tf32) const;
};

}  // namespace tessera::gpu::dry
