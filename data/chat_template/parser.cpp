#include <tessera/data/chat_template/parser.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <functional>
#include <initializer_list>
#include <utility>

#include <tessera/data/chat_template/lexer.h>
#include <tessera/data/text/text.h>

namespace tessera::data::jinja {
namespace {

constexpr int kDeepestSyntax = 400, kDeepestExpression = 200;
constexpr size_t kMostTemplateBytes = size_t{1} << 20;

class Parser {
 public:
  Parser(std::vector<LexerToken> tokens, const std::string& name)
      : tokens_(std::move(tokens)), name_(name) {}

  Tree run() {
    tree_.body = parse_body({});
    return std::move(tree_);
  }

 private:
  using Names = std::initializer_list<std::string_view>;

  // ---- Tokens

  const LexerToken& now() const { return tokens_[place_]; }
  void advance() {
    if (now().kind != TokenKind::kEnd) ++place_;
  }
  bool is_operator(std::string_view text) const {
    return now().kind == TokenKind::kOperator && now().text == text;
  }
  bool is_name(std::string_view text) const {
    return now().kind == TokenKind::kName && now().text == text;
  }
  bool take_operator(std::string_view text) {
    const bool found = is_operator(text);
    if (found) advance();
    return found;
  }
  bool take_name(std::string_view text) {
    const bool found = is_name(text);
    if (found) advance();
    return found;
  }
  void need_operator(std::string_view text) {
    if (!take_operator(text)) fail("'", text, "' is missing before ", shown(), ".");
  }
  std::string need_name() {
    if (now().kind != TokenKind::kName) fail("a name is missing before ", shown(), ".");
    std::string name = now().text;
    advance();
    return name;
  }
  void need_block_end() {
    if (now().kind != TokenKind::kBlockEnd) fail("'%}' is missing before ", shown(), ".");
    advance();
  }
  std::string shown() const {
    switch (now().kind) {
      case TokenKind::kEnd:
        return "the end of the template";
      case TokenKind::kBlockEnd:
      case TokenKind::kVariableEnd:
      case TokenKind::kName:
      case TokenKind::kOperator:
      case TokenKind::kInteger:
      case TokenKind::kFloat:
        return "'" + replace_invalid_utf8(now().text.substr(0, 60)) + "'";
      default:
        return "a text";
    }
  }
  template <class... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    syntax_error(name_, now().line, parts...);
  }
  template <class... Parts>
  [[noreturn]] void unsupported(const Parts&... parts) const {
    TS_THROW(UnsupportedError, kChatTemplate, "'", name_, "' line ", now().line, ": ", parts...,
             " is not known here; write the template without it.");
  }

  class Level {
   public:
    explicit Level(Parser& parser) : parser_(parser) {
      if (++parser_.depth_ > kDeepestSyntax) {
        parser_.fail("blocks and expressions are nested at most ", kDeepestSyntax,
                     " levels; these are nested deeper.");
      }
    }
    ~Level() { --parser_.depth_; }
    Level(const Level&) = delete;
    Level& operator=(const Level&) = delete;

   private:
    Parser& parser_;
  };

  // ---- Expressions

  ExpressionPtr make(ExpressionKind kind, int line, std::vector<ExpressionPtr> parts = {},
                     std::string name = {}) {
    auto made = std::make_unique<Expression>(Expression{.kind = kind, .line = line});
    made->name = std::move(name);
    made->parts = std::move(parts);
    return checked(std::move(made));
  }
  ExpressionPtr checked(ExpressionPtr made) const {
    for (const ExpressionPtr& part : made->parts) {
      if (part != nullptr) made->depth = std::max(made->depth, part->depth + 1);
    }
    for (const auto& [name, part] : made->named)
      made->depth = std::max(made->depth, part->depth + 1);
    if (made->depth > kDeepestExpression) {
      fail("an expression has at most ", kDeepestExpression, " levels; this one has more.");
    }
    return made;
  }
  template <class... Parts>
  ExpressionPtr make_of(ExpressionKind kind, int line, std::string name, Parts... parts) {
    std::vector<ExpressionPtr> list;
    (list.push_back(std::move(parts)), ...);
    return make(kind, line, std::move(list), std::move(name));
  }
  ExpressionPtr constant(Value value) {
    ExpressionPtr made = make(ExpressionKind::kConstant, now().line);
    made->constant = std::move(value);
    return made;
  }

