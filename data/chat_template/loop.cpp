#include <tessera/data/chat_template/loop.h>

#include <algorithm>

namespace tessera::data::jinja {

std::optional<Value> ForLoop::pull() {
  while (rest_ < items_.size()) {
    Value& value = items_[rest_++];
    if (!accept_ || accept_(value)) return std::move(value);
  }
  return std::nullopt;
}

const Value* ForLoop::peek() {
  if (!after_) after_ = pull();
  return after_ ? &*after_ : nullptr;
}

const Value* ForLoop::next() {
  std::optional<Value> value = after_ ? std::exchange(after_, std::nullopt) : pull();
  if (!value) return nullptr;
  before_ = std::exchange(now_, std::move(value));
  ++index_;
  return &*now_;
}

int64_t ForLoop::length(Run&) {
  if (accept_) {
    std::vector<Value> rest;
    while (std::optional<Value> value = pull()) rest.push_back(*std::move(value));
    items_ = std::move(rest);
    rest_ = 0;
    accept_ = nullptr;
  }
  return static_cast<int64_t>(items_.size() - rest_) + index_ + 1 + (after_ ? 1 : 0);
}

std::optional<Value> ForLoop::attribute(Run& run, std::string_view name, const Value& self) {
  if (name == "index") return Value::of(index_ + 1);
  if (name == "index0") return Value::of(index_);
  if (name == "first") return Value::of(index_ == 0);
  if (name == "last") return Value::of(peek() == nullptr);
  if (name == "length") return Value::of(length(run));
  if (name == "revindex") return Value::of(length(run) - index_);
  if (name == "revindex0") return Value::of(length(run) - index_ - 1);
  if (name == "depth") return Value::of(int64_t{1});
  if (name == "depth0") return Value::of(int64_t{0});
  if (name == "previtem") {
    return before_ ? *before_ : Value::undefined("there is no previous item");
  }
  if (name == "nextitem") {
    const Value* const after = peek();
    return after != nullptr ? *after : Value::undefined("there is no next item");
  }
  if (name == "cycle") {
    return make_callable("loop.cycle", [self](Run& in, Arguments& arguments) {
      if (arguments.positional.empty()) in.fail("loop.cycle() needs values; it got none.");
      const auto index =
          static_cast<size_t>(std::max<int64_t>(static_cast<ForLoop*>(self.loop())->index_, 0));
      return arguments.positional[index % arguments.positional.size()];
    });
  }
  if (name == "changed") {
    return make_callable("loop.changed", [self](Run& in, Arguments& arguments) {
      ForLoop& loop = static_cast<ForLoop&>(*self.loop());
      const bool same = loop.has_changed_ &&
                        std::equal(loop.changed_.begin(), loop.changed_.end(),
                                   arguments.positional.begin(), arguments.positional.end(),
                                   [&](const Value& a, const Value& b) { return equal(in, a, b); });
      for (const Value& value : arguments.positional) {
        if (!value.is_plain()) in.unsupported("loop.changed() of a ", value.type_name());
      }
      loop.has_changed_ = true;
      loop.changed_ = std::move(arguments.positional);
      return Value::of(!same);
    });
  }
  return std::nullopt;
}

}  // namespace tessera::data::jinja
