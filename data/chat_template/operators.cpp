#include <tessera/data/chat_template/operators.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include <tessera/data/text/text.h>

namespace tessera::data::jinja {
namespace {

[[noreturn]] void refuse_operands(const Run& run, std::string_view name, const Value& a,
                                  const Value& b) {
  for (const Value* const value : {&a, &b}) {
    if (value->is_undefined())
      run.fail(*value->as<Undefined>()->what, ", and '", name, "' needs it.");
  }
  run.fail("'", name, "' does not take a ", a.type_name(), " and a ", b.type_name(), ".");
}

Value integer_result(Run& run, std::string_view name, int64_t a, int64_t b) {
  int64_t result = 0;
  const auto checked = [&](bool overflows) {
    if (overflows) run.unsupported("a whole number of more than 64 bits");
    return Value::of(result);
  };
  if (name == "+") return checked(__builtin_add_overflow(a, b, &result));
  if (name == "-") return checked(__builtin_sub_overflow(a, b, &result));
  if (name == "*") return checked(__builtin_mul_overflow(a, b, &result));
  if (name == "**") {
    if (b < 0) {
      if (a == 0) run.fail("0 has no negative power.");
      return Value::of(std::pow(static_cast<double>(a), static_cast<double>(b)));
    }
    result = 1;
    for (int64_t i = 0; i < b && result != 0; ++i) {
      if (a == 1 || (a == -1 && i >= 2))
        return Value::of(a == 1 || b % 2 == 0 ? int64_t{1} : int64_t{-1});
      if (__builtin_mul_overflow(result, a, &result)) checked(true);
    }
    return Value::of(result);
  }
  if (b == 0) run.fail("a number is divided by zero.");
  if (name == "/") return Value::of(static_cast<double>(a) / static_cast<double>(b));
  if (b == -1) {
    if (name == "%") return Value::of(int64_t{0});
    return checked(__builtin_sub_overflow(int64_t{0}, a, &result));
  }
  const int64_t remainder = a % b;
  const bool down = remainder != 0 && (remainder < 0) != (b < 0);
  if (name == "%") return Value::of(down ? remainder + b : remainder);
  return Value::of(a / b - (down ? 1 : 0));
}

Value float_result(Run& run, std::string_view name, double a, double b) {
  if (name == "+") return Value::of(a + b);
  if (name == "-") return Value::of(a - b);
  if (name == "*") return Value::of(a * b);
  if (name == "**") {
    if ((a < 0 && b != std::floor(b)) || (a == 0 && b < 0))
      run.fail("the power of these numbers is not real.");
    return Value::of(std::pow(a, b));
  }
  if (b == 0) run.fail("a number is divided by zero.");
  if (name == "/") return Value::of(a / b);
  double remainder = std::fmod(a, b);
  if (remainder != 0 && (remainder < 0) != (b < 0)) remainder += b;
  if (name == "%") return Value::of(remainder == 0 ? std::copysign(0.0, b) : remainder);
  return Value::of(std::floor((a - remainder) / b + 0.5));
}

Value repeated(Run& run, const Value& value, int64_t times) {
  const auto count = static_cast<size_t>(std::max<int64_t>(times, 0));
  const auto check = [&](size_t size, size_t most) {
    if (size > 0 && count > most / size) run.check_output(std::numeric_limits<size_t>::max());
  };
  if (const std::string* const text = value.text()) {
    check(text->size(), run.limits().output_bytes);
    std::string out;
    out.reserve(text->size() * count);
    for (size_t i = 0; i < count && !text->empty(); ++i) out += *text;
    return make_text(run, std::move(out));
  }
  const ListData& list = *value.list();
  check(list.items.size(), run.limits().output_bytes);
  run.charge(list.items.size() * count);
  std::vector<Value> items;
  for (size_t i = 0; i < count && !list.items.empty(); ++i) {
    items.insert(items.end(), list.items.begin(), list.items.end());
  }
  return make_list(run, std::move(items), list.kind);
}

bool is_sequence(const Value& value) {
  if (value.text() != nullptr) return true;
  const ListData* const list = value.list();
  return list != nullptr && list->kind <= ListKind::kTuple;
}

// A bound of a slice, as Python clips it.
int64_t clipped(int64_t bound, int64_t size, bool backward) {
  if (bound < 0) bound += size;
  return std::clamp(bound, int64_t{backward ? -1 : 0}, backward ? size - 1 : size);
}

}  // namespace

Value binary(Run& run, std::string_view name, const Value& a, const Value& b) {
  for (const Value* const value : {&a, &b}) {
    if (const Text* const text = value->as<Text>(); text != nullptr && text->markup) {
      run.unsupported("an operator on what the filter 'safe' has marked");
    }
  }
  const auto x = a.integer(), y = b.integer();
  if (x && y) return integer_result(run, name, *x, *y);
  if (const auto p = a.number(), q = b.number(); p && q) return float_result(run, name, *p, *q);
  if (name == "+" && a.text() != nullptr && b.text() != nullptr) {
    run.check_output(a.text()->size() + b.text()->size());
    return make_text(run, *a.text() + *b.text());
  }
  if (name == "+" && a.list() && b.list() && a.list()->kind == b.list()->kind && is_sequence(a)) {
    run.charge(a.list()->items.size() + b.list()->items.size());
    std::vector<Value> items = a.list()->items;
    items.insert(items.end(), b.list()->items.begin(), b.list()->items.end());
    return make_list(run, std::move(items), a.list()->kind);
  }
  if (name == "*" && is_sequence(a) && y) return repeated(run, a, *y);
  if (name == "*" && is_sequence(b) && x) return repeated(run, b, *x);
  if (name == "%" && a.text() != nullptr && !b.is_undefined()) {
    return make_text(run, format(run, *a.text(), b));
  }
  refuse_operands(run, name, a, b);
}

Value negative(Run& run, const Value& value) {
  if (const auto integer = value.integer()) return integer_result(run, "-", 0, *integer);
  if (const auto number = value.number()) return Value::of(-*number);
  refuse_operands(run, "-", value, value);
}

bool contains(Run& run, const Value& container, const Value& value) {
  run.charge(1);
  if (container.is_undefined()) return false;
  if (const std::string* const text = container.text()) {
    const std::string& part = needed_text(run, value, "'in' of a text");
    run.charge_bytes(text->size());
    // Linear in the worst case, unlike std::string's search.
    return part.empty() ||
           ::memmem(text->data(), text->size(), part.data(), part.size()) != nullptr;
  }
  if (const DictData* const dict = container.dict()) {
    run.charge(value.text() == nullptr ? dict->items.size() : 1);
    return dict->find(value) != nullptr;
  }
  if (container.list() != nullptr) {
    for (const Value& item : iterate(run, container, "'in'")) {
      if (equal(run, item, value)) return true;
    }
    return false;
  }
  run.fail("'in' needs a text, a list or a dict; it got a ", container.type_name(), ".");
}

Value attribute(Run& run, const Value& value, const std::string& name) {
  run.charge(1);
  if (value.is_undefined()) {
    run.fail(*value.as<Undefined>()->what, ", and its '", name, "' was asked for.");
  }
  if (Loop* const loop = value.loop()) {
    if (std::optional<Value> found = loop->attribute(run, name, value)) return *std::move(found);
  } else if (NamespaceData* const space = value.space()) {
    const auto found = space->attributes.find(name);
    if (found != space->attributes.end()) return found->second;
  } else {
    if (std::optional<Value> found = method(run, value, name)) return *std::move(found);
    if (const DictData* const dict = value.dict()) {
      if (const Value* const found = dict->find(std::string_view(name))) return *found;
    }
  }
  return Value::undefined("a " + std::string(value.type_name()) + " has no '" +
                          name.substr(0, 100) + "'");
}

Value item(Run& run, const Value& value, const Value& place) {
  run.charge(1);
  if (value.is_undefined()) {
    run.fail(*value.as<Undefined>()->what, ", and a part of it was asked for.");
  }
  if (const DictData* const dict = value.dict()) {
    if (place.text() == nullptr) run.charge(dict->items.size());
    if (const Value* const found = dict->find(place)) return *found;
  } else if (const auto index = place.integer()) {
    if (const ListData* const list = value.list();
        list != nullptr && list->kind < ListKind::kView) {
      const auto size = static_cast<int64_t>(list->items.size());
      const int64_t at = *index < 0 ? *index + size : *index;
      if (at >= 0 && at < size) return list->items[static_cast<size_t>(at)];
    } else if (const std::string* const text = value.text()) {
      run.charge_bytes(text->size());
      const auto size = static_cast<int64_t>(count_characters(*text));
      const int64_t at = *index < 0 ? *index + size : *index;
      if (at >= 0 && at < size) {
        const size_t begin = byte_of_character(*text, static_cast<size_t>(at));
        return Value::of(text->substr(begin, decode_utf8(*text, begin).length));
      }
    }
  }
  if (const std::string* const name = place.text()) return attribute(run, value, *name);
  return Value::undefined("a " + std::string(value.type_name()) + " has no such item");
}

Value slice(Run& run, const Value& value, const std::optional<Value>& begin,
            const std::optional<Value>& end, const std::optional<Value>& step) {
  const std::string* const text = value.text();
  const ListData* const list = value.list();
  if (value.is_undefined()) run.fail(*value.as<Undefined>()->what, ", and was sliced.");
  if (text == nullptr && (list == nullptr || list->kind >= ListKind::kView)) {
    run.fail("a ", value.type_name(), " has no slices.");
  }
  const auto bound = [&](const std::optional<Value>& given) -> std::optional<int64_t> {
    if (!given || given->is_none()) return std::nullopt;
    return needed_integer(run, *given, "a slice");
  };
  constexpr int64_t kFar = int64_t{1} << 60;
  const int64_t by = std::clamp(bound(step).value_or(1), -kFar, kFar);
  if (by == 0) run.fail("a slice has a step of zero.");
  const int64_t size = length(run, value);
  int64_t first = clipped(bound(begin).value_or(by < 0 ? std::numeric_limits<int64_t>::max() : 0),
                          size, by < 0);
  const std::optional<int64_t> given_end = bound(end);
  const int64_t last = given_end ? clipped(*given_end, size, by < 0) : by < 0 ? -1 : size;
  std::vector<int64_t> places;
  if (text != nullptr && by == 1) {
    if (first >= last) return Value::of(std::string());
    const size_t from = byte_of_character(*text, static_cast<size_t>(first));
    const size_t to = byte_of_character(*text, static_cast<size_t>(last));
    return make_text(run, text->substr(from, to - from));
  }
  run.charge(static_cast<size_t>(size));
  while (by > 0 ? first < last : first > last) {
    places.push_back(first);
    if (by > 0 ? by >= last - first : -by >= first - last) break;
    first += by;
  }
  const std::vector<Value> all = text != nullptr ? iterate(run, value, "a slice") : list->items;
  std::vector<Value> items;
  for (const int64_t place : places) items.push_back(all[static_cast<size_t>(place)]);
  if (text == nullptr) return make_list(run, std::move(items), list->kind);
  std::string out;
  for (const Value& character : items) out += *character.text();
  return make_text(run, std::move(out));
}

Value call(Run& run, const Value& function, Arguments& arguments) {
  run.charge(1 + arguments.positional.size() + arguments.named.size());
  if (function.is_undefined()) {
    run.fail(*function.as<Undefined>()->what, ", and was called.");
  }
  const Callable* const callable = function.callable();
  if (callable == nullptr) run.fail("a ", function.type_name(), " is no function, and was called.");
  const Run::Level level(run);
  return callable->call(run, arguments);
}

const std::string& needed_text(const Run& run, const Value& value, std::string_view use) {
  if (const std::string* const text = value.text()) return *text;
  if (value.is_undefined()) run.fail(*value.as<Undefined>()->what, ", and ", use, " needs a text.");
  run.fail(use, " needs a text; it got a ", value.type_name(), ".");
}

int64_t needed_integer(const Run& run, const Value& value, std::string_view use) {
  if (const auto integer = value.integer()) return *integer;
  if (value.is_undefined())
    run.fail(*value.as<Undefined>()->what, ", and ", use, " needs a whole number.");
  run.fail(use, " needs a whole number; it got a ", value.type_name(), ".");
}

}  // namespace tessera::data::jinja
