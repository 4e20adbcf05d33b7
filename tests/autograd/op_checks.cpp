#include "autograd/op_checks.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <sstream>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/gradcheck.h>
#include <tessera/autograd/op.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::tests {
namespace {

constexpr uint64_t kSeed = 11;

template <class... Args>
std::string text(const Args&... args) {
  return detail::concatenate(args...);
}

std::string title(const OpRow& row, const Sample& sample) {
  std::string result = std::string(row.name) + "(";
  for (const Input& input : sample.inputs) {
    result += input.kind == Input::Kind::kAbsent ? std::string("absent ") : text(input.shape, " ");
  }
  return result + sample.attrs + ")";
}

Attrs attrs_for(const Sample& sample, DType floating) {
  Attrs attrs = Attrs::parse(sample.attrs);
  if (floating == kF64) attrs.replace_dtype(kF64);
  return attrs;
}

Result call_seeded(const OpRow& row, const TensorList& inputs, const Attrs& attrs) {
  manual_seed(kSeed);
  return call_op(row, inputs, attrs);
}

// Runs `body`; an exception becomes a complaint.
template <class Body>
void guarded(Complaints& complaints, const std::string& where, const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    complaints.push_back(where + ": threw " + error.what());
  }
}

// Complains unless `body` throws an ErrorClass that names the op.
template <class ErrorClass, class Body>
void expect_refused(Complaints& complaints, const std::string& where, const OpRow& row,
                    const Body& body) {
  try {
    body();
    complaints.push_back(where + ": was not refused");
  } catch (const ErrorClass& error) {
    if (!std::string_view(error.what()).starts_with(row.name))
      complaints.push_back(where + ": the error does not name the op: " + error.what());
  }
}

bool wants_grad(const OpRow& row, const Sample& sample, size_t i) {
  return row.differentiable != Differentiable::kNo && sample.inputs[i].grad;
}
std::vector<size_t> wanted_inputs(const OpRow& row, const Sample& sample) {
  std::vector<size_t> wanted;
  for (size_t i = 0; i < sample.inputs.size(); ++i) {
    if (wants_grad(row, sample, i)) wanted.push_back(i);
  }
  return wanted;
}

// Incoming gradients for the floating outputs, the same in every dtype up to rounding.
TensorList make_gradients(const TensorList& outputs, DType dtype) {
  TensorList gradients;
  uint64_t state = 5;
  for (const Tensor& y : outputs) {
    if (!y.requires_grad()) {
      gradients.emplace_back();
      continue;
    }
    std::vector<double> values(static_cast<size_t>(y.numel()));
    for (double& value : values) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      value = static_cast<double>(static_cast<int64_t>(state >> 40) - (1 << 23)) * 0x1p-22;
    }
    gradients.push_back(converted(tensor(values, y.shape(), dtype), y.dtype()));
  }
  return gradients;
}

struct Evaluation {
  TensorList outputs;
  std::vector<TensorList::value_type> gradients;  // of the wanted inputs
};

// Values and gradients; `gradients_in` is made in `rounding` where it is empty.
Evaluation evaluate(const OpRow& row, const TensorList& inputs, const std::vector<size_t>& wanted,
                    const Attrs& attrs, DType rounding, TensorList gradients_in = {}) {
  TensorList leaves;
  for (const Tensor& input : inputs) leaves.push_back(input);
  for (size_t i : wanted) leaves[i].set_requires_grad();
  Evaluation result;
  result.outputs = call_seeded(row, leaves, attrs).tensors;
  if (wanted.empty()) return result;
  if (gradients_in.empty()) gradients_in = make_gradients(result.outputs, rounding);
  TensorList followed, seeds, targets;
  for (size_t o = 0; o < result.outputs.size(); ++o) {
    if (!result.outputs[o].requires_grad()) continue;
    followed.push_back(result.outputs[o]);
    const Tensor seed = gradients_in[o].dtype() == result.outputs[o].dtype()
                            ? gradients_in[o]
                            : converted(gradients_in[o], result.outputs[o].dtype());
    const Device& device = result.outputs[o].device();
    seeds.push_back(seed.device() == device ? seed : seed.to(device));
  }
  TS_CHECK(!followed.empty(), row.name, "no output requires grad");
  for (size_t i : wanted) targets.push_back(leaves[i]);
  result.gradients = grad(followed, targets, seeds, {.allow_unused = true});
  for (size_t i = 0; i < targets.size(); ++i) {
    if (!result.gradients[i].defined())
      result.gradients[i] = raw::zeros(targets[i].shape(), targets[i].dtype(), targets[i].device());
  }
  return result;
}

