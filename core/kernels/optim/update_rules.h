// The optimizers' rules for one element. One struct has everything about an optimizer: its options,
// its states and its formula. From it and its name in the list at the end the loops of every
// instruction set, the kernels of the GPU (with the same bits) and the class optim::NAME
// (optim/optimizers.h) are generated.
//
//   kName                     what messages call it
//   Options                   plain numbers with torch's names and defaults. visit() names each
//                             with the range that it may have; state_dict() saves them. `lr` is
//                             not read by a step, which takes kLearningRate. Optional:
//                             contradiction(), what is wrong with several of them together, or null
//   kStates                   names of the states, at most kMaxRuleStates
//   kOptionalStates           optional: bits of the states that only some options need
//   uses_state(options, i)    with it: whether these do
//   initial_state(options, i) optional: the value with which a state begins, otherwise 0
//   kRoundsStates             optional: true where states may be bf16 (state_rounding.h); then the
//                             options have `state_dtype`
//   kInRegisters              optional: whether the CPU's loop converts 16-bit operands itself. One
//                             that waits for divisions and roots is faster where they are staged in
//                             L1 (Adam, 16 million parameters, bf16 gradients: 8.5 ms against 11.2;
//                             bench_optim)
//   Step<C>, step<C>()        the constants of one step in the compute type C (float or double),
//                             made of the options and the StepScalars
//   update(step, has, param, grad, state...)
//                             returns the new value of a parameter from the old one and the
//                             gradient, and changes its states; has[i]: whether there is state i
//
// In Step `gradient_scale` has the sign of `maximize`, `decay` multiplies the parameter, and `l2`
// times the parameter is added to the gradient (where not 0: an infinite parameter times 0 would be
// NaN).
#pragma once

#include <array>
#include <cmath>

#include <tessera/core/dtype.h>
#include <tessera/core/kernels/optim/option_range.h>
#include <tessera/core/macros.h>
#include <tessera/core/math.h>

namespace tessera::kernels {

inline constexpr int kMaxRuleStates = 3;

// Indices into StepScalars::values, an array of kNumStepScalars.
enum StepScalar : int {
  kLearningRate,
  kStep,           // 1 in the first step
  kGradientScale,  // gradients are multiplied by it as they are read: clip factor / loss scale
  kSkipStep,       // not 0: the update leaves everything as it is (found_inf)
  kNumStepScalars,
};

namespace rules {

// What is wrong with the dtype of states that may be rounded.
constexpr const char* state_dtype_problem(DType dtype) {
  return dtype == kF32 || dtype == kBF16 ? nullptr : "state_dtype must be kF32 or kBF16";
}

TS_HD double signed_scale(const double* scalars, bool maximize) {
  return maximize ? -scalars[kGradientScale] : scalars[kGradientScale];
}

// Bits of the states that an element has, known to the compiler.
template <unsigned kMask>
struct HasStates {
  TS_HD constexpr bool operator[](int i) const { return (kMask >> i & 1) != 0; }
};

// Stochastic gradient descent with momentum (Sutskever et al. 2013), as torch.optim.SGD.
struct SGD {
  static constexpr const char* kName = "SGD";
  struct Options {
    double lr = 1e-3;
    double momentum = 0;
    double dampening = 0;  // the first gradient enters the buffer undamped
    double weight_decay = 0;
    bool nesterov = false;  // needs momentum > 0 and no dampening
    bool maximize = false;
    bool master_weights = true;
    void visit(auto&& visitor) {
      using enum OptionRange;
      visitor("lr", lr, kNotNegative);
      visitor("momentum", momentum, kNotNegative);
      visitor("dampening", dampening);
      visitor("weight_decay", weight_decay, kNotNegative);
      visitor("nesterov", nesterov);
      visitor("maximize", maximize);
      visitor("master_weights", master_weights);
    }
    const char* contradiction() const {
      return nesterov && !(momentum > 0 && dampening == 0)
                 ? "nesterov needs momentum > 0 and dampening 0"
                 : nullptr;
    }
  };
  static constexpr std::array kStates = {"momentum_buffer"};
  static constexpr unsigned kOptionalStates = 0b1;
  static constexpr bool kInRegisters = true;
  static bool uses_state(const Options& options, int) { return options.momentum != 0; }

