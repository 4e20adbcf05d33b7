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
#include <tessera/core/memory/storage.h>
#include <tessera/core/shape.h>

namespace tessera {

// Counts the writes to a storage as one tensor and its views see them. It is a separate object,
// shared by those views, and not a field of the storage, since parameters that lie in one flat
// buffer each have their own.
struct VersionCounter {
  std::atomic<uint32_t> value{0};
  std::atomic<const char*> writer{nullptr};  // the op that wrote last, if it gave its name
};

// State that higher libraries attach to a tensor: its history (`autograd`), and why its elements
// must not be read (`guard`, of core/tensor/element_guard.h).
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
  std::unique_ptr<TensorSlot> guard;
  // How the tensor lies along the axes of a compute mesh, 16 bits for each: what ops check
  // (autograd/mark_rules.h). 0: as where there is none.
  uint64_t marks = 0;

 private:
  friend class Tensor;
  mutable std::atomic<int32_t> references_{0};
};

struct ValuesIndices;  // autograd/ops.h
struct UniqueResult;
enum class ScatterReduce;
class TensorIndex;
class IndexedTensor;
class RowIterator;

class Tensor {
 public:
  // The undefined tensor: an absent argument or gradient.
  Tensor() : impl_(nullptr) {}
  explicit Tensor(TensorImpl* impl) : impl_(impl) { retain(); }
  Tensor(const Tensor& other) : impl_(other.impl_) { retain(); }
  Tensor(Tensor&& other) noexcept : impl_(std::exchange(other.impl_, nullptr)) {}
  // Assignment makes a variable name another tensor. For a temporary it would do nothing.
  Tensor& operator=(const Tensor& other) & {
    Tensor copy(other);
    std::swap(impl_, copy.impl_);
    return *this;
  }
  Tensor& operator=(Tensor&& other) & noexcept {
    std::swap(impl_, other.impl_);
    return *this;
  }
  void operator=(const Tensor& other) && = delete;
  ~Tensor() { release(); }

  bool defined() const { return impl_ != nullptr; }
  TensorImpl* impl() const { return impl_; }
  bool is(const Tensor& other) const { return impl_ == other.impl_; }  // the same object
  int32_t use_count() const {
    return impl_ ? impl_->references_.load(std::memory_order_acquire) : 0;
  }

  // Geometry. Sizes and strides count elements; size(-1) is the last dimension.
  const Shape& shape() const { return get().shape; }
  const Shape& size() const { return shape(); }
  const Shape& strides() const { return get().strides; }
  int dim() const { return get().shape.size(); }
  int ndim() const { return dim(); }
  int64_t size(int64_t dim) const { return shape()[wrap_dim(dim, this->dim(), "size")]; }
  int64_t stride(int64_t dim) const { return strides()[wrap_dim(dim, this->dim(), "stride")]; }
  int64_t numel() const { return get().numel; }
  int64_t offset() const { return get().offset; }
  int64_t nbytes() const { return numel() * size_of(dtype()); }
  DType dtype() const { return get().dtype; }
  const Device& device() const { return get().storage->device(); }
  bool is_meta() const { return device().is_meta(); }
  bool is_cuda() const { return device().is_cuda(); }
  bool is_floating_point() const { return is_floating(dtype()); }
  bool is_contiguous() const { return tessera::is_contiguous(shape(), strides()); }
  const StoragePtr& storage() const { return get().storage; }

  // First element; on the CPU it can be read, and written with a call of bump_version(). T: see
  // half.h.
  void* data() const {
    const TensorImpl& impl = get();
    return static_cast<char*>(impl.storage->data()) + impl.offset * size_of(impl.dtype);
  }
  template <class T>
  T* data_as() const {
    return static_cast<T*>(data());
  }

  uint32_t version() const { return get().version->value.load(std::memory_order_relaxed); }
  // Call it after a write that is not an op's, so that cached copies and masters follow. writer:
  // the op's name, a static string, for errors.
  void bump_version(const char* writer = nullptr) const {
    get().version->value.fetch_add(1, std::memory_order_relaxed);
    get().version->writer.store(writer, std::memory_order_relaxed);
  }