// A product of the second derivatives by the inputs of `of` with fixed numbers, where those of
// `wanted` require grad: what it gives those inputs, and the incoming gradient of each output.
TensorList second_gradients(const OpRow& row, const TensorList& inputs,
                            const std::vector<size_t>& wanted, const std::vector<size_t>& of,
                            const Attrs& attrs, const TensorList& gradients_in) {
  for (const size_t i : wanted) inputs[i].set_requires_grad();
  const TensorList outputs = call_seeded(row, inputs, attrs).tensors;
  TensorList followed, seeds, targets;
  for (const size_t i : of) targets.push_back(inputs[i]);
  TensorList all = targets;
  for (size_t o = 0; o < outputs.size(); ++o) {
    all.push_back(outputs[o]);
    if (!outputs[o].requires_grad()) continue;
    followed.push_back(outputs[o]);
    seeds.push_back(gradients_in[o].detach().clone().set_requires_grad());
    all.back() = seeds.back();
  }
  const TensorList first =
      grad(followed, targets, seeds, {.create_graph = true, .allow_unused = true});
  Tensor product = zeros({}, {.dtype = kF64});
  for (const Tensor& gradient : first) {
    if (!gradient.defined() || !gradient.requires_grad()) continue;
    product = product + sum(gradient * make_gradients({gradient}, kF64)[0]);
  }
  targets.insert(targets.end(), seeds.begin(), seeds.end());
  TensorList found;
  if (product.requires_grad()) found = grad(product, targets, {}, {.allow_unused = true});
  TensorList result;
  for (const Tensor& tensor : all) {
    Tensor own = raw::zeros(tensor.shape(), kF64, kCpu);
    for (size_t i = 0; i < found.size(); ++i) {
      if (targets[i].is(tensor) && found[i].defined()) own = found[i];
    }
    result.push_back(own);
  }
  return result;
}

TensorList in_f64(const TensorList& inputs) {
  TensorList result;
  for (const Tensor& x : inputs) {
    if (!x.defined()) {
      result.push_back(x);
    } else if (is_floating(x.dtype())) {
      result.push_back(converted(x, kF64));
    } else {
      result.push_back(x.to(kCpu));
    }
  }
  return result;
}
TensorList magnitudes(const TensorList& inputs) {
  TensorList result;
  for (const Tensor& x : inputs) {
    if (!x.defined() || x.dtype() != kF64) {
      result.push_back(x);
      continue;
    }
    std::vector<double> values = x.to_vector();
    for (double& value : values) value = std::abs(value);
    result.push_back(tensor(values, x.shape(), kF64));
  }
  return result;
}

