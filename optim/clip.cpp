#include <tessera/optim/clip.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/graph.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/kernels/optim/multi_tensor_square_sum.h>
#include <tessera/core/profile/profiler.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/optim/optimizer.h>

namespace tessera::optim {
namespace {

using HolderReduction = PartHolders::Reduction;

TensorList gradients_of(const TensorList& parameters) {
  TensorList gradients;
  for (const Tensor& parameter : parameters) {
    if (Tensor gradient = parameter.grad(); gradient.defined()) {
      gradients.push_back(std::move(gradient));
    }
  }
  return gradients;
}

// The gradients that the same ranks hold parts of.
struct Cut {
  std::unique_ptr<const PartHolders> holders;  // nullptr: this rank has them whole
  Device device = kCpu;
  TensorList gradients = {};
};

const void* ranks_of(const std::unique_ptr<const PartHolders>& holders) {
  return holders != nullptr ? holders->ranks : nullptr;
}

// In the order of the parameters, which is that of the collectives. A rank that has no gradient for
// a part takes part in the others' sum.
std::vector<Cut> cuts_of(const TensorList& parameters, std::string_view where) {
  std::vector<Cut> cuts;
  for (const Tensor& parameter : parameters) {
    const Tensor gradient = parameter.grad();
    std::unique_ptr<const PartHolders> holders = part_holders(gradient, where);
    if (element_guard(gradient) == nullptr && (gradient.defined() || parameter.requires_grad())) {
      const TensorPlacement* own = tensor_placement(parameter);
      holders =
          own != nullptr ? own->of_gradient()->holders(where) : part_holders(parameter, where);
    }
    if (!gradient.defined() && holders == nullptr) continue;
    const void* const ranks = ranks_of(holders);
    auto cut = std::ranges::find_if(
        cuts, [&](const Cut& other) { return ranks_of(other.holders) == ranks; });
    if (cut == cuts.end()) {
      const Device device = (gradient.defined() ? gradient : parameter).device();
      cuts.push_back({.holders = std::move(holders), .device = device});
      cut = std::prev(cuts.end());
    }
    if (gradient.defined()) cut->gradients.push_back(gradient);
  }
  return cuts;
}

// Of all gradients, on every rank.
Tensor square_sum(const std::vector<Cut>& cuts) {
  const NoGradGuard no_grad;
  Tensor total;
  for (const Cut& cut : cuts) {
    const Tensor sum = kernels::multi_tensor_square_sum(cut.gradients, cut.device);
    if (cut.holders != nullptr) cut.holders->reduce(sum, HolderReduction::kSum);
    if (total.defined()) {
      add_(total, sum);
    } else {
      total = sum;
    }
  }
  return total;
}

// The largest of the ranks' values, none of which is negative. Their bits are ordered as they are,
// NaN above infinity: it wins on every transport.
double largest_over(const Cut& cut, double value) {
  const Tensor bits = raw::empty({1}, kI64);
  *bits.data_as<int64_t>() = std::bit_cast<int64_t>(std::abs(value));
  cut.holders->reduce(bits, HolderReduction::kMax);
  return std::bit_cast<double>(*bits.data_as<int64_t>());
}

double sum_over(const Cut& cut, double value) {
  const Tensor sum = raw::empty({1}, kF64);
  *sum.data_as<double>() = value;
  cut.holders->reduce(sum, HolderReduction::kSum);
  return *sum.data_as<double>();
}

double larger_or_nan(double a, double b) { return b > a || std::isnan(b) ? b : a; }

double norm_of(const std::vector<Cut>& cuts, double p) {
  if (p == 2) return std::sqrt(kernels::square_sum_value(square_sum(cuts)));
  const bool largest = std::isinf(p);
  double total = 0;
  for (const Cut& cut : cuts) {
    double own = 0;
    for (const double sum : kernels::multi_tensor_power_sums(cut.gradients, p)) {
      own = largest ? larger_or_nan(own, sum) : own + sum;
    }
    if (cut.holders != nullptr) own = largest ? largest_over(cut, own) : sum_over(cut, own);
    total = largest ? larger_or_nan(total, own) : total + own;
  }
  return largest || p == 1 ? total : std::pow(total, 1 / p);
}

// One factor serves all, so that what stands before it must be one, too.
void check_others(const ClipOptions& options) {
  if (options.fold_into_others.empty()) return;
  TS_CHECK(options.fold_into != nullptr, "clip_grad_norm",
           "fold_into_others goes with fold_into, which is null; name one of them there");
  const auto told = [](const Optimizer& optimizer) {
    return std::pair{optimizer.next_step().data_as<double>()[0],
                     optimizer.next_step_factor().impl()};
  };
  for (const Optimizer* other : options.fold_into_others) {
    TS_CHECK(other != nullptr && told(*other) == told(*options.fold_into), "clip_grad_norm",
             "the optimizers that share a factor must be told the same before; unscale all of them "
             "or none, and clip once a step");
  }
}

}  // namespace

Tensor clip_grad_norm(const TensorList& parameters, double max_norm, const ClipOptions& options) {
  const TimelineRange range("clip_grad_norm");
  TS_CHECK(max_norm >= 0, "clip_grad_norm", "max_norm must not be negative; got ", max_norm);
  TS_CHECK(options.fold_into == nullptr || options.gradient_scale == 1, "clip_grad_norm",
           "the optimizer in fold_into says itself what gradients are multiplied by; leave out "
           "gradient_scale");
  check_others(options);
  const double scale = options.fold_into != nullptr
                           ? options.fold_into->next_step().data_as<double>()[0]
                           : options.gradient_scale;
  TS_CHECK_AS(UnsupportedError, scale == 1 || gpu::Capture::current() == nullptr, "clip_grad_norm",
              "a factor of the host would be a constant of the graph; keep it on the device (a "
              "GradScaler with on_device)");
  for (const Tensor& parameter : parameters) {
    TS_CHECK_AS(UnsupportedError, parameter.impl()->marks == 0, "clip_grad_norm", "a parameter, ",
                parameter,
                ", is this rank's part of one that ranks calculate with together; the norm would "
                "be that of the part");
  }
  const TensorList gradients = gradients_of(parameters);
  const std::vector<Cut> cuts = cuts_of(parameters, "clip_grad_norm");
  const bool is_parted =
      std::ranges::any_of(cuts, [](const Cut& cut) { return cut.holders != nullptr; });
  TS_CHECK_AS(UnsupportedError, !is_parted || gpu::Capture::current() == nullptr, "clip_grad_norm",
              "ranks add up the norm of gradients that are parts, which is not captured; leave it "
              "out of the graph");
  const double p = options.norm_type;
  const Tensor scale_on_device =
      options.fold_into != nullptr ? options.fold_into->next_step_factor() : Tensor();
  const bool stays_on_device = !cuts.empty() && cuts[0].device.is_cuda() &&
                               options.fold_into != nullptr && !options.error_if_nonfinite &&
                               (p == 2 || !is_parted);
  if (stays_on_device) {
    const Tensor norm_and_factor =
        is_parted
            ? kernels::square_sum_clip_factor(square_sum(cuts), scale, max_norm, scale_on_device)
            : kernels::multi_tensor_clip_factor(gradients, p, scale, max_norm, scale_on_device);
    const Tensor factor_there = raw::select(norm_and_factor, 0, 1);
    options.fold_into->scale_next_step(factor_there);
    for (Optimizer* other : options.fold_into_others) other->scale_next_step(factor_there);
    return raw::select(norm_and_factor, 0, 0);
  }
  const double given = scale_on_device.defined() ? scale * scale_on_device.item() : scale;
  const double norm =
      (is_parted ? norm_of(cuts, p) : kernels::multi_tensor_norm(gradients, p)) * given;
  TS_CHECK(!options.error_if_nonfinite || std::isfinite(norm), "clip_grad_norm",
           "the norm of the gradients is ", norm,
           "; look for the op with AnomalyMode, or lower the learning rate");
  const double factor = max_norm / (norm + 1e-6);
  if (!(factor >= 1)) {  // also where the norm is NaN
    if (options.fold_into != nullptr) {
      options.fold_into->scale_next_step(factor);
      for (Optimizer* other : options.fold_into_others) other->scale_next_step(factor);
    } else {
      kernels::multi_tensor_scale(gradients, &factor);
    }
  }
  return scalar_tensor(norm, kF64);
}

void clip_grad_value(const TensorList& parameters, double limit, double gradient_scale) {
  TS_CHECK(limit >= 0, "clip_grad_value", "the limit must not be negative; got ", limit);
  TS_CHECK(gradient_scale > 0, "clip_grad_value", "gradient_scale must be positive; got ",
           gradient_scale);
  kernels::multi_tensor_clamp(gradients_of(parameters), limit / gradient_scale);
}

}  // namespace tessera::optim
