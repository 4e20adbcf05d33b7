// JSON texts to values and back: tojson as Python's json.dumps writes it.
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <variant>

#include <tessera/core/io/bounded_json.h>
#include <tessera/data/chat_template/operators.h>
#include <tessera/data/text/text.h>

namespace tessera::data::jinja {
namespace {

void write_text(std::string_view text, bool ensure_ascii, std::string& out) {
  const auto escape = [&](unsigned unit) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    out += "\\u";
    for (int shift = 12; shift >= 0; shift -= 4) out += kDigits[unit >> shift & 15];
  };
  out += '"';
  for (size_t i = 0; i < text.size();) {
    const CodePoint c = decode_utf8(text, i);
    const auto value = static_cast<unsigned>(c.value);
    constexpr std::string_view kEscaped = "\"\\\n\r\t\f\b", kLetters = "\"\\nrtfb";
    if (const size_t known = value < 0x80 ? kEscaped.find(static_cast<char>(value)) : kEscaped.npos;
        known != kEscaped.npos) {
      out += '\\';
      out += kLetters[known];
    } else if (value < 0x20 || (ensure_ascii && value > 0x7E && value < 0x10000)) {
      escape(value);
    } else if (ensure_ascii && value >= 0x10000) {
      escape(0xD800 + ((value - 0x10000) >> 10));
      escape(0xDC00 + ((value - 0x10000) & 0x3FF));
    } else {
      out += text.substr(i, c.length);
    }
    i += c.length;
  }
  out += '"';
}

std::string number_text(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value < 0 ? "-Infinity" : "Infinity";
  return repr_of(value);
}

class Writer {
 public:
  Writer(Run& run, const JsonForm& form) : run_(run), form_(form) {}

  void write(const Value& value, size_t level) {
    run_.charge(1);
    run_.check_output(out.size());
    if (const std::string* const text = value.text()) {
      run_.charge_bytes(text->size());
      return write_text(*text, form_.ensure_ascii, out);
    }
    if (value.is_none()) {
      out += "null";
    } else if (const bool* const flag = value.as<bool>()) {
      out += *flag ? "true" : "false";
    } else if (const int64_t* const integer = value.as<int64_t>()) {
      out += std::to_string(*integer);
    } else if (const double* const number = value.as<double>()) {
      out += number_text(*number);
    } else if (const ListData* const list = value.list();
               list != nullptr && list->kind <= ListKind::kTuple) {
      open('[', list->items.empty(), level);
      for (size_t i = 0; i < list->items.size(); ++i) {
        if (i > 0) next(level);
        write(list->items[i], level + 1);
      }
      close(']', list->items.empty(), level);
    } else if (const DictData* const dict = value.dict()) {
      write_dict(*dict, level);
    } else {
      if (value.is_undefined())
        run_.fail(*value.as<Undefined>()->what, ", which JSON does not have.");
      run_.fail("JSON does not have a ", value.type_name(), ".");
    }
  }

  std::string out;

 private:
  void line(size_t level) {
    if (!form_.indent) return;
    run_.charge_bytes(form_.indent->size() * level);
    run_.check_output(out.size() + form_.indent->size() * level);
    out += '\n';
    for (size_t i = 0; i < level; ++i) out += *form_.indent;
  }
  void open(char bracket, bool empty, size_t level) {
    out += bracket;
    if (!empty) line(level + 1);
  }
  void close(char bracket, bool empty, size_t level) {
    if (!empty) line(level);
    out += bracket;
  }
  void next(size_t level) {
    out += form_.item_separator;
    line(level + 1);
  }
  void write_dict(const DictData& dict, size_t level) {
    std::vector<const std::pair<Value, Value>*> items;
    for (const auto& item : dict.items) items.push_back(&item);
    if (form_.sort_keys) {
      run_.charge(items.size() * 8);
      std::stable_sort(items.begin(), items.end(), [&](const auto* a, const auto* b) {
        return less(run_, a->first, b->first);
      });
    }
    open('{', items.empty(), level);
    for (size_t i = 0; i < items.size(); ++i) {
      if (i > 0) next(level);
      const Value& key = items[i]->first;
      if (const std::string* const text = key.text()) {
        run_.charge_bytes(text->size());
        write_text(*text, form_.ensure_ascii, out);
      } else {
        out += '"';
        write(key, level);
        out += '"';
      }
      out += form_.key_separator;
      write(items[i]->second, level + 1);
    }
    close('}', items.empty(), level);
  }

  Run& run_;
  const JsonForm& form_;
};

// Makes values while a JSON text is read: keys keep their order, the last value of a key counts.
class Reader {
 public:
  explicit Reader(Run& run) : run_(run) {}

  bool null() { return add(Value()); }
  bool boolean(bool value) { return add(Value::of(value)); }
  bool number_integer(int64_t value) { return add(Value::of(value)); }
  bool number_unsigned(uint64_t value) {
    if (value > uint64_t{INT64_MAX})
      run_.unsupported("a whole number of more than 64 bits in JSON");
    return add(Value::of(static_cast<int64_t>(value)));
  }
  bool number_float(double value, const std::string&) { return add(Value::of(value)); }
  bool string(std::string& value) { return add(make_text(run_, std::move(value))); }
  bool binary(nlohmann::json::binary_t&) { return false; }
  bool start_object(size_t) { return begin(DictBuilder()); }
  bool key(std::string& value) {
    open_.back().key = Value::of(std::move(value));
    return true;
  }
  bool end_object() {
    DictBuilder dict = std::get<DictBuilder>(std::move(open_.back().value));
    open_.pop_back();
    return add(dict.finish(run_));
  }
  bool start_array(size_t) { return begin(std::vector<Value>()); }
  bool end_array() {
    auto list = std::get<std::vector<Value>>(std::move(open_.back().value));
    open_.pop_back();
    return add(make_list(run_, std::move(list)));
  }
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception& error) {
    why = error.what();
    return false;
  }

  Value result;
  std::string why;

 private:
  struct Open {
    std::variant<std::vector<Value>, DictBuilder> value;
    Value key;
  };

  template <class Container>
  bool begin(Container container) {
    if (open_.size() >= static_cast<size_t>(kMostJsonLevels)) {
      why = "it has more than " + std::to_string(kMostJsonLevels) + " levels";
      return false;
    }
    open_.push_back({std::move(container), Value()});
    return true;
  }
  bool add(Value value) {
    if (open_.empty()) {
      result = std::move(value);
      return true;
    }
    Open& open = open_.back();
    if (auto* const list = std::get_if<std::vector<Value>>(&open.value)) {
      list->push_back(std::move(value));
    } else {
      std::get<DictBuilder>(open.value).put(run_, open.key, std::move(value));
    }
    return true;
  }

  Run& run_;
  std::vector<Open> open_;
};

}  // namespace

std::string json_of(Run& run, const Value& value, const JsonForm& form) {
  Writer writer(run, form);
  writer.write(value, 0);
  return std::move(writer.out);
}

Value value_of_json(Run& run, std::string_view text, const std::string& what) {
  TS_CHECK_AS(FormatError, text.size() <= kMostJsonBytes, kChatTemplate, "'", what,
              "' has at most ", kMostJsonBytes, " bytes of JSON; got ", text.size(), ".");
  Reader reader(run);
  const bool read = nlohmann::json::sax_parse(text.begin(), text.end(), &reader);
  TS_CHECK_AS(FormatError, read, kChatTemplate, "'", what,
              "' must be JSON: ", replace_invalid_utf8(reader.why.substr(0, 300)), "; correct it.");
  return std::move(reader.result);
}

}  // namespace tessera::data::jinja
