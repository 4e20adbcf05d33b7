// Metrics over ranks: every sample counts once, whatever the sizes of data set, batch and job.
#include <tessera.h>

#include "line.h"

using namespace tessera;

int main(int argc, char** argv) {
  bool exact = true;
  const int failed = run(argc, argv, [&](std::span<const std::string>) {
    Accelerator accelerator;
    examples::Line model;
    for (const int64_t size : {1, 7, 64, 101}) {
      data::DataLoader loader(examples::make_line(size), {.batch_size = 8});
      accelerator.prepare(loader);
      const NoGradGuard no_grad;
      double squares = 0;
      int64_t samples = 0;
      for (auto& [x, y] : loader) {
        // Ranks whose last batch was filled up give only the rows that count.
        const auto [predictions, targets] = accelerator.gather_for_metrics(std::pair(model(x), y));
        squares += (predictions - targets).pow(2).sum().item();
        samples += targets.size(0);
      }
      accelerator.print(samples, " of ", size, " samples, mean squared error ",
                        squares / static_cast<double>(samples));
      exact = exact && samples == size;
    }
  });
  return failed || !exact;
}
