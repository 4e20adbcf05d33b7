// How an op enters the tape.
//
//     static const Op kProduct{
//         .name = "product", .autocast = Autocast::kWidest, .reads = {inputs(1), inputs(0)}};
//     Tensor product(const Tensor& a, const Tensor& b) {
//       return differentiable(kProduct, {a, b},
//           [](Inputs in) { return kernels::binary<fn::Mul>(in[0], in[1]); },
//           [](Grads dy, const Saved& s) -> TensorList {
//             return {s.needs(0) ? product(dy[0], s.input(1)) : Tensor(),
//                     s.needs(1) ? product(dy[0], s.input(0)) : Tensor()};
//           });
//     }
//
// forward gets the inputs after autocast and returns one Tensor or a TensorList; it runs without
// recording. As `(Inputs in, Extras& extras)` it may keep more for backward: extras.save(rstd).
// backward returns a gradient for each input (one Tensor where the op has one input); undefined for
// none. It may return a gradient in the broadcast shape: the engine sums it to the input's shape
// and converts it to the input's dtype. Attributes are captured by the lambdas, by value. Absent
// inputs are undefined tensors. What an op does with dimensions stands beside its record, for the
// rules of marked tensors: differentiable(along(kSum, dims, keepdim), {x}, ...), see mark_rules.h.
#pragma once

#include <functional>
#include <initializer_list>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <tessera/autograd/mark_rules.h>
#include <tessera/autograd/op.h>
#include <tessera/core/context.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera {

using Inputs = std::span<const Tensor>;

// For the public function of an op, before it looks at an argument.
inline void check_defined(const Op& op, const char* name, const Tensor& x) {
  TS_CHECK(x.defined(), op, name, " is undefined; give it a value first");
}

// For an argument that is none of the inputs below, or that is read before they are checked: it
// must be whole, no part of another tensor (mark_rules.h), ...
inline void check_beside(const Op& op, const char* name, const Tensor& given) {
  if (!given.defined() || given.impl()->marks == 0) return;
  const MarkRules* rules = mark_rules_for(op);
  if (rules != nullptr) rules->check_whole(op, name, given);
}
// ... and on x's device.
inline void check_same_device(const Op& op, const char* name, const Tensor& given,
                              const Tensor& x) {
  check_beside(op, name, given);
  TS_CHECK_DEVICE(given.device() == x.device(), op, "expects all tensors on one device; got ", x,
                  " and ", name, " ", given, "; move one with to(device)");
}

class OpNode;

// What forward keeps beyond inputs and outputs.
class Extras {
 public:
  explicit Extras(bool wanted) : wanted_(wanted) {}
  bool wanted() const { return wanted_; }  // false: no backward will come, saving is a waste
  // Tensors without history: statistics, masks, indices.
  void save(const Tensor& tensor) { tensors_.push_back(tensor); }
  const TensorList& tensors() const { return tensors_; }

 private:
  bool wanted_;
  TensorList tensors_;
};

// The gradients of the outputs. An output that nothing used has an undefined one: defined(i) tells;
// the only output of an op always has one.
class Grads {
 public:
  explicit Grads(std::span<const Tensor> grads) : grads_(grads) {}
  const Tensor& operator[](int output) const { return grads_[static_cast<size_t>(output)]; }
  bool defined(int output) const { return grads_[static_cast<size_t>(output)].defined(); }
  int size() const { return static_cast<int>(grads_.size()); }

 private:
  std::span<const Tensor> grads_;
};

// What backward may read. input(i) and output(i) throw where the record does not name them.
class Saved {
 public:
  explicit Saved(const OpNode& node) : node_(node) {}
  Tensor input(int i) const;
  // A defined input; if it was not kept, a recorded tensor of zeros in its place, for second
  // derivatives that need its history and not its elements.
  Tensor input_or_place(int i) const;
  Tensor output(int i = 0) const;
  Tensor extra(int i) const;
  bool needs(int input) const;  // is this gradient wanted?
  // Known for every input that was defined, kept or not.
  const Shape& input_shape(int i) const;
  DType input_dtype(int i) const;
  const Shape& output_shape(int i = 0) const;
  DType output_dtype(int i = 0) const;

  // [Note: what goes along with gradients] (engine.h), by input and output.
  //
  // The gradient that reached input i before, of its shape and dtype, or undefined. Whoever takes
  // it adds it to what it returns for that input.
  Tensor take_pending(int input) const;
  bool wants_column_sums(int input) const;
  void give_column_sums(int input, const Tensor& gradient, const Tensor& sums) const;
  // The gradients that are about to be returned are parts of the output's, one for each input.
  void give_parts(const Tensor& whole, std::span<const Tensor> parts) const;
  // [size of the last dimension], summed in f32 at least and rounded to the gradient's dtype.
  Tensor column_sums() const;

 private:
  const OpNode& node_;
  mutable std::vector<std::optional<Tensor>> extras_;
};

