// The tests of templates: `value is NAME`.
#include <algorithm>
#include <cmath>
#include <unordered_map>

#include <tessera/data/chat_template/operators.h>
#include <tessera/data/text/unicode.h>

namespace tessera::data::jinja {
namespace {

using Test = bool (*)(Run&, const Value&, Arguments&);

template <class Of>
constexpr Test plain(Of) {
  return [](Run& run, const Value& value, Arguments& arguments) {
    arguments.finish(run);
    return Of()(run, value);
  };
}
template <class Of>
constexpr Test with_other(Of) {
  return [](Run& run, const Value& value, Arguments& arguments) {
    const Value other = arguments.needed(run, "other");
    arguments.finish(run);
    return Of()(run, value, other);
  };
}

bool has_places(const Value& value) {
  if (value.text() != nullptr || value.dict() != nullptr || value.is_undefined()) return true;
  return value.list() != nullptr && value.list()->kind < ListKind::kView;
}

bool same(Run& run, const Value& a, const Value& b) {
  if (a.is_none() || b.is_none()) return a.is_none() && b.is_none();
  if (a.as<bool>() != nullptr || b.as<bool>() != nullptr) {
    return a.as<bool>() != nullptr && b.as<bool>() != nullptr && *a.as<bool>() == *b.as<bool>();
  }
  if (a.list() != nullptr || b.list() != nullptr) return a.list() == b.list();
  if (a.dict() != nullptr || b.dict() != nullptr) return a.dict() == b.dict();
  run.unsupported("'sameas' of a ", a.type_name());
}

int64_t remainder(Run& run, const Value& value, const Value& by) {
  return needed_integer(run, binary(run, "%", value, by), "this test");
}

const std::unordered_map<std::string_view, Test>& tests() {
  static const Test equals =
      with_other([](Run& run, const Value& a, const Value& b) { return equal(run, a, b); });
  static const Test differs =
      with_other([](Run& run, const Value& a, const Value& b) { return !equal(run, a, b); });
  static const Test is_less =
      with_other([](Run& run, const Value& a, const Value& b) { return less(run, a, b); });
  static const Test is_greater =
      with_other([](Run& run, const Value& a, const Value& b) { return less(run, b, a); });
  static const Test at_most = with_other(
      [](Run& run, const Value& a, const Value& b) { return less(run, a, b) || equal(run, a, b); });
  static const Test at_least = with_other(
      [](Run& run, const Value& a, const Value& b) { return less(run, b, a) || equal(run, a, b); });
  static const std::unordered_map<std::string_view, Test> known = {
      {"defined", plain([](Run&, const Value& v) { return !v.is_undefined(); })},
      {"undefined", plain([](Run&, const Value& v) { return v.is_undefined(); })},
      {"none", plain([](Run&, const Value& v) { return v.is_none(); })},
      {"boolean", plain([](Run&, const Value& v) { return v.is<bool>(); })},
      {"true", plain([](Run&, const Value& v) { return v.is<bool>() && *v.as<bool>(); })},
      {"false", plain([](Run&, const Value& v) { return v.is<bool>() && !*v.as<bool>(); })},
      {"integer", plain([](Run&, const Value& v) { return v.is<int64_t>(); })},
      {"float", plain([](Run&, const Value& v) { return v.is<double>(); })},
      {"number", plain([](Run&, const Value& v) { return v.number().has_value(); })},
      {"string", plain([](Run&, const Value& v) { return v.text() != nullptr; })},
      {"mapping", plain([](Run&, const Value& v) { return v.dict() != nullptr; })},
      {"sequence", plain([](Run&, const Value& v) { return has_places(v); })},
      {"iterable", plain([](Run&, const Value& v) {
         return has_places(v) || v.list() != nullptr || v.loop() != nullptr;
       })},
      {"callable",
       plain([](Run&, const Value& v) { return v.callable() != nullptr || v.is_undefined(); })},
      {"lower", plain([](Run& run, const Value& v) {
         const Value text = Value::of(str(run, v));
         Arguments none;
         return truth(run, call(run, *method(run, text, "islower"), none));
       })},
      {"upper", plain([](Run& run, const Value& v) {
         const Value text = Value::of(str(run, v));
         Arguments none;
         return truth(run, call(run, *method(run, text, "isupper"), none));
       })},
      {"odd", plain([](Run& run, const Value& v) {
         return remainder(run, v, Value::of(int64_t{2})) == 1;
       })},
      {"even", plain([](Run& run, const Value& v) {
         return remainder(run, v, Value::of(int64_t{2})) == 0;
       })},
      {"divisibleby", with_other([](Run& run, const Value& a, const Value& b) {
         return remainder(run, a, b) == 0;
       })},
      {"in",
       with_other([](Run& run, const Value& a, const Value& b) { return contains(run, b, a); })},
      {"sameas",
       with_other([](Run& run, const Value& a, const Value& b) { return same(run, a, b); })},
      {"eq", equals},
      {"equalto", equals},
      {"==", equals},
      {"ne", differs},
      {"!=", differs},
      {"lt", is_less},
      {"lessthan", is_less},
      {"<", is_less},
      {"gt", is_greater},
      {"greaterthan", is_greater},
      {">", is_greater},
      {"le", at_most},
      {"<=", at_most},
      {"ge", at_least},
      {">=", at_least},
      {"filter", plain([](Run& run, const Value& v) -> bool {
         run.unsupported("the test 'filter' of a ", v.type_name());
       })},
  };
  return known;
}

}  // namespace

bool is_test(std::string_view name) { return tests().contains(name); }

bool test(Run& run, const std::string& name, const Value& value, Arguments& arguments) {
  run.charge(1);
  if (name == "escaped") run.unsupported("the test 'escaped'");
  const auto found = tests().find(name);
  if (found == tests().end()) run.malformed("there is no test '", name, "'.");
  return found->second(run, value, arguments);
}

}  // namespace tessera::data::jinja
