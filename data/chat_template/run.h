// One rendering of a chat template: its limits, and the place that errors name. Included by this
// folder's .cpp files only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include <tessera/core/error.h>
#include <tessera/core/message.h>
#include <tessera/data/chat_template/rendered_chat.h>

namespace tessera::data::jinja {

inline constexpr std::string_view kChatTemplate = "chat template";

class Run {
 public:
  Run(std::string name, const ChatTemplateLimits& limits)
      : name_(std::move(name)), limits_(limits), steps_(limits.steps) {}

  // What the next error is about.
  void at(int line, std::string_view construct) {
    line_ = line;
    construct_ = construct;
  }

  // FormatError beyond the limit of steps: an operation on n values or 16 n bytes takes n.
  void charge(size_t steps) {
    if (steps > steps_) too_much("takes more than", limits_.steps, "steps");
    steps_ -= steps;
  }
  void charge_bytes(size_t bytes) { charge(1 + bytes / 16); }
  void check_output(size_t bytes) const {
    if (bytes > limits_.output_bytes) {
      too_much("makes a text of more than", limits_.output_bytes, "bytes");
    }
  }
  const ChatTemplateLimits& limits() const { return limits_; }

  // A value that does not fit its use: mostly a message without what the template needs.
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    TS_THROW(ValueError, kChatTemplate, place(), parts...);
  }
  template <class... Parts>
  [[noreturn]] void malformed(const Parts&... parts) const {
    TS_THROW(FormatError, kChatTemplate, place(), parts...);
  }
  template <class... Parts>
  [[noreturn]] void unsupported(const Parts&... parts) const {
    TS_THROW(UnsupportedError, kChatTemplate, place(), parts...,
             "; write the template without it.");
  }

  // Nested calls of macros, blocks and expressions.
  class Level {
   public:
    explicit Level(Run& run) : run_(run) {
      if (++run_.depth_ > run_.limits_.depth) {
        --run_.depth_;
        run_.too_much("is nested deeper than", static_cast<size_t>(run_.limits_.depth), "levels");
      }
    }
    ~Level() { --run_.depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    Run& run_;
  };

 private:
  std::string place() const;
  [[noreturn]] void too_much(std::string_view what, size_t limit, std::string_view unit) const;

  std::string name_;
  ChatTemplateLimits limits_;
  size_t steps_;
  int depth_ = 0;
  int line_ = 1;
  std::string_view construct_;
};

}  // namespace tessera::data::jinja
