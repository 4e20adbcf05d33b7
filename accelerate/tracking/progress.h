// A progress line on a terminal, as tqdm draws it; plain lines where the output is no terminal.
//
//     Progress bar(loader.size(), {.description = "epoch 1"});
//     for (auto& batch : loader) { train(batch), bar.set_note("loss 2.31"), bar.advance(); }
//
// On a terminal:
//     epoch 1:  43%|████████▋           | 430/1000 [00:21<00:28, 20.4/s] loss 2.31
//
// advance() costs a clock reading (about 30 ns) between two drawings.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <iosfwd>
#include <optional>
#include <string>

namespace tessera {

struct ProgressOptions {
  std::string description = {};
  bool enabled = true;                // false: draws nothing, on ranks that are not the main one
  std::ostream* out = nullptr;        // null: standard error
  std::optional<bool> terminal = {};  // nothing: what `out` is; always false for a stream given
  double interval = -1;   // seconds between drawings; negative: 0.1, or 10 for plain lines
  int width = 20;         // characters of the bar
  std::string unit = "";  // "tokens": 20.4 tokens/s
  std::function<double()> clock = {};  // seconds; the steady clock by default
};

class Progress {
 public:
  // total: steps in all, negative where that is not known.
  explicit Progress(int64_t total, ProgressOptions options = {});
  ~Progress();  // finish()
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void advance(int64_t steps = 1);
  void set_note(std::string note) { note_ = std::move(note); }
  // Draws the last state and ends the line. Later calls draw nothing.
  void finish();

  int64_t done() const { return done_; }
  // The line as it would be drawn now, without control characters.
  std::string line() const;

 private:
  double seconds() const;
  void draw(bool last);

  int64_t total_;
  ProgressOptions options_;
  bool terminal_;
  std::string note_;
  int64_t done_ = 0;
  double begin_, drawn_;
  size_t drawn_width_ = 0;
  bool finished_ = false;
};

}  // namespace tessera