// The same elements over other memory.
enum class Layout { kTransposed, kStrided, kOffset };
constexpr Layout kLayouts[] = {Layout::kTransposed, Layout::kStrided, Layout::kOffset};
const char* name_of(Layout layout) {
  constexpr const char* names[] = {"transposed", "strided", "offset"};
  return names[static_cast<int>(layout)];
}
Tensor laid_out(const Tensor& x, Layout layout) {
  if (!x.defined() || x.dim() == 0) return x;
  Tensor target;
  const int dims = x.dim();
  if (layout == Layout::kTransposed) {
    Shape reversed, order;
    for (int d = dims - 1; d >= 0; --d) {
      reversed.push_back(x.shape()[d]);
      order.push_back(d);
    }
    target = raw::permute(raw::empty(reversed, x.dtype()), order);
  } else if (layout == Layout::kStrided) {
    Shape wide = x.shape();
    wide[dims - 1] = 2 * wide[dims - 1] + 1;
    target = raw::slice(raw::zeros(wide, x.dtype()), -1, 1, {}, 2);
  } else {
    Shape tall = x.shape();
    tall[0] += 1;
    target = raw::narrow(raw::zeros(tall, x.dtype()), 0, 1, x.shape()[0]);
  }
  NoGradGuard no_grad;
  const std::vector<double> values = x.to_vector();
  Shape index = Shape::filled(dims, 0);
  for (double value : values) {
    Tensor element = target;
    for (int d = 0; d < dims; ++d) element = raw::select(element, 0, index[d]);
    element.fill_(is_floating(x.dtype()) ? Scalar(value) : Scalar(static_cast<int64_t>(value)));
    for (int d = dims - 1; d >= 0 && ++index[d] == x.shape()[d]; --d) index[d] = 0;
  }
  return raw::as_parameter(target);
}

// Scales of outputs and gradients for the error bound.
struct Scales {
  std::vector<double> outputs, gradients;
};
Scales scales_of(const OpRow& row, const Evaluation& reference, const TensorList& inputs,
                 const std::vector<size_t>& wanted, const Attrs& attrs,
                 const TensorList& gradients_in) {
  Scales scales;
  for (const Tensor& y : reference.outputs) scales.outputs.push_back(largest(y.to_vector()));
  for (const Tensor& g : reference.gradients) scales.gradients.push_back(largest(g.to_vector()));
  if (!row.sums) return scales;
  TensorList positive_gradients;
  for (const Tensor& g : gradients_in)
    positive_gradients.push_back(g.defined() ? magnitudes({g})[0] : g);
  const Evaluation totals =
      evaluate(row, magnitudes(inputs), wanted, attrs, kF64, positive_gradients);
  for (size_t i = 0; i < scales.outputs.size(); ++i) {
    scales.outputs[i] = std::max(scales.outputs[i], largest(totals.outputs[i].to_vector()));
  }
  for (size_t i = 0; i < scales.gradients.size(); ++i) {
    scales.gradients[i] = std::max(scales.gradients[i], largest(totals.gradients[i].to_vector()));
  }
  return scales;
}

bool has_floating_input(const TensorList& inputs) {
  return std::any_of(inputs.begin(), inputs.end(),
                     [](const Tensor& x) { return x.defined() && is_floating(x.dtype()); });
}

}  // namespace

double error_bound(DType dtype, double k, double terms, double scale) {
  return k * epsilon_of(dtype) / 2 * std::sqrt(terms) * scale;
}

double largest(const std::vector<double>& values) {
  double result = 0;
  for (double value : values) {
    if (std::isfinite(value)) result = std::max(result, std::abs(value));
  }
  return result;
}

std::string difference(const Tensor& got, const std::vector<double>& reference, double bound) {
  const std::vector<double> values = got.to_vector();
  if (values.size() != reference.size())
    return text("has ", values.size(), " elements, expected ", reference.size());
  double worst = -1;
  size_t position = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    const bool same =
        values[i] == reference[i] || (std::isnan(values[i]) && std::isnan(reference[i]));
    double error = same ? 0 : std::abs(values[i] - reference[i]);
    if (!same && !std::isfinite(error)) error = std::numeric_limits<double>::infinity();
    if (error > worst) {
      worst = error;
      position = i;
    }
  }
  if (worst <= (is_floating(got.dtype()) ? bound : 0)) return {};
  std::ostringstream out;
  out.precision(17);
  out << got.describe() << " element " << position << " is " << values[position] << ", expected "
      << reference[position];
  out.precision(3);
  out << ", error " << worst << ", bound " << bound;
  return out.str();
}

Tensor converted(const Tensor& x, DType dtype) { return tensor(x.to_vector(), x.shape(), dtype); }

