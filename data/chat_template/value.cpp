#include <tessera/data/chat_template/value.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>

#include <tessera/data/text/text.h>
#include <tessera/data/text/unicode.h>

namespace tessera::data::jinja {
namespace {

constexpr int kDeepestValue = 100;

void check_depth(Run& run, int depth) {
  TS_CHECK_AS(FormatError, depth <= kDeepestValue, kChatTemplate,
              "lists and dicts are nested at most ", kDeepestValue,
              " levels; the template nests them deeper.");
  run.charge(1);
}

int depth_of(const Value& value) {
  if (const ListData* const list = value.list()) return list->depth;
  if (const DictData* const dict = value.dict()) return dict->depth;
  return 0;
}

// Python shows a text with ' unless that would need escapes, and what is not printable as escapes.
void repr_text(Run& run, std::string_view text, std::string& out) {
  run.charge_bytes(text.size());
  const bool has_single = text.find('\'') != text.npos, has_double = text.find('"') != text.npos;
  const char quote = has_single && !has_double ? '"' : '\'';
  out += quote;
  for (size_t i = 0; i < text.size();) {
    const CodePoint c = decode_utf8(text, i);
    const auto value = static_cast<unsigned>(c.value);
    char escaped[16];
    if (value == static_cast<unsigned char>(quote) || value == '\\') {
      out += '\\';
      out += static_cast<char>(value);
    } else if (value == '\n') {
      out += "\\n";
    } else if (value == '\r') {
      out += "\\r";
    } else if (value == '\t') {
      out += "\\t";
    } else if (value == ' ' || is_printable(c.value)) {
      out += text.substr(i, c.length);
    } else {
      const char* const form = value < 0x100 ? "\\x%02x" : value < 0x10000 ? "\\u%04x" : "\\U%08x";
      std::snprintf(escaped, sizeof escaped, form, value);
      out += escaped;
    }
    i += c.length;
  }
  out += quote;
}

}  // namespace

// ---- Arguments ----------------------------------------------------------------------------------

std::optional<Value> Arguments::next(std::string_view name) {
  if (asked < positional.size()) return positional[asked++];
  ++asked;
  for (size_t i = 0; i < named.size(); ++i) {
    if (named[i].first != name) continue;
    Value value = std::move(named[i].second);
    named.erase(named.begin() + static_cast<std::ptrdiff_t>(i));
    return value;
  }
  return std::nullopt;
}

Value Arguments::needed(const Run& run, std::string_view name) {
  std::optional<Value> value = next(name);
  if (!value) run.fail("needs the argument '", name, "', and got none.");
  return *std::move(value);
}

void Arguments::finish(const Run& run) const {
  if (positional.size() > asked) {
    run.fail("takes ", asked, " arguments, and got ", positional.size(), ".");
  }
  if (!named.empty()) run.fail("takes no argument '", named[0].first, "'.");
}

// ---- Value --------------------------------------------------------------------------------------

std::optional<int64_t> Value::integer() const {
  if (const bool* const value = as<bool>()) return *value ? 1 : 0;
  if (const int64_t* const value = as<int64_t>()) return *value;
  return std::nullopt;
}

std::optional<double> Value::number() const {
  if (const double* const value = as<double>()) return *value;
  if (const std::optional<int64_t> value = integer()) return static_cast<double>(*value);
  return std::nullopt;
}

bool Value::is_plain() const {
  return !is<std::shared_ptr<NamespaceData>>() && !is<std::shared_ptr<const Callable>>() &&
         !is<std::shared_ptr<Loop>>();
}

std::string_view Value::type_name() const {
  if (is<Undefined>()) return "undefined value";
  if (is<None>()) return "None";
  if (is<bool>()) return "bool";
  if (is<int64_t>()) return "int";
  if (is<double>()) return "float";
  if (is<Text>()) return "str";
  if (is<std::shared_ptr<const DictData>>()) return "dict";
  if (is<std::shared_ptr<NamespaceData>>()) return "namespace";
  if (is<std::shared_ptr<const Callable>>()) return "function";
  if (is<std::shared_ptr<Loop>>()) return "loop";
  switch (list()->kind) {
    case ListKind::kList:
      return "list";
    case ListKind::kTuple:
      return "tuple";
    case ListKind::kRange:
      return "range";
    case ListKind::kView:
      return "view of a dict";
    default:
      return "generator";
  }
}

const Value* DictData::find(const Value& key) const {
  if (const std::string* const text = key.text()) return find(std::string_view(*text));
  const auto found = std::find_if(items.begin(), items.end(), [&](const auto& item) {
    if (key.is_none() || item.first.is_none()) return key.is_none() && item.first.is_none();
    const std::optional<double> a = key.number(), b = item.first.number();
    return a && b && *a == *b;
  });
  return found == items.end() ? nullptr : &found->second;
}

Value make_text(Run& run, std::string text) {
  run.charge_bytes(text.size());
  return Value::of(std::move(text));
}

Value make_callable(std::string name, std::function<Value(Run&, Arguments&)> call) {
  return Value::of(std::make_shared<const Callable>(Callable{std::move(name), std::move(call)}));
}

Value make_list(Run& run, std::vector<Value> items, ListKind kind) {
  auto data = std::make_shared<ListData>();
  data->kind = kind;
  for (const Value& item : items) {
    if (!item.is_plain()) run.unsupported("a ", item.type_name(), " in a list");
    data->depth = std::max(data->depth, 1 + depth_of(item));
  }
  run.charge(items.size());
  check_depth(run, data->depth);
  data->items = std::move(items);
  return Value::of(std::shared_ptr<const ListData>(std::move(data)));
}

void DictBuilder::put(Run& run, Value key, Value value) {
  if (!value.is_plain()) run.unsupported("a ", value.type_name(), " in a dict");
  const bool is_key = key.text() != nullptr || key.is_none() || key.number();
  if (!is_key) run.fail("keys of dicts are texts and numbers; one is a ", key.type_name(), ".");
  run.charge(1 + (key.text() == nullptr ? data_->items.size() : key.text()->size() / 16));
  data_->depth = std::max(data_->depth, 1 + depth_of(value));
  Value* there = const_cast<Value*>(data_->find(key));
  if (there != nullptr) {
    *there = std::move(value);
    return;
  }
  if (const std::string* const text = key.text()) data_->by_text[*text] = data_->items.size();
  data_->items.emplace_back(std::move(key), std::move(value));
}

Value DictBuilder::finish(Run& run) {
  check_depth(run, data_->depth);
  return Value::of(std::shared_ptr<const DictData>(std::move(data_)));
}

// ---- Python's functions -------------------------------------------------------------------------

bool truth(Run& run, const Value& value) {
  if (const bool* const known = value.as<bool>()) return *known;
  if (value.is_none() || value.is_undefined()) return false;
  if (const int64_t* const number = value.as<int64_t>()) return *number != 0;
  if (const double* const number = value.as<double>()) return *number != 0;
  if (const std::string* const text = value.text()) return !text->empty();
  if (const ListData* const list = value.list()) {
    return list->kind == ListKind::kGenerator || !list->items.empty();
  }
  if (const DictData* const dict = value.dict()) return !dict->items.empty();
  if (Loop* const loop = value.loop()) return loop->length(run) > 0;
  return true;
}

std::string repr_of(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  // The shortest digits that read back the same; exponents as Python has them.
  char digits[40];
  const auto end =
      std::to_chars(digits, digits + sizeof digits, value, std::chars_format::scientific);
  std::string_view all(digits, static_cast<size_t>(end.ptr - digits));
  std::string out;
  if (all[0] == '-') {
    out += '-';
    all.remove_prefix(1);
  }
  const size_t e = all.find('e');
  int exponent = 0;
  const std::string_view power = all.substr(e + (all[e + 1] == '+' ? 2 : 1));
  std::from_chars(power.data(), power.data() + power.size(), exponent);
  std::string mantissa(1, all[0]);
  if (e > 2) mantissa += all.substr(2, e - 2);
  if (exponent < -4 || exponent >= 16) {
    out += mantissa[0];
    if (mantissa.size() > 1) out += "." + mantissa.substr(1);
    char text[16];
    std::snprintf(text, sizeof text, "e%c%02d", exponent < 0 ? '-' : '+', std::abs(exponent));
    return out + text;
  }
  if (exponent < 0)
    return out + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + mantissa;
  const auto whole = static_cast<size_t>(exponent) + 1;
  if (mantissa.size() <= whole)
    return out + mantissa + std::string(whole - mantissa.size(), '0') + ".0";
  return out + mantissa.substr(0, whole) + "." + mantissa.substr(whole);
}

std::string str(Run& run, const Value& value) {
  if (const std::string* const text = value.text()) {
    run.charge_bytes(text->size());
    return *text;
  }
  if (value.is_undefined()) return {};
  std::string out;
  repr(run, value, out);
  return out;
}

void repr(Run& run, const Value& value, std::string& out) {
  run.charge(1);
  run.check_output(out.size());
  if (const std::string* const text = value.text()) {
    if (value.as<Text>()->markup) run.unsupported("a list that shows what 'safe' has marked");
    return repr_text(run, *text, out);
  }
  if (value.is_undefined()) {
    out += "Undefined";
  } else if (value.is_none()) {
    out += "None";
  } else if (const bool* const flag = value.as<bool>()) {
    out += *flag ? "True" : "False";
  } else if (const int64_t* const integer = value.as<int64_t>()) {
    out += std::to_string(*integer);
  } else if (const double* const number = value.as<double>()) {
    out += repr_of(*number);
  } else if (const DictData* const dict = value.dict()) {
    out += '{';
    for (size_t i = 0; i < dict->items.size(); ++i) {
      if (i > 0) out += ", ";
      repr(run, dict->items[i].first, out);
      out += ": ";
      repr(run, dict->items[i].second, out);
    }
    out += '}';
  } else if (const ListData* const list = value.list();
             list != nullptr && (list->kind == ListKind::kList || list->kind == ListKind::kTuple)) {
    const bool tuple = list->kind == ListKind::kTuple;
    out += tuple ? '(' : '[';
    for (size_t i = 0; i < list->items.size(); ++i) {
      if (i > 0) out += ", ";
      repr(run, list->items[i], out);
    }
    if (tuple && list->items.size() == 1) out += ',';
    out += tuple ? ')' : ']';
  } else {
    run.unsupported("the text of a ", value.type_name());
  }
}

bool equal(Run& run, const Value& a, const Value& b) {
  run.charge(1);
  if (const auto x = a.integer(), y = b.integer(); x && y) return *x == *y;
  if (const auto x = a.number(), y = b.number(); x && y) return *x == *y;
  if (a.text() != nullptr && b.text() != nullptr) {
    run.charge_bytes(std::min(a.text()->size(), b.text()->size()));
    return *a.text() == *b.text();
  }
  if (a.list() != nullptr && b.list() != nullptr) {
    const ListData &x = *a.list(), &y = *b.list();
    if (&x == &y) return true;
    if (x.kind != y.kind || x.kind == ListKind::kGenerator || x.kind == ListKind::kView)
      return false;
    return std::equal(
        x.items.begin(), x.items.end(), y.items.begin(), y.items.end(),
        [&](const Value& left, const Value& right) { return equal(run, left, right); });
  }
  if (a.dict() != nullptr && b.dict() != nullptr) {
    const DictData &x = *a.dict(), &y = *b.dict();
    if (x.items.size() != y.items.size()) return false;
    return std::all_of(x.items.begin(), x.items.end(), [&](const auto& item) {
      const Value* const other = y.find(item.first);
      return other != nullptr && equal(run, item.second, *other);
    });
  }
  if (a.is_none() || b.is_none()) return a.is_none() && b.is_none();
  if (a.is_undefined() || b.is_undefined()) return a.is_undefined() && b.is_undefined();
  if (a.space() != nullptr) return a.space() == b.space();
  if (a.callable() != nullptr) return a.callable() == b.callable();
  if (a.loop() != nullptr) return a.loop() == b.loop();
  return false;
}

bool less(Run& run, const Value& a, const Value& b) {
  run.charge(1);
  if (const auto x = a.integer(), y = b.integer(); x && y) return *x < *y;
  if (const auto x = a.number(), y = b.number(); x && y) return *x < *y;
  if (a.text() != nullptr && b.text() != nullptr) {  // bytes of UTF-8 have the order of characters
    run.charge_bytes(std::min(a.text()->size(), b.text()->size()));
    return *a.text() < *b.text();
  }
  if (a.list() != nullptr && b.list() != nullptr && a.list()->kind == b.list()->kind &&
      a.list()->kind <= ListKind::kTuple) {
    const auto &x = a.list()->items, &y = b.list()->items;
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      if (!equal(run, x[i], y[i])) return less(run, x[i], y[i]);
    }
    return x.size() < y.size();
  }
  for (const Value* const value : {&a, &b}) {
    if (value->is_undefined()) run.fail(*value->as<Undefined>()->what, ", and was compared.");
  }
  run.fail("a ", a.type_name(), " and a ", b.type_name(), " have no order.");
}

