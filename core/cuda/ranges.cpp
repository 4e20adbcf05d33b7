#include <tessera/core/cuda/ranges.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/context.h>
#include <tessera/core/profile/profiler.h>

namespace tessera::gpu {
namespace {

// Names of layers by number, so that nodes of the tape keep four bytes.
class Layers {
 public:
  uint32_t number(const std::string& name) {
    const std::lock_guard lock(mutex_);
    const auto [place, is_new] = numbers_.try_emplace(name, static_cast<uint32_t>(names_.size()));
    if (is_new) names_.push_back(name);
    return place->second;
  }
  std::string name(uint32_t number) {
    const std::lock_guard lock(mutex_);
    return names_.at(number);
  }

 private:
  std::mutex mutex_;
  std::map<std::string, uint32_t> numbers_ = {{"", 0}};
  std::vector<std::string> names_ = {""};
};
Layers& layers() {
  static Layers* const the_layers = new Layers;
  return *the_layers;
}

thread_local std::vector<RangeNames> open_ranges;

const std::string& current_layer() {
  static const std::string none;
  return open_ranges.empty() ? none : open_ranges.back().layer;
}

// Ops stand within layers, and both leave in order: one stack serves both. An op that another one
// is made of bears the other's name.
class OpRanges : public RangeListener {
 public:
  void enter(std::string_view name) override {
    const bool inner = !open_ranges.empty() && !open_ranges.back().op.empty();
    open_ranges.push_back({inner ? open_ranges.back().op : std::string(name), current_layer()});
  }
  void enter_backward(std::string_view name, uint32_t place) override {
    open_ranges.push_back({std::string(name), layers().name(place)});
  }
  uint32_t place() const override { return layers().number(current_layer()); }
  void leave() override { open_ranges.pop_back(); }
};
class LayerRanges : public RangeListener {
 public:
  void enter(std::string_view name) override { open_ranges.push_back({"", std::string(name)}); }
  void leave() override { open_ranges.pop_back(); }
};

}  // namespace

RangeNames current_ranges() { return open_ranges.empty() ? RangeNames{} : open_ranges.back(); }

struct NamedRanges::Impl {
  OpRanges ops;
  LayerRanges modules;
  tessera::detail::ProfilerSlot& slot = Context::current().slot<tessera::detail::ProfilerSlot>();
  const ScopedValue<RangeListener*> listens{slot.active, &ops}, marks{slot.timeline, &modules};
};
NamedRanges::NamedRanges() : impl_(std::make_unique<Impl>()) {}
NamedRanges::~NamedRanges() = default;

}  // namespace tessera::gpu
