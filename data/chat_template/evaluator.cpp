#include <tessera/data/chat_template/evaluator.h>

#include <ctime>
#include <deque>
#include <memory>

#include <tessera/data/chat_template/loop.h>
#include <tessera/data/chat_template/operators.h>
#include <tessera/data/text/text.h>

namespace tessera::data::jinja {
namespace {

constexpr int64_t kMostRange = 100'000;  // jinja2's sandbox has this limit, too

// Names and their values, from the inside to the outside.
struct Scope {
  Scope* outer = nullptr;
  bool kept = false;  // a macro refers to it
  std::vector<std::pair<std::string_view, Value>> values;

  Value* find(std::string_view name) {
    for (auto& value : values) {
      if (value.first == name) return &value.second;
    }
    return nullptr;
  }
  void set(std::string_view name, Value value) {
    if (Value* const there = find(name)) {
      *there = std::move(value);
    } else {
      values.emplace_back(name, std::move(value));
    }
  }
};

enum class Flow { kOn, kBreak, kContinue };

class Evaluator {
 public:
  Evaluator(Run& run, const Value& variables, int64_t now)
      : run_(run), variables_(variables), now_(now) {
    add_functions();
  }

  RenderedChat render(const Tree& tree) {
    Scope* const top = open(nullptr);
    execute(tree.body, *top, result_.text);
    return std::move(result_);
  }

 private:
  // ---- Scopes: they live as long as a macro may refer to them

  Scope* open(Scope* outer) {
    run_.charge(1);
    if (free_.empty()) {
      scopes_.emplace_back();
      free_.push_back(&scopes_.back());
    }
    Scope* const scope = free_.back();
    free_.pop_back();
    *scope = {.outer = outer, .kept = false, .values = {}};
    return scope;
  }
  void close(Scope* scope) {
    if (scope->kept) return;
    scope->values.clear();
    free_.push_back(scope);
  }
  class Opened {
   public:
    Opened(Evaluator& of, Scope* outer) : of_(of), scope_(of.open(outer)) {}
    ~Opened() { of_.close(scope_); }
    Opened(const Opened&) = delete;
    Opened& operator=(const Opened&) = delete;
    Scope& operator*() const { return *scope_; }
    Scope* operator->() const { return scope_; }

   private:
    Evaluator& of_;
    Scope* scope_;
  };

  Value find(std::string_view name, Scope& scope) {
    for (Scope* at = &scope; at != nullptr; at = at->outer) {
      run_.charge(1 + at->values.size() / 16);
      if (const Value* const found = at->find(name)) return *found;
    }
    if (const Value* const found = variables_.dict()->find(name)) return *found;
    if (const Value* const found = functions_.find(name)) return *found;
    return Value::undefined("'" + std::string(name.substr(0, 100)) + "' is undefined");
  }

  // ---- Expressions

