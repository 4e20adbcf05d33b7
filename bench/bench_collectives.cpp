// all_reduce over processes beside MPI's own, in the same processes and in turns.
//
//     mpirun --oversubscribe --bind-to none -n 2 bench_collectives [--rounds 30] [--chunk-kib 0]
//         [--quantile 0.5] [--smallest-kib 4] [--largest-kib 25600]
//
// A line for each size: microseconds of MPI_Allreduce and of the deterministic mode (f32) with
// their ratio, of MPI_Allreduce and of the native mode, and of the deterministic mode on as many
// bytes of bf16. A time is the slowest rank's from a common start, the figure the median of all
// rounds (on a machine that does other work as well, a lower quantile tells more). MPI_Allreduce
// runs on the main thread. The last line: what 25 MiB under 100 ms of compute add to it.
#include <mpi.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/distributed/transport/group.h>

namespace {

using namespace tessera;
using namespace tessera::distributed;
using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// The slowest rank's time, on all ranks.
double timed(const std::function<void()>& work) {
  MPI_Barrier(MPI_COMM_WORLD);
  const auto begin = Clock::now();
  work();
  double mine = seconds_since(begin), slowest = 0;
  MPI_Allreduce(&mine, &slowest, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
  return slowest;
}

double g_quantile = 0.5;

double typical(std::vector<double> values) {
  std::ranges::sort(values);
  return values[static_cast<size_t>(static_cast<double>(values.size()) * g_quantile)];
}

struct Pair {
  double raw, ours;
};

// In turns, each on a buffer of its own: one in common would travel from core to core at each turn.
Pair measure(Group& group, int64_t bytes, DType dtype, ReductionMode mode, int rounds) {
  const Tensor theirs = zeros({bytes / 4}), ours = zeros({bytes / size_of(dtype)}, {dtype});
  rank_context().reduction_mode = mode;
  std::vector<double> raw, mine;
  for (int round = -2; round < rounds; ++round) {
    const double times[] = {timed([&] {
                              MPI_Allreduce(MPI_IN_PLACE, theirs.data(),
                                            static_cast<int>(theirs.numel()), MPI_FLOAT, MPI_SUM,
                                            MPI_COMM_WORLD);
                            }),
                            timed([&] { all_reduce(ours, ReduceOp::kSum, group); })};
    if (round < 0) continue;  // buffers are made
    raw.push_back(times[0]);
    mine.push_back(times[1]);
  }
  return {typical(raw) * 1e6, typical(mine) * 1e6};
}

void measure_size(Group& group, int64_t bytes, int rounds) {
  const Pair fixed = measure(group, bytes, kF32, ReductionMode::kDeterministic, rounds);
  const Pair native = measure(group, bytes, kF32, ReductionMode::kNative, rounds);
  const Pair bf16 = measure(group, bytes, kBF16, ReductionMode::kDeterministic, rounds);
  if (group.rank() != 0) return;
  std::printf("%8lld KiB %10.1f %10.1f (%4.2f) %10.1f %10.1f (%4.2f) %10.1f\n",
              static_cast<long long>(bytes >> 10), fixed.raw, fixed.ours, fixed.ours / fixed.raw,
              native.raw, native.ours, native.ours / native.raw, bf16.ours);
  std::fflush(stdout);
}

void measure_overlap(Group& group, int rounds) {
  rank_context().reduction_mode = ReductionMode::kDeterministic;
  const Tensor x = zeros({25 << 18});
  int64_t steps = 1 << 20;
  const auto compute = [&] {
    volatile double value = 1;
    for (int64_t i = 0; i < steps; ++i) value = value * 1.0000001;
  };
  const auto begin = Clock::now();
  compute();
  steps = static_cast<int64_t>(static_cast<double>(steps) * 0.1 / seconds_since(begin));
  std::vector<double> alone, overlapped, exposed;
  for (int round = 0; round < rounds; ++round) {
    alone.push_back(timed(compute));
    exposed.push_back(timed([&] { group.all_reduce(x).wait(); }));
    overlapped.push_back(timed([&] {
      const Work work = group.all_reduce(x);
      compute();
      work.wait();
    }));
  }
  if (group.rank() != 0) return;
  std::printf("25 MiB: alone %.1f ms; under %.1f ms of compute it adds %.1f ms\n",
              typical(exposed) * 1e3, typical(alone) * 1e3,
              (typical(overlapped) - typical(alone)) * 1e3);
}

}  // namespace

int main(int argc, char** argv) {
  int rounds = 30, smallest = 4, largest = 25600;
  BackendOptions options;
  int64_t chunk_kib = options.chunk_bytes >> 10;
  CLI::App app("Collectives of the ranks of an mpirun, beside MPI's own.");
  app.add_option("--rounds", rounds, "calls of each size")->check(CLI::PositiveNumber);
  app.add_option("--quantile", g_quantile, "of the times that is shown")->check(CLI::Range(0., 1.));
  app.add_option("--smallest-kib", smallest, "sizes from here");
  app.add_option("--largest-kib", largest, "sizes up to here");
  app.add_option("--chunk-kib", chunk_kib, "what travels at once; 0: as much as it chooses")
      ->check(CLI::NonNegativeNumber);
  CLI11_PARSE(app, argc, argv);
  options.chunk_bytes = chunk_kib << 10;
  try {
    std::shared_ptr<Backend> backend = make_mpi_backend(options);
    std::vector<int> ranks;
    for (int r = 0; r < backend->size(); ++r) ranks.push_back(r);
    const auto group = std::make_shared<Group>("world", backend, ranks);
    if (backend->rank() == 0) {
      std::printf("%d ranks, us%16s %13s %14s %10s %17s\n", backend->size(), "MPI", "deterministic",
                  "MPI", "native", "bf16");
    }
    for (const int64_t kib : {4, 64, 256, 1024, 4096, 16384, 25600}) {
      if (kib < smallest || kib > largest) continue;
      measure_size(*group, kib << 10, kib > 8192 ? rounds / 2 : kib < 512 ? 5 * rounds : rounds);
    }
    measure_overlap(*group, std::max(3, rounds / 6));
    const std::string report = backend->shutdown(std::chrono::seconds(20));
    if (!report.empty()) std::fprintf(stderr, "%s\n", report.c_str());
    return report.empty() ? 0 : 1;
  } catch (const Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
