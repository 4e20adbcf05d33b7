// A program without a GPU backend captures nothing.
#include <tessera/core/cuda/graph.h>
#include <tessera/core/error.h>

namespace tessera::gpu {

class Graph::Impl {};

Capture* Capture::current() { return nullptr; }
void refuse_in_capture(const char*) {}
void upload_constants(void*, int, const void*, size_t) {
  TS_THROW(DeviceError, "copy", unavailable_reason());
}

Graph::Graph(std::shared_ptr<StreamHandle>, const std::function<void()>&) {
  TS_THROW(DeviceError, "graph", unavailable_reason());
}
Graph::~Graph() = default;
void Graph::replay() {}
int64_t Graph::num_nodes() const { return 0; }
int64_t Graph::pool_bytes() const { return 0; }

NoCapture::NoCapture(int device) : device_(device) {}
NoCapture::~NoCapture() { static_cast<void>(device_); }  // nothing captures

}  // namespace tessera::gpu
