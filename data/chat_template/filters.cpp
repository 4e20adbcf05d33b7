// The filters of templates: jinja2's, with transformers' tojson.
#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <functional>
#include <limits>
#include <unordered_map>

#include <tessera/core/plain_text.h>
#include <tessera/data/chat_template/operators.h>
#include <tessera/data/chat_template/texts.h>
#include <tessera/data/text/text.h>
#include <tessera/data/text/unicode.h>

namespace tessera::data::jinja {
namespace {

using Filter = Value (*)(Run&, const Value&, Arguments&);

bool flag_or(Run& run, Arguments& arguments, std::string_view name, bool otherwise) {
  const std::optional<Value> given = arguments.next(name);
  return given ? truth(run, *given) : otherwise;
}
int64_t number_or(Run& run, Arguments& arguments, std::string_view name, int64_t otherwise) {
  const std::optional<Value> given = arguments.next(name);
  return given && !given->is_none() ? needed_integer(run, *given, name) : otherwise;
}

// "a.b.0" of a value.
Value path_of(Run& run, Value value, const Value& path) {
  if (path.text() == nullptr) return item(run, value, path);
  for (const std::string_view step : split(*path.text(), ".", -1)) {
    int64_t index = 0;
    const auto end = step.data() + step.size();
    const bool is_number =
        !step.empty() && std::from_chars(step.data(), end, index).ptr == end && step[0] != '-';
    value = item(run, value, is_number ? Value::of(index) : Value::of(std::string(step)));
  }
  return value;
}

Value trimmed(Run& run, const Value& value, Arguments& arguments) {
  const std::optional<Value> set = arguments.next("chars");
  arguments.finish(run);
  const std::string text = str(run, value);
  std::optional<std::string_view> characters;
  if (set && !set->is_none()) characters = needed_text(run, *set, "trim");
  return make_text(run, std::string(strip(text, characters, true, true)));
}

Value length_of(Run& run, const Value& value, Arguments& arguments) {
  arguments.finish(run);
  return Value::of(length(run, value));
}

Value defaulted(Run& run, const Value& value, Arguments& arguments) {
  const Value otherwise = arguments.next("default_value").value_or(Value::of(std::string()));
  const bool falsy = flag_or(run, arguments, "boolean", false);
  arguments.finish(run);
  return value.is_undefined() || (falsy && !truth(run, value)) ? otherwise : value;
}

Value to_json(Run& run, const Value& value, Arguments& arguments) {
  JsonForm form;
  form.ensure_ascii = flag_or(run, arguments, "ensure_ascii", false);
  const std::optional<Value> indent = arguments.next("indent");
  const std::optional<Value> separators = arguments.next("separators");
  form.sort_keys = flag_or(run, arguments, "sort_keys", false);
  arguments.finish(run);
  if (indent && !indent->is_none()) {
    if (indent->text() != nullptr) {
      form.indent = *indent->text();
    } else {
      const int64_t spaces = needed_integer(run, *indent, "indent");
      if (spaces > 1000) run.fail("JSON is indented by at most 1000 spaces; got ", spaces, ".");
      form.indent = std::string(static_cast<size_t>(std::max<int64_t>(spaces, 0)), ' ');
    }
    form.item_separator = ",";
  }
  if (separators && !separators->is_none()) {
    const std::vector<Value> both = iterate(run, *separators, "separators");
    if (both.size() != 2) run.fail("JSON has two separators; got ", both.size(), ".");
    form.item_separator = needed_text(run, both[0], "separators");
    form.key_separator = needed_text(run, both[1], "separators");
  }
  return make_text(run, json_of(run, value, form));
}

Value joined(Run& run, const Value& value, Arguments& arguments) {
  const std::string by = str(run, arguments.next("d").value_or(Value::of(std::string())));
  const std::optional<Value> path = arguments.next("attribute");
  arguments.finish(run);
  std::string out;
  bool first = true;
  for (const Value& item : iterate(run, value, "join")) {
    if (!first) out += by;
    first = false;
    out += str(run, path && !path->is_none() ? path_of(run, item, *path) : item);
    run.charge_bytes(by.size());
    run.check_output(out.size());
  }
  return make_text(run, std::move(out));
}

template <std::string (*kChange)(std::string_view)>
Value changed(Run& run, const Value& value, Arguments& arguments) {
  arguments.finish(run);
  const std::string text = str(run, value);
  run.charge_bytes(4 * text.size());
  return make_text(run, kChange(text));
}

Value replaced_in(Run& run, const Value& value, Arguments& arguments) {
  Arguments same;
  same.positional.push_back(Value::of(str(run, arguments.needed(run, "old"))));
  same.positional.push_back(Value::of(str(run, arguments.needed(run, "new"))));
  same.positional.push_back(Value::of(number_or(run, arguments, "count", -1)));
  arguments.finish(run);
  return call(run, *method(run, Value::of(str(run, value)), "replace"), same);
}

Value first_of(Run& run, const Value& value, Arguments& arguments) {
  arguments.finish(run);
  if (const ListData* const list = value.list(); list && list->kind == ListKind::kGenerator) {
    if (list->read == list->items.size()) return Value::undefined("the list has no first item");
    return list->items[list->read++];
  }
  const std::vector<Value> items = iterate(run, value, "first");
  return items.empty() ? Value::undefined("the list has no first item") : items.front();
}

Value last_of(Run& run, const Value& value, Arguments& arguments) {
  arguments.finish(run);
  if (value.list() != nullptr && value.list()->kind == ListKind::kGenerator) {
    run.fail("a generator has no last item; apply |list before.");
  }
  const std::vector<Value> items = iterate(run, value, "last");
  return items.empty() ? Value::undefined("the list has no last item") : items.back();
}

Value listed(Run& run, const Value& value, Arguments& arguments) {
  arguments.finish(run);
  return make_list(run, iterate(run, value, "list"));
}

Value items_of(Run& run, const Value& value, Arguments& arguments) {
  arguments.finish(run);
  if (value.is_undefined()) return make_list(run, {}, ListKind::kGenerator);
  if (value.dict() == nullptr) run.fail("items needs a dict; it got a ", value.type_name(), ".");
  std::vector<Value> items;
  for (const auto& [key, of_key] : value.dict()->items) {
    items.push_back(make_list(run, {key, of_key}, ListKind::kTuple));
  }
  return make_list(run, std::move(items), ListKind::kGenerator);
}

Value reversed(Run& run, const Value& value, Arguments& arguments) {
  arguments.finish(run);
  std::vector<Value> items = iterate(run, value, "reverse");
  std::reverse(items.begin(), items.end());
  const ListData* const list = value.list();
  if (value.text() == nullptr) {
    const bool copies = list != nullptr && list->kind == ListKind::kGenerator;
    return make_list(run, std::move(items), copies ? ListKind::kList : ListKind::kGenerator);
  }
  std::string out;
  for (const Value& character : items) out += *character.text();
  return make_text(run, std::move(out));
}

// ---- map, select and their kind

// Whether the test that the arguments name holds; without one, whether the value is true.
std::function<bool(const Value&)> test_of(Run& run, Arguments& arguments) {
  const std::optional<Value> name = arguments.next("test");
  if (!name) {
    arguments.finish(run);
    return [&run](const Value& value) { return truth(run, value); };
  }
  Arguments rest;
  while (std::optional<Value> more = arguments.next({}))
    rest.positional.push_back(*std::move(more));
  rest.named = std::move(arguments.named);
  return [&run, called = needed_text(run, *name, "a test's name"), rest](const Value& value) {
    Arguments own = rest;
    return test(run, called, value, own);
  };
}

Value chosen(Run& run, const Value& value, Arguments& arguments, bool by_attribute, bool wanted) {
  std::optional<Value> path;
  if (by_attribute) path = arguments.needed(run, "attribute");
  const auto accepts = test_of(run, arguments);
  std::vector<Value> items;
  for (const Value& item : iterate(run, value, "select")) {
    if (accepts(path ? path_of(run, item, *path) : item) == wanted) items.push_back(item);
  }
  return make_list(run, std::move(items), ListKind::kGenerator);
}
Value selected(Run& run, const Value& value, Arguments& a) {
  return chosen(run, value, a, false, true);
}
Value rejected(Run& run, const Value& value, Arguments& a) {
  return chosen(run, value, a, false, false);
}
Value selected_attr(Run& run, const Value& value, Arguments& a) {
  return chosen(run, value, a, true, true);
}
Value rejected_attr(Run& run, const Value& value, Arguments& a) {
  return chosen(run, value, a, true, false);
}

Value mapped(Run& run, const Value& value, Arguments& arguments) {
  std::vector<Value> items;
  if (arguments.positional.empty()) {
    const Value path = arguments.needed(run, "attribute");
    const std::optional<Value> otherwise = arguments.next("default");
    arguments.finish(run);
    for (const Value& item : iterate(run, value, "map")) {
      Value part = path_of(run, item, path);
      if (part.is_undefined() && otherwise) part = *otherwise;
      items.push_back(std::move(part));
    }
    return make_list(run, std::move(items), ListKind::kGenerator);
  }
  const Value name = arguments.needed(run, "filter");
  Arguments rest;
  while (std::optional<Value> more = arguments.next({}))
    rest.positional.push_back(*std::move(more));
  rest.named = std::move(arguments.named);
  const std::string& called = needed_text(run, name, "a filter's name");
  for (const Value& item : iterate(run, value, "map")) {
    Arguments own = rest;
    items.push_back(filter(run, called, item, own));
  }
  return make_list(run, std::move(items), ListKind::kGenerator);
}

// ---- Orders

// What a value is ordered by: its attribute, and texts in lower case.
std::function<Value(const Value&)> key_of(Run& run, std::optional<Value> path,
                                          bool case_sensitive) {
  return [&run, path = std::move(path), case_sensitive](const Value& value) {
    Value key = path && !path->is_none() ? path_of(run, value, *path) : value;
    if (case_sensitive || key.text() == nullptr) return key;
    run.charge_bytes(4 * key.text()->size());
    return make_text(run, lower_case(*key.text()));
  };
}

struct Keyed {
  Value key, value;
};
std::vector<Keyed> keyed(Run& run, const Value& value,
                         const std::function<Value(const Value&)>& key, std::string_view use) {
  std::vector<Keyed> items;
  for (const Value& item : iterate(run, value, use)) items.push_back({key(item), item});
  return items;
}
void sort_by_key(Run& run, std::vector<Keyed>& items, bool reverse) {
  std::stable_sort(items.begin(), items.end(), [&](const Keyed& a, const Keyed& b) {
    return reverse ? less(run, b.key, a.key) : less(run, a.key, b.key);
  });
}
Value list_of(Run& run, std::vector<Keyed> items, ListKind kind = ListKind::kList) {
  std::vector<Value> values;
  for (Keyed& item : items) values.push_back(std::move(item.value));
  return make_list(run, std::move(values), kind);
}

Value sorted(Run& run, const Value& value, Arguments& arguments) {
  const bool reverse = flag_or(run, arguments, "reverse", false);
  const bool case_sensitive = flag_or(run, arguments, "case_sensitive", false);
  std::optional<Value> path = arguments.next("attribute");
  arguments.finish(run);
  if (path && path->text() != nullptr && path->text()->find(',') != std::string::npos) {
    run.unsupported("sort by several attributes");
  }
  auto items = keyed(run, value, key_of(run, std::move(path), case_sensitive), "sort");
  sort_by_key(run, items, reverse);
  return list_of(run, std::move(items));
}

Value sorted_dict(Run& run, const Value& value, Arguments& arguments) {
  const bool case_sensitive = flag_or(run, arguments, "case_sensitive", false);
  const Value by = arguments.next("by").value_or(Value::of(std::string("key")));
  const bool reverse = flag_or(run, arguments, "reverse", false);
  arguments.finish(run);
  if (value.dict() == nullptr) run.fail("dictsort needs a dict; it got a ", value.type_name(), ".");
  const std::string& word = needed_text(run, by, "by");
  if (word != "key" && word != "value") run.fail("dictsort is by 'key' or by 'value'.");
  std::vector<Keyed> items;
  const auto key = key_of(run, std::nullopt, case_sensitive);
  for (const auto& [name, of_name] : value.dict()->items) {
    items.push_back(
        {key(word == "key" ? name : of_name), make_list(run, {name, of_name}, ListKind::kTuple)});
  }
  sort_by_key(run, items, reverse);
  return list_of(run, std::move(items));
}

Value uniques(Run& run, const Value& value, Arguments& arguments) {
  const bool case_sensitive = flag_or(run, arguments, "case_sensitive", false);
  const auto key = key_of(run, arguments.next("attribute"), case_sensitive);
  arguments.finish(run);
  std::vector<Value> seen;
  std::vector<Keyed> items;
  for (Keyed& item : keyed(run, value, key, "unique")) {
    const bool known = std::any_of(seen.begin(), seen.end(),
                                   [&](const Value& other) { return equal(run, other, item.key); });
    if (known) continue;
    seen.push_back(item.key);
    items.push_back(std::move(item));
  }
  return list_of(run, std::move(items), ListKind::kGenerator);
}

Value extreme(Run& run, const Value& value, Arguments& arguments, bool greatest) {
  const bool case_sensitive = flag_or(run, arguments, "case_sensitive", false);
  const auto key = key_of(run, arguments.next("attribute"), case_sensitive);
  arguments.finish(run);
  const auto items = keyed(run, value, key, greatest ? "max" : "min");
  if (items.empty()) return Value::undefined("the list has no items");
  const Keyed* best = &items.front();
  for (const Keyed& item : items) {
    if (greatest ? less(run, best->key, item.key) : less(run, item.key, best->key)) best = &item;
  }
  return best->value;
}
Value greatest(Run& run, const Value& value, Arguments& a) { return extreme(run, value, a, true); }
Value least(Run& run, const Value& value, Arguments& a) { return extreme(run, value, a, false); }

Value sum_of(Run& run, const Value& value, Arguments& arguments) {
  const std::optional<Value> path = arguments.next("attribute");
  Value total = arguments.next("start").value_or(Value::of(int64_t{0}));
  arguments.finish(run);
  for (const Value& item : iterate(run, value, "sum")) {
    total = binary(run, "+", total, path && !path->is_none() ? path_of(run, item, *path) : item);
  }
  return total;
}

// ---- Texts and numbers

Value indented(Run& run, const Value& value, Arguments& arguments) {
  const Value width = arguments.next("width").value_or(Value::of(int64_t{4}));
  const bool first = flag_or(run, arguments, "first", false),
             blank = flag_or(run, arguments, "blank", false);
  arguments.finish(run);
  std::string margin;
  if (const std::string* const text = width.text()) {
    margin = *text;
  } else {
    const int64_t spaces = needed_integer(run, width, "width");
    if (spaces > 1000) run.fail("texts are indented by at most 1000 spaces; got ", spaces, ".");
    margin.assign(static_cast<size_t>(std::max<int64_t>(spaces, 0)), ' ');
  }
  const std::string text = needed_text(run, value, "indent") + "\n";
  std::string out = first ? margin : "";
  const auto lines = python_lines(text, false);
  run.charge_bytes(text.size());
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) {
      out += '\n';
      if (blank || !lines[i].empty()) out += margin;
    }
    out += lines[i];
    run.charge_bytes(margin.size());
    run.check_output(out.size());
  }
  return make_text(run, std::move(out));
}

