// The optimizers' rules: what becomes of one element. The loops of the CPU and the kernels of the
// GPU run these, and so give the same bits.
#pragma once

#include <tessera/core/macros.h>
#include <tessera/core/math.h>

namespace tessera::kernels {

// The constants of one step in the compute type C (float or double). `gradient_scale` has the sign
// of `maximize`. `decay` multiplies the parameter, `l2` times the parameter is added to the
// gradient (where not 0: an infinite parameter times 0 would be NaN).
template <class C>
struct AdamStep {
  C gradient_scale, decay, l2, one_minus_beta1, beta2, one_minus_beta2, correction2_root, eps,
      step_size;
};
template <class C>
struct SgdStep {
  C gradient_scale, l2, momentum, one_minus_dampening, lr;
  bool has_momentum, nesterov, first;
};
template <class C>
struct LionStep {
  C gradient_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr;
};
template <class C>
struct AdagradStep {
  C gradient_scale, l2, eps, lr;
};
template <class C>
struct RmspropStep {
  C gradient_scale, l2, alpha, one_minus_alpha, eps, momentum, lr;
};

// Each returns the new value of a parameter from the old one and the gradient, and changes its
// states.

template <class C>
TS_HD C adam_rule(const AdamStep<C>& step, bool has_l2, bool amsgrad, C param, C grad, C& exp_avg,
                  C& exp_avg_sq, C& max_exp_avg_sq) {
  C g = grad * step.gradient_scale;
  if (has_l2) g = g + step.l2 * param;
  const C decayed = param * step.decay;
  const C m = exp_avg + step.one_minus_beta1 * (g - exp_avg);
  const C v = exp_avg_sq * step.beta2 + step.one_minus_beta2 * g * g;
  exp_avg = m;
  exp_avg_sq = v;
  C second = v;
  if (amsgrad) {
    second = v > max_exp_avg_sq || v != v ? v : max_exp_avg_sq;
    max_exp_avg_sq = second;
  }
  const C denominator = math::sqrt(second) / step.correction2_root + step.eps;
  return decayed - step.step_size * m / denominator;
}

// momentum_buffer: read and written only with a momentum, and not read in the first step.
template <class C>
TS_HD C sgd_rule(const SgdStep<C>& step, C param, C grad, C& momentum_buffer) {
  C g = grad * step.gradient_scale;
  if (step.l2 != C(0)) g = g + step.l2 * param;
  if (!step.has_momentum) return param - step.lr * g;
  C buffer = g;
  if (!step.first) buffer = step.momentum * momentum_buffer + step.one_minus_dampening * g;
  momentum_buffer = buffer;
  const C update = step.nesterov ? g + step.momentum * buffer : buffer;
  return param - step.lr * update;
}

template <class C>
TS_HD C lion_rule(const LionStep<C>& step, C param, C grad, C& exp_avg) {
  const C g = grad * step.gradient_scale, m = exp_avg;
  const C direction = step.beta1 * m + step.one_minus_beta1 * g;
  // NaN stays NaN: a bad gradient shows in the parameter.
  const C sign = direction > 0 ? C(1) : direction < 0 ? C(-1) : direction;
  exp_avg = step.beta2 * m + step.one_minus_beta2 * g;
  return param * step.decay - step.lr * sign;
}

template <class C>
TS_HD C adagrad_rule(const AdagradStep<C>& step, C param, C grad, C& state_sum) {
  C g = grad * step.gradient_scale;
  if (step.l2 != C(0)) g = g + step.l2 * param;
  state_sum = state_sum + g * g;
  return param - step.lr * g / (math::sqrt(state_sum) + step.eps);
}

// grad_avg: where centered; momentum_buffer: where there is a momentum.
template <class C>
TS_HD C rmsprop_rule(const RmspropStep<C>& step, bool centered, bool has_momentum, C param, C grad,
                     C& square_avg, C& grad_avg, C& momentum_buffer) {
  C g = grad * step.gradient_scale;
  if (step.l2 != C(0)) g = g + step.l2 * param;
  C average = step.alpha * square_avg + step.one_minus_alpha * g * g;
  square_avg = average;
  if (centered) {
    const C mean = grad_avg + step.one_minus_alpha * (g - grad_avg);
    grad_avg = mean;
    average = average - mean * mean;
  }
  const C denominator = math::sqrt(average) + step.eps;
  if (!has_momentum) return param - step.lr * g / denominator;
  momentum_buffer = step.momentum * momentum_buffer + g / denominator;
  return param - step.lr * momentum_buffer;
}

// torch's lerp: from the nearer end, so that weight 1 gives `end` exactly.
template <class C>
TS_HD C lerp_rule(C weight, C start, C end) {
  return weight < C(0.5) ? start + weight * (end - start) : end - (end - start) * (C(1) - weight);
}

template <class C>
TS_HD C clamp_rule(C limit, C x) {
  const C low = x < -limit ? -limit : x;
  return low > limit ? limit : low;  // NaN stays
}

}  // namespace tessera::kernels