  // Takes over contents, shape and dtype of `other` for all holders; history, grad and version
  // counter stay. Backward does not notice: a graph that saved this tensor reads the new contents.
  void set_data(const Tensor& other) const;  // elements are shared then, counters of writes are not

  // The value of a tensor with one element, converted. Throws ShapeError.
  template <class T = double>
  T item() const;
  template <class T = double>
  std::vector<T> to_vector() const;  // row-major elements, converted

  // "f32[2, 3] cpu", "undefined"
  std::string describe() const;

  // ---- Methods defined in autograd/ops/tensor_methods.cpp: thin forwards to autograd/ops.h ------
  // Every op that torch.Tensor has as a method, with the contract that it has there.
  // clang-format off
  bool requires_grad() const;
  const Tensor& set_requires_grad(bool value = true) const;
  const Tensor& requires_grad_(bool value = true) const;
  bool is_leaf() const;
  [[nodiscard]] Tensor grad() const;  // undefined if there is none
  void set_grad(const Tensor& grad) const;
  void zero_grad(bool set_to_none = true) const;
  void retain_grad() const;  // keep grad() of a non-leaf tensor
  void backward(const Tensor& gradient = {}, bool retain_graph = false, bool create_graph = false) const;
  [[nodiscard]] Tensor detach() const;
  [[nodiscard]] Tensor clone() const;
  [[nodiscard]] Tensor contiguous() const;
  [[nodiscard]] Tensor to(DType dtype) const;
  [[nodiscard]] Tensor to(const Device& device) const;
  [[nodiscard]] Tensor type_as(const Tensor& other) const;  // converts to its dtype and device
  [[nodiscard]] Tensor cpu() const;
  [[nodiscard]] Tensor cuda(int index = 0) const;
  [[nodiscard]] Tensor half() const;
  [[nodiscard]] Tensor bfloat16() const;
  // With this tensor's dtype and device.
  [[nodiscard]] Tensor new_empty(const Shape& shape) const;
  [[nodiscard]] Tensor new_zeros(const Shape& shape) const;
  [[nodiscard]] Tensor new_ones(const Shape& shape) const;
  [[nodiscard]] Tensor new_full(const Shape& shape, const Scalar& value) const;

  // x[0], x[mask], x[{0, Slice(1, 3), Ellipsis, None, index}]: see IndexedTensor.
  [[nodiscard]] IndexedTensor operator[](int64_t index) const;
  [[nodiscard]] IndexedTensor operator[](const TensorIndex& index) const;
  [[nodiscard]] IndexedTensor operator[](std::initializer_list<TensorIndex> indices) const;
  [[nodiscard]] IndexedTensor index(std::initializer_list<TensorIndex> indices) const;
  // for (const Tensor& row : x): x[0], x[1]..., views. ShapeError for a tensor without dimensions.
  RowIterator begin() const;
  RowIterator end() const;
  [[nodiscard]] Tensor index_put(std::initializer_list<TensorIndex> indices, const Tensor& values, bool accumulate = false) const;
  const Tensor& index_put_(std::initializer_list<TensorIndex> indices, const Tensor& values, bool accumulate = false) const;
  const Tensor& index_put_(std::initializer_list<TensorIndex> indices, const Scalar& value, bool accumulate = false) const;