  Value evaluate(const Expression& expression, Scope& scope) {
    const Run::Level level(run_);
    run_.charge(1);
    const auto part = [&](size_t i) { return evaluate(*expression.parts[i], scope); };
    const auto here = [&](std::string_view construct) { run_.at(expression.line, construct); };
    here("");
    switch (expression.kind) {
      case ExpressionKind::kConstant:
        return expression.constant;
      case ExpressionKind::kName:
        return find(expression.name, scope);
      case ExpressionKind::kList:
      case ExpressionKind::kTuple: {
        std::vector<Value> items;
        for (size_t i = 0; i < expression.parts.size(); ++i) items.push_back(part(i));
        here("a list");
        const bool list = expression.kind == ExpressionKind::kList;
        return make_list(run_, std::move(items), list ? ListKind::kList : ListKind::kTuple);
      }
      case ExpressionKind::kDict: {
        DictBuilder dict;
        for (size_t i = 0; i < expression.parts.size(); i += 2) {
          Value key = part(i), value = part(i + 1);
          here("a dict");
          dict.put(run_, std::move(key), std::move(value));
        }
        return dict.finish(run_);
      }
      case ExpressionKind::kNegative:
      case ExpressionKind::kPositive: {
        const Value value = part(0);
        here("a sign");
        const Value negated = negative(run_, value);
        return expression.kind == ExpressionKind::kNegative ? negated : negative(run_, negated);
      }
      case ExpressionKind::kNot:
        return Value::of(!truth(run_, part(0)));
      case ExpressionKind::kAnd: {
        Value left = part(0);
        return truth(run_, left) ? part(1) : std::move(left);
      }
      case ExpressionKind::kOr: {
        Value left = part(0);
        return truth(run_, left) ? std::move(left) : part(1);
      }
      case ExpressionKind::kBinary: {
        const Value left = part(0), right = part(1);
        here(expression.name);
        return binary(run_, expression.name, left, right);
      }
      case ExpressionKind::kConcat: {
        std::string text;
        for (size_t i = 0; i < expression.parts.size(); ++i) {
          const Value value = part(i);
          here("~");
          text += str(run_, value);
          run_.check_output(text.size());
        }
        return make_text(run_, std::move(text));
      }
      case ExpressionKind::kCompare:
        return compare(expression, scope);
      case ExpressionKind::kCondition:
        if (truth(run_, part(1))) return part(0);
        if (expression.parts[2] != nullptr) return part(2);
        return Value::undefined("the inline if has no else, and its condition is false");
      case ExpressionKind::kAttribute: {
        const Value value = part(0);
        here(expression.name);
        return attribute(run_, value, expression.name);
      }
      case ExpressionKind::kItem: {
        const Value value = part(0), place = part(1);
        here("[ ]");
        return item(run_, value, place);
      }
      case ExpressionKind::kSlice: {
        const Value value = part(0);
        const auto bound = [&](size_t i) -> std::optional<Value> {
          if (expression.parts[i] == nullptr) return std::nullopt;
          return part(i);
        };
        const auto begin = bound(1), end = bound(2), step = bound(3);
        here("[:]");
        return slice(run_, value, begin, end, step);
      }
      case ExpressionKind::kCall: {
        const Value function = part(0);
        Arguments arguments = arguments_of(expression, scope);
        here(name_of_call(expression));
        return call(run_, function, arguments);
      }
      case ExpressionKind::kFilter: {
        const Value value = expression.parts[0] == nullptr ? filtered_block_ : part(0);
        Arguments arguments = arguments_of(expression, scope);
        here(expression.name);
        return filter(run_, expression.name, value, arguments);
      }
      case ExpressionKind::kTest: {
        const Value value = part(0);
        Arguments arguments = arguments_of(expression, scope);
        here(expression.name);
        return Value::of(test(run_, expression.name, value, arguments));
      }
    }
    return Value();
  }

  static std::string_view name_of_call(const Expression& call) {
    const Expression& function = *call.parts[0];
    const bool named =
        function.kind == ExpressionKind::kName || function.kind == ExpressionKind::kAttribute;
    return named ? std::string_view(function.name) : "a call";
  }

  Arguments arguments_of(const Expression& call, Scope& scope) {
    Arguments arguments;
    for (size_t i = 1; i < call.parts.size(); ++i) {
      arguments.positional.push_back(evaluate(*call.parts[i], scope));
    }
    for (const auto& [name, value] : call.named) {
      arguments.named.emplace_back(name, evaluate(*value, scope));
    }
    return arguments;
  }

  Value compare(const Expression& expression, Scope& scope) {
    Value left = evaluate(*expression.parts[0], scope);
    for (size_t i = 0; i < expression.operators.size(); ++i) {
      const std::string& name = expression.operators[i];
      Value right = evaluate(*expression.parts[i + 1], scope);
      run_.at(expression.line, name);
      bool holds = false;
      if (name == "==" || name == "!=") {
        holds = equal(run_, left, right) == (name == "==");
      } else if (name == "in" || name == "not in") {
        holds = contains(run_, right, left) == (name == "in");
      } else if (name == "<" || name == ">") {
        holds = name == "<" ? less(run_, left, right) : less(run_, right, left);
      } else {
        holds = name == "<=" ? less(run_, left, right) || equal(run_, left, right)
                             : less(run_, right, left) || equal(run_, left, right);
      }
      if (!holds) return Value::of(false);
      left = std::move(right);
    }
    return Value::of(true);
  }

  // ---- Statements

  void write(std::string& out, std::string_view text) {
    run_.charge_bytes(text.size());
    run_.check_output(out.size() + text.size());
    out += text;
  }

  Flow execute(const Body& body, Scope& scope, std::string& out) {
    const Run::Level level(run_);
    for (const Statement& statement : body) {
      const Flow flow = execute(statement, scope, out);
      if (flow != Flow::kOn) return flow;
    }
    return Flow::kOn;
  }