  template <class C>
  struct Step {
    C gradient_scale, l2, momentum, one_minus_dampening, lr;
    bool nesterov, first;
  };
  template <class C>
  static TS_HD Step<C> step(const Options& options, const double* scalars) {
    return {static_cast<C>(signed_scale(scalars, options.maximize)),
            static_cast<C>(options.weight_decay),
            static_cast<C>(options.momentum),
            static_cast<C>(1 - options.dampening),
            static_cast<C>(scalars[kLearningRate]),
            options.nesterov,
            scalars[kStep] == 1};
  }
  template <class C>
  static TS_HD C update(const Step<C>& step, const auto& has, C param, C grad, C& momentum_buffer) {
    C g = grad * step.gradient_scale;
    if (step.l2 != C(0)) g = g + step.l2 * param;
    if (!has[0]) return param - step.lr * g;
    C buffer = g;
    if (!step.first) buffer = step.momentum * momentum_buffer + step.one_minus_dampening * g;
    momentum_buffer = buffer;
    const C update = step.nesterov ? g + step.momentum * buffer : buffer;
    return param - step.lr * update;
  }
};

// Adam (Kingma, Ba 2014) and AdamW (Loshchilov, Hutter 2017), as torch.optim has them.
template <bool kDecoupled>
struct AdamRule {
  static constexpr const char* kName = kDecoupled ? "AdamW" : "Adam";
  struct Options {
    double lr = 1e-3;
    std::array<double, 2> betas = {0.9, 0.999};
    double eps = 1e-8;
    // AdamW: the parameter shrinks by lr * weight_decay, apart from the gradient. Adam:
    // weight_decay * parameter is added to the gradient.
    double weight_decay = kDecoupled ? 1e-2 : 0;
    bool amsgrad = false;  // divides by the largest second moment seen (Reddi et al. 2018)
    bool maximize = false;
    bool master_weights = true;
    // kBF16: states of two bytes, rounded stochastically (state_rounding.h). Parameters of f64 have
    // f64 states, and none of 16 bits.
    DType state_dtype = kF32;
    void visit(auto&& visitor) {
      using enum OptionRange;
      visitor("lr", lr, kNotNegative);
      visitor("betas", betas, kBelowOne);
      visitor("eps", eps, kNotNegative);
      visitor("weight_decay", weight_decay, kNotNegative);
      visitor("amsgrad", amsgrad);
      visitor("maximize", maximize);
      visitor("master_weights", master_weights);
      visitor("state_bits", state_dtype);
    }
    const char* contradiction() const {
      return amsgrad && state_dtype == kBF16
                 ? "amsgrad needs state_dtype kF32: the largest of numbers that are rounded "
                   "stochastically drifts up"
                 : state_dtype_problem(state_dtype);
    }
  };
  static constexpr bool kRoundsStates = true;
  static constexpr std::array kStates = {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
  static constexpr unsigned kOptionalStates = 0b100;
  static bool uses_state(const Options& options, int) { return options.amsgrad; }

  template <class C>
  struct Step {
    C gradient_scale, decay, l2, one_minus_beta1, beta2, one_minus_beta2, correction2_root, eps,
        step_size;
  };
  template <class C>
  static TS_HD Step<C> step(const Options& options, const double* scalars) {
    const double lr = scalars[kLearningRate], step = scalars[kStep];
    const double correction1 = 1 - ::pow(options.betas[0], step);
    const double correction2 = 1 - ::pow(options.betas[1], step);
    return {static_cast<C>(signed_scale(scalars, options.maximize)),
            static_cast<C>(kDecoupled ? 1 - lr * options.weight_decay : 1),
            static_cast<C>(kDecoupled ? 0 : options.weight_decay),
            static_cast<C>(1 - options.betas[0]),
            static_cast<C>(options.betas[1]),
            static_cast<C>(1 - options.betas[1]),
            static_cast<C>(::sqrt(correction2)),
            static_cast<C>(options.eps),
            static_cast<C>(lr / correction1)};
  }
  template <class C>
  static TS_HD C update(const Step<C>& step, const auto& has, C param, C grad, C& exp_avg,
                        C& exp_avg_sq, C& max_exp_avg_sq) {
    C g = grad * step.gradient_scale;
    if (!kDecoupled && step.l2 != C(0)) g = g + step.l2 * param;
    const C decayed = param * step.decay;
    const C m = exp_avg + step.one_minus_beta1 * (g - exp_avg);
    const C v = exp_avg_sq * step.beta2 + step.one_minus_beta2 * g * g;
    exp_avg = m;
    exp_avg_sq = v;
    C second = v;
    if (has[2]) {
      second = v > max_exp_avg_sq || v != v ? v : max_exp_avg_sq;
      max_exp_avg_sq = second;
    }
    const C denominator = math::sqrt(second) / step.correction2_root + step.eps;
    return decayed - step.step_size * m / denominator;
  }
};
using Adam = AdamRule<false>;
using AdamW = AdamRule<true>;

// Adagrad (Duchi, Hazan, Singer 2011), as torch.optim.Adagrad.
struct Adagrad {
  static constexpr const char* kName = "Adagrad";
  struct Options {
    double lr = 1e-2;
    double lr_decay = 0;  // lr / (1 + (step - 1) * lr_decay)
    double weight_decay = 0;
    double initial_accumulator_value = 0;
    double eps = 1e-10;
    bool maximize = false;
    bool master_weights = true;
    void visit(auto&& visitor) {
      using enum OptionRange;
      visitor("lr", lr, kNotNegative);
      visitor("lr_decay", lr_decay, kNotNegative);
      visitor("weight_decay", weight_decay, kNotNegative);
      visitor("initial_accumulator_value", initial_accumulator_value, kNotNegative);
      visitor("eps", eps, kNotNegative);
      visitor("maximize", maximize);
      visitor("master_weights", master_weights);
    }
  };
  static constexpr std::array kStates = {"sum"};
  static constexpr bool kInRegisters = true;
  static double initial_state(const Options& options, int) {
    return options.initial_accumulator_value;
  }

