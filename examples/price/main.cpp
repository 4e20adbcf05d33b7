// tessera-price: what `tessera price` starts, linked to the dry device.
#include <cstdio>
#include <exception>
#include <fstream>
#include <string>

#include <unistd.h>

#include <CLI/CLI.hpp>

#include <tessera/accelerate/cli/price_options.h>
#include <tessera/core/error.h>

#include "step.h"

namespace tessera::cli {
namespace {

constexpr std::string_view kPrice = "tessera price";
namespace dry = gpu::dry;

// A file, or the name of one beside the program.
std::string machine_file(const std::string& given) {
  if (given.find('/') != std::string::npos || given.find('.') != std::string::npos) return given;
  char path[4096];
  const ssize_t size = ::readlink("/proc/self/exe", path, sizeof path);
  TS_CHECK_AS(IoError, size > 0, kPrice, "cannot find its own program in /proc/self/exe");
  std::string folder(path, static_cast<size_t>(size));
  folder.resize(folder.rfind('/'));
  return folder + "/../share/tessera/machines/" + given + ".json";
}

void write(const std::string& path, const std::string& text) {
  if (path == "-") {
    std::fputs(text.c_str(), stdout);
    return;
  }
  std::ofstream out(path);
  out << text;
  out.close();
  TS_CHECK_AS(IoError, out.good(), kPrice, "cannot write '", path, "'");
}

void run(const PriceOptions& options) {
  const dry::Machine machine = dry::Machine::read(machine_file(options.machine));
  const StepPrice step = price_step(options, machine);
  if (options.json != "-") {
    std::fputs(table(step.bill, options.all).c_str(), stdout);
    std::printf(
        "%s: %.2f ms a step, %.0f tokens/s, %.3g operations, %.2f GiB of device memory; host "
        "%.2f ms without the driver\n"
        "priced by the rates of the machine file, not measured\n",
        machine.name.c_str(), step.bill.seconds * 1e3,
        static_cast<double>(step.facts.tokens) / step.bill.seconds, step.bill.flops,
        static_cast<double>(step.facts.peak_bytes) / 0x1p30, step.facts.host_seconds * 1e3);
  }
  if (!options.json.empty()) write(options.json, to_json(step.bill, machine, step.facts));
  if (!options.trace.empty()) write(options.trace, dry::chrome_trace(step.launches, machine));
}

}  // namespace
}  // namespace tessera::cli

int main(int argc, char** argv) {
  CLI::App app("the price of a training step on a GPU of stated rates", "tessera price");
  tessera::cli::PriceOptions options;
  tessera::cli::add_price_options(app, options);
  try {
    app.parse(argc, argv);
    tessera::cli::run(options);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
