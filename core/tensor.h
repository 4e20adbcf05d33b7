// Tensor: a handle to an n-dimensional array on one device.
//
// Copying a Tensor copies the handle: both name the same object, shape and grad included.
// clone() copies elements, detach() shares them without their history.
// Constness is that of the handle: elements of a `const Tensor&` may be written.
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>
#include <iosfwd>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <tessera/core/device.h>
#include <tessera/core/dtype.h>
#include <tessera/core/error.h>
#include <tessera/core/shape.h>
#include <tessera/core/storage.h>

namespace tessera {

// Counts the writes to a storage as one tensor and its views see them. It is an object of its own,
// shared by those views, and not a field of the storage: parameters that lie in one flat buffer
// each have their own.
struct VersionCounter {
  std::atomic<uint32_t> value{0};
  std::atomic<const char*> writer{nullptr};  // the op that wrote last, where it gave its name
};

// What upper floors hang on a tensor: its history (`autograd`), its sharding (`distributed`).
struct TensorSlot {
  virtual ~TensorSlot() = default;
};

class TensorImpl {
 public:
  TensorImpl(StoragePtr storage, Shape shape, Shape strides, int64_t offset, DType dtype);

  StoragePtr storage;
  Shape shape;
  Shape strides;
  int64_t offset = 0;  // in elements
  int64_t numel = 0;
  DType dtype;
  std::shared_ptr<VersionCounter> version;
  std::unique_ptr<TensorSlot> autograd;
  std::unique_ptr<TensorSlot> placement;

 private:
  friend class Tensor;
  mutable std::atomic<int32_t> references_{0};
};

struct ValuesIndices;  // autograd/ops.h

class Tensor {
 public:
  // The undefined tensor: an absent argument, a gradient that is not there.
  Tensor() : impl_(nullptr) {}
  explicit Tensor(TensorImpl* impl) : impl_(impl) { retain(); }
  Tensor(const Tensor& other) : impl_(other.impl_) { retain(); }
  Tensor(Tensor&& other) noexcept : impl_(std::exchange(other.impl_, nullptr)) {}
  // Assignment makes a variable name another tensor. To a temporary it would do nothing.
  Tensor& operator=(const Tensor& other) & {
    Tensor copy(other);
    std::swap(impl_, copy.impl_);
    return *this;
  }
  Tensor& operator=(Tensor&& other) & noexcept {
    std::swap(impl_, other.impl_);
    return *this;
  }
  void operator=(const Tensor& other) && = delete;  // x[0] = y: write x[0].copy_(y)
  ~Tensor() { release(); }

  bool defined() const { return impl_ != nullptr; }
  TensorImpl* impl() const { return impl_; }
  bool is(const Tensor& other) const { return impl_ == other.impl_; }  // the same object
  int32_t use_count() const {
    return impl_ ? impl_->references_.load(std::memory_order_acquire) : 0;
  }

  // Geometry. Sizes and strides count elements; size(-1) is the last dimension.
  const Shape& shape() const { return get().shape; }
  const Shape& strides() const { return get().strides; }
  int dim() const { return get().shape.size(); }
  int64_t size(int64_t dim) const { return shape()[wrap_dim(dim, this->dim(), "size")]; }
  int64_t stride(int64_t dim) const { return strides()[wrap_dim(dim, this->dim(), "stride")]; }
  int64_t numel() const { return get().numel; }
  int64_t offset() const { return get().offset; }
  int64_t nbytes() const { return numel() * size_of(dtype()); }
  DType dtype() const { return get().dtype; }
  const Device& device() const { return get().storage->device(); }
  bool is_meta() const { return device().is_meta(); }
  bool is_contiguous() const { return tessera::is_contiguous(shape(), strides()); }
  const StoragePtr& storage() const { return get().storage; }

  // First element; on the CPU it can be read. T is not checked: bf16 and f16 are those of half.h.
  void* data() const {
    const TensorImpl& impl = get();
    return static_cast<char*>(impl.storage->data()) + impl.offset * size_of(impl.dtype);
  }
  template <class T>
  T* data_as() const {
    return static_cast<T*>(data());
  }

  uint32_t version() const { return get().version->value.load(std::memory_order_relaxed); }
  // writer: the name of an op, of static lifetime, for errors of those who needed the old values.
  void bump_version(const char* writer = nullptr) const {
    get().version->value.fetch_add(1, std::memory_order_relaxed);
    get().version->writer.store(writer, std::memory_order_relaxed);
  }

  // Takes over contents, shape and dtype of `other` under all holders; history, grad and version
  // counter stay. Backward is not warned: a graph that saved this tensor reads the new contents.
  void set_data(const Tensor& other) const;  // elements are shared then, counters of writes are not

  // The value of a tensor with one element, converted. Throws ShapeError.
  template <class T = double>
  T item() const;
  template <class T = double>
  std::vector<T> to_vector() const;  // row-major elements, converted

  // "f32[2, 3] cpu", "undefined"
  std::string describe() const;

