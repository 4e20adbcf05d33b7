// gpu_libraries: loads NVIDIA's libraries as the first product, attention and group of ranks do,
// and prints name, version and path of each, as columns. Exits with 1 where one is missing, and
// says which and why: without them a program runs on own kernels, several times slower, or with one
// rank. Needs no GPU.
#include <cstdio>
#include <exception>
#include <fstream>
#include <string>
#include <vector>

#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/cuda/libraries/lazy_library.h>
#include <tessera/core/cuda/libraries/library_graph.h>
#if TESSERA_HAS_NCCL
#include <tessera/distributed/transport/nccl/communicator.h>
#endif

namespace {

using namespace tessera;

// The files of this process whose names begin so.
std::vector<std::string> mapped(const std::string& begin) {
  std::vector<std::string> paths;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t at = line.find('/');
    if (at == std::string::npos) continue;
    const std::string path = line.substr(at);
    const bool wanted = path.substr(path.rfind('/') + 1).starts_with(begin);
    if (wanted && (paths.empty() || paths.back() != path)) paths.push_back(path);
  }
  return paths;
}

bool all_there = true;

// `said`: its name and version, or why it is not there.
void report(const char* name, bool is_there, const std::string& said, const std::string& file) {
  if (!is_there) {
    all_there = false;
    std::printf("%-12s MISSING: %s\n", name, said.c_str());
    return;
  }
  for (const std::string& path : mapped(file)) {
    std::printf("%-12s %-18s %s\n", name, said.c_str(), path.c_str());
  }
}

// What cuDNN loads itself when a graph asks for it, from the folder in which it lies.
void report_parts_of_cudnn() {
  const std::vector<std::string> whole = mapped("libcudnn.so");
  if (whole.empty()) return;
  const std::string folder = whole[0].substr(0, whole[0].rfind('/') + 1);
  const std::string number = ".so." + std::to_string(gpu::graph_library_version() / 10000);
  for (const std::string part :
       {"graph", "heuristic", "engines_precompiled", "engines_runtime_compiled"}) {
    const std::string file = "libcudnn_" + part;
    const gpu::LazyLibrary library(folder + file + number, "cuDNN");
    report("  its part", library.reason().empty(),
           library.reason().empty() ? part : library.reason(), file);
  }
}

// Engines of cuDNN that compile at run time load it.
void report_nvrtc() {
  int (*version)(int*, int*) = nullptr;
  gpu::LazyLibrary library("libnvrtc.so." TESSERA_CUDA_MAJOR, "CUDA's NVRTC");
  library.find("nvrtcVersion", version);
  std::string said = library.reason();
  if (version != nullptr) {
    int major = 0, minor = 0;
    version(&major, &minor);
    said = "NVRTC " + std::to_string(major) + "." + std::to_string(minor);
  }
  report("compilation", version != nullptr, said, "libnvrtc.so");
}

void report_nccl() {
#if TESSERA_HAS_NCCL
  try {
    const auto library = distributed::nccl::Library::load();
    const int version = library->version;
    report("collectives", true,
           "NCCL " + std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) +
               "." + std::to_string(version % 100),
           library->path.substr(library->path.rfind('/') + 1));
  } catch (const std::exception& error) {
    report("collectives", false, error.what(), "");
  }
#else
  report("collectives", false, "this build is without NCCL (TESSERA_WITH_NCCL)", "");
#endif
}

}  // namespace

int main() {
  const std::string products = gpu::gemm_library(), graphs = gpu::graph_library();
  report("products", products.starts_with("cuBLASLt"), products, "libcublasLt.so");
  report("graphs", gpu::graph_library_version() != 0, graphs, "libcudnn.so");
  report_parts_of_cudnn();
  report_nvrtc();
  report_nccl();
  return all_there ? 0 : 1;
}
