#include <tessera/nn/models/kv_cache.h>

#include <cmath>

#include <tessera/autograd/autograd.h>
#include <tessera/core/kernels/attention/attention_bytes.h>

namespace tessera::nn::models {

namespace {

constexpr double kSteps = 255;

void copy_rows(const Tensor& to, const Tensor& from, const Tensor& rows, int64_t length) {
  if (!from.defined()) return;
  to.narrow(2, 0, length).copy_(index_select(from.narrow(2, 0, length), 0, rows));
}

}  // namespace

KvCache::KvCache(const KvCacheShape& shape, DType dtype, const Device& device)
    : shape_(shape), dtype_(dtype), device_(device) {
  TS_CHECK_DTYPE(dtype == kU8 || (is_floating(dtype) && !is_fp8(dtype)), "KvCache",
                 "holds f64, f32, bf16, f16 or, in 8 bits, u8; got ", dtype);
  for (int64_t i = 0; i < shape.layers; ++i) {
    keys_.push_back(make_part());
    values_.push_back(make_part());
  }
}

KvCache::Part KvCache::make_part() const {
  const Shape shape = {shape_.batch, shape_.heads, shape_.capacity, shape_.width};
  Part part{.held = empty(shape, {.dtype = dtype_, .device = device_}), .least = {}, .step = {}};
  if (dtype_ == kU8) {
    const Shape vectors = {shape_.batch, shape_.heads, shape_.capacity, 1};
    part.least = empty(vectors, {.dtype = kF32, .device = device_});
    part.step = empty(vectors, {.dtype = kF32, .device = device_});
  }
  return part;
}

int64_t KvCache::bytes() const {
  const int64_t vectors = 2 * shape_.layers * shape_.batch * shape_.heads * shape_.capacity;
  return vectors * (shape_.width * size_of(dtype_) + (dtype_ == kU8 ? 2 * size_of(kF32) : 0));
}

void KvCache::write(Part& part, const Tensor& added) const {
  const auto fresh = [&](const Tensor& all) { return all.narrow(2, length_, added.size(2)); };
  if (dtype_ != kU8) {
    fresh(part.held).copy_(added);
    return;
  }
  const Tensor x = added.to(kF32), least = amin(x, {-1}, true);
  const Tensor step = (amax(x, {-1}, true) - least) / kSteps;
  // Where all elements are equal the step is 0, and any number of steps is right.
  const Tensor number = (x - least) / step.masked_fill(eq(step, 0), 1);
  fresh(part.held).copy_(round(number));
  fresh(part.least).copy_(least);
  fresh(part.step).copy_(step);
}

Tensor KvCache::read(const Part& part, int64_t total, DType dtype) const {
  const auto all = [&](const Tensor& each) { return each.narrow(2, 0, total); };
  if (dtype_ != kU8) return all(part.held).to(dtype);
  return (all(part.held).to(kF32) * all(part.step) + all(part.least)).to(dtype);
}

void KvCache::check_room(int64_t added) const {
  TS_CHECK_SHAPE(length_ + added <= capacity(), "KvCache", "holds ", length_, " of ", capacity(),
                 " tokens and cannot take ", added,
                 " more; make it with more room, or clear() it and begin with fewer");
}

KvCache::Held KvCache::append(size_t layer, const Tensor& keys, const Tensor& values) {
  const int64_t total = length_ + keys.size(2);
  check_room(keys.size(2));
  const NoGradGuard no_grad;
  write(keys_.at(layer), keys);
  write(values_.at(layer), values);
  return {read(keys_[layer], total, keys.dtype()), read(values_[layer], total, values.dtype())};
}

Tensor KvCache::attend(size_t layer, const Tensor& query, const Tensor& keys, const Tensor& values,
                       const AttentionOptions& options) {
  // What the kernel of bytes does not know goes the way of all dtypes: gradients of the query, parts
  // of tensors, f64, and bounds.
  const bool by_bytes =
      dtype_ == kU8 && device_.is_cpu() && query.device().is_cpu() && query.dim() == 4 &&
      query.size(2) <= kernels::kFewQueries && query.dtype() != kF64 &&
      !(grad_enabled() && query.requires_grad()) && query.impl()->marks == 0 &&
      options.dropout == 0 && (options.enable_gqa || query.size(1) == keys.size(1)) &&
      !options.lengths.defined() && !options.starts.defined() && !options.ends.defined();
  if (!by_bytes) {
    const Held held = append(layer, keys, values);
    return scaled_dot_product_attention(query, held.keys, held.values, options);
  }
  const int64_t total = length_ + keys.size(2);
  check_room(keys.size(2));
  const NoGradGuard no_grad;
  write(keys_.at(layer), keys);
  write(values_.at(layer), values);
  const auto bytes_of = [&](const Part& part) {
    const auto all = [&](const Tensor& each) { return each.narrow(2, 0, total); };
    return kernels::ByteVectors{all(part.held), all(part.least), all(part.step)};
  };
  kernels::AttentionSpec spec{
      .scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(query.size(3)))),
      .causal = options.causal};
  if (options.mask.defined()) {
    spec.mask = options.mask.expand({query.size(0), query.size(1), query.size(2), total});
  }
  return kernels::attention_of_bytes(query, bytes_of(keys_[layer]), bytes_of(values_[layer]), spec);
}

void KvCache::select(const Tensor& rows) {
  const NoGradGuard no_grad;
  shape_.batch = rows.size(0);
  for (std::vector<Part>* const parts : {&keys_, &values_}) {
    for (Part& part : *parts) {
      const Part before = part;
      part = make_part();
      copy_rows(part.held, before.held, rows, length_);
      copy_rows(part.least, before.least, rows, length_);
      copy_rows(part.step, before.step, rows, length_);
    }
  }
}

}  // namespace tessera::nn::models