Complaints check_forward(const OpRow& row, const Sample& sample) {
  return check_forward_on(row, sample, kCpu);
}

Complaints check_forward_on(const OpRow& row, const Sample& sample, const Device& device) {
  Complaints complaints;
  for (const DType dtype : {kF32, kBF16, kF16}) {
    const std::string where = text(title(row, sample), " in ", dtype);
    guarded(complaints, where, [&] {
      TensorList inputs = make_inputs(row, sample, dtype);
      if (!device.is_cpu()) {
        for (Tensor& x : inputs) {
          if (x.defined()) x = x.to(device);
        }
      }
      if (row.linear_algebra && (!device.is_cpu() || dtype != kF32)) {
        const auto call = [&] { (void)call_seeded(row, inputs, attrs_for(sample, dtype)); };
        if (device.is_cpu()) {
          expect_refused<DTypeError>(complaints, where, row, call);
        } else {
          expect_refused<UnsupportedError>(complaints, where, row, call);
        }
        return;
      }
      const bool floating = has_floating_input(inputs);
      if (!floating && dtype != kF32 && !sample.inputs.empty()) return;
      const std::vector<size_t> wanted = wanted_inputs(row, sample);
      std::vector<std::vector<double>> before;
      for (const Tensor& x : inputs)
        before.push_back(x.defined() ? x.to_vector() : std::vector<double>{});

      const Attrs attrs = attrs_for(sample, dtype), exact_attrs = attrs_for(sample, kF64);
      const Evaluation got = evaluate(row, inputs, wanted, attrs, dtype);
      for (size_t i = 0; i < inputs.size(); ++i) {
        if (inputs[i].defined() && inputs[i].to_vector() != before[i]) {
          complaints.push_back(text(where, ": input ", i, " was changed"));
        }
      }
      if (row.random) return;
      const TensorList exact_inputs = in_f64(inputs);
      TensorList exact_gradients;
      if (!wanted.empty()) {
        for (const Tensor& g : make_gradients(got.outputs, dtype)) {
          exact_gradients.push_back(g.defined() ? converted(g, kF64) : g);
        }
      }
      const Evaluation reference =
          evaluate(row, exact_inputs, wanted, exact_attrs, dtype, exact_gradients);
      const Scales scales =
          scales_of(row, reference, exact_inputs, wanted, exact_attrs, exact_gradients);
      const double terms = static_cast<double>(sample.terms);
      for (size_t i = 0; i < reference.outputs.size(); ++i) {
        const Tensor& y = got.outputs[i];
        const Tensor& expected = reference.outputs[i];
        const bool keeps = attrs_for(sample, dtype).dtype().has_value() || !floating;
        if (y.shape() != expected.shape()) {
          complaints.push_back(text(where, ": output ", i, " is ", y, ", in f64 ", expected));
          continue;
        }
        const DType natural = row.float32_result ? kF32 : dtype;
        if (!keeps && y.dtype() != (expected.dtype() == kF64 ? natural : expected.dtype())) {
          complaints.push_back(text(where, ": output ", i, " is ", y, ", in f64 ", expected));
        }
        const bool inside = row.bf16_inside_on_gpu && device.is_cuda() && dtype == kBF16;
        const std::string wrong = difference(
            y, expected.to_vector(),
            error_bound(inside ? kBF16 : y.dtype(), row.tolerance, terms, scales.outputs[i]));
        if (!wrong.empty()) complaints.push_back(text(where, ": output ", i, ": ", wrong));
      }
      for (size_t i = 0; i < wanted.size(); ++i) {
        const Tensor& gradient = got.gradients[i];
        if (gradient.dtype() != dtype || gradient.shape() != inputs[wanted[i]].shape()) {
          complaints.push_back(text(where, ": gradient of input ", wanted[i], " is ", gradient));
          continue;
        }
        const std::string wrong =
            difference(gradient, reference.gradients[i].to_vector(),
                       error_bound(dtype, row.tolerance, terms, scales.gradients[i]));
        if (!wrong.empty())
          complaints.push_back(text(where, ": gradient of input ", wanted[i], ": ", wrong));
      }
    });
  }
  return complaints;
}

