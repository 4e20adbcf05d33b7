// How linear layers are trained in fp8: which operands, in which format, with whose scales.
//
//     const AppliedPolicy applied = apply(model, Policy::fp8(Fp8Recipe::named("rowwise")));
//
// | name               | operands                               | scale                           |
// |--------------------|----------------------------------------|---------------------------------|
// | tensorwise         | x, W E4M3; dy E5M2 (hybrid) or E4M3    | of the tensor at hand           |
// | delayed            | the same                               | of earlier steps' maxima        |
// | rowwise            | E4M3                                   | one a row, a power of two       |
// | rowwise_with_gw_hp | E4M3; grad_W in the dtype of x         | as rowwise; W of grad_x one     |
// | blockwise          | E4M3; x, dy by 1 x 128, W by 128 x 128 | one a block, a power of two     |
//
// "current" is another name of tensorwise. A row runs along the sum of the product, so rowwise and
// blockwise quantize x, W and dy twice, each time from the unrounded source, except for the square
// blocks of W. rowwise_with_gw_hp is torchao's recipe of that name; in dy W its W has one scale for
// the whole tensor.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/autograd/fp8/layer.h>

namespace tessera::precision {

enum class Fp8Scaling : uint8_t { kTensorwise, kDelayed, kRowwise, kRowwiseWithGwHp, kBlockwise };
enum class Fp8Format : uint8_t {
  kHybrid,  // E4M3 for x and W, E5M2, whose range is larger, for dy
  kE4M3,
};
// Which maximum of the history a delayed scale is made from.
enum class AmaxAlgorithm : uint8_t { kMax, kMostRecent };
// Which Linears take part. The report names the others, with the reason.
enum class Fp8Filter : uint8_t {
  kDefault,  // with dimensions that are multiples of 16, but not the last one of the model
  kAll,      // every one; calls with a dimension that is no multiple of 16 fall back
  kPays,  // of the default, those whose products are large enough to win back the casts on an H100
};

struct Fp8Recipe {
  Fp8Scaling scaling = Fp8Scaling::kTensorwise;
  std::optional<Fp8Format> format = {};   // unset: hybrid for tensorwise and delayed, else e4m3
  std::optional<bool> power_of_two = {};  // unset: as in the table
  int64_t block = 128;                    // blockwise: the side of a block; a GPU has 128
  bool weight_gradient_in_low = true;     // false: grad_W in the dtype of x, and x is kept
  bool in_evaluation = true;              // false: evaluation runs as under bf16
  // delayed
  int64_t history = 1024;  // steps whose maxima are kept
  AmaxAlgorithm algorithm = AmaxAlgorithm::kMax;
  int64_t margin = 0;  // scales are divided by 2^margin
  // Layers
  Fp8Filter filter = Fp8Filter::kDefault;
  std::vector<std::string> exclude = {};  // dotted names or ends of them
  bool strict = false;                    // the first call that falls back throws

  // The recipe of a name above. Throws ConfigError for others.
  static Fp8Recipe named(std::string_view name);

  Fp8Format format_or_default() const;
  bool power_of_two_or_default() const;
  Fp8Casts casts() const;
  friend bool operator==(const Fp8Recipe&, const Fp8Recipe&) = default;
};

std::string_view name_of(Fp8Scaling scaling);
std::string_view name_of(Fp8Filter filter);
Fp8Filter fp8_filter_named(std::string_view name);  // "default", "all", "pays"

// Throws ConfigError if settings contradict each other or are out of range.
void check(const Fp8Recipe& recipe);

// "fp8 delayed (hybrid, history 1024, max, margin 0), filter default"
std::string describe(const Fp8Recipe& recipe);

// Why a Linear of this shape, in calls with many rows, gains nothing on an H100; empty if it does.
// Measured by torchao with its own casts: tensor scales do not pay up to in 4096 and out 1024; row
// scales not up to out 2048, or in 1024, or in 2048 and out 4096.
std::string reason_not_to_pay(Fp8Scaling scaling, int64_t in_features, int64_t out_features);

}  // namespace tessera::precision