  template <class C>
  struct Step {
    C gradient_scale, l2, eps, lr;
  };
  template <class C>
  static TS_HD Step<C> step(const Options& options, const double* scalars) {
    const double lr = scalars[kLearningRate] / (1 + (scalars[kStep] - 1) * options.lr_decay);
    return {static_cast<C>(signed_scale(scalars, options.maximize)),
            static_cast<C>(options.weight_decay), static_cast<C>(options.eps), static_cast<C>(lr)};
  }
  template <class C>
  static TS_HD C update(const Step<C>& step, const auto&, C param, C grad, C& sum) {
    C g = grad * step.gradient_scale;
    if (step.l2 != C(0)) g = g + step.l2 * param;
    sum = sum + g * g;
    return param - step.lr * g / (math::sqrt(sum) + step.eps);
  }
};

// RMSprop (Hinton's lecture 6e; centered: Graves 2013), as torch.optim.RMSprop.
struct RMSprop {
  static constexpr const char* kName = "RMSprop";
  struct Options {
    double lr = 1e-2;
    double alpha = 0.99;
    double eps = 1e-8;
    double weight_decay = 0;
    double momentum = 0;
    bool centered = false;  // divides by the standard deviation instead of the root mean square
    bool maximize = false;
    bool master_weights = true;
    void visit(auto&& visitor) {
      using enum OptionRange;
      visitor("lr", lr, kNotNegative);
      visitor("alpha", alpha, kNotNegative);
      visitor("eps", eps, kNotNegative);
      visitor("weight_decay", weight_decay, kNotNegative);
      visitor("momentum", momentum, kNotNegative);
      visitor("centered", centered);
      visitor("maximize", maximize);
      visitor("master_weights", master_weights);
    }
  };
  static constexpr std::array kStates = {"square_avg", "grad_avg", "momentum_buffer"};
  static constexpr unsigned kOptionalStates = 0b110;
  static constexpr bool kInRegisters = true;
  static bool uses_state(const Options& options, int state) {
    return state == 1 ? options.centered : options.momentum != 0;
  }