Complaints check_grad(const OpRow& row, const Sample& sample) {
  Complaints complaints;
  const std::string where = title(row, sample);
  guarded(complaints, where, [&] {
    TensorList inputs = make_inputs(row, sample, kF64);
    const Attrs attrs = attrs_for(sample, kF64);
    const auto function = [&](TensorList x) {
      if (row.symmetric) x[0] = mul(add(x[0], transpose(x[0], -2, -1)), 0.5);
      return call_seeded(row, x, attrs).tensors;
    };
    if (row.differentiable == Differentiable::kNo) {
      for (Tensor& x : inputs) {
        if (x.defined() && is_floating(x.dtype())) x.set_requires_grad();
      }
      for (const Tensor& y : function(inputs)) {
        if (y.requires_grad())
          complaints.push_back(
              text(where, ": ", y, " requires grad, but the row says there is none"));
      }
      return;
    }
    int64_t elements = 0;
    for (size_t i : wanted_inputs(row, sample)) {
      inputs[i].set_requires_grad();
      elements += inputs[i].numel();
    }
    const GradcheckResult first = gradcheck(function, inputs);
    if (!first.ok) complaints.push_back(where + ": " + first.message);
    if (elements == 0) return;
    if (row.differentiable == Differentiable::kYes) {
      if (elements > 60) return;  // quadratic cost
      const GradcheckResult second = gradgradcheck(function, inputs, {.absolute = 1e-4});
      if (!second.ok) complaints.push_back(where + ": second derivative: " + second.message);
      return;
    }
    try {  // an honest refusal names the op
      (void)gradgradcheck(function, inputs);
      complaints.push_back(where +
                           ": a second derivative was given, but the row says there is none");
    } catch (const UnsupportedError& error) {
      if (std::string_view(error.what()).find("second derivative") == std::string_view::npos) throw;
    }
  });
  return complaints;
}

Complaints check_grad_of_some(const OpRow& row, const Sample& sample) {
  Complaints complaints;
  const std::vector<size_t> all = wanted_inputs(row, sample);
  if (all.size() < 2) return complaints;
  const Attrs attrs = attrs_for(sample, kF64);
  guarded(complaints, title(row, sample), [&] {
    TensorList leaves = make_inputs(row, sample, kF64);
    for (const size_t i : all) leaves[i].set_requires_grad();
    const TensorList gradients = make_gradients(call_seeded(row, leaves, attrs).tensors, kF64);
    const Evaluation reference =
        evaluate(row, make_inputs(row, sample, kF64), all, attrs, kF64, gradients);
    const double terms = static_cast<double>(sample.terms);
    // Of long lists each alone, and all but one.
    std::vector<std::vector<size_t>> sets;
    const bool is_short = all.size() <= 4;
    for (size_t set = 1; is_short && set + 1 < (size_t{1} << all.size()); ++set) {
      std::vector<size_t>& some = sets.emplace_back();
      for (size_t i = 0; i < all.size(); ++i) {
        if (set >> i & 1) some.push_back(all[i]);
      }
    }
    for (size_t i = 0; !is_short && i < all.size(); ++i) {
      sets.push_back({all[i]});
      sets.push_back(all);
      sets.back().erase(sets.back().begin() + static_cast<std::ptrdiff_t>(i));
    }
    for (const std::vector<size_t>& some : sets) {
      std::string where = title(row, sample) + " where a gradient is wanted of";
      for (const size_t i : some) where += text(" ", i);
      guarded(complaints, where, [&] {
        const Evaluation got =
            evaluate(row, make_inputs(row, sample, kF64), some, attrs, kF64, gradients);
        for (size_t i = 0; i < some.size(); ++i) {
          const auto at = static_cast<size_t>(std::ranges::find(all, some[i]) - all.begin());
          const std::vector<double> expected = reference.gradients[at].to_vector();
          const std::string wrong =
              difference(got.gradients[i], expected,
                         error_bound(kF64, row.tolerance, terms, 1 + largest(expected)));
          if (!wrong.empty()) complaints.push_back(text(where, ": input ", some[i], ": ", wrong));
        }
        if (row.differentiable != Differentiable::kYes) return;
        const TensorList of_all =
            second_gradients(row, make_inputs(row, sample, kF64), all, some, attrs, gradients);
        const TensorList of_some =
            second_gradients(row, make_inputs(row, sample, kF64), some, some, attrs, gradients);
        for (size_t i = 0; i < of_all.size(); ++i) {
          const std::vector<double> expected = of_all[i].to_vector();
          // Rounding errors of first derivatives are among them.
          const std::string wrong =
              difference(of_some[i], expected,
                         error_bound(kF64, 100 * row.tolerance, terms, 1 + largest(expected)));
          if (!wrong.empty()) {
            complaints.push_back(text(where, ": second derivative ", i, ": ", wrong));
          }
        }
      });
    }
  });
  return complaints;
}

