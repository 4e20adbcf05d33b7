// A user's own pair of forward and backward, simpler than the op pattern of differentiable.h:
//
//     struct Cube : Function<Cube> {
//       static constexpr const char* kName = "cube";
//       static Tensor forward(FunctionContext&, const Tensor& x) { return x * x * x; }
//       static TensorList backward(FunctionContext&, Grads dy, const Saved& saved) {
//         Tensor x = saved.input(0);
//         return {dy[0] * x * x * 3};
//       }
//     };
//     Tensor y = Cube::apply(x);
//
// forward runs without recording. All inputs are kept for backward and read through saved.input(i);
// forward stores everything else that backward needs in the context. backward returns a gradient
// (or an undefined tensor) for each tensor argument, made of ops, so that second derivatives work.
// Arguments that are not tensors go into the context through `apply_with`.
#pragma once

#include <any>
#include <memory>
#include <utility>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/differentiable.h>

namespace tessera {

class SavedExtra;

class FunctionContext {
 public:
  // Saves a tensor without history. It goes through the hooks of saved tensors, so that
  // checkpoint() drops it.
  void save(const Tensor& tensor);
  Tensor saved(int i) const;
  std::any data;  // attributes, or anything else that forward stores for backward

 private:
  std::vector<std::shared_ptr<const SavedExtra>> saved_;
};

template <class Derived>
struct Function {
  template <class... Tensors>
  static auto apply(const Tensors&... arguments) {
    return apply_with(std::any(), arguments...);
  }
  // `data` becomes context.data for forward and backward.
  template <class... Tensors>
  static auto apply_with(std::any data, const Tensors&... arguments) {
    static const Op op{.name = Derived::kName, .reads = {~IndexMask{0}}};
    auto context = std::make_shared<FunctionContext>();
    context->data = std::move(data);
    return differentiable(
        op, {arguments...},
        [&](Inputs in) {
          return [&]<size_t... kPlace>(std::index_sequence<kPlace...>) {
            return Derived::forward(*context, in[kPlace]...);
          }
          (std::index_sequence_for<Tensors...>{});
        },
        [context](Grads dy, const Saved& saved) -> TensorList {
          return Derived::backward(*context, dy, saved);
        });
  }
};

}  // namespace tessera
