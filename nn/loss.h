// Losses as modules: an op of autograd/ops.h with its options. forward(prediction, target).
#pragma once

#include <memory>

#include <tessera/autograd/ops.h>
#include <tessera/nn/module.h>

namespace tessera::nn {

// logits [N, C] or [N, C, d1...]; target: class indices, or probabilities in the logits' shape.
class CrossEntropyLoss : public Module<CrossEntropyLoss> {
 public:
  using Options = CrossEntropyOptions;
  explicit CrossEntropyLoss(const CrossEntropyOptions& options = {})
      : options(options), weight(buffer("weight", options.weight)) {}
  Tensor forward(const Tensor& logits, const Tensor& target) {
    return cross_entropy(logits, target, with_weight(options));
  }
  std::unique_ptr<CrossEntropyLoss> remake() const {
    return std::make_unique<CrossEntropyLoss>(with_weight(options));
  }

  const CrossEntropyOptions options;
  const Tensor& weight;  // of the classes, or undefined

 private:
  CrossEntropyOptions with_weight(CrossEntropyOptions changed) const {
    changed.weight = weight;
    return changed;
  }
};

// For log-probabilities.
class NLLLoss : public Module<NLLLoss> {
 public:
  using Options = CrossEntropyOptions;
  explicit NLLLoss(const CrossEntropyOptions& options = {})
      : options(options), weight(buffer("weight", options.weight)) {}
  Tensor forward(const Tensor& log_probabilities, const Tensor& target) {
    return nll_loss(log_probabilities, target, with_weight(options));
  }
  std::unique_ptr<NLLLoss> remake() const {
    return std::make_unique<NLLLoss>(with_weight(options));
  }

  const CrossEntropyOptions options;
  const Tensor& weight;

 private:
  CrossEntropyOptions with_weight(CrossEntropyOptions changed) const {
    changed.weight = weight;
    return changed;
  }
};

class MSELoss : public Module<MSELoss> {
 public:
  explicit MSELoss(Reduction reduction = Reduction::kMean) : reduction(reduction) {}
  Tensor forward(const Tensor& x, const Tensor& target) { return mse_loss(x, target, reduction); }
  std::unique_ptr<MSELoss> remake() const { return std::make_unique<MSELoss>(reduction); }

  const Reduction reduction;
};

class L1Loss : public Module<L1Loss> {
 public:
  explicit L1Loss(Reduction reduction = Reduction::kMean) : reduction(reduction) {}
  Tensor forward(const Tensor& x, const Tensor& target) { return l1_loss(x, target, reduction); }
  std::unique_ptr<L1Loss> remake() const { return std::make_unique<L1Loss>(reduction); }

  const Reduction reduction;
};

class SmoothL1Loss : public Module<SmoothL1Loss> {
 public:
  explicit SmoothL1Loss(Reduction reduction = Reduction::kMean, double beta = 1)
      : reduction(reduction), beta(beta) {}
  Tensor forward(const Tensor& x, const Tensor& target) {
    return smooth_l1_loss(x, target, reduction, beta);
  }
  std::unique_ptr<SmoothL1Loss> remake() const {
    return std::make_unique<SmoothL1Loss>(reduction, beta);
  }

  const Reduction reduction;
  const double beta;
};

class HuberLoss : public Module<HuberLoss> {
 public:
  explicit HuberLoss(Reduction reduction = Reduction::kMean, double delta = 1)
      : reduction(reduction), delta(delta) {}
  Tensor forward(const Tensor& x, const Tensor& target) {
    return huber_loss(x, target, reduction, delta);
  }
  std::unique_ptr<HuberLoss> remake() const {
    return std::make_unique<HuberLoss>(reduction, delta);
  }

  const Reduction reduction;
  const double delta;
};

struct BCEWithLogitsOptions {
  Tensor weight = {};      // of each element, broadcast
  Tensor pos_weight = {};  // of positive answers, by class
  Reduction reduction = Reduction::kMean;
};
class BCEWithLogitsLoss : public Module<BCEWithLogitsLoss> {
 public:
  using Options = BCEWithLogitsOptions;
  explicit BCEWithLogitsLoss(const BCEWithLogitsOptions& options = {})
      : reduction(options.reduction),
        weight(buffer("weight", options.weight)),
        pos_weight(buffer("pos_weight", options.pos_weight)) {}
  Tensor forward(const Tensor& logits, const Tensor& target) {
    return binary_cross_entropy_with_logits(logits, target, weight, reduction, pos_weight);
  }
  std::unique_ptr<BCEWithLogitsLoss> remake() const {
    return std::make_unique<BCEWithLogitsLoss>(BCEWithLogitsOptions{weight, pos_weight, reduction});
  }

