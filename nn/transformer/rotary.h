// Rotary positions (Su et al. 2021, https://arxiv.org/abs/2104.09864), with the scalings by which a
// model handles longer texts than in training.
//
//     nn::RotaryEmbedding rotary(128, {.theta = 500000});
//     Tensor turned = rotary(x);                       // [B, H, T, 128], at positions 0..T-1
//     Tensor next = rotary(x, 17);                     // behind 17 tokens of a cache
//     const auto [cos, sin] = rotary.angles(0, 1024);  // once for all layers of a model
//     Tensor keys = rotary_embedding(x, cos, sin);
//
// Pair i of a vector of C features at position p is rotated by p * theta^(-2 i / C), calculated in
// f64 and rounded to f32 once, whatever the dtype of x. Nothing is kept between calls (no table, no
// buffer, no limit of positions), so threads may share a layer.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <tessera/nn/module.h>

namespace tessera::nn {

// Scalings of the frequencies; the names in config.json of transformers ("rope_type").
enum class RotaryScaling {
  kNone,      // "default"
  kLinear,    // "linear": each is divided by `factor` (Chen et al. 2023)
  kDynamic,   // "dynamic": theta grows once a sequence is longer than `context` ("NTK-aware")
  kLlama3,    // "llama3": slow ones are divided by `factor`, fast ones stay, and between blends
  kYarn,      // "yarn": the same by the pair's number (Peng et al. 2023), and scores grow
  kLongRope,  // "longrope": each has a divisor of its own (Ding et al. 2024), and scores grow
};
struct RotaryOptions {
  double theta = 10000;
  RotaryScaling scaling = RotaryScaling::kNone;
  double factor = 1;
  int64_t context = 0;  // context length of the training: all but kNone and kLinear
  // kLlama3: pairs with fewer rotations than the first number in `context` positions are slow,
  // those with more than the second are fast.
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  // kYarn: pairs that turn more often than beta_fast times in `context` positions are fast, those
  // that turn less often than beta_slow times slow; `truncate` widens this to whole pairs.
  double beta_fast = 32;
  double beta_slow = 1;
  bool truncate = true;
  // kLongRope: the divisors of the pairs' frequencies, for sequences up to `context` and longer.
  std::vector<double> short_factor = {}, long_factor = {};
  // kYarn, kLongRope: cos and sin are multiplied with it. Absent: 0.1 log(factor) + 1, and
  // sqrt(1 + log(factor) / log(context)).
  std::optional<double> attention_factor = {};
  bool interleaved = false;  // pairs (2i, 2i + 1) in place of (i, i + C/2)
  bool operator==(const RotaryOptions&) const = default;
};

struct RotaryAngles {
  Tensor cos, sin;  // [T, C/2], f32
  void visit_tensors(auto&& visit) { visit(cos), visit(sin); }
};

// It has no parameters. ConfigError: an odd number of features or none, or options that fit no
// scaling.
class RotaryEmbedding : public Module<RotaryEmbedding> {
 public:
  explicit RotaryEmbedding(int64_t features, const RotaryOptions& options = {});
  // x: [..., T, features], at positions begin .. begin + T - 1.
  Tensor forward(const Tensor& x, int64_t begin = 0);
  // For positions begin .. begin + count - 1; kDynamic and kLongRope take begin + count as the
  // sequence's length and use its frequencies for this call only (cached keys do not change).
  RotaryAngles angles(int64_t begin, int64_t count, const Device& device = kCpu) const;
  // For any positions of sequences of that length. positions: [..., T] i64; result: [..., T, C/2].
  RotaryAngles angles(const Tensor& positions, int64_t length) const;
  // Of packed rows: for position ids [B, T], [B, 1, T, C/2]. kDynamic and kLongRope take the largest
  // position + 1 as the length, which the host reads.
  RotaryAngles angles(const Tensor& position_ids) const;
  // By which a position turns each pair, in sequences of that length: [C/2], f64.
  Tensor frequencies(int64_t length, const Device& device) const;
  double amplitude() const;  // of cos and sin: attention_factor, or what it is where absent
  std::string extra_repr() const override;
  std::unique_ptr<RotaryEmbedding> remake() const {
    return std::make_unique<RotaryEmbedding>(features, options);
  }

  const int64_t features;
  const RotaryOptions options;
};

}  // namespace tessera::nn