  [[nodiscard]] Tensor view(const Shape& shape) const;
  [[nodiscard]] Tensor reshape(const Shape& shape) const;
  [[nodiscard]] Tensor permute(const Shape& dims) const;
  [[nodiscard]] Tensor expand(const Shape& shape) const;
  [[nodiscard]] Tensor repeat(const Shape& repeats) const;
  // x.view(2, -1): two or more numbers instead of a list.
  template <class... Sizes> [[nodiscard]] Tensor view(int64_t first, int64_t second, Sizes... sizes) const { return view({first, second, static_cast<int64_t>(sizes)...}); }
  template <class... Sizes> [[nodiscard]] Tensor reshape(int64_t first, int64_t second, Sizes... sizes) const { return reshape({first, second, static_cast<int64_t>(sizes)...}); }
  template <class... Dims> [[nodiscard]] Tensor permute(int64_t first, int64_t second, Dims... dims) const { return permute({first, second, static_cast<int64_t>(dims)...}); }
  template <class... Sizes> [[nodiscard]] Tensor expand(int64_t first, int64_t second, Sizes... sizes) const { return expand({first, second, static_cast<int64_t>(sizes)...}); }
  template <class... Times> [[nodiscard]] Tensor repeat(int64_t first, int64_t second, Times... times) const { return repeat({first, second, static_cast<int64_t>(times)...}); }
  [[nodiscard]] Tensor view_as(const Tensor& other) const;
  [[nodiscard]] Tensor reshape_as(const Tensor& other) const;
  [[nodiscard]] Tensor expand_as(const Tensor& other) const;
  [[nodiscard]] Tensor flatten(int64_t start = 0, int64_t end = -1) const;
  [[nodiscard]] Tensor transpose(int64_t dim0, int64_t dim1) const;
  [[nodiscard]] Tensor t() const;
  [[nodiscard]] Tensor mT() const;  // the last two dimensions change places
  [[nodiscard]] Tensor movedim(const Shape& source, const Shape& destination) const;
  [[nodiscard]] Tensor unfold(int64_t dim, int64_t size, int64_t step) const;  // windows as a last dimension, a copy
  [[nodiscard]] Tensor squeeze() const;
  [[nodiscard]] Tensor squeeze(int64_t dim) const;
  [[nodiscard]] Tensor unsqueeze(int64_t dim) const;
  [[nodiscard]] Tensor narrow(int64_t dim, int64_t start, int64_t length) const;
  [[nodiscard]] Tensor select(int64_t dim, int64_t index) const;
  [[nodiscard]] Tensor slice(int64_t dim, std::optional<int64_t> start = {}, std::optional<int64_t> end = {}, int64_t step = 1) const;
  [[nodiscard]] Tensor as_strided(const Shape& shape, const Shape& strides, int64_t offset = 0) const;
  [[nodiscard]] std::vector<Tensor> split(int64_t size, int64_t dim = 0) const;
  [[nodiscard]] std::vector<Tensor> split(const Shape& sizes, int64_t dim) const;
  [[nodiscard]] std::vector<Tensor> chunk(int64_t chunks, int64_t dim = 0) const;
  [[nodiscard]] std::vector<Tensor> unbind(int64_t dim = 0) const;
  [[nodiscard]] Tensor repeat_interleave(int64_t repeats, std::optional<int64_t> dim = {}) const;
  [[nodiscard]] Tensor repeat_interleave(const Tensor& repeats, std::optional<int64_t> dim = {}) const;
  [[nodiscard]] Tensor diagonal(int64_t offset = 0, int64_t dim1 = 0, int64_t dim2 = 1) const;
  [[nodiscard]] Tensor diag_embed(int64_t offset = 0, int64_t dim1 = -2, int64_t dim2 = -1) const;
  [[nodiscard]] Tensor flip(const Shape& dims) const;
  [[nodiscard]] Tensor roll(const Shape& shifts, const Shape& dims = {}) const;
  [[nodiscard]] Tensor tril(int64_t diagonal = 0) const;
  [[nodiscard]] Tensor triu(int64_t diagonal = 0) const;

