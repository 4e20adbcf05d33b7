#include <tessera/optim/muon.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/op.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/gemm/matmul.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/profile/profiler.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::optim {
namespace {

namespace rules = kernels::rules;

double rate_ratio(const MuonOptions& options, const Shape& shape) {
  const auto a = static_cast<double>(shape[0]);
  const auto b = static_cast<double>(std::max<int64_t>(shape[1], 1));
  switch (options.adjust_lr_fn) {
    case AdjustLr::kOriginal:
      break;
    case AdjustLr::kMatchRmsAdamW:
      return 0.2 * std::sqrt(std::max(a, b));
    case AdjustLr::kSpectralUnclamped:
      return std::sqrt(a / b);
  }
  return std::sqrt(std::max(1.0, a / b));
}

void check_matrix(const std::string& name, const Tensor& parameter) {
  TS_CHECK_SHAPE(whole_shape(parameter).size() == 2, Muon::kName,
                 "updates matrices, parameters of two dimensions; '", name, "' is ", parameter,
                 "; give it to another optimizer (split_for_muon)");
}

}  // namespace

const char* MuonOptions::contradiction() const {
  if (ns_steps >= 100) return "ns_steps must be below 100";
  return rules::state_dtype_problem(state_dtype);
}

// A parameter of a step on its way.
struct Muon::Matrix {
  const Pass* pass;
  ParameterState* state;
  Tensor x;  // what is made orthogonal of this rank's part, then what has become of it; bf16
};

Muon::Muon(const NamedTensors& parameters, const Options& options)
    : TypedOptimizer(kName, parameters, options) {
  check_matrices();
}
Muon::Muon(const std::vector<ParameterGroup<Options>>& groups) : TypedOptimizer(kName, groups) {
  check_matrices();
}

void Muon::check_matrices() const {
  for (const auto& [name, parameter] : parameters()) check_matrix(name, parameter);
}

std::span<const char* const> Muon::state_names() const { return rules::MuonMomentum::kStates; }

void Muon::update(size_t group, std::span<ParameterState* const> parameters,
                  const kernels::StepScalars& scalars) {
  const Pass pass{group, parameters, &scalars};
  update_all({&pass, 1});
}

void Muon::update_all(std::span<const Pass> passes) {
  std::vector<Matrix> matrices;
  for (const Pass& pass : passes) {
    const Options& options = this->options(pass.group);
    std::vector<kernels::UpdateTensors> tensors;
    for (ParameterState* const p : pass.parameters) {
      check_matrix("a parameter", p->parameter);
      const DType dtype = p->parameter.dtype() == kF64 ? kF64 : kBF16;
      kernels::UpdateTensors& one = tensors.emplace_back();
      one.param = raw::empty_like(p->states[0], dtype);
      // A step that the device leaves out writes nothing.
      if (pass.scalars->found.defined()) zero_(one.param);
      one.grad = p->gradient;
      one.states[0] = p->states[0];
      if (options.state_dtype == kBF16) one.rounding = rounding_of(*p);
      matrices.push_back({&pass, p, one.param});
    }
    kernels::multi_tensor_update<rules::MuonMomentum>(tensors, {options.momentum, options.nesterov},
                                                      *pass.scalars);
  }
  for (Matrix& matrix : matrices) matrix.x = kernels::contiguous(matrix.x.to(kBF16));
  make_orthogonal(matrices);
  for (const Pass& pass : passes) {
    const Options& options = this->options(pass.group);
    std::map<double, std::vector<kernels::UpdateTensors>> by_ratio;
    for (const Matrix& matrix : matrices) {
      if (matrix.pass != &pass) continue;
      const ParameterState& p = *matrix.state;
      by_ratio[rate_ratio(options, whole_shape(p.parameter))].push_back(
          {.param = p.target(), .grad = matrix.x, .model_copy = p.model_copy()});
    }
    for (const auto& [ratio, tensors] : by_ratio) {
      kernels::multi_tensor_update<rules::MuonUpdate>(tensors, {options.weight_decay, ratio},
                                                      *pass.scalars);
    }
  }
}