  template <class C>
  struct Step {
    C gradient_scale, l2, alpha, one_minus_alpha, eps, momentum, lr;
  };
  template <class C>
  static TS_HD Step<C> step(const Options& options, const double* scalars) {
    return {static_cast<C>(signed_scale(scalars, options.maximize)),
            static_cast<C>(options.weight_decay),
            static_cast<C>(options.alpha),
            static_cast<C>(1 - options.alpha),
            static_cast<C>(options.eps),
            static_cast<C>(options.momentum),
            static_cast<C>(scalars[kLearningRate])};
  }
  template <class C>
  static TS_HD C update(const Step<C>& step, const auto& has, C param, C grad, C& square_avg,
                        C& grad_avg, C& momentum_buffer) {
    C g = grad * step.gradient_scale;
    if (step.l2 != C(0)) g = g + step.l2 * param;
    C average = step.alpha * square_avg + step.one_minus_alpha * g * g;
    square_avg = average;
    if (has[1]) {
      const C mean = grad_avg + step.one_minus_alpha * (g - grad_avg);
      grad_avg = mean;
      average = average - mean * mean;
    }
    const C denominator = math::sqrt(average) + step.eps;
    if (!has[2]) return param - step.lr * g / denominator;
    momentum_buffer = step.momentum * momentum_buffer + g / denominator;
    return param - step.lr * momentum_buffer;
  }
};

// Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms", algorithm 2).
struct Lion {
  static constexpr const char* kName = "Lion";
  struct Options {
    double lr = 1e-4;  // about a tenth of AdamW's: every element moves by lr
    std::array<double, 2> betas = {0.9, 0.99};
    double weight_decay = 0;  // decoupled
    bool maximize = false;
    bool master_weights = true;
    void visit(auto&& visitor) {
      using enum OptionRange;
      visitor("lr", lr, kNotNegative);
      visitor("betas", betas, kBelowOne);
      visitor("weight_decay", weight_decay, kNotNegative);
      visitor("maximize", maximize);
      visitor("master_weights", master_weights);
    }
  };
  static constexpr std::array kStates = {"exp_avg"};
  static constexpr bool kInRegisters = true;

  template <class C>
  struct Step {
    C gradient_scale, decay, beta1, one_minus_beta1, beta2, one_minus_beta2, lr;
  };
  template <class C>
  static TS_HD Step<C> step(const Options& options, const double* scalars) {
    const double lr = scalars[kLearningRate];
    return {static_cast<C>(signed_scale(scalars, options.maximize)),
            static_cast<C>(1 - lr * options.weight_decay),
            static_cast<C>(options.betas[0]),
            static_cast<C>(1 - options.betas[0]),
            static_cast<C>(options.betas[1]),
            static_cast<C>(1 - options.betas[1]),
            static_cast<C>(lr)};
  }
  template <class C>
  static TS_HD C update(const Step<C>& step, const auto&, C param, C grad, C& exp_avg) {
    const C g = grad * step.gradient_scale, m = exp_avg;
    const C direction = step.beta1 * m + step.one_minus_beta1 * g;
    // NaN stays NaN: a bad gradient shows in the parameter.
    const C sign = direction > 0 ? C(1) : direction < 0 ? C(-1) : direction;
    exp_avg = step.beta2 * m + step.one_minus_beta2 * g;
    return param * step.decay - step.lr * sign;
  }
};

// Adadelta (Zeiler 2012), as torch.optim.Adadelta.
struct Adadelta {
  static constexpr const char* kName = "Adadelta";
  struct Options {
    double lr = 1;
    double rho = 0.9;
    double eps = 1e-6;
    double weight_decay = 0;
    bool maximize = false;
    bool master_weights = true;
    void visit(auto&& visitor) {
      using enum OptionRange;
      visitor("lr", lr, kNotNegative);
      visitor("rho", rho, kUpToOne);
      visitor("eps", eps, kNotNegative);
      visitor("weight_decay", weight_decay, kNotNegative);
      visitor("maximize", maximize);
      visitor("master_weights", master_weights);
    }
  };
  static constexpr std::array kStates = {"square_avg", "acc_delta"};