  [[nodiscard]] Tensor sum(const Shape& dims = {}, bool keepdim = false, std::optional<DType> dtype = {}) const;
  [[nodiscard]] Tensor mean(const Shape& dims = {}, bool keepdim = false) const;
  [[nodiscard]] Tensor var(const Shape& dims = {}, double correction = 1, bool keepdim = false) const;
  [[nodiscard]] Tensor std(const Shape& dims = {}, double correction = 1, bool keepdim = false) const;
  [[nodiscard]] Tensor prod() const;
  [[nodiscard]] Tensor prod(int64_t dim, bool keepdim = false) const;
  [[nodiscard]] Tensor amax(const Shape& dims = {}, bool keepdim = false) const;
  [[nodiscard]] Tensor amin(const Shape& dims = {}, bool keepdim = false) const;
  [[nodiscard]] Tensor max() const;
  [[nodiscard]] Tensor min() const;
  [[nodiscard]] ValuesIndices max(int64_t dim, bool keepdim = false) const;
  [[nodiscard]] ValuesIndices min(int64_t dim, bool keepdim = false) const;
  [[nodiscard]] Tensor argmax(std::optional<int64_t> dim = {}, bool keepdim = false) const;
  [[nodiscard]] Tensor argmin(std::optional<int64_t> dim = {}, bool keepdim = false) const;
  [[nodiscard]] Tensor median() const;
  [[nodiscard]] ValuesIndices median(int64_t dim, bool keepdim = false) const;
  [[nodiscard]] Tensor quantile(double q, std::optional<int64_t> dim = {}, bool keepdim = false) const;
  [[nodiscard]] Tensor quantile(const Tensor& q, std::optional<int64_t> dim = {}, bool keepdim = false) const;
  [[nodiscard]] Tensor any(const Shape& dims = {}, bool keepdim = false) const;
  [[nodiscard]] Tensor all(const Shape& dims = {}, bool keepdim = false) const;
  [[nodiscard]] Tensor norm(double p = 2, const Shape& dims = {}, bool keepdim = false) const;
  [[nodiscard]] Tensor count_nonzero(const Shape& dims = {}) const;
  [[nodiscard]] Tensor logsumexp(const Shape& dims, bool keepdim = false) const;
  [[nodiscard]] Tensor cumsum(int64_t dim) const;
  [[nodiscard]] Tensor cumprod(int64_t dim) const;
  [[nodiscard]] ValuesIndices cummax(int64_t dim) const;
  [[nodiscard]] ValuesIndices cummin(int64_t dim) const;
  [[nodiscard]] Tensor softmax(int64_t dim) const;
  [[nodiscard]] Tensor log_softmax(int64_t dim) const;

  [[nodiscard]] Tensor neg() const;
  [[nodiscard]] Tensor abs() const;
  [[nodiscard]] Tensor exp() const;
  [[nodiscard]] Tensor expm1() const;
  [[nodiscard]] Tensor log() const;
  [[nodiscard]] Tensor log1p() const;
  [[nodiscard]] Tensor log2() const;
  [[nodiscard]] Tensor log10() const;
  [[nodiscard]] Tensor sqrt() const;
  [[nodiscard]] Tensor rsqrt() const;
  [[nodiscard]] Tensor reciprocal() const;
  [[nodiscard]] Tensor square() const;
  [[nodiscard]] Tensor sin() const;
  [[nodiscard]] Tensor cos() const;
  [[nodiscard]] Tensor tan() const;
  [[nodiscard]] Tensor tanh() const;
  [[nodiscard]] Tensor sigmoid() const;
  [[nodiscard]] Tensor relu() const;
  [[nodiscard]] Tensor prelu(const Tensor& weight) const;
  [[nodiscard]] Tensor erf() const;
  [[nodiscard]] Tensor erfinv() const;
  [[nodiscard]] Tensor lgamma() const;
  [[nodiscard]] Tensor digamma() const;
  [[nodiscard]] Tensor polygamma(int64_t n) const;
  [[nodiscard]] Tensor sign() const;
  [[nodiscard]] Tensor floor() const;
  [[nodiscard]] Tensor ceil() const;
  [[nodiscard]] Tensor trunc() const;
  [[nodiscard]] Tensor round() const;
  [[nodiscard]] Tensor clamp(std::optional<Scalar> min, std::optional<Scalar> max = {}) const;
  [[nodiscard]] Tensor clamp(const Tensor& min, const Tensor& max) const;
  [[nodiscard]] Tensor nan_to_num(double nan = 0, std::optional<double> posinf = {}, std::optional<double> neginf = {}) const;
  [[nodiscard]] Tensor isnan() const;
  [[nodiscard]] Tensor isinf() const;
  [[nodiscard]] Tensor isfinite() const;
  [[nodiscard]] Tensor logical_not() const;
  [[nodiscard]] Tensor bitwise_not() const;

