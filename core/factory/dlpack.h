// Tensors from and to other libraries without a copy, by the DLPack interface.
//
// The structs below have the layout of DLPack 1.0 (github.com/dmlc/dlpack), `ManagedTensor` that of
// 0.8 and before, so that the pointers fit DLManagedTensor* and DLManagedTensorVersioned* of any
// other library; its header is not needed.
#pragma once

#include <cstdint>

#include <tessera/core/tensor/tensor.h>

namespace tessera {
namespace dlpack {

inline constexpr int32_t kCpuDevice = 1;
inline constexpr int32_t kCudaDevice = 2;

enum TypeCode : uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kBoolean = 6,
  kFloat8E4M3FN = 10,
  kFloat8E5M2 = 12,
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct TensorView {
  void* data;
  int32_t device_type;
  int32_t device_id;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: row-major
  uint64_t byte_offset;
};

struct ManagedTensor {
  TensorView tensor;
  void* manager_context;
  void (*deleter)(ManagedTensor* self);
};

inline constexpr uint64_t kReadOnly = 1;

struct ManagedTensorVersioned {
  uint32_t major;
  uint32_t minor;
  void* manager_context;
  void (*deleter)(ManagedTensorVersioned* self);
  uint64_t flags;
  TensorView tensor;
};

}  // namespace dlpack

// Shares x's elements; the receiver calls `deleter` once, which may be after x and its context are
// gone. Any layout and dtype; CPU tensors. Gradients stay behind: pass x.detach() where x has any.
// Throws DeviceError.
dlpack::ManagedTensor* to_dlpack(const Tensor& x);
dlpack::ManagedTensorVersioned* to_dlpack_versioned(const Tensor& x);

// Shares the elements and owns `source` from then on: its deleter runs when the last tensor goes.
// After an error the caller still owns it. Throws DTypeError, DeviceError, ShapeError (negative
// strides), ValueError (read-only or misaligned memory), UnsupportedError (a newer major version).
Tensor from_dlpack(dlpack::ManagedTensor* source);
Tensor from_dlpack(dlpack::ManagedTensorVersioned* source);

}  // namespace tessera
