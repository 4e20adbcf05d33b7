// Upper limits for a config.json, so that a damaged one is an error instead of hours of work or
// numbers that overflow.
#pragma once

#include <cstdint>

#include <tessera/core/error.h>

namespace tessera::nn::models {

inline constexpr int64_t kLargestSize = int64_t{1} << 31;  // the product of two does not overflow
inline constexpr int64_t kMostLayers = 1024;    // a thousand were trained; a plan takes 6 s
inline constexpr double kMostWeights = 0x1p50;  // bytes of their training do not overflow

inline void check_extent(const char* model, int64_t layers, double weights) {
  TS_CHECK_AS(ConfigError, layers <= kMostLayers, model, "has at most ", kMostLayers,
              " layers; got ", layers);
  TS_CHECK_AS(ConfigError, weights <= kMostWeights, model, "has at most ", kMostWeights,
              " weights; its sizes make ", weights);
}

}  // namespace tessera::nn::models
