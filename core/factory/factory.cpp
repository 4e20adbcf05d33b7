#include <tessera/core/factory/factory.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include <tessera/core/cuda/graph.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/copy/copy.h>

namespace tessera {
namespace {

template <class Value>
Tensor from_values(std::span<const Value> values, const Shape& shape, DType dtype) {
  TS_CHECK_SHAPE(checked_numel(shape, "tensor") == static_cast<int64_t>(values.size()), "tensor",
                 "shape ", shape, " needs ", numel_of(shape), " values; got ", values.size());
  Tensor result = raw::empty(shape, dtype);
  dispatch_all(dtype, "tensor", [&]<class Element>() {
    Element* out = result.data_as<Element>();
    for (size_t i = 0; i < values.size(); ++i) {
      if constexpr (!std::is_same_v<Value, Scalar>) {
        out[i] = store<Element>(static_cast<Compute<Element>>(values[i]));
      } else if constexpr (std::is_same_v<Element, bool>) {
        out[i] = values[i].to_bool();
      } else if constexpr (std::is_integral_v<Compute<Element>>) {
        out[i] = store<Element>(static_cast<Compute<Element>>(values[i].to_int()));
      } else {
        out[i] = store<Element>(static_cast<Compute<Element>>(values[i].to_double()));
      }
    }
  });
  return result;
}

// The same elements on a GPU.
Tensor moved(const Tensor& x, const Device& device) {
  Tensor result = raw::empty(x.shape(), x.dtype(), device);
  // Constants, also of a graph that is captured.
  gpu::upload_constants(result.data(), device.index, x.data(), static_cast<size_t>(x.nbytes()));
  return result;
}

}  // namespace

namespace raw {

Tensor arange(const Scalar& start, const Scalar& step, int64_t size, DType dtype,
              const Device& device) {
  if (device.is_cuda()) return moved(arange(start, step, size, dtype, kCpu), device);
  Tensor result = empty({size}, dtype, device);
  if (device.is_meta()) return result;
  dispatch_all(dtype, "arange", [&]<class Element>() {
    Element* out = result.data_as<Element>();
    if constexpr (std::is_same_v<Compute<Element>, int64_t>) {
      const int64_t first = start.to_int(), difference = step.to_int();
      for (int64_t i = 0; i < size; ++i) out[i] = store<Element>(first + i * difference);
    } else {
      const double first = start.to_double(), difference = step.to_double();
      for (int64_t i = 0; i < size; ++i) {
        out[i] = store<Element>(first + static_cast<double>(i) * difference);
      }
    }
  });
  return result;
}

Tensor linspace(double start, double end, int64_t size, DType dtype, const Device& device) {
  if (device.is_cuda()) return moved(linspace(start, end, size, dtype, kCpu), device);
  Tensor result = empty({size}, dtype, device);
  if (device.is_meta()) return result;
  dispatch_all(dtype, "linspace", [&]<class Element>() {
    Element* out = result.data_as<Element>();
    using C = std::conditional_t<std::is_integral_v<Element>, double, Compute<Element>>;
    const C first = load<C>(store<Element>(start)), last = load<C>(store<Element>(end));
    const C step = size > 1 ? (last - first) / static_cast<C>(size - 1) : C(0);
    for (int64_t i = 0; i < size; ++i) {
      const C value = i < size / 2 ? std::fma(step, static_cast<C>(i), first)
                                   : std::fma(-step, static_cast<C>(size - 1 - i), last);
      out[i] = store<Element>(size == 1 ? first : value);
    }
  });
  return result;
}

Tensor eye(int64_t rows, int64_t columns, DType dtype, const Device& device) {
  if (device.is_cuda()) return moved(eye(rows, columns, dtype, kCpu), device);
  Tensor result = zeros({rows, columns}, dtype, device);
  if (device.is_meta()) return result;
  dispatch_all(dtype, "eye", [&]<class Element>() {
    const Element one = store<Element>(Compute<Element>(1));
    Element* out = result.data_as<Element>();
    for (int64_t i = 0; i < std::min(rows, columns); ++i) out[i * columns + i] = one;
  });
  return result;
}

Tensor from_blob(void* data, const Shape& shape, const Shape& strides, DType dtype,
                 std::function<void()> release) {
  checked_numel(shape, "from_blob");
  TS_CHECK_SHAPE(shape.size() == strides.size(), "from_blob", "shape ", shape, " and strides ",
                 strides, " must have the same length");
  for (int64_t stride : strides) {
    TS_CHECK_SHAPE(stride >= 0, "from_blob", "strides must not be negative; got ", strides);
  }
  TS_CHECK(reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(size_of(dtype)) == 0,
           "from_blob", "the pointer is not aligned to ", size_of(dtype), " bytes, the size of ",
           dtype, "; copy the bytes first");
  const int64_t bytes = storage_extent(shape, strides) * size_of(dtype);
  return Tensor(new TensorImpl(std::make_shared<Storage>(data, bytes, kCpu, std::move(release)),
                               shape, strides, 0, dtype));
}

Tensor from_blob(void* data, const Shape& shape, DType dtype, std::function<void()> release) {
  return from_blob(data, shape, contiguous_strides(shape), dtype, std::move(release));
}

}  // namespace raw

Tensor tensor(std::initializer_list<Scalar> values, const Shape& shape, DType dtype) {
  return from_values<Scalar>({values.begin(), values.size()}, shape, dtype);
}
Tensor tensor(std::span<const double> values, const Shape& shape, DType dtype) {
  return from_values(values, shape, dtype);
}
Tensor tensor(std::span<const float> values, const Shape& shape, DType dtype) {
  return from_values(values, shape, dtype);
}
Tensor tensor(std::span<const int64_t> values, const Shape& shape, DType dtype) {
  return from_values(values, shape, dtype);
}
Tensor tensor(std::span<const int32_t> values, const Shape& shape, DType dtype) {
  return from_values(values, shape, dtype);
}
Tensor tensor(const Scalar& value) {
  const DType dtypes[] = {kBool, kI64, kF32};
  return scalar_tensor(value, dtypes[static_cast<int>(value.kind())]);
}
Tensor scalar_tensor(const Scalar& value, DType dtype, const Device& device) {
  return raw::full({}, value, dtype, device);
}

}  // namespace tessera
