// The values of a chat template: Python's, as far as templates see them. Included by this folder's
// .cpp files only.
//
// Texts, lists and dicts do not change once they are made: transformers runs templates in a sandbox
// that forbids it. Lists and dicts hold plain values only, so that no reference can be a circle.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include <tessera/data/chat_template/run.h>

namespace tessera::data::jinja {

struct ListData;
struct DictData;
struct NamespaceData;
struct Callable;
class Loop;
class Value;

struct Undefined {
  std::shared_ptr<const std::string> what;  // of errors: "'tools' is undefined"
};
struct None {};
struct Text {
  std::shared_ptr<const std::string> text;  // valid UTF-8
  bool markup = false;                      // the filter safe has marked it
};

// The arguments of a call.
struct Arguments {
  std::vector<Value> positional;
  std::vector<std::pair<std::string, Value>> named;
  size_t asked = 0;  // of the positional ones, from the first

  // The next parameter of a function, by its place or its name.
  std::optional<Value> next(std::string_view name);
  // ValueError where one is left, or was not given.
  Value needed(const Run& run, std::string_view name);
  void finish(const Run& run) const;
};

class Value {
 public:
  Value() : data_(None{}) {}
  static Value undefined(std::string what) {
    return Value(Undefined{std::make_shared<const std::string>(std::move(what))});
  }
  static Value of(const char*) = delete;  // would be a bool
  static Value of(bool value) { return Value(value); }
  static Value of(int64_t value) { return Value(value); }
  static Value of(double value) { return Value(value); }
  static Value of(std::string value) {
    return Value(Text{std::make_shared<const std::string>(std::move(value))});
  }
  static Value of(Text value) { return Value(std::move(value)); }
  static Value of(std::shared_ptr<const ListData> value) { return Value(std::move(value)); }
  static Value of(std::shared_ptr<const DictData> value) { return Value(std::move(value)); }
  static Value of(std::shared_ptr<NamespaceData> value) { return Value(std::move(value)); }
  static Value of(std::shared_ptr<const Callable> value) { return Value(std::move(value)); }
  static Value of(std::shared_ptr<Loop> value) { return Value(std::move(value)); }

  template <class T>
  const T* as() const {
    return std::get_if<T>(&data_);
  }
  template <class T>
  bool is() const {
    return std::holds_alternative<T>(data_);
  }
  bool is_undefined() const { return is<Undefined>(); }
  bool is_none() const { return is<None>(); }
  const std::string* text() const {
    const Text* const found = as<Text>();
    return found == nullptr ? nullptr : found->text.get();
  }
  const ListData* list() const {
    const auto* const found = as<std::shared_ptr<const ListData>>();
    return found == nullptr ? nullptr : found->get();
  }
  const DictData* dict() const {
    const auto* const found = as<std::shared_ptr<const DictData>>();
    return found == nullptr ? nullptr : found->get();
  }
  const Callable* callable() const {
    const auto* const found = as<std::shared_ptr<const Callable>>();
    return found == nullptr ? nullptr : found->get();
  }
  NamespaceData* space() const {
    const auto* const found = as<std::shared_ptr<NamespaceData>>();
    return found == nullptr ? nullptr : found->get();
  }
  Loop* loop() const {
    const auto* const found = as<std::shared_ptr<Loop>>();
    return found == nullptr ? nullptr : found->get();
  }
  // Python's True is a number, too.
  std::optional<int64_t> integer() const;
  std::optional<double> number() const;
  // What lists may hold.
  bool is_plain() const;
  std::string_view type_name() const;  // Python's

 private:
  template <class T>
  explicit Value(T value) : data_(std::move(value)) {}
  std::variant<Undefined, None, bool, int64_t, double, Text, std::shared_ptr<const ListData>,
               std::shared_ptr<const DictData>, std::shared_ptr<NamespaceData>,
               std::shared_ptr<const Callable>, std::shared_ptr<Loop>>
      data_;
};

// The variable `loop` of a for block: loop.h.
class Loop {
 public:
  virtual ~Loop() = default;
  virtual int64_t length(Run& run) = 0;  // reads all values, if it must
  // A property or a method; nothing for a name that is neither.
  virtual std::optional<Value> attribute(Run& run, std::string_view name, const Value& self) = 0;
};

enum class ListKind : uint8_t {
  kList,
  kTuple,
  kRange,      // of numbers, which str() does not show
  kView,       // what dict.items() returns: it has a length and no places
  kGenerator,  // what map and select return: true, and read once
};

struct ListData {
  std::vector<Value> items;
  ListKind kind = ListKind::kList;
  int depth = 1;
  mutable size_t read = 0;  // of a generator
};

// In the order in which keys were written first.
struct DictData {
  std::vector<std::pair<Value, Value>> items;
  std::unordered_map<std::string, size_t> by_text;  // the place of keys that are texts
  int depth = 1;

  const Value* find(std::string_view key) const {
    const auto found = by_text.find(std::string(key));
    return found == by_text.end() ? nullptr : &items[found->second].second;
  }
  const Value* find(const Value& key) const;
};

struct NamespaceData {
  std::unordered_map<std::string, Value> attributes;
};

struct Callable {
  std::string name;
  std::function<Value(Run&, Arguments&)> call;
};

// Lists and dicts of values: FormatError where they would be nested too deep, UnsupportedError for
// a value that is not plain.
Value make_list(Run& run, std::vector<Value> items, ListKind kind = ListKind::kList);
class DictBuilder {
 public:
  // A later value of a key takes the earlier one's place. ValueError for a list or dict as key.
  void put(Run& run, Value key, Value value);
  Value finish(Run& run);

 private:
  std::shared_ptr<DictData> data_ = std::make_shared<DictData>();
};
Value make_text(Run& run, std::string text);
Value make_callable(std::string name, std::function<Value(Run&, Arguments&)> call);

// ---- What Python's functions of these names say

bool truth(Run& run, const Value& value);  // bool()
std::string str(Run& run, const Value& value);
// Appends repr().
void repr(Run& run, const Value& value, std::string& out);
std::string repr_of(double value);
bool equal(Run& run, const Value& a, const Value& b);
// < ; ValueError for values that have no order.
bool less(Run& run, const Value& a, const Value& b);
int64_t length(Run& run, const Value& value);
// What a loop over it visits. ValueError for a value that cannot be iterated. Reads a generator.
std::vector<Value> iterate(Run& run, const Value& value, std::string_view use);

// ---- Texts by their characters

size_t count_characters(std::string_view text);
// The byte at which a character begins; the end for those behind.
size_t byte_of_character(std::string_view text, size_t character);
bool is_python_space(char32_t c);
std::string_view strip_spaces(std::string_view text, bool left, bool right);

}  // namespace tessera::data::jinja
