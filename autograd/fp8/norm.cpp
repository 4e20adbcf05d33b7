#include <tessera/autograd/fp8/norm_call.h>

#include <functional>
#include <string>
#include <utility>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/fp8/operands.h>
#include <tessera/autograd/op_observer.h>
#include <tessera/core/context.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/norm/norm_quantized.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/tensor/unreadable_storage.h>

namespace tessera {
namespace {

// Of a result without bytes.
struct NormalisedStorage final : UnreadableStorage {
  std::string describe(const Tensor& of) const override {
    return tessera::detail::concatenate(of.dtype(), of.shape(), ", written in fp8 alone");
  }
  std::string_view remedy() const override {
    return "ops calculate its elements when they read it: clone() it first";
  }
  std::unique_ptr<ElementGuard> clone() const override { return nullptr; }
  bool can_bring() const override { return true; }
  void bring() const override {
    TS_CHECK_AS(AutogradError, source.version() == version, "layer_norm",
                "what was normalised was written in place before the result was read; clone() it");
    TensorImpl* const whole = bearer;
    const std::unique_ptr<TensorSlot> self = std::move(whole->guard);  // ends with this call
    const Tensor y = calculate(source);
    whole->storage->resize(y.nbytes());
    kernels::copy_into(Tensor(new TensorImpl(whole->storage, y.shape(), y.strides(), 0, y.dtype())),
                       y);
  }

  TensorImpl* bearer = nullptr;
  std::function<Tensor(const Tensor&)> calculate;
  Tensor source;
  uint32_t version = 0;
  const Fp8Linear* layer = nullptr;
  std::optional<DType> through;
  mutable std::optional<kernels::Quantized> written;
};

NormalisedStorage* normalised(const Tensor& x) {
  return x.defined() ? dynamic_cast<NormalisedStorage*>(x.impl()->guard.get()) : nullptr;
}

}  // namespace

Fp8Norm::Fp8Norm(const Tensor& x, int64_t columns) {
  const Fp8Reader& reader = Context::current().slot<Fp8Reader>();
  if (reader.layer == nullptr || !x.device().is_cuda()) [[likely]]
    return;
  const Fp8Casts& casts = reader.layer->casts();
  const Tensor scale = reader.layer->scale(Fp8Role::kInput);
  // Before the first call the scales lie elsewhere.
  if (!scale.defined() || scale.device() != x.device()) return;
  if (casts.input_of_weight != std::optional(casts.input)) return;
  const int64_t rows = columns == 0 ? 0 : x.numel() / columns;
  if (x.size(-1) != columns || !kernels::quantises_rows(rows, columns, x.dtype(), casts.input) ||
      !reader.layer->could_take(x, *reader.weight, rows)) {
    return;
  }
  const AutocastMode& mode = Context::current().slot<AutocastMode>();
  const std::optional<DType> through = fp8_through(x, casts);
  if (mode.boundary != nullptr || mode.dtype != through.value_or(x.dtype())) return;
  if (Context::current().slot<OpObserverSlot>().observer != nullptr) return;  // may read results
  layer_ = reader.layer;
  wants_ = layer_->notes(Fp8Role::kInput);
  wants_.by_columns = grad_enabled() && reader.weight->requires_grad();
  wants_.through = through;
}

kernels::RowNorm Fp8Norm::forward(const Tensor& x, const Tensor& residual, int64_t columns,
                                  const Tensor& weight, const Tensor& bias, double eps,
                                  bool center) const {
  if (layer_ == nullptr) {
    return kernels::row_norm_forward(x, residual, columns, weight, bias, eps, center);
  }
  kernels::QuantizedRowNorm made =
      kernels::row_norm_quantized(x, residual, columns, weight, bias, eps, center,
                                  layer_->casts().input, layer_->scale(Fp8Role::kInput), wants_);
  auto storage = std::make_unique<NormalisedStorage>();
  storage->source = raw::alias(residual.defined() ? made.norm.sum : x);
  storage->version = storage->source.version();
  storage->calculate = [=, weight = weight.defined() ? raw::alias(weight) : Tensor(),
                        bias = bias.defined() ? raw::alias(bias) : Tensor()](const Tensor& source) {
    return kernels::row_norm_forward(source, {}, columns, weight, bias, eps, center).y;
  };
  storage->layer = layer_.get();
  storage->through = wants_.through;
  storage->written = std::move(made.y);
  made.norm.y = Tensor(new TensorImpl(std::make_shared<Storage>(0, x.device()), x.shape(),
                                      contiguous_strides(x.shape()), 0, x.dtype()));
  storage->bearer = made.norm.y.impl();
  storage->bearer->guard = std::move(storage);
  return std::move(made.norm);
}

std::optional<kernels::Quantized> take_normalised(const Tensor& x, const Fp8Linear& layer,
                                                  std::optional<DType> through, bool by_columns) {
  NormalisedStorage* const storage = normalised(x);
  if (storage == nullptr) return std::nullopt;
  if (storage->written && storage->layer == &layer && storage->through == through &&
      (!by_columns || storage->written->transposed.defined())) {
    return std::exchange(storage->written, std::nullopt);
  }
  storage->bring();
  return std::nullopt;
}

void write_normalised(const Tensor& x) {
  if (const NormalisedStorage* storage = normalised(x)) storage->bring();
}

}  // namespace tessera
