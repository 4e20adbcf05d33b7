#include <tessera/autograd/gradcheck.h>

#include <cmath>
#include <sstream>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/random.h>

namespace tessera {
namespace {

using Column = std::vector<double>;

std::vector<Column> values_of(const TensorList& outputs) {
  std::vector<Column> values;
  for (const Tensor& output : outputs) {
    const bool counts = output.defined() && is_floating(output.dtype());
    values.push_back(counts ? output.to_vector() : Column{});
  }
  return values;
}

// Nothing to look at is no proof.
void check_any_requires_grad(const char* where, const TensorList& inputs) {
  bool any = false;
  for (const Tensor& input : inputs) any |= input.defined() && input.requires_grad();
  TS_CHECK(any, where, "no input requires grad; call set_requires_grad() on those to check");
}

}  // namespace

GradcheckResult gradcheck(const std::function<TensorList(const TensorList&)>& function,
                          const TensorList& inputs, const GradcheckOptions& options) {
  check_any_requires_grad("gradcheck", inputs);
  TensorList leaves;
  for (const Tensor& input : inputs) {
    const bool wanted = input.defined() && input.requires_grad();
    TS_CHECK_DTYPE(!wanted || input.dtype() == kF64, "gradcheck", "needs f64 inputs; got ", input);
    // Elements are moved one by one below, so each needs a place of its own.
    leaves.push_back(wanted ? contiguous(detach(input)).clone().set_requires_grad() : input);
  }
  const TensorList outputs = function(leaves);
  const std::vector<Column> values = values_of(outputs);

  // analytic[o][i]: row-major Jacobian, outputs by inputs.
  std::vector<std::vector<Column>> analytic(outputs.size());
  for (size_t o = 0; o < outputs.size(); ++o) {
    analytic[o].resize(leaves.size());
    if (values[o].empty() || !outputs[o].requires_grad()) continue;
    for (size_t row = 0; row < values[o].size(); ++row) {
      Tensor seed = raw::zeros(outputs[o].shape(), kF64);
      seed.data_as<double>()[row] = 1;
      TensorList wanted;
      std::vector<size_t> positions;
      for (size_t i = 0; i < leaves.size(); ++i) {
        if (!leaves[i].defined() || !leaves[i].requires_grad()) continue;
        wanted.push_back(leaves[i]);
        positions.push_back(i);
      }
      const TensorList gradients =
          grad(outputs[o], wanted, seed, {.retain_graph = true, .allow_unused = true});
      for (size_t w = 0; w < wanted.size(); ++w) {
        Column& jacobian = analytic[o][positions[w]];
        const Column gradient = gradients[w].defined()
                                    ? gradients[w].to_vector()
                                    : Column(static_cast<size_t>(wanted[w].numel()), 0.0);
        jacobian.insert(jacobian.end(), gradient.begin(), gradient.end());
      }
    }
  }

  GradcheckResult result;
  NoGradGuard no_grad;
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (!leaves[i].defined() || !leaves[i].requires_grad()) continue;
    double* elements = leaves[i].data_as<double>();
    for (int64_t column = 0; column < leaves[i].numel(); ++column) {
      const double value = elements[column];
      elements[column] = value + options.step;
      const std::vector<Column> above = values_of(function(leaves));
      elements[column] = value - options.step;
      const std::vector<Column> below = values_of(function(leaves));
      elements[column] = value;
      for (size_t o = 0; o < outputs.size(); ++o) {
        for (size_t row = 0; row < values[o].size(); ++row) {
          const double numeric = (above[o][row] - below[o][row]) / (2 * options.step);
          const size_t at =
              row * static_cast<size_t>(leaves[i].numel()) + static_cast<size_t>(column);
          const double exact = analytic[o][i].empty() ? 0 : analytic[o][i][at];
          double ratio =
              std::abs(exact - numeric) / (options.absolute + options.relative * std::abs(numeric));
          if (std::isnan(ratio)) ratio = INFINITY;
          if (ratio <= result.worst) continue;
          result.worst = ratio;
          PlainText<std::ostringstream> text;
          text << "d output " << o << "[" << row << "] / d input " << i << "[" << column
               << "]: backward gives " << exact << ", differences give " << numeric;
          result.message = text.str();
        }
      }
    }
  }
  result.ok = result.worst <= 1;
  return result;
}

GradcheckResult gradgradcheck(const std::function<TensorList(const TensorList&)>& function,
                              const TensorList& inputs, const GradcheckOptions& options) {
  check_any_requires_grad("gradgradcheck", inputs);
  // A fixed random direction for each output makes the gradients functions of the inputs.
  TensorList seeds;
  {
    NoGradGuard no_grad;
    for (const Tensor& output : function(inputs)) {
      const bool counts = output.defined() && is_floating(output.dtype());
      seeds.push_back(
          counts ? randn(output.shape(), {.dtype = kF64}, named_random_stream("gradgradcheck"))
                 : Tensor());
    }
  }
  const size_t count = inputs.size();
  const auto gradient_function = [&](const TensorList& arguments) {
    EnableGradGuard enable;
    TensorList leaves(arguments.begin(), arguments.begin() + static_cast<ptrdiff_t>(count));
    TensorList wanted;
    for (Tensor& leaf : leaves) {
      if (leaf.defined() && leaf.dtype() == kF64 && leaf.requires_grad()) wanted.push_back(leaf);
    }
    TensorList outputs, gradients;
    const TensorList all = function(leaves);
    for (size_t o = 0; o < all.size(); ++o) {
      if (!all[o].defined() || !all[o].requires_grad()) continue;
      outputs.push_back(all[o]);
      gradients.push_back(arguments[count + o]);
    }
    TensorList result =
        grad(outputs, wanted, gradients, {.create_graph = true, .allow_unused = true});
    for (Tensor& gradient : result) {
      if (!gradient.defined()) gradient = raw::zeros({}, kF64);
    }
    return result;
  };
  TensorList arguments = inputs;
  for (Tensor& seed : seeds) {
    arguments.push_back(seed.defined() ? seed.set_requires_grad() : Tensor());
  }
  return gradcheck(gradient_function, arguments, options);
}

}  // namespace tessera