  // ---- Methods defined in autograd/tensor_methods.cpp: thin forwards to autograd/ops.h ----------
  // clang-format off
  bool requires_grad() const;
  const Tensor& set_requires_grad(bool value = true) const;
  bool is_leaf() const;
  Tensor grad() const;                        // undefined where there is none
  void set_grad(const Tensor& grad) const;
  void zero_grad(bool set_to_none = true) const;
  void backward(const Tensor& gradient = {}, bool retain_graph = false, bool create_graph = false) const;
  Tensor detach() const;
  Tensor clone() const;
  Tensor contiguous() const;
  Tensor to(DType dtype) const;
  Tensor to(const Device& device) const;
  Tensor view(const Shape& shape) const;
  Tensor reshape(const Shape& shape) const;
  Tensor flatten(int64_t start = 0, int64_t end = -1) const;
  Tensor transpose(int64_t dim0, int64_t dim1) const;
  Tensor t() const;
  Tensor permute(const Shape& dims) const;
  Tensor movedim(const Shape& source, const Shape& destination) const;
  Tensor unfold(int64_t dim, int64_t size, int64_t step) const;  // windows as a last dimension, a copy
  Tensor expand(const Shape& shape) const;
  Tensor squeeze(int64_t dim) const;
  Tensor unsqueeze(int64_t dim) const;
  Tensor narrow(int64_t dim, int64_t start, int64_t length) const;
  Tensor select(int64_t dim, int64_t index) const;
  Tensor slice(int64_t dim, std::optional<int64_t> start = {}, std::optional<int64_t> end = {}, int64_t step = 1) const;
  Tensor operator[](int64_t index) const;     // select(0, index)
  std::vector<Tensor> split(int64_t size, int64_t dim = 0) const;
  std::vector<Tensor> chunk(int64_t chunks, int64_t dim = 0) const;
  std::vector<Tensor> unbind(int64_t dim = 0) const;
  Tensor sum(const Shape& dims = {}, bool keepdim = false) const;
  Tensor mean(const Shape& dims = {}, bool keepdim = false) const;
  Tensor max() const;
  Tensor min() const;
  Tensor abs() const;
  Tensor exp() const;
  Tensor log() const;
  Tensor log2() const;
  Tensor log10() const;
  Tensor sqrt() const;
  Tensor tan() const;
  Tensor atan2(const Tensor& other) const;
  Tensor erfinv() const;
  Tensor lgamma() const;
  Tensor digamma() const;
  Tensor trunc() const;
  Tensor fmod(const Tensor& other) const;
  Tensor fmod(const Scalar& other) const;
  Tensor tanh() const;
  Tensor sigmoid() const;
  Tensor relu() const;
  Tensor pow(const Scalar& exponent) const;
  Tensor argmax(int64_t dim, bool keepdim = false) const;
  Tensor isclose(const Tensor& other, double rtol = 1e-5, double atol = 1e-8, bool equal_nan = false) const;
  bool allclose(const Tensor& other, double rtol = 1e-5, double atol = 1e-8, bool equal_nan = false) const;
  Tensor median() const;
  ValuesIndices median(int64_t dim, bool keepdim = false) const;
  Tensor quantile(double q, std::optional<int64_t> dim = {}, bool keepdim = false) const;
  ValuesIndices cummax(int64_t dim) const;
  ValuesIndices cummin(int64_t dim) const;
  Tensor softmax(int64_t dim) const;
  Tensor matmul(const Tensor& other) const;
  Tensor masked_fill(const Tensor& mask, const Scalar& value) const;
  Tensor eq(const Tensor& other) const;
  const Tensor& copy_(const Tensor& source) const;
  const Tensor& fill_(const Scalar& value) const;
  const Tensor& zero_() const;
  const Tensor& add_(const Tensor& other, const Scalar& alpha = 1) const;
  const Tensor& sub_(const Tensor& other, const Scalar& alpha = 1) const;
  const Tensor& mul_(const Tensor& other) const;
  const Tensor& div_(const Tensor& other) const;
  const Tensor& add_(const Scalar& other) const;
  const Tensor& sub_(const Scalar& other) const;
  const Tensor& mul_(const Scalar& other) const;
  const Tensor& div_(const Scalar& other) const;
  // clang-format on
  // -----------------------------------------------------------------------------------------------

 private:
  const TensorImpl& get() const {
    TS_CHECK(impl_ != nullptr, "tensor", "the tensor is undefined; give it a value first");
    return *impl_;
  }
  void retain() const {
    if (impl_) impl_->references_.fetch_add(1, std::memory_order_relaxed);
  }
  void release() {
    if (impl_ && impl_->references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete impl_;
  }

  TensorImpl* impl_;
};

// The values as torch prints them: repr() of print.h. Errors name tensors by describe() instead.
std::ostream& operator<<(std::ostream& out, const Tensor& tensor);

using TensorList = std::vector<Tensor>;

}  // namespace tessera