Value truncated(Run& run, const Value& value, Arguments& arguments) {
  const int64_t most = number_or(run, arguments, "length", 255);
  const bool kills_words = flag_or(run, arguments, "killwords", false);
  const std::string end = str(run, arguments.next("end").value_or(Value::of(std::string("..."))));
  const int64_t leeway = number_or(run, arguments, "leeway", 5);
  arguments.finish(run);
  const auto end_length = static_cast<int64_t>(count_characters(end));
  if (most < end_length || leeway < 0 || most > int64_t{1} << 40 || leeway > int64_t{1} << 40) {
    run.fail("truncate needs a length of at least ", end_length, " and a leeway of at least 0.");
  }
  const std::string& text = needed_text(run, value, "truncate");
  if (static_cast<int64_t>(count_characters(text)) <= most + leeway) return value;
  std::string out = text.substr(0, byte_of_character(text, static_cast<size_t>(most - end_length)));
  const size_t space = out.rfind(' ');
  if (!kills_words && space != std::string::npos) out.resize(space);
  return make_text(run, out + end);
}

Value to_integer(Run& run, const Value& value, Arguments& arguments) {
  const Value otherwise = arguments.next("default").value_or(Value::of(int64_t{0}));
  const int64_t base = number_or(run, arguments, "base", 10);
  arguments.finish(run);
  if (base != 10) run.unsupported("int with a base");
  if (value.is_undefined()) run.fail(*value.as<Undefined>()->what, ", and int needs it.");
  if (const auto integer = value.integer()) return Value::of(*integer);
  std::optional<double> number = value.number();
  if (const std::string* const text = value.text()) {
    const std::string_view digits = strip_spaces(*text, true, true);
    const char* const end = digits.data() + digits.size();
    const char* const begin = digits.data() + (digits.starts_with('+') ? 1 : 0);
    int64_t result = 0;
    const auto read = std::from_chars(begin, end, result);
    if (read.ptr == end && read.ec == std::errc() && begin != end) return Value::of(result);
    if (read.ec == std::errc::result_out_of_range)
      run.unsupported("a whole number of more than 64 bits");
    double real = 0;
    const auto read_real = std::from_chars(begin, end, real);
    if (read_real.ptr == end && read_real.ec == std::errc() && begin != end) number = real;
  }
  if (!number || !std::isfinite(*number)) return otherwise;
  if (std::abs(*number) >= 0x1p63) run.unsupported("a whole number of more than 64 bits");
  return Value::of(static_cast<int64_t>(*number));
}

