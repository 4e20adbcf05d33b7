// A chat template as a tree. Included by this folder's .cpp files only.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <tessera/data/chat_template/value.h>

namespace tessera::data::jinja {

struct Expression;
using ExpressionPtr = std::unique_ptr<Expression>;

enum class ExpressionKind : uint8_t {
  kConstant,
  kName,
  kList,       // parts
  kTuple,      // parts
  kDict,       // parts: key, value, key, value...
  kNegative,   // parts[0]
  kPositive,   // parts[0]
  kNot,        // parts[0]
  kAnd,        // parts[0], parts[1]
  kOr,         // parts[0], parts[1]
  kBinary,     // name: + - * / // % **
  kConcat,     // parts, as texts
  kCompare,    // parts, with operators between them: == != < <= > >= in, not in
  kCondition,  // parts[0] if parts[1] else parts[2], which may be absent
  kAttribute,  // parts[0].name
  kItem,       // parts[0][parts[1]]
  kSlice,      // parts[0][parts[1]:parts[2]:parts[3]], absent ones nullptr
  kCall,       // parts[0](parts[1]..., named)
  kFilter,     // parts[0] | name(parts[1]..., named); parts[0] is absent in a filter block
  kTest,       // parts[0] is name(parts[1]..., named)
};

struct Expression {
  ExpressionKind kind;
  int line;
  int depth = 1;
  std::string name = {};
  Value constant = {};
  std::vector<ExpressionPtr> parts = {};
  std::vector<std::pair<std::string, ExpressionPtr>> named = {};
  std::vector<std::string> operators = {};
};

struct Statement;
using Body = std::vector<Statement>;

enum class StatementKind : uint8_t {
  kData,        // text
  kPrint,       // value
  kFor,         // for target in value if condition: body, else other
  kIf,          // branches
  kSet,         // target, value
  kSetBlock,    // target, body; value: a chain of filters, if there is one
  kMacro,       // text(parameters): body
  kCall,        // call(parameters) value: body
  kFilter,      // value: a chain of filters of the body
  kWith,        // parameters: names and values; body
  kGeneration,  // body
  kBreak,
  kContinue,
};

struct Parameter {
  std::string name;
  ExpressionPtr value;  // nullptr: none
};

struct Branch {
  ExpressionPtr condition;  // nullptr: else
  Body body;
};

struct Statement {
  StatementKind kind;
  int line;
  std::string text = {};
  ExpressionPtr target = {}, value = {}, condition = {};
  std::vector<Parameter> parameters = {};
  std::vector<Branch> branches = {};
  Body body = {}, other = {};
  // A macro or call block whose body asks for these.
  bool uses_caller = false, uses_varargs = false, uses_kwargs = false;
};

struct Tree {
  Body body;
  bool marks_generation = false;
};

}  // namespace tessera::data::jinja
