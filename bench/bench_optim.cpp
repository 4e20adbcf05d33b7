// Speed of the multi-tensor passes: optimizer steps, the gradient norm and the copies of sharded
// training over the parameters of a GPT-like model, beside a copy of the same run.
//
//     bench_optim [--threads N] [--millions N] [--every]
//
// Bytes are those that must move: each tensor once for reading and once for writing. PyTorch's
// figures for the same tensors: bench/compare/pytorch_optim.py.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/kernels/optim/multi_tensor_copy.h>
#include <tessera/core/parallel.h>

namespace {

using namespace tessera;
using Clock = std::chrono::steady_clock;

double median_seconds(auto&& call) {
  std::vector<double> times;
  call();
  for (int i = 0; i < 9; ++i) {
    const Clock::time_point start = Clock::now();
    call();
    times.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// What a step works on. Shapes of a transformer: a few large matrices, many short vectors.
struct Case {
  const char* name;
  DType param, grad, model_copy;
  bool has_model_copy;
};

std::vector<Shape> shapes(int64_t millions) {
  std::vector<Shape> result;
  for (int64_t i = 0; i < millions; ++i) {
    result.push_back({1024, 1024});
    result.push_back({1024});
    result.push_back({768});
  }
  return result;
}

TensorList make(const std::vector<Shape>& shapes, DType dtype, bool random) {
  TensorList list;
  for (const Shape& shape : shapes) {
    list.push_back(random ? randn(shape, {.dtype = dtype}) : zeros(shape, {.dtype = dtype}));
  }
  return list;
}

// Flat memory as eight ranks send it, each its part of every tensor, put in its places in whole
// tensors; `most` cuts parts into still smaller ones.
std::vector<kernels::CopySegment> unpacked(const Tensor& flat, const TensorList& tensors,
                                           int64_t most) {
  constexpr int64_t kRanks = 8;
  std::vector<kernels::CopySegment> segments;
  const char* from = static_cast<const char*>(flat.data());
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    for (const Tensor& x : tensors) {
      const int64_t part = x.numel() / kRanks;
      for (int64_t begin = 0; begin < part; begin += most) {
        const int64_t numel = std::min(most, part - begin);
        char* const to = static_cast<char*>(x.data()) + (rank * part + begin) * size_of(x.dtype());
        segments.push_back({from, to, numel});
        from += numel * size_of(flat.dtype());
      }
    }
  }
  return segments;
}

int run(int argc, char** argv) {
  CLI::App app("Speed of optimizer steps and of the gradient norm.");
  int threads = 0;
  int64_t millions = 16;
  app.add_option("--threads", threads, "0: one a core");
  bool every = false;
  app.add_option("--millions", millions, "parameters")->capture_default_str();
  app.add_flag("--every", every, "all optimizers with their default options too");
  CLI11_PARSE(app, argc, argv);
  if (threads > 0) set_num_threads(threads);
  const std::vector<Shape> all = shapes(millions);
  double numel = 0;
  for (const Shape& shape : all) numel += static_cast<double>(numel_of(shape));

  const Tensor source = zeros({millions << 20}), target = zeros({millions << 20});
  const double copy =
      static_cast<double>(2 * source.nbytes()) / median_seconds([&] { copy_(target, source); });
  std::printf("%d threads, %.1f million parameters; copy %.1f GB/s\n", num_threads(), numel * 1e-6,
              copy * 1e-9);
  std::printf("%-44s %9s %8s %8s\n", "pass", "ms", "GB/s", "of copy");
  const auto report = [&](const char* pass, const char* name, double bytes_per_element,
                          double seconds) {
    const double rate = bytes_per_element * numel / seconds;
    std::printf("%-12s %-31s %9.3f %8.1f %7.0f%%\n", pass, name, seconds * 1e3, rate * 1e-9,
                100 * rate / copy);
    std::fflush(stdout);
  };
  const double scalars[kernels::kNumStepScalars] = {1e-4, 10, 1, 0};
  for (const Case& one : {Case{"f32", kF32, kF32, kF32, false},
                          Case{"f32 with a bf16 model copy", kF32, kF32, kBF16, true},
                          Case{"bf16 with f32 masters", kF32, kBF16, kBF16, true},
                          Case{"bf16 without masters", kBF16, kBF16, kF32, false},
                          Case{"f16 with f32 masters", kF32, kF16, kF16, true}}) {
    const TensorList param = make(all, one.param, true), grad = make(all, one.grad, true);
    const TensorList first = make(all, kF32, false), second = make(all, kF32, false);
    const TensorList model_copy =
        one.has_model_copy ? make(all, one.model_copy, false) : TensorList{};
    const auto model_copy_at = [&](size_t i) {
      return one.has_model_copy ? model_copy[i] : Tensor();
    };
    const double narrow = static_cast<double>(2 * size_of(one.param) + size_of(one.grad) +
                                              (one.has_model_copy ? size_of(one.model_copy) : 0));
    using namespace kernels::rules;
    const std::array<const TensorList*, 2> states = {&first, &second};
    const auto run = [&]<class Rule>(Rule, const char* pass,
                                     const typename Rule::Options& options) {
      std::vector<kernels::UpdateTensors> entries;
      double bytes = narrow;
      for (size_t i = 0; i < all.size(); ++i) {
        entries.push_back({param[i], grad[i], {}, model_copy_at(i)});
      }
      for (int state = 0; state < kNumStates<Rule>; ++state) {
        if (!uses_state<Rule>(options, state)) continue;
        bytes += 8;
        for (size_t i = 0; i < all.size(); ++i) {
          entries[i].states[static_cast<size_t>(state)] =
              states.at(static_cast<size_t>(state))->at(i);
        }
      }
      report(pass, one.name, bytes, median_seconds([&] {
               kernels::multi_tensor_update<Rule>(entries, options, scalars);
             }));
    };
    run(AdamW{}, "AdamW", {.weight_decay = 0.1});
    run(SGD{}, "SGD+momentum", {.momentum = 0.9});
    run(Lion{}, "Lion", {.weight_decay = 0.1});
    if (!every) continue;
#define TS_RUN(name) run(name{}, name::kName, {});
    TS_UPDATE_RULES(TS_RUN)
#undef TS_RUN
  }
  for (const DType dtype : {kF32, kBF16, kF16}) {
    const TensorList grad = make(all, dtype, true);
    const std::string name(name_of(dtype));
    report("norm", name.c_str(), static_cast<double>(size_of(dtype)),
           median_seconds([&] { kernels::multi_tensor_norm(grad); }));
    const double factor = 1;
    report("scale", name.c_str(), static_cast<double>(2 * size_of(dtype)),
           median_seconds([&] { kernels::multi_tensor_scale(grad, &factor); }));
  }
  for (const auto& [from, to] : {std::pair(kF32, kF32), std::pair(kF32, kBF16),
                                 std::pair(kBF16, kF32), std::pair(kBF16, kBF16)}) {
    const Tensor flat = zeros({static_cast<int64_t>(numel)}, {.dtype = from});
    const TensorList tensors = make(all, to, false);
    for (const int64_t most : {int64_t{1} << 40, int64_t{100}}) {
      const std::vector<kernels::CopySegment> segments = unpacked(flat, tensors, most);
      const std::string name = std::string(name_of(from)) + " to " + std::string(name_of(to)) +
                               ", " + std::to_string(segments.size()) + " pieces";
      report("unpack", name.c_str(), static_cast<double>(size_of(from) + size_of(to)),
             median_seconds([&] { kernels::copy_segments(segments, from, to, kCpu); }));
      if (from != to) continue;
      report("memcpy each", name.c_str(), static_cast<double>(2 * size_of(to)), median_seconds([&] {
               for (const kernels::CopySegment& one : segments) {
                 std::memcpy(one.to, one.from, static_cast<size_t>(one.numel * size_of(to)));
               }
             }));
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const tessera::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
