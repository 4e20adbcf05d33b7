// Sharing memory by the DLPack interface.
#include <gtest/gtest.h>

#include <tessera/core/factory/dlpack.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::test_dlpack {
namespace {

TEST(Dlpack, ATensorReturnsFromItsOwnExport) {
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    const Tensor x = raw::transpose(raw::full({2, 3}, 1, dtype), 0, 1);
    const Tensor y = from_dlpack(to_dlpack(x)), z = from_dlpack(to_dlpack_versioned(x));
    for (const Tensor& back : {y, z}) {
      EXPECT_EQ(back.dtype(), dtype);
      EXPECT_EQ(back.shape(), x.shape());
      EXPECT_EQ(back.strides(), x.strides());
      EXPECT_EQ(back.data(), x.data());
    }
  }
}

TEST(Dlpack, AnExportKeepsTheElementsAliveUntilItsDeleterRuns) {
  dlpack::ManagedTensor* managed = nullptr;
  StoragePtr storage;
  {
    const Tensor x = tensor({1, 2, 3});
    storage = x.storage();
    managed = to_dlpack(x);
  }
  EXPECT_EQ(static_cast<float*>(managed->tensor.data)[2], 3);
  EXPECT_EQ(storage.use_count(), 2);
  managed->deleter(managed);
  EXPECT_EQ(storage.use_count(), 1);
}

// Memory of another library: int32 [[10, 20, 30]] at an offset, row-major without strides.
struct Foreign {
  int32_t values[4] = {0, 10, 20, 30};
  int64_t shape[2] = {1, 3};
  int64_t strides[2] = {3, 1};
  int deleted = 0;
  dlpack::ManagedTensorVersioned managed{};

  Foreign() {
    managed.major = 1;
    managed.manager_context = this;
    managed.deleter = [](dlpack::ManagedTensorVersioned* self) {
      ++static_cast<Foreign*>(self->manager_context)->deleted;
    };
    managed.tensor.data = values;
    managed.tensor.device_type = dlpack::kCpuDevice;
    managed.tensor.ndim = 2;
    managed.tensor.dtype = {dlpack::kInt, 32, 1};
    managed.tensor.shape = shape;
    managed.tensor.byte_offset = 4;
  }
};

TEST(Dlpack, ForeignMemoryIsSharedAndReleasedWithTheLastTensor) {
  Foreign foreign;
  {
    const Tensor x = from_dlpack(&foreign.managed);
    const Tensor last = raw::select(x, 1, 2);
    EXPECT_EQ(x.dtype(), kI32);
    EXPECT_EQ(x.to_vector<int64_t>(), (std::vector<int64_t>{10, 20, 30}));
    foreign.values[3] = 31;
    EXPECT_EQ(last.item<int64_t>(), 31);
    EXPECT_EQ(foreign.deleted, 0);
  }
  EXPECT_EQ(foreign.deleted, 1);
}

TEST(Dlpack, WhatCannotBeSharedIsRefusedAndStaysWithTheCaller) {
  Foreign foreign;
  dlpack::ManagedTensorVersioned& managed = foreign.managed;
  const dlpack::ManagedTensorVersioned good = managed;

  managed.flags = dlpack::kReadOnly;
  EXPECT_THROW(from_dlpack(&managed), ValueError);
  managed = good;
  managed.major = 2;
  EXPECT_THROW(from_dlpack(&managed), UnsupportedError);
  managed = good;
  managed.tensor.device_type = dlpack::kCudaDevice;
  EXPECT_THROW(from_dlpack(&managed), DeviceError);
  managed = good;
  managed.tensor.dtype = {dlpack::kFloat, 32, 4};
  EXPECT_THROW(from_dlpack(&managed), DTypeError);
  managed = good;
  managed.tensor.dtype = {dlpack::kInt, 16, 1};
  EXPECT_THROW(from_dlpack(&managed), DTypeError);
  managed = good;
  managed.tensor.byte_offset = 2;
  EXPECT_THROW(from_dlpack(&managed), ValueError);
  managed = good;
  managed.tensor.strides = foreign.strides;
  foreign.strides[1] = -1;
  EXPECT_THROW(from_dlpack(&managed), ShapeError);
  managed = good;
  managed.tensor.ndim = kMaxDims + 1;
  EXPECT_THROW(from_dlpack(&managed), ShapeError);
  managed = good;
  managed.tensor.data = nullptr;
  EXPECT_THROW(from_dlpack(&managed), ValueError);
  EXPECT_EQ(foreign.deleted, 0);
  EXPECT_THROW(to_dlpack(raw::empty({2}, kF32, kMeta)), DeviceError);
}

}  // namespace
}  // namespace tessera::test_dlpack