  Flow execute(const Statement& statement, Scope& scope, std::string& out) {
    run_.charge(1);
    run_.at(statement.line, "");
    switch (statement.kind) {
      case StatementKind::kData:
        write(out, statement.text);
        return Flow::kOn;
      case StatementKind::kPrint: {
        const Value value = evaluate(*statement.value, scope);
        run_.at(statement.line, "{{ }}");
        write(out, str(run_, value));
        return Flow::kOn;
      }
      case StatementKind::kFor:
        return execute_for(statement, scope, out);
      case StatementKind::kIf:
        for (const Branch& branch : statement.branches) {
          if (branch.condition == nullptr || truth(run_, evaluate(*branch.condition, scope))) {
            return execute(branch.body, scope, out);
          }
        }
        return Flow::kOn;
      case StatementKind::kSet:
        assign(*statement.target, evaluate(*statement.value, scope), scope);
        return Flow::kOn;
      case StatementKind::kSetBlock:
      case StatementKind::kFilter: {
        std::string text;
        {
          const Opened inner(*this, &scope);
          execute(statement.body, *inner, text);
        }
        Value value = Value::of(std::move(text));
        if (statement.value != nullptr) {
          const Value before = std::exchange(filtered_block_, std::move(value));
          value = evaluate(*statement.value, scope);
          filtered_block_ = before;
        }
        if (statement.kind == StatementKind::kFilter) {
          write(out, str(run_, value));
        } else {
          assign(*statement.target, std::move(value), scope);
        }
        return Flow::kOn;
      }
      case StatementKind::kMacro:
        assign_name(statement.text, macro(statement, statement.text, scope), scope);
        return Flow::kOn;
      case StatementKind::kCall: {
        const Expression& expression = *statement.value;
        const Value function = evaluate(*expression.parts[0], scope);
        Arguments arguments = arguments_of(expression, scope);
        arguments.named.emplace_back("caller", macro(statement, "caller", scope));
        run_.at(statement.line, "{% call %}");
        write(out, str(run_, call(run_, function, arguments)));
        return Flow::kOn;
      }
      case StatementKind::kWith: {
        std::vector<Value> values;
        for (const Parameter& name : statement.parameters)
          values.push_back(evaluate(*name.value, scope));
        const Opened inner(*this, &scope);
        for (size_t i = 0; i < values.size(); ++i) {
          inner->set(statement.parameters[i].name, std::move(values[i]));
        }
        return execute(statement.body, *inner, out);
      }
      case StatementKind::kGeneration: {
        std::string text;
        {
          const Opened inner(*this, &scope);
          execute(statement.body, *inner, text);
        }
        const auto begin = static_cast<int64_t>(characters_written());
        run_.charge_bytes(text.size());
        result_.generated.push_back({begin, begin + static_cast<int64_t>(count_characters(text))});
        write(out, text);
        return Flow::kOn;
      }
      case StatementKind::kBreak:
        return Flow::kBreak;
      case StatementKind::kContinue:
        return Flow::kContinue;
    }
    return Flow::kOn;
  }

  // Of the whole text so far. Each byte is counted once.
  size_t characters_written() {
    const std::string_view more = std::string_view(result_.text).substr(counted_bytes_);
    counted_characters_ += count_characters(more);
    counted_bytes_ = result_.text.size();
    return counted_characters_;
  }

  Flow execute_for(const Statement& statement, Scope& scope, std::string& out) {
    const Value iterated = evaluate(*statement.value, scope);
    run_.at(statement.line, "{% for %}");
    std::vector<Value> items = iterate(run_, iterated, "a loop");
    ForLoop::Accept accept;
    if (statement.condition != nullptr) {
      accept = [&](const Value& value) {
        const Opened inner(*this, &scope);
        assign(*statement.target, value, *inner);
        return truth(run_, evaluate(*statement.condition, *inner));
      };
    }
    const auto loop = std::make_shared<ForLoop>(std::move(items), std::move(accept));
    struct Ended {  // its condition refers to this scope
      ForLoop& loop;
      ~Ended() { loop.end(); }
    } const ended{*loop};
    bool any = false;
    while (const Value* const value = loop->next()) {
      any = true;
      run_.charge(1);
      const Opened inner(*this, &scope);
      inner->set("loop", Value::of(std::shared_ptr<Loop>(loop)));
      run_.at(statement.line, "{% for %}");
      assign(*statement.target, *value, *inner);
      if (execute(statement.body, *inner, out) == Flow::kBreak) break;
    }
    if (any || statement.other.empty()) return Flow::kOn;
    const Opened inner(*this, &scope);
    return execute(statement.other, *inner, out);
  }