  template <class C>
  struct Step {
    C gradient_scale, l2, rho, one_minus_rho, eps, lr;
  };
  template <class C>
  static TS_HD Step<C> step(const Options& options, const double* scalars) {
    return {static_cast<C>(signed_scale(scalars, options.maximize)),
            static_cast<C>(options.weight_decay),
            static_cast<C>(options.rho),
            static_cast<C>(1 - options.rho),
            static_cast<C>(options.eps),
            static_cast<C>(scalars[kLearningRate])};
  }
  template <class C>
  static TS_HD C update(const Step<C>& step, const auto&, C param, C grad, C& square_avg,
                        C& acc_delta) {
    C g = grad * step.gradient_scale;
    if (step.l2 != C(0)) g = g + step.l2 * param;
    square_avg = square_avg * step.rho + step.one_minus_rho * g * g;
    const C delta = math::sqrt(acc_delta + step.eps) / math::sqrt(square_avg + step.eps) * g;
    acc_delta = acc_delta * step.rho + step.one_minus_rho * delta * delta;
    return param - step.lr * delta;
  }
};

// Adamax (Kingma, Ba 2014, section 7.1), as torch.optim.Adamax.
struct Adamax {
  static constexpr const char* kName = "Adamax";
  struct Options {
    double lr = 2e-3;
    std::array<double, 2> betas = {0.9, 0.999};
    double eps = 1e-8;
    double weight_decay = 0;
    bool maximize = false;
    bool master_weights = true;
    void visit(auto&& visitor) {
      using enum OptionRange;
      visitor("lr", lr, kNotNegative);
      visitor("betas", betas, kBelowOne);
      visitor("eps", eps, kNotNegative);
      visitor("weight_decay", weight_decay, kNotNegative);
      visitor("maximize", maximize);
      visitor("master_weights", master_weights);
    }
  };
  static constexpr std::array kStates = {"exp_avg", "exp_inf"};

  template <class C>
  struct Step {
    C gradient_scale, l2, one_minus_beta1, beta2, eps, step_size;
  };
  template <class C>
  static TS_HD Step<C> step(const Options& options, const double* scalars) {
    const double correction = 1 - ::pow(options.betas[0], scalars[kStep]);
    return {static_cast<C>(signed_scale(scalars, options.maximize)),
            static_cast<C>(options.weight_decay),
            static_cast<C>(1 - options.betas[0]),
            static_cast<C>(options.betas[1]),
            static_cast<C>(options.eps),
            static_cast<C>(scalars[kLearningRate] / correction)};
  }
  template <class C>
  static TS_HD C update(const Step<C>& step, const auto&, C param, C grad, C& exp_avg, C& exp_inf) {
    C g = grad * step.gradient_scale;
    if (step.l2 != C(0)) g = g + step.l2 * param;
    exp_avg = exp_avg + step.one_minus_beta1 * (g - exp_avg);
    const C old = exp_inf * step.beta2, now = (g < C(0) ? -g : g) + step.eps;
    exp_inf = old > now || old != old ? old : now;
    return param - step.step_size * exp_avg / exp_inf;
  }
};

// NAdam (Dozat 2016, "Incorporating Nesterov momentum into Adam"), as torch.optim.NAdam, whose
// state mu_product is here a function of the step's number, as are Adam's corrections: of the betas
// in use.
struct NAdam {
  static constexpr const char* kName = "NAdam";
  struct Options {
    double lr = 2e-3;
    std::array<double, 2> betas = {0.9, 0.999};
    double eps = 1e-8;
    double weight_decay = 0;
    double momentum_decay = 4e-3;
    bool decoupled_weight_decay = false;  // as AdamW's
    bool maximize = false;
    bool master_weights = true;
    void visit(auto&& visitor) {
      using enum OptionRange;
      visitor("lr", lr, kNotNegative);
      visitor("betas", betas, kBelowOne);
      visitor("eps", eps, kNotNegative);
      visitor("weight_decay", weight_decay, kNotNegative);
      visitor("momentum_decay", momentum_decay, kNotNegative);
      visitor("decoupled_weight_decay", decoupled_weight_decay);
      visitor("maximize", maximize);
      visitor("master_weights", master_weights);
    }
  };
  static constexpr std::array kStates = {"exp_avg", "exp_avg_sq"};

