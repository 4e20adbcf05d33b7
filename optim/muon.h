// Muon: momentum whose matrix is orthogonalized before it is applied (Jordan et al. 2024), as
// torch.optim.Muon. It is for the weights of hidden layers, which are matrices; embeddings, the
// head, gains and biases belong to another optimizer, as torch recommends:
//
//     auto [matrices, others] = optim::split_for_muon(model.named_parameters(), {"wte", "wpe"});
//     optim::Muon muon(matrices, {.lr = 0.02, .momentum = 0.95});
//     optim::AdamW adamw(others, {.lr = 3e-4});
//     for (auto& batch : loader) {
//       model(batch.inputs, batch.targets).loss.backward();
//       muon.step(), adamw.step();
//       muon.zero_grad(), adamw.zero_grad();
//     }
//
// A step for a gradient G [A, B] (torch/optim/_muon.py):
//
//     M = M + (1 - momentum) (G - M)
//     X = bf16(nesterov ? G + momentum (M - G) : M)
//     X = X / max(|X|, eps), transposed where A > B
//     ns_steps times: S = X X^T;  X = ns_coefficients[0] X + ([1] S + [2] S S) X
//     W = W (1 - lr weight_decay) - lr ratio X
//     ratio: sqrt(max(1, A / B)), or what else adjust_lr_fn says
//
// X and the products are bf16, each result rounded once, with f32 sums; the rest is f32 (f64 for
// f64 parameters). The state is momentum_buffer, in f32, f64 or bf16 (state_dtype). A step needs
// memory for X of all matrices.
//
// Sharded parameters (zero(), fully_shard(), a DTensor of any placement except Partial) are updated
// with the bits of whole ones: momentum and update run on the shards, X on one owner for each
// matrix, which gets the shards and returns them in bf16. This takes two collectives a step for all
// matrices together (distributed/mesh/matrix_exchange.h, [Note: owners]), so step() is collective
// then. distributed::report_update(optimizer) reports the traffic.
//
// ShapeError for a parameter that does not have two dimensions; ValueError for options outside of
// torch's ranges.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include <tessera/optim/optimizer.h>

namespace tessera::optim {

// The factor of the rate for a matrix of A rows and B columns.
enum class AdjustLr : uint8_t {
  kOriginal,           // sqrt(max(1, A / B)), Jordan's: tall matrices take larger steps
  kMatchRmsAdamW,      // 0.2 sqrt(max(A, B)), Moonshot's: the rate and weight decay of AdamW fit
  kSpectralUnclamped,  // sqrt(A / B), Bernstein's
};

struct MuonOptions {
  double lr = 1e-3;
  double weight_decay = 0.1;  // decoupled from the gradient, as AdamW's
  double momentum = 0.95;
  bool nesterov = true;
  std::array<double, 3> ns_coefficients = {3.4445, -4.7750, 2.0315};
  double eps = 1e-7;
  int64_t ns_steps = 5;  // below 100
  AdjustLr adjust_lr_fn = AdjustLr::kOriginal;
  bool master_weights = true;
  DType state_dtype = kF32;  // kBF16: rounded stochastically (kernels/optim/state_rounding.h)
  void visit(auto&& visitor) {
    using enum OptionRange;
    visitor("lr", lr, kNotNegative);
    visitor("weight_decay", weight_decay, kNotNegative);
    visitor("momentum", momentum, kNotNegative);
    visitor("nesterov", nesterov);
    visitor("ns_coefficients", ns_coefficients);
    visitor("eps", eps);
    visitor("ns_steps", ns_steps, kNotNegative);
    visitor("adjust_lr_fn", adjust_lr_fn);
    visitor("master_weights", master_weights);
    visitor("state_bits", state_dtype);
  }
  const char* contradiction() const;
};

class Muon : public TypedOptimizer<MuonOptions> {
 public:
  using Options = MuonOptions;
  static constexpr const char* kName = "Muon";
  explicit Muon(const NamedTensors& parameters, const Options& options = {});
  explicit Muon(const std::vector<ParameterGroup<Options>>& groups);

  WholeParameters whole_parameters() const override { return {parameters(), kBF16}; }

 protected:
  std::span<const char* const> state_names() const override;
  std::optional<double> initial_state(size_t, size_t) const override { return 0; }
  void update(size_t group, std::span<ParameterState* const> parameters,
              const kernels::StepScalars& scalars) override;
  void update_all(std::span<const Pass> passes) override;

 private:
  struct Matrix;
  void check_matrices() const;
  void make_orthogonal(std::vector<Matrix>& matrices) const;
};

// The orthogonal matrix near X / |X|, by ns_steps Newton-Schulz iterations; see above. matrix: bf16
// [A, B], a plain tensor; the result is contiguous. Not recorded.
Tensor newton_schulz(const Tensor& matrix, const MuonOptions& options = {});

struct MuonParameters {
  NamedTensors matrices;  // for Muon
  NamedTensors others;    // for AdamW
};
// Separates parameters with two dimensions from the others and from listed ones: names of
// parameters, or of modules whose parameters they are ("wte", "lm_head.weight"). List embeddings
// and the head there, which have two dimensions too. Throws ValueError for a name that fits none.
MuonParameters split_for_muon(const NamedTensors& parameters,
                              const std::vector<std::string>& not_by_muon = {});

}  // namespace tessera::optim
