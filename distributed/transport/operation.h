// The operations of groups and their movements: transports implement movements, and know an
// operation by name only if their library has its own form of it. A new operation needs a row here
// and a method of Group that says which bytes go where.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string_view>

namespace tessera::distributed {

enum class Operation : uint8_t {
  kAllReduce,
  kReduce,
  kBroadcast,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kScatter,
  kPermute,
  kSend,
  kRecv,
  kBarrier,
  kInvalid,  // a rank could not issue its call: the others learn why
};

// How a transport moves the parts of a call; see Call in backend.h.
enum class Movement : uint8_t {
  kNothing,    // only the header is exchanged
  kReduction,  // sends[r] is the piece that rank r sums
  kBroadcast,  // one buffer, from the root to all
  kParts,      // sends[r] goes to rank r, receives[r] comes from it
  kMessage,    // to or from one peer, matched by tag
};

// The destination of a reduction's sums.
enum class Delivery : uint8_t {
  kAll,    // in place, to every rank
  kRoot,   // in place, to the root
  kOwner,  // each piece to receives[rank] of the rank that sums it
};

struct OperationTraits {
  Operation operation;
  std::string_view name;
  Movement movement;
  Delivery delivery = Delivery::kAll;
  // Bytes that a rank sends in a bandwidth-optimal algorithm for each byte that its record counts.
  double (*wire)(double ranks) = [](double) { return 1.0; };
};

inline constexpr OperationTraits kOperations[] = {
    {Operation::kAllReduce, "all_reduce", Movement::kReduction, Delivery::kAll,
     [](double ranks) { return 2 * (ranks - 1) / ranks; }},
    {Operation::kReduce, "reduce", Movement::kReduction, Delivery::kRoot},
    {Operation::kBroadcast, "broadcast", Movement::kBroadcast},
    {Operation::kAllGather, "all_gather", Movement::kParts, Delivery::kAll,
     [](double ranks) { return ranks - 1; }},
    {Operation::kReduceScatter, "reduce_scatter", Movement::kReduction, Delivery::kOwner,
     [](double ranks) { return ranks - 1; }},
    {Operation::kAllToAll, "all_to_all", Movement::kParts, Delivery::kAll,
     [](double ranks) { return (ranks - 1) / ranks; }},
    {Operation::kGather, "gather", Movement::kParts},
    {Operation::kScatter, "scatter", Movement::kParts},
    {Operation::kPermute, "permute", Movement::kParts},
    {Operation::kSend, "send", Movement::kMessage},
    {Operation::kRecv, "recv", Movement::kMessage},
    {Operation::kBarrier, "barrier", Movement::kNothing, Delivery::kAll,
     [](double) { return 0.0; }},
    {Operation::kInvalid, "(nothing)", Movement::kNothing, Delivery::kAll,
     [](double) { return 0.0; }},
};
static_assert([] {
  for (size_t i = 0; i < std::size(kOperations); ++i) {
    if (static_cast<size_t>(kOperations[i].operation) != i) return false;
  }
  return std::size(kOperations) == static_cast<size_t>(Operation::kInvalid) + 1;
}());

constexpr const OperationTraits& traits_of(Operation operation) {
  return kOperations[static_cast<size_t>(operation)];
}
constexpr std::string_view name_of(Operation operation) { return traits_of(operation).name; }
constexpr Movement movement_of(Operation operation) { return traits_of(operation).movement; }
constexpr bool is_message(Operation operation) {
  return movement_of(operation) == Movement::kMessage;
}

}  // namespace tessera::distributed