Value to_float(Run& run, const Value& value, Arguments& arguments) {
  const Value otherwise = arguments.next("default").value_or(Value::of(0.0));
  arguments.finish(run);
  if (value.is_undefined()) run.fail(*value.as<Undefined>()->what, ", and float needs it.");
  if (const auto number = value.number()) return Value::of(*number);
  if (const std::string* const text = value.text()) {
    const std::string_view digits = strip_spaces(*text, true, true);
    const char* const end = digits.data() + digits.size();
    const char* const begin = digits.data() + (digits.starts_with('+') ? 1 : 0);
    double real = 0;
    const auto read = std::from_chars(begin, end, real);
    if (read.ptr == end && read.ec == std::errc() && begin != end) return Value::of(real);
  }
  return otherwise;
}

Value absolute(Run& run, const Value& value, Arguments& arguments) {
  arguments.finish(run);
  if (const auto integer = value.integer())
    return *integer < 0 ? negative(run, value) : Value::of(*integer);
  if (const auto number = value.number()) return Value::of(std::abs(*number));
  run.fail("abs needs a number; it got a ", value.type_name(), ".");
}

Value rounded(Run& run, const Value& value, Arguments& arguments) {
  const int64_t precision = number_or(run, arguments, "precision", 0);
  const Value how = arguments.next("method").value_or(Value::of(std::string("common")));
  arguments.finish(run);
  const std::string& word = needed_text(run, how, "method");
  if (word != "common" && word != "ceil" && word != "floor")
    run.fail("round is 'common', 'ceil' or 'floor'.");
  const auto number = value.number();
  if (!number) run.fail("round needs a number; it got a ", value.type_name(), ".");
  if (word == "common") {
    if (precision < 0 || precision > 300) run.unsupported("round to these places");
    // Python rounds the decimal digits of the number itself, halves of them to even.
    if (value.integer()) return Value::of(*value.integer());
    char digits[700];
    plain_snprintf(digits, sizeof digits, "%.*f", static_cast<int>(precision), *number);
    double result = 0;
    std::from_chars(digits, digits + std::char_traits<char>::length(digits), result);
    return Value::of(result);
  }
  const double unit = std::pow(10.0, static_cast<double>(precision));
  const double scaled = *number * unit;
  return Value::of((word == "ceil" ? std::ceil(scaled) : std::floor(scaled)) / unit);
}