  [[nodiscard]] Tensor add(const Tensor& other, const Scalar& alpha = 1) const;
  [[nodiscard]] Tensor sub(const Tensor& other, const Scalar& alpha = 1) const;
  [[nodiscard]] Tensor mul(const Tensor& other) const;
  [[nodiscard]] Tensor div(const Tensor& other) const;
  [[nodiscard]] Tensor floor_divide(const Tensor& other) const;
  [[nodiscard]] Tensor remainder(const Tensor& other) const;
  [[nodiscard]] Tensor fmod(const Tensor& other) const;
  [[nodiscard]] Tensor atan2(const Tensor& other) const;
  [[nodiscard]] Tensor pow(const Tensor& exponent) const;
  [[nodiscard]] Tensor maximum(const Tensor& other) const;
  [[nodiscard]] Tensor minimum(const Tensor& other) const;
  [[nodiscard]] Tensor eq(const Tensor& other) const;
  [[nodiscard]] Tensor ne(const Tensor& other) const;
  [[nodiscard]] Tensor lt(const Tensor& other) const;
  [[nodiscard]] Tensor le(const Tensor& other) const;
  [[nodiscard]] Tensor gt(const Tensor& other) const;
  [[nodiscard]] Tensor ge(const Tensor& other) const;
  [[nodiscard]] Tensor logical_and(const Tensor& other) const;
  [[nodiscard]] Tensor logical_or(const Tensor& other) const;
  [[nodiscard]] Tensor logical_xor(const Tensor& other) const;
  [[nodiscard]] Tensor bitwise_and(const Tensor& other) const;
  [[nodiscard]] Tensor bitwise_or(const Tensor& other) const;
  [[nodiscard]] Tensor bitwise_xor(const Tensor& other) const;
  [[nodiscard]] Tensor add(const Scalar& other, const Scalar& alpha = 1) const;
  [[nodiscard]] Tensor sub(const Scalar& other, const Scalar& alpha = 1) const;
  [[nodiscard]] Tensor mul(const Scalar& other) const;
  [[nodiscard]] Tensor div(const Scalar& other) const;
  [[nodiscard]] Tensor floor_divide(const Scalar& other) const;
  [[nodiscard]] Tensor remainder(const Scalar& other) const;
  [[nodiscard]] Tensor fmod(const Scalar& other) const;
  [[nodiscard]] Tensor pow(const Scalar& exponent) const;
  [[nodiscard]] Tensor eq(const Scalar& other) const;
  [[nodiscard]] Tensor ne(const Scalar& other) const;
  [[nodiscard]] Tensor lt(const Scalar& other) const;
  [[nodiscard]] Tensor le(const Scalar& other) const;
  [[nodiscard]] Tensor gt(const Scalar& other) const;
  [[nodiscard]] Tensor ge(const Scalar& other) const;
  [[nodiscard]] Tensor bitwise_and(const Scalar& other) const;
  [[nodiscard]] Tensor bitwise_or(const Scalar& other) const;
  [[nodiscard]] Tensor bitwise_xor(const Scalar& other) const;
  [[nodiscard]] Tensor isclose(const Tensor& other, double rtol = 1e-5, double atol = 1e-8, bool equal_nan = false) const;
  [[nodiscard]] bool allclose(const Tensor& other, double rtol = 1e-5, double atol = 1e-8, bool equal_nan = false) const;
  [[nodiscard]] Tensor addcmul(const Tensor& a, const Tensor& b, const Scalar& value = 1) const;
  [[nodiscard]] Tensor addcdiv(const Tensor& a, const Tensor& b, const Scalar& value = 1) const;
  [[nodiscard]] Tensor lerp(const Tensor& end, const Tensor& weight) const;
  [[nodiscard]] Tensor lerp(const Tensor& end, double weight) const;
  [[nodiscard]] Tensor where(const Tensor& condition, const Tensor& other) const;  // this where it is true
  [[nodiscard]] Tensor where(const Tensor& condition, const Scalar& other) const;
  [[nodiscard]] Tensor masked_fill(const Tensor& mask, const Scalar& value) const;

  [[nodiscard]] Tensor matmul(const Tensor& other) const;
  [[nodiscard]] Tensor mm(const Tensor& other) const;  // matmul of matrices
  [[nodiscard]] Tensor mv(const Tensor& other) const;  // of a matrix and a vector
  [[nodiscard]] Tensor bmm(const Tensor& other) const;
  [[nodiscard]] Tensor dot(const Tensor& other) const;
  [[nodiscard]] Tensor outer(const Tensor& other) const;
  [[nodiscard]] Tensor addmm(const Tensor& a, const Tensor& b, const Scalar& beta = 1, const Scalar& alpha = 1) const;

