#include <tessera/accelerate/settings/import_report.h>

#include <algorithm>
#include <string_view>

namespace tessera::accelerate {

std::string Import::report() const {
  constexpr std::string_view kNames[] = {"mapped", "planned", "-", "none", "refused"};
  std::string text;
  size_t width = 0;
  for (const ImportLine& line : lines) {
    width = std::max(width, line.key.size() + line.value.size() + 2);
  }
  for (const ImportLine& line : lines) {
    std::string left = line.key + ": " + line.value;
    left.resize(std::max(width, left.size()), ' ');
    std::string outcome(kNames[static_cast<size_t>(line.outcome)]);
    outcome.resize(8, ' ');
    text += "  " + left + "  " + outcome + line.note +
            (line.outcome == ImportOutcome::kPlanned ? " (not available yet)" : "") + "\n";
  }
  return text;
}

std::string Import::refusals() const {
  std::string text;
  for (const ImportLine& line : lines) {
    const bool planned = line.outcome == ImportOutcome::kPlanned;
    if (!planned && line.outcome != ImportOutcome::kRefused) continue;
    text += (text.empty() ? "" : "; ") + line.key + ": " + line.value + " (" + line.note +
            (planned ? ", which is not available yet)" : ")");
  }
  return text;
}

}  // namespace tessera::accelerate
