// A program without cuDNN: that of no GPU, and one built without its header.
#include <tessera/core/cuda/libraries/library_graph.h>
#include <tessera/core/error.h>

namespace tessera::gpu {
namespace {

constexpr const char* kNoCudnn =
    "this program was built without cuDNN; build it with nvcc and cudnn.h";

}  // namespace

int graph_library_version() { return 0; }
std::string graph_library() { return std::string("graphs run on own kernels, as ") + kNoCudnn; }
bool has_engine(const GraphRequest&) { return false; }
bool run_graph(const GraphRequest&, std::span<void* const>) { return false; }
std::vector<GraphEngine> list_engines(const LibraryGraph&, const std::string&) {
  TS_THROW(UnsupportedError, "cudnn", kNoCudnn);
}

}  // namespace tessera::gpu
