// A checkpoint as objects see it: sections selected by the prefix of names. Internal.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include <tessera/core/state/state_dict.h>
#include <tessera/distributed/checkpoint/reader.h>

namespace tessera::accelerate {

// Metadata of a tied name: "tied:" and the name; the value is the name that is saved.
inline constexpr std::string_view kTiedPrefix = "tied:";

// The tensor into which a name will be loaded, if known; else undefined.
using Destination = std::function<Tensor(std::string_view name)>;
Destination in_state(StateDict state);

class SavedState {
 public:
  // `reader` must outlive it.
  explicit SavedState(distributed::CheckpointReader& reader, const Device& device = kCpu);

  // Values for a DTensor are DTensors of the same placement, of which this rank reads its shard;
  // all others are whole.
  StateDict section(const std::string& prefix, const Destination& destination = {}) const;
  bool has_section(const std::string& prefix) const;
  // A number of the metadata. FormatError.
  int64_t number(const std::string& key) const;
  distributed::CheckpointReader& reader() const { return reader_; }

 private:
  distributed::CheckpointReader& reader_;
  Device device_;
  std::map<std::string, std::string> tied_;
};

}  // namespace tessera::accelerate
