#include <tessera/distributed/backward/requires_grad_changes.h>

#include <cstdint>
#include <cstdio>
#include <utility>

namespace tessera::distributed {
namespace {

std::vector<bool> flags_of(const NamedTensors& parameters) {
  std::vector<bool> flags;
  flags.reserve(parameters.size());
  for (const auto& [name, tensor] : parameters) flags.push_back(tensor.requires_grad());
  return flags;
}

// The text of a call has 255 letters.
std::string shortened(const std::string& name) {
  constexpr size_t kMost = 90;
  return name.size() <= kMost ? name : "..." + name.substr(name.size() - kMost);
}

}  // namespace

RequiresGradChanges::RequiresGradChanges(NamedTensors parameters)
    : parameters_(std::move(parameters)), agreed_(flags_of(parameters_)), seen_(agreed_) {}

bool RequiresGradChanges::look() {
  std::vector<bool> flags = flags_of(parameters_);
  if (flags == seen_) return false;
  seen_ = std::move(flags);
  text_.clear();
  size_t changed = 0;
  uint32_t hash = 2166136261u;  // FNV-1a of all that changed
  const auto take = [&](unsigned char letter) { hash = (hash ^ letter) * 16777619u; };
  for (size_t i = 0; i < seen_.size(); ++i) {
    if (seen_[i] == agreed_[i]) continue;
    const std::string& name = parameters_[i].name;
    for (const char letter : name) take(static_cast<unsigned char>(letter));
    take(seen_[i] ? 1 : 0);
    if (changed++ > 0) continue;
    text_ = "; '" + shortened(name) + (seen_[i] ? "' requires grad here" : "' is frozen here");
  }
  if (changed == 0) return true;
  if (changed > 1) {
    char more[64];
    std::snprintf(more, sizeof more, " and %zu more changed (%08x)", changed - 1, hash);
    text_ += more;
  }
  text_ += ": set requires_grad alike on all ranks";
  return true;
}

void RequiresGradChanges::agree() {
  if (text_.empty()) return;
  agreed_ = seen_;
  text_.clear();
}

}  // namespace tessera::distributed
