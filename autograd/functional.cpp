#include <tessera/autograd/functional.h>

#include <algorithm>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>

namespace tessera::functional {
namespace {

// The tensors that function is called with: the inputs' elements as leaves, or, with create_graph,
// the inputs seen through a view, so that an input that is given twice counts as two.
TensorList begin(const char* where, const TensorList& inputs, bool create_graph) {
  TS_CHECK(!inputs.empty(), where, "needs at least one input");
  TensorList result;
  for (const Tensor& input : inputs) {
    TS_CHECK(input.defined(), where, "an input is undefined; give it a value first");
    TS_CHECK_DTYPE(is_floating(input.dtype()), where, "needs floating inputs; got ", input);
    const Tensor own = create_graph && input.requires_grad() ? view(input, input.shape())
                                                             : detach(input).set_requires_grad();
    result.push_back(own);
  }
  return result;
}

TensorList call(const char* where, const Function& function, const TensorList& inputs) {
  TensorList outputs = function(inputs);
  TS_CHECK(!outputs.empty(), where, "the function returned no tensor");
  for (const Tensor& output : outputs) {
    TS_CHECK(output.defined(), where, "the function returned an undefined tensor");
    TS_CHECK_DTYPE(is_floating(output.dtype()), where, "needs floating outputs; got ", output);
  }
  return outputs;
}

TensorList checked_v(const char* where, const TensorList& v, const TensorList& like,
                     const char* what) {
  if (v.empty()) {
    TS_CHECK(like.size() == 1 && like[0].numel() == 1, where, "v may be left out only for ", what,
             " of one element; got ", like.size(), " of which the first is ", like[0]);
    return {ones_like(like[0])};
  }
  TS_CHECK(v.size() == like.size(), where, "needs a v for each of the ", like.size(), " ", what,
           "; got ", v.size());
  for (size_t i = 0; i < v.size(); ++i) {
    TS_CHECK_SHAPE(v[i].defined() && v[i].shape() == like[i].shape(), where,
                   "v must have the shape of ", like[i], "; got ", v[i]);
  }
  return v;
}

// Gradients by all of `inputs`, zeros where nothing leads from them to `outputs`.
TensorList gradients(const char* where, const TensorList& outputs, const TensorList& inputs,
                     const TensorList& v, bool create_graph, bool strict) {
  TensorList followed, seeds, result(inputs.size());
  for (size_t o = 0; o < outputs.size(); ++o) {
    if (!outputs[o].requires_grad()) continue;
    followed.push_back(outputs[o]);
    seeds.push_back(v[o].dtype() == outputs[o].dtype() ? v[o] : to(v[o], outputs[o].dtype()));
  }
  if (!followed.empty()) {
    result = grad(followed, inputs, seeds,
                  {.retain_graph = true, .create_graph = create_graph, .allow_unused = true});
  }
  for (size_t i = 0; i < result.size(); ++i) {
    if (result[i].defined()) continue;
    TS_CHECK_AS(AutogradError, !strict, where, "the outputs do not depend on input ", i,
                ", as strict asks; their derivative by it would be zeros");
    result[i] = zeros_like(inputs[i]);
  }
  return result;
}

TensorList finished(TensorList tensors, bool create_graph) {
  if (create_graph) return tensors;
  for (Tensor& tensor : tensors) tensor = detach(tensor);
  return tensors;
}

Function listed(const TensorFunction& function) {
  return [function](const TensorList& x) { return TensorList{function(x[0])}; };
}
Function listed(const ScalarFunction& function) {
  return [function](const TensorList& x) { return TensorList{function(x)}; };
}
ScalarFunction scalar(const TensorFunction& function) {
  return [function](const TensorList& x) { return function(x[0]); };
}
TensorList maybe(const Tensor& v) { return v.defined() ? TensorList{v} : TensorList{}; }
Product single(const Products& both) { return {both.outputs[0], both.products[0]}; }

Products vjp_of(const char* where, const Function& function, const TensorList& inputs,
                const TensorList& v, const FunctionalOptions& options) {
  const EnableGradGuard recording;
  const TensorList x = begin(where, inputs, options.create_graph);
  const TensorList outputs = call(where, function, x);
  const TensorList seeds = checked_v(where, v, outputs, "outputs");
  const TensorList products =
      gradients(where, outputs, x, seeds, options.create_graph, options.strict);
  return {finished(outputs, options.create_graph), finished(products, options.create_graph)};
}

// [Note: forward mode by two backwards] g(u) = J^T u is linear in u, so that the gradient of g . v
// by u is J v, whatever u is: zeros. That the outputs are on the tape of u is all that is used.
TensorList forward_products(const char* where, const TensorList& outputs, const TensorList& x,
                            const TensorList& v, const FunctionalOptions& options) {
  TensorList u;
  for (const Tensor& output : outputs) u.push_back(zeros_like(output).set_requires_grad());
  const TensorList g = gradients(where, outputs, x, u, true, options.strict);
  return gradients(where, g, u, v, options.create_graph, options.strict);
}

}  // namespace

Products vjp(const Function& function, const TensorList& inputs, const TensorList& v,
             const FunctionalOptions& options) {
  return vjp_of("vjp", function, inputs, v, options);
}
Product vjp(const TensorFunction& function, const Tensor& input, const Tensor& v,
            const FunctionalOptions& options) {
  return single(vjp(listed(function), {input}, maybe(v), options));
}

Products jvp(const Function& function, const TensorList& inputs, const TensorList& v,
             const FunctionalOptions& options) {
  constexpr const char* kWhere = "jvp";
  const EnableGradGuard recording;
  const TensorList x = begin(kWhere, inputs, options.create_graph);
  const TensorList direction = checked_v(kWhere, v, x, "inputs");
  const TensorList outputs = call(kWhere, function, x);
  const TensorList products = forward_products(kWhere, outputs, x, direction, options);
  return {finished(outputs, options.create_graph), finished(products, options.create_graph)};
}
Product jvp(const TensorFunction& function, const Tensor& input, const Tensor& v,
            const FunctionalOptions& options) {
  return single(jvp(listed(function), {input}, maybe(v), options));
}

namespace {

std::vector<TensorList> jacobian_of(const char* where, const TensorList& outputs,
                                    const TensorList& x, const FunctionalOptions& options) {
  std::vector<TensorList> result;
  for (const Tensor& output : outputs) {
    std::vector<TensorList> rows(x.size());  // of each input, a row for each element of the output
    for (int64_t k = 0; k < output.numel(); ++k) {
      const Tensor seed = zeros({output.numel()}, {output.dtype(), output.device()});
      {
        const NoGradGuard no_grad;
        fill_(narrow(seed, 0, k, 1), 1);
      }
      const TensorList row = gradients(where, {output}, x, {reshape(seed, output.shape())},
                                       options.create_graph, options.strict);
      for (size_t i = 0; i < x.size(); ++i) rows[i].push_back(row[i]);
    }
    TensorList blocks;
    for (size_t i = 0; i < x.size(); ++i) {
      Shape shape = output.shape();
      for (const int64_t size : x[i].shape()) shape.push_back(size);
      blocks.push_back(rows[i].empty() ? zeros(shape, {x[i].dtype(), x[i].device()})
                                       : reshape(stack(rows[i], 0), shape));
    }
    result.push_back(finished(std::move(blocks), options.create_graph));
  }
  return result;
}

}  // namespace

std::vector<TensorList> jacobian(const Function& function, const TensorList& inputs,
                                 const FunctionalOptions& options) {
  constexpr const char* kWhere = "jacobian";
  const EnableGradGuard recording;
  const TensorList x = begin(kWhere, inputs, options.create_graph);
  return jacobian_of(kWhere, call(kWhere, function, x), x, options);
}
Tensor jacobian(const TensorFunction& function, const Tensor& input,
                const FunctionalOptions& options) {
  return jacobian(listed(function), {input}, options)[0][0];
}

namespace {

// The gradient of a function to one element, on the tape of x.
struct OfScalar {
  TensorList x, output, gradient;
};
OfScalar gradient_of(const char* where, const ScalarFunction& function, const TensorList& inputs,
                     const FunctionalOptions& options) {
  OfScalar result;
  result.x = begin(where, inputs, options.create_graph);
  result.output = call(where, listed(function), result.x);
  TS_CHECK_SHAPE(result.output[0].numel() == 1, where, "needs a function to one element; got ",
                 result.output[0]);
  result.gradient = gradients(where, result.output, result.x, {ones_like(result.output[0])}, true,
                              options.strict);
  return result;
}

}  // namespace

std::vector<TensorList> hessian(const ScalarFunction& function, const TensorList& inputs,
                                const FunctionalOptions& options) {
  constexpr const char* kWhere = "hessian";
  const EnableGradGuard recording;
  const OfScalar f = gradient_of(kWhere, function, inputs, options);
  return jacobian_of(kWhere, f.gradient, f.x, options);
}
Tensor hessian(const TensorFunction& function, const Tensor& input,
               const FunctionalOptions& options) {
  return hessian(scalar(function), TensorList{input}, options)[0][0];
}

Products vhp(const ScalarFunction& function, const TensorList& inputs, const TensorList& v,
             const FunctionalOptions& options) {
  constexpr const char* kWhere = "vhp";
  const EnableGradGuard recording;
  const OfScalar f = gradient_of(kWhere, function, inputs, options);
  const TensorList direction = checked_v(kWhere, v, f.x, "inputs");
  const TensorList products =
      gradients(kWhere, f.gradient, f.x, direction, options.create_graph, options.strict);
  return {finished(f.output, options.create_graph), finished(products, options.create_graph)};
}
Product vhp(const TensorFunction& function, const Tensor& input, const Tensor& v,
            const FunctionalOptions& options) {
  return single(vhp(scalar(function), TensorList{input}, maybe(v), options));
}

Products hvp(const ScalarFunction& function, const TensorList& inputs, const TensorList& v,
             const FunctionalOptions& options) {
  constexpr const char* kWhere = "hvp";
  const EnableGradGuard recording;
  const OfScalar f = gradient_of(kWhere, function, inputs, options);
  const TensorList direction = checked_v(kWhere, v, f.x, "inputs");
  const TensorList products = forward_products(kWhere, f.gradient, f.x, direction, options);
  return {finished(f.output, options.create_graph), finished(products, options.create_graph)};
}
Product hvp(const TensorFunction& function, const Tensor& input, const Tensor& v,
            const FunctionalOptions& options) {
  return single(hvp(scalar(function), TensorList{input}, maybe(v), options));
}

}  // namespace tessera::functional
