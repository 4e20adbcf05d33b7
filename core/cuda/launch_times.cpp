#include <tessera/core/cuda/launch_times.h>

#include <cuda_runtime_api.h>

#include <map>
#include <utility>

#include <tessera/core/cuda/check.h>
#include <tessera/core/cuda/graph.h>
#include <tessera/core/cuda/launch_log.h>
#include <tessera/core/cuda/ranges.h>
#include <tessera/core/cuda/streams.h>

namespace tessera::gpu {
namespace {

struct Logged {
  const char* name;
  RangeNames ranges;
  std::string request;
  cudaStream_t stream;
  cudaEvent_t end = nullptr;
};
struct Log {
  std::vector<Logged> launches;
  std::string request;  // of the next one
  ~Log() {
    for (const Logged& one : launches) {
      if (one.end != nullptr) cudaEventDestroy(one.end);
    }
  }
};
thread_local Log* open_log = nullptr;

void add(Log& log, const char* name, cudaStream_t stream) {
  log.launches.push_back({name, current_ranges(), std::exchange(log.request, {}), stream});
  TS_CUDA(cudaEventCreateWithFlags(&log.launches.back().end, 0));
  TS_CUDA(cudaEventRecord(log.launches.back().end, stream));
}

}  // namespace

bool times_launches() { return open_log != nullptr && Capture::current() == nullptr; }

void note_request(std::string request) {
  if (times_launches()) open_log->request = std::move(request);
}

void log_launch(const char* name, cudaStream_t stream) {
  if (times_launches()) add(*open_log, name, stream);
}

std::vector<LaunchTime> time_launches(const std::function<void()>& work) {
  refuse_in_capture("timing launches");
  Log log;
  add(log, "", current_stream());  // the beginning
  {
    const NamedRanges ranges;
    const struct Scope {
      Log* const before = std::exchange(open_log, nullptr);
      ~Scope() { open_log = before; }
    } scope;
    open_log = &log;
    work();
  }
  std::map<cudaStream_t, cudaEvent_t> last;  // of each stream
  std::vector<LaunchTime> result;
  for (Logged& one : log.launches) {
    TS_CUDA(cudaEventSynchronize(one.end));
    const cudaEvent_t before = std::exchange(last[one.stream], one.end);
    if (*one.name == 0) continue;
    float milliseconds = 0;
    const cudaEvent_t since = before != nullptr ? before : log.launches.front().end;
    TS_CUDA(cudaEventElapsedTime(&milliseconds, since, one.end));
    result.push_back({one.name, std::move(one.ranges.op), std::move(one.ranges.layer),
                      std::move(one.request), static_cast<double>(milliseconds) * 1e-3});
  }
  return result;
}

}  // namespace tessera::gpu
