#include <tessera/autograd/function.h>

#include <tessera/autograd/saved_tensor.h>

namespace tessera {

void FunctionContext::save(const Tensor& tensor) {
  saved_.push_back(std::make_shared<const SavedExtra>(tensor));
}
Tensor FunctionContext::saved(int i) const { return saved_.at(static_cast<size_t>(i))->unpack(); }

}  // namespace tessera
