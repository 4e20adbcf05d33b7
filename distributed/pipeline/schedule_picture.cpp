#include <tessera/distributed/pipeline/schedule_picture.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

#include <tessera/core/plain_text.h>

namespace tessera::distributed {
namespace {

constexpr double kLeft = 70, kRight = 90, kTop = 52, kRow = 26, kGap = 8, kBottom = 44;

struct Colour {
  int red, green, blue;
};
// By Act; dark letters are read on all of them.
constexpr std::array<Colour, 4> kColours = {
    {{126, 176, 232}, {142, 205, 134}, {142, 205, 134}, {246, 190, 98}}};
constexpr std::array<const char*, 4> kWords = {"forward", "backward", "gradient of inputs",
                                               "gradient of weights"};

// Later stages of a rank are paler.
std::string colour_of(Act act, int turn, int turns) {
  const Colour& full = kColours[static_cast<size_t>(act)];
  const double pale = turns == 1 ? 0 : 0.65 * turn / (turns - 1);
  const auto mixed = [&](int part) { return static_cast<int>(part + (255 - part) * pale); };
  char text[16];
  plain_snprintf(text, sizeof text, "#%02x%02x%02x", mixed(full.red), mixed(full.green),
                 mixed(full.blue));
  return text;
}

}  // namespace

std::string schedule_picture(const PipelineTable& schedule, std::string_view name,
                             const Costs& costs) {
  const Timing timing = simulate(schedule, costs);
  const int ranks = schedule.ranks(), turns = schedule.stages / ranks;
  double shortest = timing.seconds;
  std::array<bool, 4> there{};
  for (size_t rank = 0; rank < schedule.rows.size(); ++rank) {
    for (size_t index = 0; index < schedule.rows[rank].size(); ++index) {
      const Action& action = schedule.rows[rank][index];
      if (!action.computes()) continue;
      there[static_cast<size_t>(action.act)] = true;
      const Timing::Span& span = timing.spans[rank][index];
      if (span.end > span.start) shortest = std::min(shortest, span.end - span.start);
    }
  }
  // The shortest box has room for two digits, and the picture is no narrower than its title.
  const double seconds = std::max(timing.seconds, 1e-300);
  const double length = std::clamp(22 * seconds / std::max(shortest, 1e-300), 520.0, 20000.0);
  const double width = kLeft + length + kRight;
  const double height = kTop + ranks * (kRow + kGap) + kBottom;
  const auto x = [&](double at) { return kLeft + at / seconds * length; };
  const auto y = [&](int rank) { return kTop + rank * (kRow + kGap); };

  char text[600];
  plain_snprintf(text, sizeof text,
                 "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"%.0f\" height=\"%.0f\" "
                 "viewBox=\"0 0 %.0f %.0f\" font-family=\"sans-serif\" font-size=\"12\" "
                 "fill=\"#222\">\n<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n"
                 "<text x=\"%.0f\" y=\"24\" font-size=\"16\">%s: %d stages on %d ranks, %d "
                 "micro-batches, bubble %.1f%%</text>\n",
                 width, height, width, height, kLeft, std::string(name).c_str(), schedule.stages,
                 ranks, schedule.micro_batches, 100 * timing.bubble);
  std::string svg = text;
  plain_snprintf(text, sizeof text, "<text x=\"%.1f\" y=\"%.0f\" fill=\"#777\">live</text>\n",
                 width - kRight + 12, kTop - 8);
  svg += text;
  for (int rank = 0; rank < ranks; ++rank) {
    plain_snprintf(text, sizeof text,
                   "<text x=\"%.0f\" y=\"%.1f\" text-anchor=\"end\">rank %d</text>"
                   "<rect x=\"%.1f\" y=\"%.1f\" width=\"%.1f\" height=\"%.0f\" fill=\"#e9e9e9\"/>"
                   "<text x=\"%.1f\" y=\"%.1f\">%d</text>\n",
                   kLeft - 10, y(rank) + 17, rank, kLeft, y(rank), length, kRow,
                   width - kRight + 12, y(rank) + 17,
                   timing.live_activations[static_cast<size_t>(rank)]);
    svg += text;
    const auto& row = schedule.rows[static_cast<size_t>(rank)];
    for (size_t index = 0; index < row.size(); ++index) {
      const Action& action = row[index];
      if (!action.computes()) continue;
      const Timing::Span& span = timing.spans[static_cast<size_t>(rank)][index];
      const double from = x(span.start), to = x(span.end);
      plain_snprintf(text, sizeof text,
                     "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.0f\" fill=\"%s\" "
                     "stroke=\"white\"><title>%s</title></rect>",
                     from, y(rank), to - from, kRow,
                     colour_of(action.act, action.stage / ranks, turns).c_str(),
                     action.describe().c_str());
      svg += text;
      const std::string number = std::to_string(action.micro);
      if (to - from >= 8.0 * static_cast<double>(number.size())) {
        plain_snprintf(text, sizeof text,
                       "<text x=\"%.2f\" y=\"%.1f\" text-anchor=\"middle\" "
                       "pointer-events=\"none\">%s</text>",
                       (from + to) / 2, y(rank) + 17, number.c_str());
        svg += text;
      }
      svg += '\n';
    }
  }
  // What the colours mean.
  double at = kLeft;
  const double low = height - kBottom + 10;
  const auto legend = [&](const std::string& colour, const std::string& words) {
    plain_snprintf(text, sizeof text,
                   "<rect x=\"%.0f\" y=\"%.1f\" width=\"14\" height=\"14\" fill=\"%s\"/>"
                   "<text x=\"%.0f\" y=\"%.1f\">%s</text>\n",
                   at, low, colour.c_str(), at + 20, low + 12, words.c_str());
    svg += text;
    at += 46 + 6.5 * static_cast<double>(words.size());
  };
  for (size_t act = 0; act < there.size(); ++act) {
    if (there[act]) legend(colour_of(static_cast<Act>(act), 0, turns), kWords[act]);
  }
  legend("#e9e9e9", "bubble");
  if (turns > 1) {
    legend(colour_of(Act::kForward, turns - 1, turns), "paler: later stages of a rank");
  }
  return svg + "</svg>\n";
}

}  // namespace tessera::distributed
