// What the ranks along one mesh axis hold of a tensor, and the table of data-parallel modes.
#pragma once

#include <string>
#include <string_view>

namespace tessera::distributed {

enum class Placement : unsigned char {
  kReplicate,  // every rank holds the whole value
  kPartial,    // every rank holds a summand of the whole shape
  kShard,      // every rank holds its rows of dimension 0
};
constexpr std::string_view name_of(Placement placement) {
  switch (placement) {
    case Placement::kReplicate:
      return "R";
    case Placement::kPartial:
      return "P";
    case Placement::kShard:
      return "S";
  }
  return "?";
}

// Where parameters, gradients (between the micro-batches of a step) and optimizer states lie. A
// data-parallel mode is nothing but such a triple for each mesh axis:
//
//     mode               parameter  gradient  optimizer   communication of a step (m micro-batches)
//     kDataParallel      R          P         R           all-reduce of the gradients
//     kZero1             R          P         S           reduce-scatter, all-gather
//     kZero2             R          S         S           m reduce-scatters, all-gather
//     kFullyShard        S          S         S           2m all-gathers, m reduce-scatters
struct ShardingMode {
  Placement parameter = Placement::kReplicate;
  Placement gradient = Placement::kPartial;
  Placement optimizer = Placement::kReplicate;
  friend constexpr bool operator==(const ShardingMode&, const ShardingMode&) = default;
};
inline constexpr ShardingMode kDataParallel{};
inline constexpr ShardingMode kZero1{Placement::kReplicate, Placement::kPartial, Placement::kShard};
inline constexpr ShardingMode kZero2{Placement::kReplicate, Placement::kShard, Placement::kShard};
inline constexpr ShardingMode kFullyShard{Placement::kShard, Placement::kShard, Placement::kShard};

inline std::string describe(const ShardingMode& mode) {
  return "(" + std::string(name_of(mode.parameter)) + ", " + std::string(name_of(mode.gradient)) +
         ", " + std::string(name_of(mode.optimizer)) + ")";
}

}  // namespace tessera::distributed
