#include <tessera/nn/tied_values.h>

#include <algorithm>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/message.h>

namespace tessera::nn {

std::optional<std::string> first_difference(const Tensor& a, const Tensor& b, DType dtype) {
  const bool is_same = a.storage() == b.storage() && a.impl()->offset == b.impl()->offset &&
                       a.strides() == b.strides() && a.dtype() == b.dtype();
  if (is_same) return {};
  const NoGradGuard no_grad;
  const auto plain = [&](const Tensor& x) {
    return x.detach().to(kCpu).to(dtype).contiguous().view({x.numel()});
  };
  const Tensor x = plain(a), y = plain(b);
  const auto* const left = static_cast<const char*>(x.data());
  const auto* const right = static_cast<const char*>(y.data());
  const auto place = std::mismatch(left, left + x.nbytes(), right).first - left;
  if (place == x.nbytes()) return {};
  const int64_t element = place / size_of(dtype);
  Shape index = a.shape();
  int64_t rest = element;
  for (int d = index.size() - 1; d >= 0; --d) {
    index[d] = rest % a.size(d);
    rest /= a.size(d);
  }
  const auto at = [&](const Tensor& values) { return values.select(0, element).item(); };
  return tessera::detail::concatenate("at ", index, ": ", at(x), " and ", at(y));
}

}  // namespace tessera::nn