  [[nodiscard]] Tensor index_select(int64_t dim, const Tensor& index) const;
  [[nodiscard]] Tensor index_add(int64_t dim, const Tensor& index, const Tensor& source) const;
  [[nodiscard]] Tensor index_fill(int64_t dim, const Tensor& index, const Scalar& value) const;
  [[nodiscard]] Tensor gather(int64_t dim, const Tensor& index) const;
  [[nodiscard]] Tensor scatter(int64_t dim, const Tensor& index, const Tensor& source) const;
  [[nodiscard]] Tensor scatter(int64_t dim, const Tensor& index, const Scalar& value) const;
  [[nodiscard]] Tensor scatter_add(int64_t dim, const Tensor& index, const Tensor& source) const;
  [[nodiscard]] Tensor scatter_reduce(int64_t dim, const Tensor& index, const Tensor& source, ScatterReduce reduce, bool include_self = true) const;
  [[nodiscard]] Tensor masked_select(const Tensor& mask) const;
  [[nodiscard]] Tensor nonzero() const;
  [[nodiscard]] ValuesIndices sort(int64_t dim = -1, bool descending = false) const;
  [[nodiscard]] Tensor argsort(int64_t dim = -1, bool descending = false) const;
  [[nodiscard]] ValuesIndices topk(int64_t k, int64_t dim = -1, bool largest = true) const;
  [[nodiscard]] UniqueResult unique(bool sorted = true, bool return_inverse = false, bool return_counts = false, std::optional<int64_t> dim = {}) const;
  [[nodiscard]] Tensor bincount(const Tensor& weights = {}, int64_t minlength = 0) const;
  [[nodiscard]] Tensor multinomial(int64_t count, bool replacement = false) const;