  template <class C>
  struct Step {
    C gradient_scale, decay, l2, one_minus_beta1, beta2, one_minus_beta2, correction2, eps,
        grad_step, average_step;
  };
  template <class C>
  static TS_HD Step<C> step(const Options& options, const double* scalars) {
    const double lr = scalars[kLearningRate], step = scalars[kStep], beta1 = options.betas[0];
    const bool decoupled = options.decoupled_weight_decay;
    const double fading = ::pow(0.96, options.momentum_decay);
    const double mu = beta1 * (1 - 0.5 * ::pow(0.96, step * options.momentum_decay));
    const double mu_next = beta1 * (1 - 0.5 * ::pow(0.96, (step + 1) * options.momentum_decay));
    // In f32, as torch keeps it. Only the first factors matter: a product below this changes no bit
    // of 1 - product (after 53 steps of the default options).
    float product = 1;
    double faded = 1;
    for (double i = 1; i <= step && product > 0x1p-60f; ++i) {
      faded *= fading;
      product *= static_cast<float>(beta1 * (1 - 0.5 * faded));
    }
    return {static_cast<C>(signed_scale(scalars, options.maximize)),
            static_cast<C>(decoupled ? 1 - lr * options.weight_decay : 1),
            static_cast<C>(decoupled ? 0 : options.weight_decay),
            static_cast<C>(1 - beta1),
            static_cast<C>(options.betas[1]),
            static_cast<C>(1 - options.betas[1]),
            static_cast<C>(1 - ::pow(options.betas[1], step)),
            static_cast<C>(options.eps),
            static_cast<C>(lr * (1 - mu) / (1 - double{product})),
            static_cast<C>(lr * mu_next / (1 - double{product} * mu_next))};
  }
  template <class C>
  static TS_HD C update(const Step<C>& step, const auto&, C param, C grad, C& exp_avg,
                        C& exp_avg_sq) {
    C g = grad * step.gradient_scale;
    if (step.l2 != C(0)) g = g + step.l2 * param;
    exp_avg = exp_avg + step.one_minus_beta1 * (g - exp_avg);
    exp_avg_sq = exp_avg_sq * step.beta2 + step.one_minus_beta2 * g * g;
    const C denominator = math::sqrt(exp_avg_sq / step.correction2) + step.eps;
    const C moved = param * step.decay - step.grad_step * g / denominator;
    return moved - step.average_step * exp_avg / denominator;
  }
};

// RAdam (Liu et al. 2019, "On the variance of the adaptive learning rate and beyond"), as
// torch.optim.RAdam.
struct RAdam {
  static constexpr const char* kName = "RAdam";
  struct Options {
    double lr = 1e-3;
    std::array<double, 2> betas = {0.9, 0.999};
    double eps = 1e-8;
    double weight_decay = 0;
    bool decoupled_weight_decay = false;  // as AdamW's
    bool maximize = false;
    bool master_weights = true;
    void visit(auto&& visitor) {
      using enum OptionRange;
      visitor("lr", lr, kNotNegative);
      visitor("betas", betas, kBelowOne);
      visitor("eps", eps, kNotNegative);
      visitor("weight_decay", weight_decay, kNotNegative);
      visitor("decoupled_weight_decay", decoupled_weight_decay);
      visitor("maximize", maximize);
      visitor("master_weights", master_weights);
    }
  };
  static constexpr std::array kStates = {"exp_avg", "exp_avg_sq"};

