// Derivatives of functions, as torch.autograd.functional: products with the Jacobian and the
// Hessian, and these matrices.
//
//     const auto f = [](const Tensor& x) { return exp(x).sum(); };
//     Tensor h = functional::hessian(f, x);                // [x.shape()..., x.shape()...]
//     auto [value, product] = functional::hvp(f, x, y);    // h y, without h
//
// Names and the order of arguments are torch's. `function` takes tensors and returns tensors: one
// of each, or lists. It is called on detached copies of the handles `inputs`, without their
// history; other captured tensors count as constants. If an output does not depend on an input, the
// derivative is 0, or with `strict` an error. Recording is always on in the call. With
// `create_graph` the inputs themselves are used, and results can be differentiated again, to any
// order. Outputs and inputs are floating. Ops without a second derivative throw UnsupportedError in
// jvp, hvp, vhp and hessian. nn/functional_call.h turns a module and its parameters into a
// function.
//
// Cost in backward passes besides one call: vjp 1; jvp 2 (the gradient is linear in its weights,
// and its own gradient by them is the product); hvp 2, vhp 2; jacobian one for each element of the
// outputs; hessian one for each element of the inputs, and 1.
#pragma once

#include <functional>
#include <vector>

#include <tessera/core/tensor/tensor.h>

namespace tessera::functional {

using Function = std::function<TensorList(const TensorList&)>;
using TensorFunction = std::function<Tensor(const Tensor&)>;
using ScalarFunction = std::function<Tensor(const TensorList&)>;  // returns one element

struct FunctionalOptions {
  bool create_graph = false;  // results can be differentiated
  bool strict = false;        // a derivative that is 0 by independence is an AutogradError
};

struct Product {
  Tensor output;  // of the function
  Tensor product;
};
struct Products {
  TensorList outputs;
  TensorList products;
};

// v^T J, a product for each input. v has the shapes of the outputs and may be omitted for a
// function that returns one element.
Products vjp(const Function& function, const TensorList& inputs, const TensorList& v = {},
             const FunctionalOptions& options = {});
Product vjp(const TensorFunction& function, const Tensor& input, const Tensor& v = {},
            const FunctionalOptions& options = {});

// J v, a product for each output. v has the shapes of the inputs and may be omitted for one input
// of one element.
Products jvp(const Function& function, const TensorList& inputs, const TensorList& v = {},
             const FunctionalOptions& options = {});
Product jvp(const TensorFunction& function, const Tensor& input, const Tensor& v = {},
            const FunctionalOptions& options = {});

// result[o][i]: [outputs[o].shape()..., inputs[i].shape()...].
std::vector<TensorList> jacobian(const Function& function, const TensorList& inputs,
                                 const FunctionalOptions& options = {});
Tensor jacobian(const TensorFunction& function, const Tensor& input,
                const FunctionalOptions& options = {});

// For functions that return one element. result[i][j]: [inputs[i].shape()...,
// inputs[j].shape()...].
std::vector<TensorList> hessian(const ScalarFunction& function, const TensorList& inputs,
                                const FunctionalOptions& options = {});
Tensor hessian(const TensorFunction& function, const Tensor& input,
               const FunctionalOptions& options = {});

// H v and v^T H, which are equal if second derivatives are continuous; vhp keeps less. v has the
// shapes of the inputs.
Products hvp(const ScalarFunction& function, const TensorList& inputs, const TensorList& v,
             const FunctionalOptions& options = {});
Product hvp(const TensorFunction& function, const Tensor& input, const Tensor& v,
            const FunctionalOptions& options = {});
Products vhp(const ScalarFunction& function, const TensorList& inputs, const TensorList& v,
             const FunctionalOptions& options = {});
Product vhp(const TensorFunction& function, const Tensor& input, const Tensor& v,
            const FunctionalOptions& options = {});

}  // namespace tessera::functional