  ExpressionPtr parse_expression(bool with_condition = true) {
    const Level level(*this);
    if (!with_condition) return parse_or();
    ExpressionPtr value = parse_or();
    while (is_name("if")) {
      const int line = now().line;
      advance();
      ExpressionPtr condition = parse_or();
      ExpressionPtr otherwise = take_name("else") ? parse_expression() : nullptr;
      value = make_of(ExpressionKind::kCondition, line, "", std::move(value), std::move(condition),
                      std::move(otherwise));
    }
    return value;
  }

  ExpressionPtr parse_or() {
    ExpressionPtr left = parse_and();
    while (is_name("or")) {
      const int line = now().line;
      advance();
      left = make_of(ExpressionKind::kOr, line, "", std::move(left), parse_and());
    }
    return left;
  }

  ExpressionPtr parse_and() {
    ExpressionPtr left = parse_not();
    while (is_name("and")) {
      const int line = now().line;
      advance();
      left = make_of(ExpressionKind::kAnd, line, "", std::move(left), parse_not());
    }
    return left;
  }

  ExpressionPtr parse_not() {
    const Level level(*this);
    const int line = now().line;
    if (take_name("not")) return make_of(ExpressionKind::kNot, line, "", parse_not());
    return parse_compare();
  }

  ExpressionPtr parse_compare() {
    const int line = now().line;
    std::vector<ExpressionPtr> parts;
    std::vector<std::string> operators;
    parts.push_back(parse_sum());
    for (;;) {
      if (now().kind == TokenKind::kOperator &&
          (now().text == "==" || now().text == "!=" || now().text == "<" || now().text == "<=" ||
           now().text == ">" || now().text == ">=")) {
        operators.push_back(now().text);
        advance();
      } else if (take_name("in")) {
        operators.emplace_back("in");
      } else if (is_name("not") && tokens_[place_ + 1].kind == TokenKind::kName &&
                 tokens_[place_ + 1].text == "in") {
        advance(), advance();
        operators.emplace_back("not in");
      } else {
        break;
      }
      parts.push_back(parse_sum());
    }
    if (operators.empty()) return std::move(parts[0]);
    ExpressionPtr made = make(ExpressionKind::kCompare, line, std::move(parts));
    made->operators = std::move(operators);
    return made;
  }

  ExpressionPtr parse_binary(Names operators, const std::function<ExpressionPtr()>& operand) {
    ExpressionPtr left = operand();
    for (;;) {
      const auto found = std::find_if(operators.begin(), operators.end(),
                                      [&](std::string_view op) { return is_operator(op); });
      if (found == operators.end()) return left;
      const int line = now().line;
      advance();
      left =
          make_of(ExpressionKind::kBinary, line, std::string(*found), std::move(left), operand());
    }
  }
  ExpressionPtr parse_sum() {
    return parse_binary({"+", "-"}, [this] { return parse_concat(); });
  }
  ExpressionPtr parse_concat() {
    std::vector<ExpressionPtr> parts;
    const int line = now().line;
    parts.push_back(parse_product());
    while (take_operator("~")) parts.push_back(parse_product());
    if (parts.size() == 1) return std::move(parts[0]);
    return make(ExpressionKind::kConcat, line, std::move(parts));
  }
  ExpressionPtr parse_product() {
    return parse_binary({"*", "/", "//", "%"}, [this] { return parse_power(); });
  }
  ExpressionPtr parse_power() {
    return parse_binary({"**"}, [this] { return parse_unary(true); });
  }

  ExpressionPtr parse_unary(bool with_filter) {
    const Level level(*this);
    const int line = now().line;
    ExpressionPtr value;
    if (take_operator("-")) {
      value = make_of(ExpressionKind::kNegative, line, "", parse_unary(false));
    } else if (take_operator("+")) {
      value = make_of(ExpressionKind::kPositive, line, "", parse_unary(false));
    } else {
      value = parse_primary();
    }
    value = parse_postfix(std::move(value));
    return with_filter ? parse_filters(std::move(value)) : std::move(value);
  }

