// The loop of a for block. Included by this folder's .cpp files only.
#pragma once

#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include <tessera/data/chat_template/value.h>

namespace tessera::data::jinja {

// It reads its values one by one: a condition of the loop may depend on what the body has set.
class ForLoop : public Loop {
 public:
  using Accept = std::function<bool(const Value&)>;  // empty: every value counts
  ForLoop(std::vector<Value> items, Accept accept)
      : items_(std::move(items)), accept_(std::move(accept)) {}

  // The next value, nullptr at the end.
  const Value* next();
  void end() { accept_ = nullptr, rest_ = items_.size(), after_.reset(); }

  int64_t length(Run& run) override;
  std::optional<Value> attribute(Run& run, std::string_view name, const Value& self) override;

 private:
  std::optional<Value> pull();
  const Value* peek();

  std::vector<Value> items_;
  size_t rest_ = 0;  // in items_
  Accept accept_;
  std::optional<Value> before_, now_, after_;
  std::vector<Value> changed_;  // the arguments of the last changed()
  bool has_changed_ = false;
  int64_t index_ = -1;
};

}  // namespace tessera::data::jinja
