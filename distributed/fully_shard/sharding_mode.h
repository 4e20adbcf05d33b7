// What the ranks along one mesh axis hold of a tensor, and the table of data-parallel modes.
#pragma once

#include <string>
#include <string_view>

namespace tessera::distributed {

enum class ModePlacement : unsigned char {
  kReplicate,  // every rank holds the whole value
  kPartial,    // every rank holds a summand of the whole shape
  kShard,      // every rank holds its rows of dimension 0
};
constexpr std::string_view name_of(ModePlacement placement) {
  switch (placement) {
    case ModePlacement::kReplicate:
      return "R";
    case ModePlacement::kPartial:
      return "P";
    case ModePlacement::kShard:
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
  ModePlacement parameter = ModePlacement::kReplicate;
  ModePlacement gradient = ModePlacement::kPartial;
  ModePlacement optimizer = ModePlacement::kReplicate;
  friend constexpr bool operator==(const ShardingMode&, const ShardingMode&) = default;
};
inline constexpr ShardingMode kDataParallel{};
inline constexpr ShardingMode kZero1{ModePlacement::kReplicate, ModePlacement::kPartial,
                                     ModePlacement::kShard};
inline constexpr ShardingMode kZero2{ModePlacement::kReplicate, ModePlacement::kShard,
                                     ModePlacement::kShard};
inline constexpr ShardingMode kFullyShard{ModePlacement::kShard, ModePlacement::kShard,
                                          ModePlacement::kShard};

inline std::string describe(const ShardingMode& mode) {
  return "(" + std::string(name_of(mode.parameter)) + ", " + std::string(name_of(mode.gradient)) +
         ", " + std::string(name_of(mode.optimizer)) + ")";
}

}  // namespace tessera::distributed