  ExpressionPtr parse_primary() {
    const LexerToken token = now();
    switch (token.kind) {
      case TokenKind::kName: {
        advance();
        const std::string& name = token.text;
        if (name == "true" || name == "True") return constant(Value::of(true));
        if (name == "false" || name == "False") return constant(Value::of(false));
        if (name == "none" || name == "None") return constant(Value());
        uses_caller_ |= name == "caller";
        uses_varargs_ |= name == "varargs";
        uses_kwargs_ |= name == "kwargs";
        return make(ExpressionKind::kName, token.line, {}, name);
      }
      case TokenKind::kString: {
        std::string text;
        while (now().kind == TokenKind::kString) {
          text += now().text;
          advance();
        }
        return constant(Value::of(std::move(text)));
      }
      case TokenKind::kInteger: {
        int64_t value = 0;
        const char* const end = token.text.data() + token.text.size();
        if (std::from_chars(token.text.data(), end, value).ec != std::errc()) {
          unsupported("a whole number of more than 64 bits");
        }
        advance();
        return constant(Value::of(value));
      }
      case TokenKind::kFloat: {
        double value = 0;
        const char* const end = token.text.data() + token.text.size();
        if (std::from_chars(token.text.data(), end, value).ec != std::errc()) {
          unsupported("a number that double does not hold");
        }
        advance();
        return constant(Value::of(value));
      }
      default:
        break;
    }
    if (take_operator("(")) {
      ExpressionPtr value = parse_tuple(true, true);
      need_operator(")");
      return value;
    }
    if (take_operator("[")) {
      ExpressionPtr list = make(ExpressionKind::kList, token.line);
      while (!is_operator("]")) {
        if (!list->parts.empty()) need_operator(",");
        if (is_operator("]")) break;
        list->parts.push_back(parse_expression());
      }
      advance();
      return checked(std::move(list));
    }
    if (take_operator("{")) {
      ExpressionPtr dict = make(ExpressionKind::kDict, token.line);
      while (!is_operator("}")) {
        if (!dict->parts.empty()) need_operator(",");
        if (is_operator("}")) break;
        dict->parts.push_back(parse_expression());
        need_operator(":");
        dict->parts.push_back(parse_expression());
      }
      advance();
      return checked(std::move(dict));
    }
    fail("a value is missing before ", shown(), ".");
  }

  // Values with commas between: a tuple. `in_parentheses`: it may be empty.
  ExpressionPtr parse_tuple(bool in_parentheses, bool with_condition) {
    const Level level(*this);
    const int line = now().line;
    std::vector<ExpressionPtr> parts;
    bool is_tuple = false;
    for (;;) {
      if (!parts.empty()) {
        need_operator(",");
        is_tuple = true;
      }
      if (now().kind == TokenKind::kVariableEnd || now().kind == TokenKind::kBlockEnd ||
          is_operator(")") || is_name("recursive")) {
        break;
      }
      parts.push_back(parse_expression(with_condition));
      if (!is_operator(",")) break;
      is_tuple = true;
    }
    if (!is_tuple && !parts.empty()) return std::move(parts[0]);
    if (parts.empty() && !in_parentheses) fail("a value is missing before ", shown(), ".");
    return make(ExpressionKind::kTuple, line, std::move(parts));
  }

  ExpressionPtr parse_postfix(ExpressionPtr value) {
    for (;;) {
      if (is_operator(".") || is_operator("[")) {
        value = parse_subscript(std::move(value));
      } else if (is_operator("(")) {
        value = parse_call(ExpressionKind::kCall, std::move(value), "");
      } else {
        return value;
      }
    }
  }