  const Tensor& copy_(const Tensor& source) const;
  const Tensor& fill_(const Scalar& value) const;
  const Tensor& zero_() const;
  const Tensor& uniform_(double low = 0, double high = 1) const;
  const Tensor& normal_(double mean = 0, double std = 1) const;
  const Tensor& bernoulli_(double p = 0.5) const;
  const Tensor& add_(const Tensor& other, const Scalar& alpha = 1) const;
  const Tensor& sub_(const Tensor& other, const Scalar& alpha = 1) const;
  const Tensor& mul_(const Tensor& other) const;
  const Tensor& div_(const Tensor& other) const;
  const Tensor& add_(const Scalar& other) const;
  const Tensor& sub_(const Scalar& other) const;
  const Tensor& mul_(const Scalar& other) const;
  const Tensor& div_(const Scalar& other) const;
  const Tensor& pow_(const Scalar& exponent) const;
  const Tensor& neg_() const;
  const Tensor& exp_() const;
  const Tensor& sqrt_() const;
  const Tensor& tanh_() const;
  const Tensor& sigmoid_() const;
  const Tensor& relu_() const;
  const Tensor& clamp_(std::optional<Scalar> min, std::optional<Scalar> max = {}) const;
  const Tensor& lerp_(const Tensor& end, double weight) const;
  const Tensor& addcmul_(const Tensor& a, const Tensor& b, const Scalar& value = 1) const;
  const Tensor& addcdiv_(const Tensor& a, const Tensor& b, const Scalar& value = 1) const;
  const Tensor& masked_fill_(const Tensor& mask, const Scalar& value) const;
  // Computes a new tensor and copies it here. DTypeError: a result that torch does not convert to
  // this dtype.
  const Tensor& abs_() const;
  const Tensor& ceil_() const;
  const Tensor& cos_() const;
  const Tensor& digamma_() const;
  const Tensor& erf_() const;
  const Tensor& erfinv_() const;
  const Tensor& expm1_() const;
  const Tensor& floor_() const;
  const Tensor& lgamma_() const;
  const Tensor& log_() const;
  const Tensor& log10_() const;
  const Tensor& log1p_() const;
  const Tensor& log2_() const;
  const Tensor& logical_not_() const;
  const Tensor& bitwise_not_() const;
  const Tensor& reciprocal_() const;
  const Tensor& round_() const;
  const Tensor& rsqrt_() const;
  const Tensor& sign_() const;
  const Tensor& sin_() const;
  const Tensor& square_() const;
  const Tensor& tan_() const;
  const Tensor& trunc_() const;
  const Tensor& nan_to_num_(double nan = 0, std::optional<double> posinf = {}, std::optional<double> neginf = {}) const;
  const Tensor& polygamma_(int64_t n) const;
  const Tensor& atan2_(const Tensor& other) const;
  const Tensor& logical_and_(const Tensor& other) const;
  const Tensor& logical_or_(const Tensor& other) const;
  const Tensor& logical_xor_(const Tensor& other) const;
  const Tensor& pow_(const Tensor& other) const;
  const Tensor& bitwise_and_(const Tensor& other) const;
  const Tensor& bitwise_and_(const Scalar& other) const;
  const Tensor& bitwise_or_(const Tensor& other) const;
  const Tensor& bitwise_or_(const Scalar& other) const;
  const Tensor& bitwise_xor_(const Tensor& other) const;
  const Tensor& bitwise_xor_(const Scalar& other) const;
  const Tensor& eq_(const Tensor& other) const;
  const Tensor& eq_(const Scalar& other) const;
  const Tensor& ne_(const Tensor& other) const;
  const Tensor& ne_(const Scalar& other) const;
  const Tensor& lt_(const Tensor& other) const;
  const Tensor& lt_(const Scalar& other) const;
  const Tensor& le_(const Tensor& other) const;
  const Tensor& le_(const Scalar& other) const;
  const Tensor& gt_(const Tensor& other) const;
  const Tensor& gt_(const Scalar& other) const;
  const Tensor& ge_(const Tensor& other) const;
  const Tensor& ge_(const Scalar& other) const;
  const Tensor& floor_divide_(const Tensor& other) const;
  const Tensor& floor_divide_(const Scalar& other) const;
  const Tensor& fmod_(const Tensor& other) const;
  const Tensor& fmod_(const Scalar& other) const;
  const Tensor& remainder_(const Tensor& other) const;
  const Tensor& remainder_(const Scalar& other) const;
  const Tensor& tril_(int64_t diagonal = 0) const;
  const Tensor& triu_(int64_t diagonal = 0) const;
  const Tensor& cumsum_(int64_t dim) const;
  const Tensor& cumprod_(int64_t dim) const;
  const Tensor& addmm_(const Tensor& a, const Tensor& b, const Scalar& beta = 1, const Scalar& alpha = 1) const;
  const Tensor& index_add_(int64_t dim, const Tensor& index, const Tensor& source) const;
  const Tensor& index_fill_(int64_t dim, const Tensor& index, const Scalar& value) const;
  const Tensor& scatter_(int64_t dim, const Tensor& index, const Tensor& source) const;
  const Tensor& scatter_add_(int64_t dim, const Tensor& index, const Tensor& source) const;
  const Tensor& scatter_(int64_t dim, const Tensor& index, const Scalar& value) const;
  const Tensor& scatter_reduce_(int64_t dim, const Tensor& index, const Tensor& source, ScatterReduce reduce, bool include_self = true) const;
  // clang-format on
  // The only element, as a truth value: `if (loss > 3)`. Throws ShapeError for more elements.
  explicit operator bool() const;
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

// The row of dimension 0 at which a loop over a tensor is.
class RowIterator {
 public:
  RowIterator(const Tensor& x, int64_t row) : x_(x), row_(row) {}
  Tensor operator*() const { return x_.select(0, row_); }
  RowIterator& operator++() {
    ++row_;
    return *this;
  }
  bool operator==(const RowIterator& other) const { return row_ == other.row_; }