void Muon::make_orthogonal(std::vector<Matrix>& matrices) const {
  TensorList parameters;
  for (const Matrix& matrix : matrices) parameters.push_back(matrix.state->parameter);
  std::vector<bool> cut(matrices.size());
  // In an order that is that of all ranks.
  for (const auto& [holders, members] : by_holders(parameters, kName)) {
    TensorList members_of, parts;
    for (const size_t i : members) {
      cut[i] = true;
      members_of.push_back(parameters[i]);
      parts.push_back(matrices[i].x);
    }
    const std::unique_ptr<WholeExchange> exchange = holders->exchange(members_of);
    TensorList wholes = exchange->gather(parts);
    for (size_t i = 0; i < wholes.size(); ++i) {
      if (!exchange->owns(i)) continue;
      wholes[i] = newton_schulz(wholes[i], options(matrices[members[i]].pass->group));
    }
    exchange->scatter(wholes, parts);
  }
  for (size_t i = 0; i < matrices.size(); ++i) {
    if (cut[i]) continue;
    Matrix& matrix = matrices[i];
    const Tensor whole = raw::view(matrix.x, whole_shape(parameters[i]));
    const Tensor made = newton_schulz(whole, options(matrix.pass->group));
    matrix.x = raw::view(made, parameters[i].shape());
  }
}

Tensor newton_schulz(const Tensor& matrix, const MuonOptions& options) {
  TS_CHECK_SHAPE(matrix.dim() == 2, "newton_schulz", "expects a matrix; got ", matrix);
  TS_CHECK_DTYPE(matrix.dtype() == kBF16, "newton_schulz", "expects bf16; got ", matrix,
                 "; convert it, as torch's Muon does");
  const ProfilerRange range("newton_schulz");
  const NoGradGuard no_grad;
  const bool tall = matrix.size(0) > matrix.size(1);
  Tensor x = kernels::contiguous(tall ? raw::transpose(matrix, 0, 1) : raw::alias(matrix));
  const auto m = static_cast<double>(x.size(0)), n = static_cast<double>(x.size(1));
  count_flops(static_cast<double>(options.ns_steps) * 2 * m * m * (2 * n + m));
  if (matrix.is_meta() || matrix.numel() == 0) return kernels::contiguous(raw::alias(matrix));
  // The norm stays beside the matrix: a GPU is not waited for.
  const Tensor norm = kernels::multi_tensor_clip_factor({&x, 1}, 2, 1, 1);
  x = div(x, clamp(raw::view(raw::narrow(norm, 0, 0, 1), {}).to(kBF16), Scalar(options.eps)));
  const auto [a, b, c] = options.ns_coefficients;
  for (int64_t i = 0; i < options.ns_steps; ++i) {
    const Tensor gram = kernels::matmul(x, raw::transpose(x, 0, 1));
    const Tensor polynomial = kernels::addmm(gram, gram, gram, b, c);
    x = kernels::addmm(x, polynomial, x, a, 1);
  }
  return kernels::contiguous(tall ? raw::transpose(x, 0, 1) : x);
}

MuonParameters split_for_muon(const NamedTensors& parameters,
                              const std::vector<std::string>& not_by_muon) {
  std::vector<bool> fits(not_by_muon.size());
  MuonParameters split;
  for (const NamedTensor& named : parameters) {
    bool listed = false;
    for (size_t i = 0; i < not_by_muon.size(); ++i) {
      const std::string& scope = not_by_muon[i];
      const bool inside = named.name.starts_with(scope) &&
                          (named.name.size() == scope.size() || named.name[scope.size()] == '.');
      if (inside) fits[i] = listed = true;
    }
    const bool matrix = !listed && whole_shape(named.tensor).size() == 2;
    (matrix ? split.matrices : split.others).push_back(named);
  }
  for (size_t i = 0; i < fits.size(); ++i) {
    TS_CHECK(fits[i], "split_for_muon", "no parameter and no module is '", not_by_muon[i],
             "'; give names as named_parameters() has them");
  }
  return split;
}

}  // namespace tessera::optim
