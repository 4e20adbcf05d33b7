// one_loop_program OUT MODEL:BATCH_SIZE:SETTINGS...: trains with each file of settings in turn; the
// main process writes a line of numbers for each into OUT.
#include <tessera/accelerate/process/run.h>

#include <cstdio>
#include <fstream>

#include "accelerate/one_loop.h"

int main(int argc, char** argv) {
  return tessera::run(argc, argv, [](std::span<const std::string> words) {
    using namespace tessera::one_loop;
    const tessera::ProcessControl ranks;
    std::ofstream out;
    if (ranks.is_main_process()) out.open(words[0]);
    for (const std::string& word : words.subspan(1)) {
      const size_t first = word.find(':'), second = word.find(':', first + 1);
      const std::string model = word.substr(0, first), settings = word.substr(second + 1);
      const int64_t batch_size = std::stoll(word.substr(first + 1, second - first - 1));
      const Values values =
          model == "net" ? train<Net>(settings, batch_size) : train<Line>(settings, batch_size);
      for (const auto& each : values) {
        for (const double value : each) {
          char text[40];
          std::snprintf(text, sizeof text, "%.17g ", value);
          out << text;
        }
      }
      out << '\n';
    }
  });
}
