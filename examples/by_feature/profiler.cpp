// Profiling some steps: a trace for each rank, which ui.perfetto.dev shows.
//
//     profiler [FOLDER]      default: out/profiles
#include <tessera.h>

#include "line.h"

using namespace tessera;

int main(int argc, char** argv) {
  int64_t cycles = 0;
  const int failed = run(argc, argv, [&](std::span<const std::string> arguments) {
    Accelerator accelerator;
    data::DataLoader loader(examples::make_line(256 * accelerator.num_processes()),
                            {.batch_size = 16});
    examples::Line model;
    optim::AdamW optimizer(model.named_parameters(), {.lr = 0.1});
    accelerator.prepare(model, optimizer, loader);
    ProfileSession session(
        {.schedule = {{.wait = 2, .warmup = 1, .active = 3, .repeat = 2}},
         .folder = arguments.empty() ? "out/profiles" : arguments[0],
         .on_trace_ready = [&](const Profile& profile) { accelerator.print(profile.table(8)); }});
    for (auto& [x, y] : loader) {
      const auto micro = accelerator.accumulate(model);
      accelerator.backward(mse_loss(model(x), y));
      optimizer.step();
      optimizer.zero_grad();
      session.step();
    }
    session.finish();
    cycles = session.cycles();
  });
  return failed || cycles != 2;
}