  const Reduction reduction;
  const Tensor& weight;
  const Tensor& pos_weight;
};

// x: log-probabilities; target: probabilities (or their logarithms).
class KLDivLoss : public Module<KLDivLoss> {
 public:
  explicit KLDivLoss(KlReduction reduction = KlReduction::kMean, bool log_target = false)
      : reduction(reduction), log_target(log_target) {}
  Tensor forward(const Tensor& x, const Tensor& target) {
    return kl_div(x, target, reduction, log_target);
  }
  std::unique_ptr<KLDivLoss> remake() const {
    return std::make_unique<KLDivLoss>(reduction, log_target);
  }

  const KlReduction reduction;
  const bool log_target;
};

// target: counts; x: the logarithm of the rate, or the rate.
class PoissonNLLLoss : public Module<PoissonNLLLoss> {
 public:
  explicit PoissonNLLLoss(bool log_input = true, bool full = false, double eps = 1e-8,
                          Reduction reduction = Reduction::kMean)
      : log_input(log_input), full(full), eps(eps), reduction(reduction) {}
  Tensor forward(const Tensor& x, const Tensor& target) {
    return poisson_nll_loss(x, target, log_input, full, eps, reduction);
  }
  std::unique_ptr<PoissonNLLLoss> remake() const {
    return std::make_unique<PoissonNLLLoss>(log_input, full, eps, reduction);
  }

  const bool log_input;
  const bool full;
  const double eps;
  const Reduction reduction;
};

class GaussianNLLLoss : public Module<GaussianNLLLoss> {
 public:
  explicit GaussianNLLLoss(bool full = false, double eps = 1e-6,
                           Reduction reduction = Reduction::kMean)
      : full(full), eps(eps), reduction(reduction) {}
  Tensor forward(const Tensor& x, const Tensor& target, const Tensor& var) {
    return gaussian_nll_loss(x, target, var, full, eps, reduction);
  }
  std::unique_ptr<GaussianNLLLoss> remake() const {
    return std::make_unique<GaussianNLLLoss>(full, eps, reduction);
  }

  const bool full;
  const double eps;
  const Reduction reduction;
};

class TripletMarginLoss : public Module<TripletMarginLoss> {
 public:
  explicit TripletMarginLoss(double margin = 1, double p = 2, double eps = 1e-6, bool swap = false,
                             Reduction reduction = Reduction::kMean)
      : margin(margin), p(p), eps(eps), swap(swap), reduction(reduction) {}
  Tensor forward(const Tensor& anchor, const Tensor& positive, const Tensor& negative) {
    return triplet_margin_loss(anchor, positive, negative, margin, p, eps, swap, reduction);
  }
  std::unique_ptr<TripletMarginLoss> remake() const {
    return std::make_unique<TripletMarginLoss>(margin, p, eps, swap, reduction);
  }

  const double margin;
  const double p;
  const double eps;
  const bool swap;
  const Reduction reduction;
};

// target: 1 for pairs that belong together, -1 for others.
class CosineEmbeddingLoss : public Module<CosineEmbeddingLoss> {
 public:
  explicit CosineEmbeddingLoss(double margin = 0, Reduction reduction = Reduction::kMean)
      : margin(margin), reduction(reduction) {}
  Tensor forward(const Tensor& x1, const Tensor& x2, const Tensor& target) {
    return cosine_embedding_loss(x1, x2, target, margin, reduction);
  }
  std::unique_ptr<CosineEmbeddingLoss> remake() const {
    return std::make_unique<CosineEmbeddingLoss>(margin, reduction);
  }

  const double margin;
  const Reduction reduction;
};

// x: log-probabilities [T, N, C]; targets have no alignment.
class CTCLoss : public Module<CTCLoss> {
 public:
  explicit CTCLoss(int64_t blank = 0, Reduction reduction = Reduction::kMean,
                   bool zero_infinity = false)
      : blank(blank), reduction(reduction), zero_infinity(zero_infinity) {}
  Tensor forward(const Tensor& log_probs, const Tensor& targets, const Tensor& input_lengths,
                 const Tensor& target_lengths) {
    return ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction,
                    zero_infinity);
  }
  std::unique_ptr<CTCLoss> remake() const {
    return std::make_unique<CTCLoss>(blank, reduction, zero_infinity);
  }

  const int64_t blank;
  const Reduction reduction;
  const bool zero_infinity;
};

}  // namespace tessera::nn
