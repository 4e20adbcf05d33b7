#include <tessera/nn/models/visible_keys.h>

#include <tessera/autograd/autograd.h>
#include <tessera/nn/transformer/positions.h>

namespace tessera::nn::models {

Tensor mask_of(const VisibleKeys& keys, const Device& device) {
  const NoGradGuard no_grad;
  const int64_t S = keys.past + keys.count;
  Tensor mask = tril(ones({keys.count, S}, {.dtype = kBool, .device = device}), keys.past);
  if (keys.window > 0 && keys.window < S) mask = triu(mask, keys.past - keys.window + 1);
  if (keys.documents.defined()) {
    const Tensor first = keys.documents.starts.to(kI64).unsqueeze(1).unsqueeze(-1);
    return logical_and(mask, ge(arange(0, S, 1, kI64, device), first));
  }
  if (!keys.padding.defined()) return mask;
  const Tensor real =
      ge(arange(0, S, 1, kI64, device), keys.padding.to(kI64).reshape({-1, 1, 1, 1}));
  return logical_and(mask, real);
}

SeenKeys attention_to(const VisibleKeys& keys, const Device& device) {
  const bool cut = keys.window > 0 && keys.window < keys.past + keys.count;
  if (keys.documents.defined()) {
    SeenKeys seen{.options = {.starts = keys.documents.starts, .causal = true, .enable_gqa = true}};
    if (cut) {
      const NoGradGuard no_grad;
      const Tensor places = positions(keys.count, device, keys.past, kI32);
      seen.options.starts =
          maximum(seen.options.starts, clamp(places - (keys.window - 1), Scalar(0)));
    }
    return seen;
  }
  if (keys.past == 0 && !cut && !keys.padding.defined()) return {};
  SeenKeys seen{.options = {.enable_gqa = true}};
  if (keys.count > 1 || cut || keys.padding.defined()) seen.options.mask = mask_of(keys, device);
  return seen;
}

Tensor positions_of(const VisibleKeys& keys, const Device& device) {
  if (keys.documents.defined()) return keys.documents.position_ids;
  const Tensor plain = positions(keys.count, device, keys.past);
  if (!keys.padding.defined()) return plain;
  const Tensor place = plain - keys.padding.to(kI64).unsqueeze(1);
  return place.masked_fill(lt(place, 0), 0);
}

void check_padding(const Tensor& padding, const Tensor& tokens) {
  if (!padding.defined()) return;
  TS_CHECK_SHAPE(padding.shape() == Shape{tokens.size(0)}, "padding", "is one number a text, [",
                 tokens.size(0), "]; got ", padding);
  TS_CHECK_DTYPE(padding.dtype() == kI64 || padding.dtype() == kI32, "padding",
                 "counts tokens in i64 or i32; got ", padding);
}

void check_packed(const char* where, const VisibleKeys& keys, bool has_cache) {
  TS_CHECK_AS(UnsupportedError,
              !keys.documents.defined() || (!has_cache && !keys.padding.defined()), where,
              "a cache and padding are of one sequence a row; packed documents go without them");
}

}  // namespace tessera::nn::models
