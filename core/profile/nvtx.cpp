#include <tessera/core/profile/nvtx.h>

#include <string>

#include <tessera/core/environment.h>
#include <tessera/core/gpu/transfers.h>

namespace tessera {
namespace {

class NvtxTimeline : public RangeListener {
 public:
  void enter(std::string_view name) override { gpu::push_range(std::string(name).c_str()); }
  void leave() override { gpu::pop_range(); }
};

}  // namespace

RangeListener& nvtx_timeline() {
  static NvtxTimeline* const timeline = new NvtxTimeline;  // outlives static objects that compute
  return *timeline;
}

detail::ProfilerSlot::ProfilerSlot() {
  static const bool asked = environment_flag("TESSERA_NVTX");
  if (asked) active = timeline = &nvtx_timeline();
}

}  // namespace tessera
