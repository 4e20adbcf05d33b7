// Probability distributions, as torch.distributions: samples, log-densities, entropies and
// divergences, with gradients.
//
//     const distributions::Normal policy(x, exp(y));
//     Tensor action = policy.sample();
//     Tensor surprise = -policy.log_prob(action).mean() - 0.01 * policy.entropy().mean();
//
// Parameters broadcast to batch_shape(); a distribution is a batch of independent ones.
// sample(shape) has shape [shape..., batch_shape...], draws the next random stream of the context
// and is a constant; rsample returns the same numbers as a function of the parameters, for
// gradients by reparametrization. log_prob(value) broadcasts value to the batch. Parameters have
// one floating dtype and device, and so have the results, except class indices. Every method is
// made of ops: it works on both devices and has derivatives of any order.
//
// Values are not checked: a standard deviation below 0, a probability above 1 or a value outside of
// the support gives the formulas' results (NaN, an infinity), as torch's validate_args=False does.
#pragma once

#include <tessera/core/tensor/tensor.h>

namespace tessera::distributions {

class Normal {
 public:
  Normal(const Tensor& loc, const Tensor& scale);  // scale > 0: the standard deviation
  const Shape& batch_shape() const { return loc.shape(); }
  Tensor mean() const { return loc; }
  Tensor stddev() const { return scale; }
  Tensor variance() const;
  Tensor sample(const Shape& shape = {}) const;
  Tensor rsample(const Shape& shape = {}) const;
  Tensor log_prob(const Tensor& value) const;
  Tensor cdf(const Tensor& value) const;
  Tensor entropy() const;

  const Tensor loc;    // [batch_shape...]
  const Tensor scale;  // [batch_shape...]
};

// In [low, high).
class Uniform {
 public:
  Uniform(const Tensor& low, const Tensor& high);  // low < high
  const Shape& batch_shape() const { return low.shape(); }
  Tensor mean() const;
  Tensor stddev() const;
  Tensor variance() const;
  Tensor sample(const Shape& shape = {}) const;
  Tensor rsample(const Shape& shape = {}) const;
  Tensor log_prob(const Tensor& value) const;  // -infinity outside
  Tensor cdf(const Tensor& value) const;
  Tensor entropy() const;

  const Tensor low;
  const Tensor high;
};

// The kind of a discrete distribution's parameters.
enum class Of {
  kProbs,   // probabilities
  kLogits,  // Bernoulli: log-odds; Categorical: logarithms of probabilities up to a constant
};

// 1 with probability p, else 0, as floating numbers.
class Bernoulli {
 public:
  Bernoulli(Of kind, const Tensor& parameter);
  const Shape& batch_shape() const { return probs.shape(); }
  Tensor mean() const { return probs; }
  Tensor variance() const;
  Tensor sample(const Shape& shape = {}) const;
  Tensor log_prob(const Tensor& value) const;
  Tensor entropy() const;

  // Each calculated from the other. Logits of probabilities are clamped to eps from 0 and 1, as in
  // torch.
  const Tensor probs;
  const Tensor logits;
};

// One of C classes. Parameters: [batch_shape..., C]; probabilities are divided by their sum.
class Categorical {
 public:
  Categorical(Of kind, const Tensor& parameter);
  const Shape& batch_shape() const { return batch_shape_; }
  int64_t num_classes() const { return logits.size(-1); }
  Tensor sample(const Shape& shape = {}) const;  // i64 [shape..., batch_shape...]
  Tensor log_prob(const Tensor& value) const;    // value: class indices
  Tensor entropy() const;

  const Tensor probs;   // [batch_shape..., C], sums are 1
  const Tensor logits;  // their logarithms

 private:
  Shape batch_shape_;
};

// The Kullback-Leibler divergence, the mean of log p - log q under p. Batches broadcast.
Tensor kl_divergence(const Normal& p, const Normal& q);
Tensor kl_divergence(const Uniform& p, const Uniform& q);  // infinite where p reaches beyond q
Tensor kl_divergence(const Bernoulli& p, const Bernoulli& q);
Tensor kl_divergence(const Categorical& p, const Categorical& q);

}  // namespace tessera::distributions