  ExpressionPtr parse_subscript(ExpressionPtr value) {
    const int line = now().line;
    if (take_operator(".")) {
      const LexerToken token = now();
      if (token.kind == TokenKind::kInteger) {
        ExpressionPtr place = parse_primary();
        return make_of(ExpressionKind::kItem, line, "", std::move(value), std::move(place));
      }
      return make_of(ExpressionKind::kAttribute, line, need_name(), std::move(value));
    }
    advance();  // [
    ExpressionPtr bounds[3];
    bool is_slice = false;
    size_t place = 0;
    while (!is_operator("]")) {
      if (is_operator(",")) unsupported("several places in [ ]");
      if (take_operator(":")) {
        is_slice = true;
        if (++place > 2) fail("a slice has at most three parts.");
        continue;
      }
      if (bounds[place] != nullptr) fail("']' is missing before ", shown(), ".");
      bounds[place] = parse_expression();
    }
    advance();
    if (is_slice) {
      return make_of(ExpressionKind::kSlice, line, "", std::move(value), std::move(bounds[0]),
                     std::move(bounds[1]), std::move(bounds[2]));
    }
    if (bounds[0] == nullptr) fail("a place is missing in [ ].");
    return make_of(ExpressionKind::kItem, line, "", std::move(value), std::move(bounds[0]));
  }

  // The arguments in parentheses, behind the parts that are there.
  ExpressionPtr parse_call(ExpressionKind kind, ExpressionPtr value, std::string name) {
    const int line = now().line;
    ExpressionPtr call = make_of(kind, line, std::move(name), std::move(value));
    parse_arguments(*call);
    return checked(std::move(call));
  }
  void parse_arguments(Expression& call) {
    need_operator("(");
    bool first = true;
    while (!is_operator(")")) {
      if (!first) need_operator(",");
      first = false;
      if (is_operator(")")) break;
      if (is_operator("*") || is_operator("**")) unsupported("a call with * or **");
      if (now().kind == TokenKind::kName && tokens_[place_ + 1].kind == TokenKind::kOperator &&
          tokens_[place_ + 1].text == "=") {
        std::string key = need_name();
        advance();
        call.named.emplace_back(std::move(key), parse_expression());
      } else {
        if (!call.named.empty()) fail("an argument without a name follows one with a name.");
        call.parts.push_back(parse_expression());
      }
    }
    advance();
  }

  std::string parse_dotted_name() {
    std::string name = need_name();
    while (take_operator(".")) name += "." + need_name();
    return name;
  }

  ExpressionPtr parse_filters(ExpressionPtr value) {
    for (;;) {
      if (is_operator("|")) {
        value = parse_filter(std::move(value));
      } else if (is_name("is")) {
        value = parse_test(std::move(value));
      } else if (is_operator("(")) {
        value = parse_call(ExpressionKind::kCall, std::move(value), "");
      } else {
        return value;
      }
    }
  }

  ExpressionPtr parse_filter(ExpressionPtr value) {
    need_operator("|");
    return parse_filter_name(std::move(value));
  }
  ExpressionPtr parse_filter_name(ExpressionPtr value) {
    const int line = now().line;
    std::string name = parse_dotted_name();
    if (is_operator("(")) {
      return parse_call(ExpressionKind::kFilter, std::move(value), std::move(name));
    }
    return make_of(ExpressionKind::kFilter, line, std::move(name), std::move(value));
  }
  // name|name(...): of a block.
  ExpressionPtr parse_filter_chain() {
    ExpressionPtr value = parse_filter_name(nullptr);
    while (is_operator("|")) value = parse_filter(std::move(value));
    return value;
  }

  ExpressionPtr parse_test(ExpressionPtr value) {
    const int line = now().line;
    advance();  // is
    const bool negated = take_name("not");
    std::string name = parse_dotted_name();
    ExpressionPtr test;
    if (is_operator("(")) {
      test = parse_call(ExpressionKind::kTest, std::move(value), std::move(name));
    } else {
      test = make_of(ExpressionKind::kTest, line, std::move(name), std::move(value));
      const TokenKind kind = now().kind;
      const bool begins_value = kind == TokenKind::kName || kind == TokenKind::kString ||
                                kind == TokenKind::kInteger || kind == TokenKind::kFloat ||
                                is_operator("[") || is_operator("{");
      if (is_name("is")) fail("a test follows a test; put the first in parentheses.");
      if (begins_value && !is_name("else") && !is_name("or") && !is_name("and")) {
        test->parts.push_back(parse_postfix(parse_primary()));
        test = checked(std::move(test));
      }
    }
    return negated ? make_of(ExpressionKind::kNot, line, "", std::move(test)) : std::move(test);
  }

  // ---- Statements