Complaints check_layout(const OpRow& row, const Sample& sample) {
  Complaints complaints;
  guarded(complaints, title(row, sample), [&] {
    const std::vector<size_t> wanted = wanted_inputs(row, sample);
    const Attrs attrs = attrs_for(sample, kF32);
    const TensorList inputs = make_inputs(row, sample, kF32);
    const Evaluation reference = evaluate(row, inputs, wanted, attrs, kF32);
    const TensorList gradients =
        wanted.empty() ? TensorList{} : make_gradients(reference.outputs, kF32);
    const double terms = static_cast<double>(sample.terms);

    const auto attempt = [&](const std::string& where, const auto& body) {
      guarded(complaints, where, [&] {
        try {
          body();
        } catch (const ShapeError&) {
          if (!row.refuses_layouts) throw;
        }
      });
    };
    TensorList exact_gradients;
    for (const Tensor& g : gradients)
      exact_gradients.push_back(g.defined() ? converted(g, kF64) : g);
    const Scales scales =
        scales_of(row, reference, in_f64(inputs), wanted, attrs_for(sample, kF64), exact_gradients);

    const auto compare = [&](const std::string& where, const Evaluation& got,
                             const Evaluation& expected, bool values) {
      for (size_t i = 0; i < expected.outputs.size(); ++i) {
        if (row.random && !values) continue;
        const std::vector<double> exact = expected.outputs[i].to_vector();
        const double scale = std::max(largest(exact), scales.outputs[i]);
        const std::string wrong =
            difference(got.outputs[i], exact, error_bound(kF32, row.tolerance, terms, scale));
        if (!wrong.empty()) complaints.push_back(text(where, ": output ", i, ": ", wrong));
      }
      for (size_t i = 0; i < expected.gradients.size(); ++i) {
        const std::vector<double> exact = expected.gradients[i].to_vector();
        const double scale = std::max({largest(exact), scales.gradients[i], 1e-3});
        const std::string wrong =
            difference(got.gradients[i], exact, error_bound(kF32, row.tolerance, terms, scale));
        if (!wrong.empty())
          complaints.push_back(text(where, ": gradient of input ", wanted[i], ": ", wrong));
      }
    };

    if (row.random && !row.samples.empty() && row.differentiable == Differentiable::kNo) return;
    for (const Layout layout : kLayouts) {
      const std::string where = text(title(row, sample), " ", name_of(layout));
      attempt(where, [&] {
        // All inputs alike, then each alone beside contiguous ones.
        for (size_t only = 0; only <= (inputs.size() > 1 ? inputs.size() : 0); ++only) {
          TensorList others;
          for (size_t i = 0; i < inputs.size(); ++i) {
            others.push_back(only == 0 || only == i + 1 ? laid_out(inputs[i], layout)
                                                        : make_inputs(row, sample, kF32)[i]);
          }
          TensorList dys;
          for (const Tensor& g : gradients) dys.push_back(only == 0 ? laid_out(g, layout) : g);
          compare(where, evaluate(row, others, wanted, attrs, kF32, dys), reference, false);
        }
      });
    }
    if (!wanted.empty()) {  // the gradient that sum() sends: one element seen everywhere
      const std::string where = title(row, sample) + " with an expanded gradient";
      attempt(where, [&] {
        TensorList expanded, full;
        for (const Tensor& g : gradients) {
          expanded.push_back(g.defined() ? raw::expand(raw::full({}, 0.75, kF32), g.shape()) : g);
          full.push_back(g.defined() ? raw::full(g.shape(), 0.75, kF32) : g);
        }
        compare(where, evaluate(row, make_inputs(row, sample, kF32), wanted, attrs, kF32, expanded),
                evaluate(row, make_inputs(row, sample, kF32), wanted, attrs, kF32, full), false);
      });
    }
    // Each floating input with its first row seen in all rows.
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (sample.inputs[i].kind != Input::Kind::kFloating &&
          sample.inputs[i].kind != Input::Kind::kAway)
        continue;
      if (inputs[i].dim() == 0 || inputs[i].size(0) < 2) continue;
      const std::string where = text(title(row, sample), " with input ", i, " expanded");
      attempt(where, [&] {
        const TensorList fresh = make_inputs(row, sample, kF32);
        TensorList expanded = fresh, full = make_inputs(row, sample, kF32);
        expanded[i] =
            raw::as_parameter(raw::expand(raw::narrow(fresh[i], 0, 0, 1), fresh[i].shape()));
        full[i] = converted(expanded[i], kF32);
        compare(where, evaluate(row, expanded, wanted, attrs, kF32, gradients),
                evaluate(row, full, wanted, attrs, kF32, gradients), false);
      });
    }
  });
  return complaints;
}