  void assign_name(const std::string& name, Value value, Scope& scope) {
    run_.charge(1 + scope.values.size() / 16);
    scope.set(name, std::move(value));
  }

  void assign(const Expression& target, Value value, Scope& scope) {
    if (target.kind == ExpressionKind::kName)
      return assign_name(target.name, std::move(value), scope);
    if (target.kind == ExpressionKind::kAttribute) {
      const Value space = find(target.parts[0]->name, scope);
      run_.at(target.line, target.name);
      if (space.space() == nullptr) {
        run_.fail("attributes are set of a namespace; '", target.parts[0]->name, "' is a ",
                  space.type_name(), ".");
      }
      set_attribute(*space.space(), target.name, std::move(value));
      return;
    }
    run_.at(target.line, "an assignment");
    const std::vector<Value> values = iterate(run_, value, "an assignment to several names");
    if (values.size() != target.parts.size()) {
      run_.fail(values.size(), " values are assigned to ", target.parts.size(), " names.");
    }
    for (size_t i = 0; i < values.size(); ++i) assign(*target.parts[i], values[i], scope);
  }

  void set_attribute(NamespaceData& space, const std::string& name, Value value) {
    if (name.starts_with('_')) run_.unsupported("the attribute '", name, "' of a namespace");
    if (!value.is_plain()) run_.unsupported("a ", value.type_name(), " in a namespace");
    run_.charge_bytes(name.size());
    space.attributes[name] = std::move(value);
  }

  // ---- Macros

  Value macro(const Statement& statement, const std::string& name, Scope& scope) {
    for (Scope* at = &scope; at != nullptr && !at->kept; at = at->outer) at->kept = true;
    return make_callable(name, [this, &statement, &scope](Run&, Arguments& arguments) {
      return call_macro(statement, arguments, scope);
    });
  }

  Value call_macro(const Statement& statement, Arguments& arguments, Scope& scope) {
    const Opened inner(*this, &scope);
    std::optional<Value> caller;
    if (statement.uses_caller || statement.kind == StatementKind::kMacro) {
      for (size_t i = 0; i < arguments.named.size(); ++i) {
        if (arguments.named[i].first != "caller") continue;
        if (!statement.uses_caller)
          run_.fail("the macro '", statement.text, "' has no use for a caller.");
        caller = std::move(arguments.named[i].second);
        arguments.named.erase(arguments.named.begin() + static_cast<std::ptrdiff_t>(i));
        break;
      }
    }
    std::vector<const Parameter*> absent;
    for (const Parameter& parameter : statement.parameters) {
      if (std::optional<Value> given = arguments.next(parameter.name)) {
        inner->set(parameter.name, *std::move(given));
      } else {
        absent.push_back(&parameter);
        inner->set(parameter.name,
                   Value::undefined("the parameter '" + parameter.name + "' was not given"));
      }
    }
    if (statement.uses_varargs) {
      std::vector<Value> rest;
      while (arguments.asked < arguments.positional.size())
        rest.push_back(arguments.positional[arguments.asked++]);
      inner->set("varargs", make_list(run_, std::move(rest), ListKind::kTuple));
    }
    if (statement.uses_kwargs) {
      DictBuilder rest;
      for (auto& [key, value] : std::exchange(arguments.named, {}))
        rest.put(run_, Value::of(key), value);
      inner->set("kwargs", rest.finish(run_));
    }
    arguments.finish(run_);
    if (statement.uses_caller) {
      inner->set("caller", caller ? *std::move(caller) : Value::undefined("'caller' is undefined"));
    }
    for (const Parameter* const parameter : absent) {
      if (parameter->value != nullptr)
        inner->set(parameter->name, evaluate(*parameter->value, *inner));
    }
    std::string text;
    execute(statement.body, *inner, text);
    return make_text(run_, std::move(text));
  }

  // ---- Functions of every template

