// Who asks for launches: the ranges of ops and modules, as timelines hear of them.
#include <chrono>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/context.h>
#include <tessera/core/cuda/dry/launches.h>
#include <tessera/core/cuda/dry/record.h>
#include <tessera/core/profiler.h>

namespace tessera::gpu::dry {
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

struct Range {
  std::string op, layer;
};
thread_local std::vector<Range> open_ranges;

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

void sign(Launch& launch) {
  if (open_ranges.empty()) return;
  launch.op = open_ranges.back().op;
  launch.layer = open_ranges.back().layer;
}

Recording record(const std::function<void()>& work) {
  OpRanges ops;
  LayerRanges modules;
  auto& slot = Context::current().slot<tessera::detail::ProfilerSlot>();
  const ScopedValue<RangeListener*> listens(slot.active, &ops), marks(slot.timeline, &modules);
  take_launches();
  const auto begin = std::chrono::steady_clock::now();
  work();
  const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
  return {take_launches(), time.count()};
}

}  // namespace tessera::gpu::dry