using BackwardFunction = std::function<TensorList(Grads, const Saved&)>;

// The untyped part, to which the templates below adapt lambdas.
struct DifferentiableCall {
  using Forward = void (*)(void* function, Inputs inputs, Extras& extras, TensorList& outputs);
  // True where grad mode is on and an input requires grad: only then is backward kept.
  static bool will_record(std::span<const Tensor> inputs);
  static TensorList run(const OpCall& call, std::span<const Tensor> inputs, Forward forward,
                        void* function, BackwardFunction backward);
  static Tensor run_inplace(const OpCall& call, std::span<const Tensor> inputs, Forward forward,
                            void* function, BackwardFunction backward);

 private:
  static TensorList run_marked(const OpCall& call, const MarkRules& rules,
                               std::span<const Tensor> inputs, Forward forward, void* function,
                               BackwardFunction backward);
};

namespace detail {

template <class Forward>
inline constexpr bool takes_extras = std::is_invocable_v<Forward&, Inputs, Extras&>;

template <class Forward>
auto forward_result() {
  if constexpr (takes_extras<Forward>) {
    return std::type_identity<std::invoke_result_t<Forward&, Inputs, Extras&>>{};
  } else {
    return std::type_identity<std::invoke_result_t<Forward&, Inputs>>{};
  }
}
template <class Forward>
using ForwardResult = typename decltype(forward_result<Forward>())::type;

template <class Forward>
void call_forward(void* function, Inputs in, Extras& extras, TensorList& outputs) {
  Forward& forward = *static_cast<Forward*>(function);
  const auto take = [&](auto&& result) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(result)>, Tensor>) {
      outputs.push_back(std::move(result));
    } else {
      outputs = std::move(result);
    }
  };
  if constexpr (takes_extras<Forward>) {
    take(forward(in, extras));
  } else {
    take(forward(in));
  }
}

template <class Backward>
BackwardFunction adapt_backward(Backward backward) {
  using Result = std::invoke_result_t<Backward&, Grads, const Saved&>;
  if constexpr (std::is_same_v<Result, TensorList>) {
    return BackwardFunction(std::move(backward));
  } else {
    return [backward = std::move(backward)](Grads grads, const Saved& saved) mutable {
      TensorList result;
      result.push_back(backward(grads, saved));
      return result;
    };
  }
}

template <class Forward>
ForwardResult<Forward> unpack_outputs(TensorList outputs) {
  if constexpr (std::is_same_v<ForwardResult<Forward>, Tensor>) {
    return std::move(outputs[0]);
  } else {
    return outputs;
  }
}

}  // namespace detail

template <class Forward, class Backward>
detail::ForwardResult<Forward> differentiable(const OpCall& call, std::span<const Tensor> inputs,
                                              Forward forward, Backward backward) {
  BackwardFunction function;
  if (DifferentiableCall::will_record(inputs)) {
    function = detail::adapt_backward(std::move(backward));
  }
  return detail::unpack_outputs<Forward>(DifferentiableCall::run(
      call, inputs, detail::call_forward<Forward>, &forward, std::move(function)));
}
template <class Forward, class Backward>
detail::ForwardResult<Forward> differentiable(const OpCall& call,
                                              std::initializer_list<Tensor> inputs, Forward forward,
                                              Backward backward) {
  return differentiable(call, std::span<const Tensor>(inputs.begin(), inputs.size()),
                        std::move(forward), std::move(backward));
}

// An op without a gradient (comparisons, argmax, integer results): outputs require none.
template <class Forward>
detail::ForwardResult<Forward> not_differentiable(const OpCall& call,
                                                  std::span<const Tensor> inputs, Forward forward) {
  return detail::unpack_outputs<Forward>(
      DifferentiableCall::run(call, inputs, detail::call_forward<Forward>, &forward, nullptr));
}
template <class Forward>
detail::ForwardResult<Forward> not_differentiable(const OpCall& call,
                                                  std::initializer_list<Tensor> inputs,
                                                  Forward forward) {
  return not_differentiable(call, std::span<const Tensor>(inputs.begin(), inputs.size()),
                            std::move(forward));
}

// An op that writes its first input: forward writes in[0] and returns it. Throws AutogradError for
// a leaf that requires grad. Bumps the version; where backward reads input 0, a copy of its old
// value is kept. The gradient of input 0 is that of the old value. Returns inputs[0] itself.
template <class Forward, class Backward>
Tensor differentiable_inplace(const OpCall& call, std::initializer_list<Tensor> inputs,
                              Forward forward, Backward backward) {
  const std::span<const Tensor> list(inputs.begin(), inputs.size());
  BackwardFunction function;
  if (DifferentiableCall::will_record(list)) {
    function = detail::adapt_backward(std::move(backward));
  }
  return DifferentiableCall::run_inplace(call, list, detail::call_forward<Forward>, &forward,
                                         std::move(function));
}

}  // namespace tessera