  void add_functions() {
    DictFunctions& add = functions_;
    add.put("range", [](Run& run, Arguments& arguments) {
      const int64_t first = needed_integer(run, arguments.needed(run, "start"), "range()");
      const std::optional<Value> second = arguments.next("stop"), third = arguments.next("step");
      arguments.finish(run);
      const int64_t begin = second ? first : 0;
      const int64_t end = second ? needed_integer(run, *second, "range()") : first;
      const int64_t step = third ? needed_integer(run, *third, "range()") : 1;
      if (step == 0) run.fail("range() has a step of zero.");
      std::vector<Value> items;
      for (int64_t i = begin; step > 0 ? i < end : i > end;) {
        items.push_back(Value::of(i));
        if (static_cast<int64_t>(items.size()) > kMostRange) {
          run.fail("range() has at most ", kMostRange, " numbers.");
        }
        if (__builtin_add_overflow(i, step, &i)) break;
      }
      return make_list(run, std::move(items), ListKind::kRange);
    });
    add.put("namespace", [this](Run& run, Arguments& arguments) {
      auto space = std::make_shared<NamespaceData>();
      if (std::optional<Value> first = arguments.next({})) {
        if (first->dict() == nullptr)
          run.fail("namespace() takes a dict; it got a ", first->type_name(), ".");
        for (const auto& [key, value] : first->dict()->items) {
          set_attribute(*space, needed_text(run, key, "namespace()"), value);
        }
      }
      for (auto& [name, value] : std::exchange(arguments.named, {})) {
        set_attribute(*space, name, std::move(value));
      }
      arguments.finish(run);
      return Value::of(std::move(space));
    });
    add.put("dict", [](Run& run, Arguments& arguments) {
      DictBuilder dict;
      if (std::optional<Value> first = arguments.next({})) {
        if (const DictData* const other = first->dict()) {
          for (const auto& [key, value] : other->items) dict.put(run, key, value);
        } else {
          for (const Value& pair : iterate(run, *first, "dict()")) {
            const std::vector<Value> both = iterate(run, pair, "dict()");
            if (both.size() != 2) run.fail("dict() takes pairs; it got ", both.size(), " values.");
            dict.put(run, both[0], both[1]);
          }
        }
      }
      for (auto& [name, value] : std::exchange(arguments.named, {})) {
        dict.put(run, Value::of(name), value);
      }
      arguments.finish(run);
      return dict.finish(run);
    });
    add.put("raise_exception", [](Run& run, Arguments& arguments) -> Value {
      const Value message = arguments.needed(run, "message");
      arguments.finish(run);
      run.fail("the template refuses the conversation: ", str(run, message));
    });
    add.put("strftime_now", [this](Run& run, Arguments& arguments) {
      const Value given = arguments.needed(run, "format");
      arguments.finish(run);
      const std::string& form = needed_text(run, given, "strftime_now()");
      if (form.empty()) return Value::of(std::string());
      if (form.size() > 200) run.fail("strftime_now() takes a format of at most 200 bytes.");
      const std::time_t time = now_;
      std::tm local{};
      if (::localtime_r(&time, &local) == nullptr) run.fail("the time has no calendar.");
      // A letter before the format tells an empty result from one that does not fit.
      char text[8192];
      const size_t size = std::strftime(text, sizeof text, ("." + form).c_str(), &local);
      if (size == 0) run.fail("strftime_now() makes a text that is too long.");
      return make_text(run, replace_invalid_utf8(std::string_view(text, size).substr(1)));
    });
    for (const char* const name : {"cycler", "joiner", "lipsum"}) {
      add.put(name, [name](Run& run, Arguments&) -> Value {
        run.unsupported("the function '", name, "'");
      });
    }
  }

  struct DictFunctions {
    std::vector<std::pair<std::string_view, Value>> all;
    void put(std::string_view name, std::function<Value(Run&, Arguments&)> function) {
      all.emplace_back(name, make_callable(std::string(name), std::move(function)));
    }
    const Value* find(std::string_view name) const {
      for (const auto& function : all) {
        if (function.first == name) return &function.second;
      }
      return nullptr;
    }
  };

  Run& run_;
  const Value& variables_;
  int64_t now_;
  DictFunctions functions_;
  std::deque<Scope> scopes_;
  std::vector<Scope*> free_;
  Value filtered_block_;  // of the filter block that is evaluated
  RenderedChat result_;
  size_t counted_bytes_ = 0, counted_characters_ = 0;
};

}  // namespace

RenderedChat render(const Tree& tree, Run& run, const Value& variables, int64_t now) {
  return Evaluator(run, variables, now).render(tree);
}

}  // namespace tessera::data::jinja