 private:
  Tensor x_;
  int64_t row_;
};
inline RowIterator Tensor::begin() const {
  TS_CHECK_SHAPE(dim() > 0, "tensor", "a tensor without dimensions has no rows; got ", *this);
  return {*this, 0};
}
inline RowIterator Tensor::end() const { return {*this, size(0)}; }

// ---- Indexing ----------------------------------------------------------------------------------

// x[{None}]: a new dimension of size 1. Also an absent bound or number: Slice(None, 3). X11 has a
// macro of this name, which is 0: a file that includes it uses NoneType(), or undefines the macro.
struct NoneType {
  operator std::optional<int64_t>() const { return {}; }
};
#pragma push_macro("None")
#undef None
inline constexpr NoneType None;
#pragma pop_macro("None")
// x[{Ellipsis, 0}]: all dimensions without another index.
struct EllipsisType {};
inline constexpr EllipsisType Ellipsis;
// Python's start:end:step; step >= 1, and negative bounds count from the end.
struct Slice {
  Slice(std::optional<int64_t> start = {}, std::optional<int64_t> end = {}, int64_t step = 1)
      : start(start), end(end), step(step) {}
  std::optional<int64_t> start, end;
  int64_t step;
};

// One of the indices in x[{...}].
class TensorIndex {
 public:
  enum class Kind : uint8_t { kInteger, kSlice, kNone, kEllipsis, kTensor };
  TensorIndex(int value) : integer(value) {}
  TensorIndex(long value) : integer(value) {}
  TensorIndex(long long value) : integer(value) {}
  TensorIndex(unsigned value) : integer(value) {}
  TensorIndex(unsigned long value) : integer(static_cast<int64_t>(value)) {}
  TensorIndex(unsigned long long value) : integer(static_cast<int64_t>(value)) {}
  TensorIndex(bool) = delete;
  TensorIndex(const Slice& value) : kind(Kind::kSlice), slice(value) {}
  TensorIndex(NoneType) : kind(Kind::kNone) {}
  TensorIndex(EllipsisType) : kind(Kind::kEllipsis) {}
  // i64 or i32: positions. Bool: a mask over as many dimensions as it has. Undefined: all, as
  // Slice().
  TensorIndex(const Tensor& value) : kind(Kind::kTensor), tensor(value) {}

  Kind kind = Kind::kInteger;
  int64_t integer = 0;
  Slice slice;
  Tensor tensor;
};

// The result of x[...]: a tensor; assigning to it before it has a name writes into x, as in Python:
//
//     x[0] = y;                            // broadcast, converted as copy_ does
//     x[{Ellipsis, Slice(1, 3)}] += 1;
//     x[x > 0] = 0;  x[{0, index}] = y;    // y of x's dtype
//
// Integers, slices, None and Ellipsis give a view of x. With masks or index tensors it is a copy,
// which is made also for an assignment (masked_fill_ and index_put_ make none); for repeated
// indices the last value counts, and += adds once. Writing is recorded and bumps x's version, as
// for other in-place ops. Throws IndexError, ShapeError, DTypeError.
class IndexedTensor : public Tensor {
 public:
  IndexedTensor(const IndexedTensor&) = default;
  IndexedTensor(IndexedTensor&&) noexcept = default;
  ~IndexedTensor() = default;

  void operator=(const Tensor& values) && { write(values); }
  void operator=(const IndexedTensor& values) && { write(values); }
  void operator=(const Scalar& value) && { write(value); }
  void operator+=(const Tensor& other) &&;
  void operator-=(const Tensor& other) &&;
  void operator*=(const Tensor& other) &&;
  void operator/=(const Tensor& other) &&;
  void operator&=(const Tensor& other) &&;
  void operator|=(const Tensor& other) &&;
  void operator^=(const Tensor& other) &&;
  void operator+=(const Scalar& other) &&;
  void operator-=(const Scalar& other) &&;
  void operator*=(const Scalar& other) &&;
  void operator/=(const Scalar& other) &&;
  void operator&=(const Scalar& other) &&;
  void operator|=(const Scalar& other) &&;
  void operator^=(const Scalar& other) &&;

  // A variable names another tensor afterwards, as variables of Tensor do.
  IndexedTensor& operator=(const Tensor& other) & {
    Tensor::operator=(other);
    place_ = nullptr;
    return *this;
  }
  IndexedTensor& operator=(const IndexedTensor& other) & = default;
  IndexedTensor& operator=(IndexedTensor&& other) & noexcept = default;

 private:
  friend class Tensor;
  struct Place;  // the tensor and its index tensors; none for a view
  IndexedTensor(const Tensor& value, std::shared_ptr<const Place> place)
      : Tensor(value), place_(std::move(place)) {}
  static IndexedTensor of(const Tensor& x, std::span<const TensorIndex> indices);
  void write(const Tensor& values) const;
  void write(const Scalar& value) const;

  std::shared_ptr<const Place> place_;
};

// The values as torch prints them: repr() of print.h. Errors name tensors by describe() instead.
std::ostream& operator<<(std::ostream& out, const Tensor& tensor);

using TensorList = std::vector<Tensor>;

}  // namespace tessera