Value to_text(Run& run, const Value& value, Arguments& arguments) {
  arguments.finish(run);
  return Value::of(str(run, value));
}

Value marked_safe(Run& run, const Value& value, Arguments& arguments) {
  arguments.finish(run);
  return Value::of(Text{std::make_shared<const std::string>(str(run, value)), true});
}

Value formatted(Run& run, const Value& value, Arguments& arguments) {
  std::vector<Value> values;
  while (std::optional<Value> more = arguments.next({})) values.push_back(*std::move(more));
  arguments.finish(run);
  return make_text(
      run, format(run, str(run, value), make_list(run, std::move(values), ListKind::kTuple)));
}

Value centered(Run& run, const Value& value, Arguments& arguments) {
  Arguments same;
  same.positional.push_back(arguments.next("width").value_or(Value::of(int64_t{80})));
  arguments.finish(run);
  return call(run, *method(run, Value::of(str(run, value)), "center"), same);
}

const std::unordered_map<std::string_view, Filter>& filters() {
  static const std::unordered_map<std::string_view, Filter> known = {
      {"abs", absolute},
      {"capitalize", changed<capitalized>},
      {"center", centered},
      {"count", length_of},
      {"d", defaulted},
      {"default", defaulted},
      {"dictsort", sorted_dict},
      {"first", first_of},
      {"float", to_float},
      {"format", formatted},
      {"indent", indented},
      {"int", to_integer},
      {"items", items_of},
      {"join", joined},
      {"last", last_of},
      {"length", length_of},
      {"list", listed},
      {"lower", changed<lower_case>},
      {"map", mapped},
      {"max", greatest},
      {"min", least},
      {"reject", rejected},
      {"rejectattr", rejected_attr},
      {"replace", replaced_in},
      {"reverse", reversed},
      {"round", rounded},
      {"safe", marked_safe},
      {"select", selected},
      {"selectattr", selected_attr},
      {"sort", sorted},
      {"string", to_text},
      {"sum", sum_of},
      {"title", changed<title_of_filter>},
      {"tojson", to_json},
      {"trim", trimmed},
      {"truncate", truncated},
      {"unique", uniques},
      {"upper", changed<upper_case>},
  };
  return known;
}

