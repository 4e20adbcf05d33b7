// What a config.json may ask for at most, so that a damaged one ends in an error and not in hours or
// in numbers that overflow.
#pragma once

#include <cstdint>

#include <tessera/core/error.h>

namespace tessera::nn::models {

inline constexpr int64_t kLargestSize = int64_t{1} << 31;  // products of two are numbers, too
inline constexpr int64_t kMostLayers = 1024;    // a thousand were trained; a plan takes 6 s
inline constexpr double kMostWeights = 0x1p50;  // bytes of their training are numbers

inline void check_extent(const char* model, int64_t layers, double weights) {
  TS_CHECK_AS(ConfigError, layers <= kMostLayers, model, "has at most ", kMostLayers,
              " layers; got ", layers);
  TS_CHECK_AS(ConfigError, weights <= kMostWeights, model, "has at most ", kMostWeights,
              " weights; its sizes make ", weights);
}

}  // namespace tessera::nn::models
