#include <tessera/core/factory/dlpack.h>

#include <cstddef>
#include <memory>

#include <tessera/core/factory/factory.h>
#include <tessera/core/tensor/element_guard.h>

namespace tessera {
namespace {

using namespace dlpack;

// The interface lies in memory, not in a header of ours: its layout must not move.
static_assert(sizeof(TensorView) == 48 && offsetof(TensorView, shape) == 24 &&
              offsetof(TensorView, byte_offset) == 40);
static_assert(sizeof(ManagedTensor) == 64 && offsetof(ManagedTensor, deleter) == 56);
static_assert(sizeof(ManagedTensorVersioned) == 80 &&
              offsetof(ManagedTensorVersioned, flags) == 24 &&
              offsetof(ManagedTensorVersioned, tensor) == 32);

DataType data_type_of(DType dtype) {
  const auto bits = static_cast<uint8_t>(8 * size_of(dtype));
  switch (dtype) {
    case kF64:
    case kF32:
    case kF16:
      return {kFloat, bits, 1};
    case kBF16:
      return {kBfloat, bits, 1};
    case kF8E4M3:
      return {kFloat8E4M3FN, bits, 1};
    case kF8E5M2:
      return {dlpack::kFloat8E5M2, bits, 1};
    case kI64:
    case kI32:
      return {kInt, bits, 1};
    case kU8:
      return {kUInt, bits, 1};
    case kBool:
      return {kBoolean, bits, 1};
  }
  return {kFloat, bits, 1};
}

DType dtype_of_data_type(const DataType& type) {
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    const DataType known = data_type_of(dtype);
    if (known.code == type.code && known.bits == type.bits && type.lanes == 1) return dtype;
  }
  TS_THROW(DTypeError, "from_dlpack", "no dtype for code ", int{type.code}, ", ", int{type.bits},
           " bits, ", type.lanes, " lanes; convert it before the export");
}

// What an export keeps alive: the tensor, and the lists that the interface points to.
template <class Managed>
struct Export {
  Managed managed{};
  Tensor tensor;
  Shape shape, strides;
};

template <class Managed>
Managed* export_tensor(const Tensor& x) {
  check_whole(x, "to_dlpack");
  TS_CHECK_DEVICE(x.device().is_cpu(), "to_dlpack", "shares bytes of CPU tensors; got ", x,
                  "; use to(kCpu) first");
  auto owner = std::make_unique<Export<Managed>>();
  owner->tensor = x;
  owner->shape = x.shape();
  owner->strides = x.strides();
  TensorView& view = owner->managed.tensor;
  view.data = x.data();
  view.device_type = kCpuDevice;
  view.ndim = x.dim();
  view.dtype = data_type_of(x.dtype());
  view.shape = owner->shape.begin();
  view.strides = owner->strides.begin();
  owner->managed.manager_context = owner.get();
  owner->managed.deleter = [](Managed* self) {
    delete static_cast<Export<Managed>*>(self->manager_context);
  };
  return &owner.release()->managed;
}

template <class Managed>
Tensor import_tensor(Managed* source) {
  const TensorView& view = source->tensor;
  TS_CHECK_DEVICE(view.device_type == kCpuDevice, "from_dlpack",
                  "takes memory of the CPU (device type 1); got device type ", view.device_type,
                  "; move it to the CPU before the export");
  TS_CHECK_SHAPE(view.ndim >= 0 && view.ndim <= kMaxDims, "from_dlpack", "at most ", kMaxDims,
                 " dimensions; got ", view.ndim);
  TS_CHECK(view.ndim == 0 || view.shape != nullptr, "from_dlpack", "the shape is missing");
  const DType dtype = dtype_of_data_type(view.dtype);
  const auto dims = static_cast<size_t>(view.ndim);
  const Shape shape(std::span<const int64_t>(view.shape, dims));
  const Shape strides = view.strides == nullptr
                            ? contiguous_strides(shape)
                            : Shape(std::span<const int64_t>(view.strides, dims));
  TS_CHECK(view.data != nullptr || checked_numel(shape, "from_dlpack") == 0, "from_dlpack",
           "the data pointer is null");
  return raw::from_blob(static_cast<char*>(view.data) + view.byte_offset, shape, strides, dtype,
                        [source] {
                          if (source->deleter != nullptr) source->deleter(source);
                        });
}

}  // namespace

dlpack::ManagedTensor* to_dlpack(const Tensor& x) { return export_tensor<ManagedTensor>(x); }

dlpack::ManagedTensorVersioned* to_dlpack_versioned(const Tensor& x) {
  ManagedTensorVersioned* managed = export_tensor<ManagedTensorVersioned>(x);
  managed->major = 1;
  managed->minor = 0;
  return managed;
}

Tensor from_dlpack(dlpack::ManagedTensor* source) {
  TS_CHECK(source != nullptr, "from_dlpack", "the pointer is null");
  return import_tensor(source);
}

Tensor from_dlpack(dlpack::ManagedTensorVersioned* source) {
  TS_CHECK(source != nullptr, "from_dlpack", "the pointer is null");
  TS_CHECK_AS(UnsupportedError, source->major == 1, "from_dlpack",
              "knows version 1 of DLPack; got ", source->major, ".", source->minor);
  TS_CHECK((source->flags & kReadOnly) == 0, "from_dlpack",
           "the memory is read-only, and a tensor may be written; export a copy");
  return import_tensor(source);
}

}  // namespace tessera