  template <class C>
  struct Step {
    C gradient_scale, decay, l2, one_minus_beta1, beta2, one_minus_beta2, eps, step_size;
    bool rectified;  // the variance of the second moment is known: divide by its root
  };
  template <class C>
  static TS_HD Step<C> step(const Options& options, const double* scalars) {
    const double lr = scalars[kLearningRate], step = scalars[kStep], beta2 = options.betas[1];
    const bool decoupled = options.decoupled_weight_decay;
    const double beta2_power = ::pow(beta2, step);
    const double correction1 = 1 - ::pow(options.betas[0], step), correction2 = 1 - beta2_power;
    const double longest = 2 / (1 - beta2) - 1;  // lengths of the approximated moving average
    const double length = longest - 2 * step * beta2_power / correction2;
    const bool rectified = length > 5;
    const double rectification = rectified ? ::sqrt((length - 4) * (length - 2) * longest /
                                                    ((longest - 4) * (longest - 2) * length)) *
                                                 ::sqrt(correction2)
                                           : 1;
    return {static_cast<C>(signed_scale(scalars, options.maximize)),
            static_cast<C>(decoupled ? 1 - lr * options.weight_decay : 1),
            static_cast<C>(decoupled ? 0 : options.weight_decay),
            static_cast<C>(1 - options.betas[0]),
            static_cast<C>(beta2),
            static_cast<C>(1 - beta2),
            static_cast<C>(options.eps),
            static_cast<C>(lr / correction1 * rectification),
            rectified};
  }
  template <class C>
  static TS_HD C update(const Step<C>& step, const auto&, C param, C grad, C& exp_avg,
                        C& exp_avg_sq) {
    C g = grad * step.gradient_scale;
    if (step.l2 != C(0)) g = g + step.l2 * param;
    exp_avg = exp_avg + step.one_minus_beta1 * (g - exp_avg);
    exp_avg_sq = exp_avg_sq * step.beta2 + step.one_minus_beta2 * g * g;
    const C moved = step.step_size * exp_avg;
    const C update = step.rectified ? moved / (math::sqrt(exp_avg_sq) + step.eps) : moved;
    return param * step.decay - update;
  }
};

// As torch's lerp, from the nearer end, so that weight 1 gives that exactly.
template <class C>
TS_HD C lerp(C start, C end, C weight) {
  return weight < C(0.5) ? start + weight * (end - start) : end - (end - start) * (C(1) - weight);
}

// Muon (Jordan et al. 2024) before a matrix is made orthogonal: moves the average of gradients, and
// what stands as `param` becomes what is made orthogonal of it. optim/muon.h goes on from there.
struct MuonMomentum {
  static constexpr const char* kName = "Muon";
  struct Options {
    double momentum;
    bool nesterov;
  };
  static constexpr bool kRoundsStates = true;
  static constexpr std::array kStates = {"momentum_buffer"};
  static constexpr bool kInRegisters = true;

  template <class C>
  struct Step {
    C gradient_scale, momentum, one_minus_momentum;
    bool nesterov;
  };
  template <class C>
  static TS_HD Step<C> step(const Options& options, const double* scalars) {
    return {static_cast<C>(scalars[kGradientScale]), static_cast<C>(options.momentum),
            static_cast<C>(1 - options.momentum), options.nesterov};
  }
  template <class C>
  static TS_HD C update(const Step<C>& step, const auto&, C, C grad, C& momentum_buffer) {
    const C g = grad * step.gradient_scale;
    momentum_buffer = lerp(momentum_buffer, g, step.one_minus_momentum);
    return step.nesterov ? lerp(g, momentum_buffer, step.momentum) : momentum_buffer;
  }
};

// And after it: `grad` is the orthogonal matrix. The rate is the step's times `ratio`, which a
// matrix has by its shape.
struct MuonUpdate {
  static constexpr const char* kName = "Muon";
  struct Options {
    double weight_decay, ratio;
  };
  static constexpr std::array<const char*, 0> kStates = {};
  static constexpr bool kInRegisters = true;

