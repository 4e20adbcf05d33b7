#include <tessera/accelerate/state/saved_state.h>

#include <algorithm>

#include <tessera/core/error.h>
#include <tessera/distributed/checkpoint/parts.h>
#include <tessera/distributed/mesh/dtensor.h>

namespace tessera::accelerate {

Destination in_state(StateDict state) {
  return [state = std::move(state)](std::string_view name) {
    const Tensor* tensor = state.find(name);
    return tensor != nullptr ? *tensor : Tensor();
  };
}

SavedState::SavedState(distributed::CheckpointReader& reader, const Device& device)
    : reader_(reader), device_(device) {
  for (const auto& [key, value] : reader.metadata()) {
    if (key.starts_with(kTiedPrefix)) tied_.emplace(key.substr(kTiedPrefix.size()), value);
  }
}

StateDict SavedState::section(const std::string& prefix, const Destination& destination) const {
  StateDict state;
  const auto add = [&](const std::string& full, const std::string& saved) {
    const std::string name = full.substr(prefix.size());
    const Tensor target = destination ? destination(name) : Tensor();
    // Of another shape it comes as it is, for the object to say so.
    if (target.defined() && distributed::is_dtensor(target) &&
        distributed::global_shape(target) == reader_.tensor(saved).shape) {
      state.set(name, distributed::read_as(reader_, saved, distributed::spec_of(target), device_));
    } else {
      const Tensor whole = reader_.view(saved);
      state.set(name, device_.is_cpu() ? whole : whole.to(device_));
    }
  };
  const auto& tensors = reader_.tensors();
  for (auto one = tensors.lower_bound(prefix);
       one != tensors.end() && one->first.starts_with(prefix); ++one) {
    add(one->first, one->first);
  }
  for (auto alias = tied_.lower_bound(prefix);
       alias != tied_.end() && alias->first.starts_with(prefix); ++alias) {
    if (alias->second.starts_with(prefix) && reader_.contains(alias->second)) {
      add(alias->first, alias->second);
    }
  }
  return state;
}

bool SavedState::has_section(const std::string& prefix) const {
  const auto first = reader_.tensors().lower_bound(prefix);
  return first != reader_.tensors().end() && first->first.starts_with(prefix);
}

int64_t SavedState::number(const std::string& key) const {
  const auto found = reader_.metadata().find(key);
  TS_CHECK_AS(FormatError, found != reader_.metadata().end(), "load_state", "'", reader_.folder(),
              "': the metadata has no '", key, "'; it is no checkpoint of a training state.");
  const std::string& text = found->second;
  const bool digits = !text.empty() && text.size() <= 18 &&
                      std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
  TS_CHECK_AS(FormatError, digits, "load_state", "'", reader_.folder(), "': the metadata '", key,
              "' must be a whole number; it is ", shown(text), "; load an older checkpoint.");
  return std::stoll(text);
}

}  // namespace tessera::accelerate