int64_t length(Run& run, const Value& value) {
  if (const std::string* const text = value.text()) {
    run.charge_bytes(text->size());
    return static_cast<int64_t>(count_characters(*text));
  }
  if (value.is_undefined()) return 0;
  if (const ListData* const list = value.list(); list && list->kind != ListKind::kGenerator) {
    return static_cast<int64_t>(list->items.size());
  }
  if (const DictData* const dict = value.dict()) return static_cast<int64_t>(dict->items.size());
  if (Loop* const loop = value.loop()) return loop->length(run);
  run.fail("a ", value.type_name(), " has no length.");
}

std::vector<Value> iterate(Run& run, const Value& value, std::string_view use) {
  if (value.is_undefined()) return {};
  std::vector<Value> items;
  if (const ListData* const list = value.list()) {
    const auto begin = list->items.begin() + static_cast<std::ptrdiff_t>(list->read);
    items.assign(begin, list->items.end());
    if (list->kind == ListKind::kGenerator) list->read = list->items.size();
  } else if (const DictData* const dict = value.dict()) {
    for (const auto& item : dict->items) items.push_back(item.first);
  } else if (const std::string* const text = value.text()) {
    run.charge(text->size());
    for (size_t i = 0; i < text->size();) {
      const uint32_t size = decode_utf8(*text, i).length;
      items.push_back(Value::of(text->substr(i, size)));
      i += size;
    }
  } else {
    run.fail(use, " needs a list; it got a ", value.type_name(), ".");
  }
  run.charge(items.size());
  return items;
}

// ---- Characters ---------------------------------------------------------------------------------

size_t count_characters(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char byte) { return (byte & 0xC0) != 0x80; }));
}

size_t byte_of_character(std::string_view text, size_t character) {
  size_t count = 0;
  for (size_t i = 0; i < text.size(); ++i) {
    if ((text[i] & 0xC0) == 0x80) continue;
    if (count++ == character) return i;
  }
  return text.size();
}

bool is_python_space(char32_t c) {
  if (c < 0x80) return (c >= 9 && c <= 13) || (c >= 0x1C && c <= 0x20);
  return is_white_space(c);
}

std::string_view strip_spaces(std::string_view text, bool left, bool right) {
  while (left && !text.empty()) {
    const CodePoint first = decode_utf8(text, 0);
    if (!is_python_space(first.value)) break;
    text.remove_prefix(first.length);
  }
  while (right && !text.empty()) {
    size_t last = text.size() - 1;
    while (last > 0 && (text[last] & 0xC0) == 0x80) --last;
    if (!is_python_space(decode_utf8(text, last).value)) break;
    text.remove_suffix(text.size() - last);
  }
  return text;
}

}  // namespace tessera::data::jinja
