#include <tessera/accelerate/tracking/progress.h>

#include <unistd.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>

#include <tessera/core/plain_text.h>

namespace tessera {
namespace {

// "00:21", "1:02:03"
std::string duration(double seconds) {
  const auto whole = static_cast<int64_t>(std::max(0.0, seconds));
  char text[40];
  if (whole >= 3600) {
    plain_snprintf(text, sizeof text, "%lld:%02lld:%02lld", static_cast<long long>(whole / 3600),
                   static_cast<long long>(whole / 60 % 60), static_cast<long long>(whole % 60));
  } else {
    plain_snprintf(text, sizeof text, "%02lld:%02lld", static_cast<long long>(whole / 60),
                   static_cast<long long>(whole % 60));
  }
  return text;
}

// Characters of UTF-8 text.
size_t width_of(const std::string& text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  }));
}

// `part` of `width` characters filled, to an eighth of one.
std::string bar(double part, int width) {
  static constexpr const char* kEighths[] = {" ", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const auto eighths = static_cast<int>(std::clamp(part, 0.0, 1.0) * width * 8);
  std::string text;
  for (int i = 0; i < width; ++i) {
    const int here = eighths - 8 * i;
    text += here >= 8 ? "█" : kEighths[std::max(here, 0)];
  }
  return text;
}

}  // namespace

Progress::Progress(int64_t total, ProgressOptions options)
    : total_(total),
      options_(std::move(options)),
      terminal_(options_.terminal.value_or(options_.out == nullptr && ::isatty(STDERR_FILENO))) {
  if (options_.interval < 0) options_.interval = terminal_ ? 0.1 : 10;
  begin_ = drawn_ = seconds();
}

Progress::~Progress() { finish(); }

double Progress::seconds() const {
  if (options_.clock) return options_.clock();
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void Progress::advance(int64_t steps) {
  done_ += steps;
  if (options_.enabled && !finished_ && seconds() - drawn_ >= options_.interval) draw(false);
}

std::string Progress::line() const {
  const double elapsed = seconds() - begin_;
  const double rate = elapsed > 0 ? static_cast<double>(done_) / elapsed : 0;
  char text[160];
  std::string line;
  if (!options_.description.empty()) line += options_.description + ": ";
  if (total_ >= 0) {
    const double part = total_ > 0 ? static_cast<double>(done_) / static_cast<double>(total_) : 1;
    plain_snprintf(text, sizeof text, "%3.0f%%|", std::floor(100 * part));
    line += text + bar(part, options_.width) + "| ";
    line += std::to_string(done_) + "/" + std::to_string(total_);
  } else {
    line += std::to_string(done_);
  }
  line += " [" + duration(elapsed);
  if (total_ >= 0) {
    line += "<" + (rate > 0 ? duration(static_cast<double>(total_ - done_) / rate) : "?");
  }
  // Slow steps read better as seconds a step.
  if (rate > 0 && rate < 1 && options_.unit.empty()) {
    plain_snprintf(text, sizeof text, ", %.2f s/step]", 1 / rate);
  } else {
    plain_snprintf(text, sizeof text, ", %.*f%s%s/s]", rate < 100 ? 1 : 0, rate,
                   options_.unit.empty() ? "" : " ", options_.unit.c_str());
  }
  line += text;
  if (!note_.empty()) line += " " + note_;
  return line;
}

void Progress::draw(bool last) {
  drawn_ = seconds();
  std::ostream& out = options_.out ? *options_.out : std::cerr;
  const std::string text = line();
  const size_t width = width_of(text);
  if (!terminal_) {
    out << text << '\n';
  } else {
    // What a longer line left behind is painted over.
    out << '\r' << text << std::string(drawn_width_ > width ? drawn_width_ - width : 0, ' ');
    if (last) out << '\n';
  }
  drawn_width_ = width;
  out.flush();
}

void Progress::finish() {
  if (finished_) return;
  if (options_.enabled) draw(true);
  finished_ = true;
}

}  // namespace tessera