Complaints check_meta(const OpRow& row, const Sample& sample) {
  Complaints complaints;
  if (sample.inputs.empty()) return complaints;
  const std::string where = title(row, sample) + " on meta";
  guarded(complaints, where, [&] {
    const Attrs attrs = attrs_for(sample, kF32);
    const TensorList inputs = make_inputs(row, sample, kF32);
    const TensorList expected = call_seeded(row, inputs, attrs).tensors;
    TensorList meta;
    for (const Tensor& x : inputs)
      meta.push_back(x.defined() ? raw::empty(x.shape(), x.dtype(), kMeta) : x);
    if (row.value_dependent) {
      try {
        (void)call_seeded(row, meta, attrs);
        complaints.push_back(where + ": a shape that depends on values was given without values");
      } catch (const Error&) {
      }
      return;
    }
    const TensorList got = call_seeded(row, meta, attrs).tensors;
    if (got.size() != expected.size()) {
      complaints.push_back(text(where, ": ", got.size(), " outputs, on cpu ", expected.size()));
      return;
    }
    for (size_t i = 0; i < got.size(); ++i) {
      if (!got[i].is_meta() || got[i].shape() != expected[i].shape() ||
          got[i].dtype() != expected[i].dtype()) {
        complaints.push_back(text(where, ": output ", i, " is ", got[i], ", on cpu ", expected[i]));
      }
    }
  });
  return complaints;
}

