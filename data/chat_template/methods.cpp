// Methods of texts, dicts and lists.
#include <algorithm>
#include <array>
#include <functional>
#include <limits>

#include <tessera/data/chat_template/operators.h>
#include <tessera/data/chat_template/texts.h>
#include <tessera/data/text/text.h>
#include <tessera/data/text/unicode.h>

namespace tessera::data::jinja {
namespace {

using Method = std::function<Value(Run&, const Value& self, Arguments&)>;

Value text_list(Run& run, const std::vector<std::string_view>& parts,
                ListKind kind = ListKind::kList) {
  std::vector<Value> items;
  for (const std::string_view part : parts) items.push_back(make_text(run, std::string(part)));
  return make_list(run, std::move(items), kind);
}

std::optional<std::string> optional_text(Run& run, Arguments& arguments, std::string_view name) {
  const std::optional<Value> given = arguments.next(name);
  if (!given || given->is_none()) return std::nullopt;
  return needed_text(run, *given, name);
}
int64_t integer_or(Run& run, Arguments& arguments, std::string_view name, int64_t otherwise) {
  const std::optional<Value> given = arguments.next(name);
  return given ? needed_integer(run, *given, name) : otherwise;
}

// The part of a text that arguments `start` and `end` choose; `first`: how many characters stand
// before it.
std::string_view chosen_part(Run& run, std::string_view text, Arguments& arguments,
                             int64_t* first = nullptr) {
  const std::optional<Value> start = arguments.next("start"), stop = arguments.next("end");
  if (!start && !stop) return text;
  const auto size = static_cast<int64_t>(count_characters(text));
  const auto bound = [&](const std::optional<Value>& given, int64_t otherwise) {
    if (!given || given->is_none()) return otherwise;
    const int64_t value = needed_integer(run, *given, "a bound");
    return std::clamp<int64_t>(value < 0 ? value + size : value, 0, size);
  };
  const int64_t begin = bound(start, 0), end = std::max(begin, bound(stop, size));
  if (first != nullptr) *first = begin;
  const size_t from = byte_of_character(text, static_cast<size_t>(begin));
  return text.substr(from, byte_of_character(text, static_cast<size_t>(end)) - from);
}

Method strips(bool left, bool right) {
  return [=](Run& run, const Value& self, Arguments& arguments) {
    const std::optional<std::string> set = optional_text(run, arguments, "chars");
    arguments.finish(run);
    return make_text(run, std::string(strip(*self.text(), set, left, right)));
  };
}

Method changes(std::string (*change)(std::string_view)) {
  return [=](Run& run, const Value& self, Arguments& arguments) {
    arguments.finish(run);
    run.charge_bytes(4 * self.text()->size());
    return make_text(run, change(*self.text()));
  };
}

Method splits(bool from_right) {
  return [=](Run& run, const Value& self, Arguments& arguments) {
    const std::optional<std::string> separator = optional_text(run, arguments, "sep");
    const int64_t most = integer_or(run, arguments, "maxsplit", -1);
    arguments.finish(run);
    if (separator && separator->empty()) run.fail("the separator of split() is empty.");
    const auto cut = from_right ? split_from_right : split;
    return text_list(run, cut(*self.text(), separator, most));
  };
}

Method begins_or_ends(bool begins) {
  return [=](Run& run, const Value& self, Arguments& arguments) {
    const Value what = arguments.needed(run, begins ? "prefix" : "suffix");
    const std::string_view text = chosen_part(run, *self.text(), arguments);
    arguments.finish(run);
    const auto fits = [&](const Value& part) {
      const std::string& wanted = needed_text(run, part, begins ? "startswith()" : "endswith()");
      return begins ? text.starts_with(wanted) : text.ends_with(wanted);
    };
    if (what.list() == nullptr || what.list()->kind != ListKind::kTuple)
      return Value::of(fits(what));
    const auto& items = what.list()->items;
    run.charge(items.size());
    return Value::of(std::any_of(items.begin(), items.end(), fits));
  };
}

Method finds(bool last, bool must) {
  return [=](Run& run, const Value& self, Arguments& arguments) {
    const Value part = arguments.needed(run, "sub");
    int64_t before = 0;
    const std::string_view text = chosen_part(run, *self.text(), arguments, &before);
    arguments.finish(run);
    run.charge_bytes(text.size());
    const std::string& wanted = needed_text(run, part, "find()");
    const size_t found = last ? find_last_part(text, wanted) : find_part(text, wanted);
    if (found == text.npos && must) run.fail("the text does not have what index() looks for.");
    if (found == text.npos) return Value::of(int64_t{-1});
    return Value::of(before + static_cast<int64_t>(count_characters(text.substr(0, found))));
  };
}

Method partitions(bool last) {
  return [=](Run& run, const Value& self, Arguments& arguments) {
    const Value separator = arguments.needed(run, "sep");
    arguments.finish(run);
    const std::string_view text = *self.text(), by = needed_text(run, separator, "partition()");
    if (by.empty()) run.fail("the separator of partition() is empty.");
    const size_t found = last ? find_last_part(text, by) : find_part(text, by);
    if (found == text.npos) {
      return text_list(run,
                       last ? std::vector<std::string_view>{"", "", text}
                            : std::vector<std::string_view>{text, "", ""},
                       ListKind::kTuple);
    }
    return text_list(run, {text.substr(0, found), by, text.substr(found + by.size())},
                     ListKind::kTuple);
  };
}

Method removes(bool prefix) {
  return [=](Run& run, const Value& self, Arguments& arguments) {
    const Value part = arguments.needed(run, prefix ? "prefix" : "suffix");
    arguments.finish(run);
    std::string_view text = *self.text();
    const std::string& wanted = needed_text(run, part, "removeprefix()");
    if (prefix && text.starts_with(wanted)) text.remove_prefix(wanted.size());
    if (!prefix && text.ends_with(wanted)) text.remove_suffix(wanted.size());
    return make_text(run, std::string(text));
  };
}

// Whether there is a character, and each one fits.
Method all_characters(bool (*fits)(char32_t)) {
  return [=](Run& run, const Value& self, Arguments& arguments) {
    arguments.finish(run);
    const std::string& text = *self.text();
    run.charge_bytes(text.size());
    for (size_t i = 0; i < text.size();) {
      const CodePoint c = decode_utf8(text, i);
      if (!fits(c.value)) return Value::of(false);
      i += c.length;
    }
    return Value::of(!text.empty());
  };
}

// Whether there are letters with cases, and all have this one.
Method all_cased(bool upper) {
  return [=](Run& run, const Value& self, Arguments& arguments) {
    arguments.finish(run);
    const std::string& text = *self.text();
    run.charge_bytes(text.size());
    bool any = false;
    for (size_t i = 0; i < text.size();) {
      const CodePoint c = decode_utf8(text, i);
      if (is_cased(c.value)) {
        if (is_upper(c.value) != upper) return Value::of(false);
        any = true;
      }
      i += c.length;
    }
    return Value::of(any);
  };
}

enum class Side { kLeft, kRight, kBoth };
Method fills(Side side) {
  return [=](Run& run, const Value& self, Arguments& arguments) {
    const Value given = arguments.needed(run, "width");
    const int64_t width = needed_integer(run, given, "width");
    const std::string fill = optional_text(run, arguments, "fillchar").value_or(" ");
    arguments.finish(run);
    if (count_characters(fill) != 1) run.fail("a text is filled with one character.");
    const int64_t more = width - static_cast<int64_t>(count_characters(*self.text()));
    if (more <= 0) return self;
    if (static_cast<uint64_t>(more) > run.limits().output_bytes / fill.size()) {
      run.check_output(std::numeric_limits<size_t>::max());
    }
    const int64_t left = side == Side::kLeft    ? more
                         : side == Side::kRight ? 0
                                                : more / 2 + (more & width & 1);
    std::string out;
    for (int64_t i = 0; i < left; ++i) out += fill;
    out += *self.text();
    for (int64_t i = left; i < more; ++i) out += fill;
    return make_text(run, std::move(out));
  };
}

Value replaces(Run& run, const Value& self, Arguments& arguments) {
  const Value old = arguments.needed(run, "old"), with = arguments.needed(run, "new");
  const int64_t most = integer_or(run, arguments, "count", -1);
  arguments.finish(run);
  const std::string& from = needed_text(run, old, "replace()");
  const std::string& to = needed_text(run, with, "replace()");
  const size_t size = self.text()->size();
  const size_t times = from.empty() ? size + 1 : size / from.size();
  if (to.size() > 1)
    run.charge_bytes(std::min(times, run.limits().output_bytes) *
                     std::min(to.size(), run.limits().output_bytes / (times + 1)));
  std::string out = replaced(*self.text(), from, to, most);
  run.check_output(out.size());
  return make_text(run, std::move(out));
}

Value joins(Run& run, const Value& self, Arguments& arguments) {
  const Value list = arguments.needed(run, "iterable");
  arguments.finish(run);
  std::string out;
  bool first = true;
  for (const Value& item : iterate(run, list, "join()")) {
    if (!first) out += *self.text();
    first = false;
    out += needed_text(run, item, "join()");
    run.check_output(out.size());
    run.charge_bytes(self.text()->size());
  }
  return make_text(run, std::move(out));
}

Value counts(Run& run, const Value& self, Arguments& arguments) {
  const Value part = arguments.needed(run, "sub");
  const std::string_view text = chosen_part(run, *self.text(), arguments);
  arguments.finish(run);
  run.charge_bytes(text.size());
  const std::string& wanted = needed_text(run, part, "count()");
  if (wanted.empty()) return Value::of(static_cast<int64_t>(count_characters(text)) + 1);
  int64_t count = 0;
  for (size_t at = find_part(text, wanted); at != text.npos;
       at = find_part(text, wanted, at + wanted.size()))
    ++count;
  return Value::of(count);
}

Value zero_fills(Run& run, const Value& self, Arguments& arguments) {
  const Value given = arguments.needed(run, "width");
  arguments.finish(run);
  const std::string& text = *self.text();
  const int64_t more =
      needed_integer(run, given, "zfill()") - static_cast<int64_t>(count_characters(text));
  if (more <= 0) return self;
  if (static_cast<uint64_t>(more) > run.limits().output_bytes)
    run.check_output(std::numeric_limits<size_t>::max());
  const size_t sign = text.starts_with('-') || text.starts_with('+') ? 1 : 0;
  return make_text(
      run, text.substr(0, sign) + std::string(static_cast<size_t>(more), '0') + text.substr(sign));
}

Value cuts_lines(Run& run, const Value& self, Arguments& arguments) {
  const std::optional<Value> keep = arguments.next("keepends");
  arguments.finish(run);
  return text_list(run, python_lines(*self.text(), keep && truth(run, *keep)));
}

Method text_method(std::string_view name) {
  if (name == "strip") return strips(true, true);
  if (name == "lstrip") return strips(true, false);
  if (name == "rstrip") return strips(false, true);
  if (name == "split") return splits(false);
  if (name == "rsplit") return splits(true);
  if (name == "splitlines") return cuts_lines;
  if (name == "startswith") return begins_or_ends(true);
  if (name == "endswith") return begins_or_ends(false);
  if (name == "replace") return replaces;
  if (name == "upper") return changes(upper_case);
  if (name == "lower") return changes(lower_case);
  if (name == "title") return changes(title_of_method);
  if (name == "capitalize") return changes(capitalized);
  if (name == "join") return joins;
  if (name == "find") return finds(false, false);
  if (name == "rfind") return finds(true, false);
  if (name == "index") return finds(false, true);
  if (name == "rindex") return finds(true, true);
  if (name == "count") return counts;
  if (name == "partition") return partitions(false);
  if (name == "rpartition") return partitions(true);
  if (name == "removeprefix") return removes(true);
  if (name == "removesuffix") return removes(false);
  if (name == "isspace") return all_characters(is_python_space);
  if (name == "isalpha") return all_characters(is_alphabetic);
  if (name == "isdigit") return all_characters(is_digit);
  if (name == "isalnum") {
    return all_characters([](char32_t c) { return is_alphabetic(c) || is_numeric(c); });
  }
  if (name == "isupper") return all_cased(true);
  if (name == "islower") return all_cased(false);
  if (name == "ljust") return fills(Side::kRight);
  if (name == "rjust") return fills(Side::kLeft);
  if (name == "center") return fills(Side::kBoth);
  if (name == "zfill") return zero_fills;
  return nullptr;
}

Method dict_method(std::string_view name) {
  if (name == "get") {
    return [](Run& run, const Value& self, Arguments& arguments) {
      const Value key = arguments.needed(run, "key");
      const std::optional<Value> otherwise = arguments.next("default");
      arguments.finish(run);
      if (key.text() == nullptr) run.charge(self.dict()->items.size());
      const Value* const found = self.dict()->find(key);
      return found != nullptr ? *found : otherwise.value_or(Value());
    };
  }
  const bool keys = name == "keys", values = name == "values";
  if (keys || values || name == "items") {
    return [=](Run& run, const Value& self, Arguments& arguments) {
      arguments.finish(run);
      std::vector<Value> items;
      for (const auto& [key, value] : self.dict()->items) {
        items.push_back(keys     ? key
                        : values ? value
                                 : make_list(run, {key, value}, ListKind::kTuple));
      }
      return make_list(run, std::move(items), ListKind::kView);
    };
  }
  if (name == "copy") {
    return [](Run&, const Value& self, Arguments&) { return self; };
  }
  return nullptr;
}

Method list_method(std::string_view name) {
  const bool counts_items = name == "count";
  if (!counts_items && name != "index") return nullptr;
  return [=](Run& run, const Value& self, Arguments& arguments) {
    const Value wanted = arguments.needed(run, "value");
    arguments.finish(run);
    int64_t count = 0;
    const auto& items = self.list()->items;
    for (size_t i = 0; i < items.size(); ++i) {
      if (!equal(run, items[i], wanted)) continue;
      if (!counts_items) return Value::of(static_cast<int64_t>(i));
      ++count;
    }
    if (!counts_items) run.fail("the list does not have what index() looks for.");
    return Value::of(count);
  };
}

// Python has these, too; they are not known here, or change their value, which the sandbox forbids.
constexpr std::array<std::string_view, 14> kOtherTextMethods = {
    "casefold",  "encode",       "expandtabs",  "format",    "format_map", "isascii", "isdecimal",
    "isnumeric", "isidentifier", "isprintable", "maketrans", "swapcase",   "istitle", "translate"};
constexpr std::array<std::string_view, 6> kOtherDictMethods = {"clear",   "fromkeys",   "pop",
                                                               "popitem", "setdefault", "update"};
constexpr std::array<std::string_view, 9> kOtherListMethods = {
    "append", "clear", "copy", "extend", "insert", "pop", "remove", "reverse", "sort"};

bool is_one_of(std::string_view name, const auto& names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

std::optional<Value> method(Run& run, const Value& value, std::string_view name) {
  run.charge(1);
  Method found;
  bool is_other = false;
  if (value.text() != nullptr) {
    found = text_method(name);
    is_other = is_one_of(name, kOtherTextMethods);
  } else if (value.dict() != nullptr) {
    found = dict_method(name);
    is_other = is_one_of(name, kOtherDictMethods);
  } else if (value.list() != nullptr && value.list()->kind <= ListKind::kTuple) {
    found = list_method(name);
    is_other = value.list()->kind == ListKind::kList && is_one_of(name, kOtherListMethods);
  }
  if (!found && !is_other) return std::nullopt;
  const std::string shown(name);
  if (is_other || (value.as<Text>() != nullptr && value.as<Text>()->markup)) {
    const std::string type(value.type_name());
    return make_callable(shown, [shown, type](Run& in, Arguments&) -> Value {
      in.unsupported("the method '", shown, "' of this ", type);
    });
  }
  return make_callable(shown, [value, found](Run& in, Arguments& arguments) {
    in.charge_bytes(value.text() != nullptr ? value.text()->size() : 0);
    return found(in, value, arguments);
  });
}

}  // namespace tessera::data::jinja