constexpr std::array<std::string_view, 16> kOtherFilters = {
    "attr",    "batch",     "e",        "escape", "filesizeformat", "forceescape",
    "groupby", "pprint",    "random",   "slice",  "striptags",      "urlencode",
    "urlize",  "wordcount", "wordwrap", "xmlattr"};

// These leave what 'safe' has marked as it is.
bool keeps_marks(std::string_view name) {
  return name == "safe" || name == "length" || name == "count" || name == "string" ||
         name == "default" || name == "d";
}

}  // namespace

Value filter(Run& run, const std::string& name, const Value& value, Arguments& arguments) {
  const Run::Level level(run);
  run.charge(1);
  const auto found = filters().find(name);
  if (found == filters().end()) {
    if (std::find(kOtherFilters.begin(), kOtherFilters.end(), name) != kOtherFilters.end()) {
      run.unsupported("the filter '", name, "'");
    }
    run.malformed("there is no filter '", name, "'.");
  }
  const Text* const text = value.as<Text>();
  if (text != nullptr && text->markup && !keeps_marks(name)) {
    run.unsupported("the filter '", name, "' of what 'safe' has marked");
  }
  return found->second(run, value, arguments);
}

std::string format(Run& run, const std::string& form, const Value& values) {
  std::vector<Value> list;
  if (values.list() != nullptr && values.list()->kind == ListKind::kTuple) {
    list = values.list()->items;
  } else {
    list.push_back(values);
  }
  std::string out;
  size_t used = 0;
  for (size_t i = 0; i < form.size(); ++i) {
    if (form[i] != '%') {
      out += form[i];
      continue;
    }
    const size_t end = form.find_first_not_of("0123456789-+ #.", i + 1);
    if (end == std::string::npos) run.fail("a '%' of a format has no letter.");
    const std::string flags = form.substr(i + 1, end - i - 1);
    const char letter = form[end];
    i = end;
    if (letter == '%') {
      out += '%';
      continue;
    }
    if (used >= list.size()) run.fail("a format has more places than values.");
    const Value& value = list[used++];
    if (letter == 's' && flags.empty()) {
      out += str(run, value);
    } else if (letter == 'd' && flags.size() <= 3) {
      const auto number = value.number();
      if (!number) run.fail("%d needs a number; it got a ", value.type_name(), ".");
      char digits[1100];
      const auto whole = value.integer() ? *value.integer()
                                         : static_cast<int64_t>(std::clamp(*number, -9e18, 9e18));
      plain_snprintf(digits, sizeof digits, ("%" + flags + "lld").c_str(),
                     static_cast<long long>(whole));
      out += digits;
    } else if (letter == 'f' && flags.size() <= 3) {
      const auto number = value.number();
      if (!number) run.fail("%f needs a number; it got a ", value.type_name(), ".");
      char digits[1500];
      plain_snprintf(digits, sizeof digits, ("%" + flags + "f").c_str(), *number);
      out += digits;
    } else {
      run.unsupported("the format '%", flags, std::string(1, letter), "'");
    }
    run.check_output(out.size());
  }
  if (used < list.size()) run.fail("a format has fewer places than values.");
  return out;
}

}  // namespace tessera::data::jinja