Complaints check_devices(const OpRow& row, const Sample& sample, const Device& other) {
  Complaints complaints;
  const TensorList inputs = make_inputs(row, sample, kF32);
  if (std::ranges::count_if(inputs, &Tensor::defined) < 2) return complaints;
  const Attrs attrs = attrs_for(sample, kF32);
  const auto on = [](const Tensor& x, const Device& device) {
    if (!device.is_meta()) return x.to(device);
    return raw::empty(x.shape(), x.dtype(), kMeta);
  };
  // All that was queued is done: kernels that read another device's memory fail.
  const auto call = [&](const TensorList& given) {
    for (const Tensor& y : call_seeded(row, given, attrs).tensors) {
      if (!y.is_meta()) (void)y.to_vector();
    }
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined()) continue;
    for (const bool moved : {true, false}) {
      TensorList given;
      bool numbers = true;  // all that is on the CPU
      for (size_t j = 0; j < inputs.size(); ++j) {
        const Device device = (i == j) == moved ? other : Device(kCpu);
        given.push_back(inputs[j].defined() ? on(inputs[j], device) : inputs[j]);
        if (inputs[j].defined() && device.is_cpu()) numbers = numbers && inputs[j].dim() == 0;
      }
      const std::string where = text(title(row, sample), " with ", given[i], " as input ", i,
                                     " and the others elsewhere");
      try {
        call(given);
        const bool travels = row.name == "copy_";  // that is what it is for
        if (!numbers && !travels) complaints.push_back(where + ": was not refused");
      } catch (const DeviceError& error) {
        const std::string_view said =
            error.what();  // of what the op made of its operands, as a rule
        for (const Device& device : {Device(kCpu), other}) {
          if (said.find(text(device)) == std::string_view::npos) {
            complaints.push_back(text(where, ": the error does not name ", device, ": ", said));
          }
        }
      } catch (const UnsupportedError& error) {  // these run on the CPU alone
        if (!row.linear_algebra) complaints.push_back(where + ": " + error.what());
      } catch (const std::exception& error) {
        complaints.push_back(where + ": another error: " + error.what());
      }
    }
    // A number of the CPU in its place.
    TensorList given;
    for (const Tensor& x : inputs) given.push_back(x.defined() ? on(x, other) : x);
    given[i] = raw::zeros({}, inputs[i].dtype());
    try {
      call(given);
    } catch (const Error&) {
    } catch (const std::exception& error) {
      complaints.push_back(text(title(row, sample), " with a number as input ", i,
                                " and the others elsewhere: ", error.what()));
    }
  }
  return complaints;
}

Complaints check_autocast(const OpRow& row) {
  Complaints complaints;
  const Op* record = nullptr;
  for (const Op* op : all_ops()) {
    if (op->name == row.name) record = op;
  }
  if (record == nullptr || row.samples.empty()) return complaints;
  const Sample& sample = row.samples.front();
  if (Attrs::parse(sample.attrs).has("dtype")) return complaints;  // the caller decides
  for (const DType dtype : {kF32, kBF16}) {
    const std::string where = text(title(row, sample), " in ", dtype, " under autocast");
    guarded(complaints, where, [&] {
      const TensorList inputs = make_inputs(row, sample, dtype);
      if (!has_floating_input(inputs)) return;
      const Attrs attrs = attrs_for(sample, dtype);
      const TensorList plain =
          call_seeded(row, row.linear_algebra ? make_inputs(row, sample, kF32) : inputs, attrs)
              .tensors;
      AutocastGuard autocast(kBF16);
      if (record->autocast == Autocast::kRefuse) {
        if (dtype == kF32) return;
        try {
          (void)call_seeded(row, inputs, attrs);
          complaints.push_back(where + ": was not refused");
        } catch (const Error&) {
        }
        return;
      }
      const std::vector<size_t> wanted = wanted_inputs(row, sample);
      const Evaluation got = evaluate(row, inputs, wanted, attrs, dtype);
      for (size_t i = 0; i < got.outputs.size(); ++i) {
        DType expected = plain[i].dtype();
        const bool low = record->autocast == Autocast::kLow && !row.float32_result;
        if (is_floating(expected) && low) expected = kBF16;
        if (is_floating(expected) && record->autocast == Autocast::kFloat32) expected = kF32;
        if (row.float32_under_autocast) expected = kF32;
        if (got.outputs[i].dtype() != expected) {
          complaints.push_back(
              text(where, ": output ", i, " is ", got.outputs[i], "; expected ", expected));
        }
      }
      for (size_t i = 0; i < wanted.size(); ++i) {
        if (got.gradients[i].dtype() != dtype) {
          complaints.push_back(
              text(where, ": gradient of input ", wanted[i], " is ", got.gradients[i]));
        }
      }
    });
  }
  return complaints;
}

}  // namespace tessera::tests