  // Up to a block of one of these names, which is not taken.
  Body parse_body(Names ends) {
    const Level level(*this);
    Body body;
    for (;;) {
      switch (now().kind) {
        case TokenKind::kEnd:
          if (ends.size() > 0) fail("the block {% ", *ends.begin(), " %} is missing.");
          return body;
        case TokenKind::kData:
          body.push_back({.kind = StatementKind::kData, .line = now().line, .text = now().text});
          advance();
          break;
        case TokenKind::kVariableBegin: {
          body.push_back({.kind = StatementKind::kPrint, .line = now().line});
          advance();
          body.back().value = parse_tuple(false, true);
          if (now().kind != TokenKind::kVariableEnd) fail("'}}' is missing before ", shown(), ".");
          advance();
          break;
        }
        default: {
          advance();  // {%
          if (now().kind != TokenKind::kName)
            fail("a block begins with a name, not ", shown(), ".");
          const bool ends_here = std::any_of(ends.begin(), ends.end(),
                                             [&](std::string_view end) { return is_name(end); });
          if (ends_here) return body;
          body.push_back(parse_statement());
        }
      }
    }
  }
  // The same, and the block's end.
  Body parse_whole_body(std::string_view end) {
    Body body = parse_body({end});
    advance();
    need_block_end();
    return body;
  }

  Statement parse_statement() {
    const int line = now().line;
    const std::string name = now().text;
    constexpr std::array<std::string_view, 7> kOfFiles = {
        "include", "import", "from", "extends", "block", "autoescape", "do"};
    if (std::find(kOfFiles.begin(), kOfFiles.end(), name) != kOfFiles.end()) {
      unsupported("{% ", name, " %}");
    }
    advance();
    Statement made{.kind = StatementKind::kBreak, .line = line};
    if (name == "for") {
      parse_for(made);
    } else if (name == "if") {
      parse_if(made);
    } else if (name == "set") {
      parse_set(made);
    } else if (name == "macro") {
      made.kind = StatementKind::kMacro;
      made.text = need_name();
      parse_macro_body(made, "endmacro");
    } else if (name == "call") {
      made.kind = StatementKind::kCall;
      if (is_operator("(")) parse_parameters(made);
      made.value = parse_expression();
      if (made.value->kind != ExpressionKind::kCall) fail("{% call %} calls a macro.");
      parse_macro_body(made, "endcall", false);
    } else if (name == "filter") {
      made.kind = StatementKind::kFilter;
      made.value = parse_filter_chain();
      need_block_end();
      made.body = in_closed_body([&] { return parse_whole_body("endfilter"); });
    } else if (name == "with") {
      made.kind = StatementKind::kWith;
      while (now().kind != TokenKind::kBlockEnd) {
        if (!made.parameters.empty()) need_operator(",");
        std::string key = need_name();
        need_operator("=");
        made.parameters.push_back({std::move(key), parse_expression()});
      }
      advance();
      made.body = parse_whole_body("endwith");
    } else if (name == "generation") {
      made.kind = StatementKind::kGeneration;
      tree_.marks_generation = true;
      need_block_end();
      made.body = in_closed_body([&] { return parse_whole_body("endgeneration"); });
    } else if (name == "break" || name == "continue") {
      if (name == "continue") made.kind = StatementKind::kContinue;
      if (loops_ == 0) fail("{% ", name, " %} stands in a loop; this one does not.");
      need_block_end();
    } else {
      fail("there is no block {% ", name, " %}.");
    }
    return made;
  }

  // A body that a loop outside cannot be left from.
  Body in_closed_body(const std::function<Body()>& parse) {
    const int loops = std::exchange(loops_, 0);
    Body body = parse();
    loops_ = loops;
    return body;
  }

