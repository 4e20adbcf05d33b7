// core_no_cuda: a program without a GPU backend.
#include <tessera/core/error.h>
#include <tessera/core/gpu/transfers.h>

namespace tessera::gpu {
namespace {

[[noreturn]] void refuse(const char* where) { TS_THROW(DeviceError, where, unavailable_reason()); }

}  // namespace

struct StreamHandle {};
struct EventHandle {};
struct CurrentStream::Impl {};

BackendKind backend_kind() { return BackendKind::kNone; }
int device_count() { return 0; }
std::string unavailable_reason() {
  return "this program has no backend for cuda; use cpu, or build with the CUDA toolkit on PATH";
}
std::string describe_device(int) { refuse("cuda"); }
int64_t free_memory(int) { refuse("cuda"); }
void require_device(int, const char* where) { refuse(where); }
Allocator& device_allocator(int) { refuse("allocator"); }
void record_use(int, void*) { refuse("cuda"); }
void use_device(int) { refuse("cuda"); }
void synchronize(int) { refuse("synchronize"); }
void copy_bytes(void*, const Device&, const void*, const Device&, size_t, bool) { refuse("copy"); }
Allocator& pinned_allocator() { refuse("pinned memory"); }
int64_t pinned_bytes_in_use() { return 0; }
bool is_pinned(const void*) { return false; }
std::shared_ptr<StreamHandle> make_stream(int) { refuse("stream"); }
std::shared_ptr<StreamHandle> copy_stream(int) { refuse("stream"); }
std::shared_ptr<StreamHandle> wrap_stream(int, void*) { refuse("stream"); }
std::shared_ptr<StreamHandle> current_stream_handle(int) { refuse("stream"); }
void* native_stream(const StreamHandle&) { refuse("stream"); }
void synchronize_stream(StreamHandle&) { refuse("stream"); }
std::shared_ptr<EventHandle> record_event(StreamHandle&) { refuse("event"); }
void wait_event(StreamHandle&, EventHandle&) { refuse("event"); }
bool event_done(EventHandle&) { refuse("event"); }
void synchronize_event(EventHandle&) { refuse("event"); }
float elapsed_milliseconds(EventHandle&, EventHandle&) { refuse("event"); }
void push_range(const char*) {}
void pop_range() {}
CurrentStream::CurrentStream(std::shared_ptr<StreamHandle>) { refuse("stream"); }
CurrentStream::~CurrentStream() = default;
CurrentDevice::CurrentDevice(int) : previous_(0) { refuse("cuda"); }
CurrentDevice::~CurrentDevice() { static_cast<void>(previous_); }  // nothing to go back to

}  // namespace tessera::gpu
