// What files of tests/cuda ask the emulation for, in programs that run on a GPU. It counts nothing
// and says so: a check that needs a count fails instead of passing for no reason, and its test has
// to say TS_NEEDS_EMULATION. An order that is drawn is the GPU's own.
#include <stdexcept>
#include <string>

#include <tessera/core/cuda/emulation/gemm.h>
#include <tessera/core/cuda/emulation/race.h>
#include <tessera/core/cuda/emulation/report.h>
#include <tessera/core/cuda/emulation/simt.h>

namespace tessera::gpu::emulation {
namespace {

[[noreturn]] void only_on_the_emulation(const char* what) {
  throw std::logic_error(std::string(what) +
                         " is the emulation's alone: see tests/cuda/on_emulation.h");
}

}  // namespace

void set_seed(uint64_t) {}
bool race::tracked() { return false; }

std::string take_report() { only_on_the_emulation("take_report"); }
std::vector<std::string> take_ranges() { only_on_the_emulation("take_ranges"); }
std::vector<CountedTraffic> count_traffic(const std::function<void()>&) {
  only_on_the_emulation("count_traffic");
}
int64_t host_waits() { only_on_the_emulation("host_waits"); }
EventCalls event_calls() { only_on_the_emulation("event_calls"); }
CopiedBytes copied_beside(int) { only_on_the_emulation("copied_beside"); }
int64_t launches_of(const std::string&) { only_on_the_emulation("launches_of"); }
void set_gemm_model(GemmModel) { only_on_the_emulation("set_gemm_model"); }
void set_gemm_lack(GemmLack) { only_on_the_emulation("set_gemm_lack"); }

}  // namespace tessera::gpu::emulation