  // Names to assign to: one, several, or an attribute of a namespace.
  ExpressionPtr parse_target(bool with_namespace) {
    const int line = now().line;
    if (with_namespace && tokens_[place_ + 1].kind == TokenKind::kOperator &&
        tokens_[place_ + 1].text == ".") {
      const std::string space = need_name();
      advance();
      ExpressionPtr name = make(ExpressionKind::kName, line, {}, space);
      return make_of(ExpressionKind::kAttribute, line, need_name(), std::move(name));
    }
    const bool closed = take_operator("(");
    std::vector<ExpressionPtr> names;
    do {
      if (!names.empty() && now().kind != TokenKind::kName) break;
      const int at = now().line;
      const std::string name = need_name();
      constexpr std::array<std::string_view, 6> kReserved = {"true",  "True", "false",
                                                             "False", "none", "None"};
      if (std::find(kReserved.begin(), kReserved.end(), name) != kReserved.end()) {
        fail("nothing can be assigned to '", name, "'.");
      }
      names.push_back(make(ExpressionKind::kName, at, {}, name));
    } while (take_operator(","));
    if (closed) need_operator(")");
    if (names.size() == 1) return std::move(names[0]);
    return make(ExpressionKind::kTuple, line, std::move(names));
  }

  void parse_for(Statement& made) {
    made.kind = StatementKind::kFor;
    made.target = parse_target(false);
    if (!take_name("in")) fail("'in' is missing before ", shown(), ".");
    made.value = parse_tuple(false, false);
    if (take_name("if")) made.condition = parse_expression();
    if (is_name("recursive")) unsupported("a recursive loop");
    need_block_end();
    ++loops_;
    made.body = parse_body({"endfor", "else"});
    --loops_;
    const bool has_else = is_name("else");
    advance();
    need_block_end();
    if (has_else) made.other = parse_whole_body("endfor");
  }

  void parse_if(Statement& made) {
    made.kind = StatementKind::kIf;
    for (bool is_last = false;;) {
      ExpressionPtr condition = is_last ? nullptr : parse_tuple(false, false);
      need_block_end();
      Body body = is_last ? parse_body({"endif"}) : parse_body({"endif", "elif", "else"});
      made.branches.push_back({std::move(condition), std::move(body)});
      const std::string next = now().text;
      advance();
      if (next == "endif") break;
      is_last = next == "else";
    }
    need_block_end();
  }

  void parse_set(Statement& made) {
    made.target = parse_target(true);
    if (take_operator("=")) {
      made.kind = StatementKind::kSet;
      made.value = parse_tuple(false, true);
      return need_block_end();
    }
    made.kind = StatementKind::kSetBlock;
    if (take_operator("|")) made.value = parse_filter_chain();
    need_block_end();
    made.body = in_closed_body([&] { return parse_whole_body("endset"); });
  }

  void parse_parameters(Statement& made) {
    need_operator("(");
    while (!is_operator(")")) {
      if (!made.parameters.empty()) need_operator(",");
      if (is_operator(")")) break;
      std::string name = need_name();
      ExpressionPtr value = take_operator("=") ? parse_expression() : nullptr;
      if (value == nullptr && !made.parameters.empty() && made.parameters.back().value != nullptr) {
        fail("a parameter without a default follows one with a default.");
      }
      made.parameters.push_back({std::move(name), std::move(value)});
    }
    advance();
  }

  void parse_macro_body(Statement& made, std::string_view end, bool with_parameters = true) {
    const bool caller = std::exchange(uses_caller_, false);
    const bool varargs = std::exchange(uses_varargs_, false);
    const bool kwargs = std::exchange(uses_kwargs_, false);
    if (with_parameters) parse_parameters(made);
    need_block_end();
    made.body = in_closed_body([&] { return parse_whole_body(end); });
    made.uses_caller = std::exchange(uses_caller_, caller);
    made.uses_varargs = std::exchange(uses_varargs_, varargs);
    made.uses_kwargs = std::exchange(uses_kwargs_, kwargs);
  }

  std::vector<LexerToken> tokens_;  // the last one is kEnd
  const std::string& name_;
  Tree tree_;
  size_t place_ = 0;
  int depth_ = 0, loops_ = 0;
  bool uses_caller_ = false, uses_varargs_ = false, uses_kwargs_ = false;
};

}  // namespace

Tree parse_template(std::string_view source, const std::string& name) {
  TS_CHECK_AS(FormatError, source.size() <= kMostTemplateBytes, kChatTemplate, "'", name, "' has ",
              source.size(), " bytes, and at most ", kMostTemplateBytes,
              " are read; get the file again.");
  const std::string text =
      find_invalid_utf8(source) ? replace_invalid_utf8(source) : std::string(source);
  return Parser(read_tokens(text, name), name).run();
}

}  // namespace tessera::data::jinja