  template <class C>
  struct Step {
    C decay, rate;
  };
  template <class C>
  static TS_HD Step<C> step(const Options& options, const double* scalars) {
    const double lr = scalars[kLearningRate];
    return {static_cast<C>(1 - lr * options.weight_decay), static_cast<C>(lr * options.ratio)};
  }
  template <class C>
  static TS_HD C update(const Step<C>& step, const auto&, C param, C orthogonal) {
    return param * step.decay - step.rate * orthogonal;
  }
};

// A moving average of tensors (multi_tensor_lerp): `grad` is what it moves to.
struct Lerp {
  static constexpr std::array<const char*, 0> kStates = {};
  static constexpr bool kInRegisters = true;
  struct Options {
    double weight;
  };
  template <class C>
  struct Step {
    C weight;
  };
  template <class C>
  static TS_HD Step<C> step(const Options& options, const double*) {
    return {static_cast<C>(options.weight)};
  }
  template <class C>
  static TS_HD C update(const Step<C>& step, const auto&, C start, C end) {
    return lerp(start, end, step.weight);
  }
};

// ---- What loops and kernels ask of a rule ------------------------------------------------------

template <class Rule>
inline constexpr int kNumStates = static_cast<int>(Rule::kStates.size());

template <class Rule>
constexpr unsigned optional_states() {
  if constexpr (requires { Rule::kOptionalStates; }) return Rule::kOptionalStates;
  return 0;
}
template <class Rule>
constexpr bool in_registers() {
  if constexpr (requires { Rule::kInRegisters; }) return Rule::kInRegisters;
  return false;
}
template <class Rule>
constexpr bool rounds_states() {
  if constexpr (requires { Rule::kRoundsStates; }) return Rule::kRoundsStates;
  return false;
}
template <class Rule>
bool uses_state(const typename Rule::Options& options, int state) {
  if constexpr (optional_states<Rule>() != 0) {
    if ((Rule::kOptionalStates >> state & 1) != 0) return Rule::uses_state(options, state);
  }
  return true;
}
template <class Rule>
double initial_state(const typename Rule::Options& options, int state) {
  if constexpr (requires { Rule::initial_state(options, state); }) {
    return Rule::initial_state(options, state);
  }
  return 0;
}

// With as many states as the rule has.
template <class Rule, class C>
TS_HD C update(const typename Rule::template Step<C>& step, const auto& has, C param, C grad, C& a,
               C& b, C& c) {
  if constexpr (kNumStates<Rule> == 0) {
    return Rule::update(step, has, param, grad);
  } else if constexpr (kNumStates<Rule> == 1) {
    return Rule::update(step, has, param, grad, a);
  } else if constexpr (kNumStates<Rule> == 2) {
    return Rule::update(step, has, param, grad, a, b);
  } else {
    return Rule::update(step, has, param, grad, a, b, c);
  }
}

}  // namespace rules

template <class C>
TS_HD C clamp_rule(C limit, C x) {
  const C low = x < -limit ? -limit : x;
  return low > limit ? limit : low;  // NaN stays
}

}  // namespace tessera::kernels

// clang-format off
#define TS_UPDATE_RULES(X)                                                                         \
  X(SGD) X(Adam) X(AdamW) X(Adagrad) X(RMSprop) X(Lion) X(Adadelta) X(Adamax) X(NAdam) X(RAdam)
// What the optimizers that are more than a rule do with elements.
#define TS_UPDATE_PARTS(X) X(MuonMomentum) X(MuonUpdate)
// clang-format on
