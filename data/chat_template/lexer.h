// Cuts a chat template into tokens, by Jinja's rules of white space with trim_blocks and
// lstrip_blocks. Included by this folder's .cpp files only.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/data/chat_template/run.h>

namespace tessera::data::jinja {

enum class TokenKind : uint8_t {
  kData,
  kVariableBegin,
  kVariableEnd,
  kBlockBegin,
  kBlockEnd,
  kName,
  kString,  // text: its value
  kInteger,
  kFloat,
  kOperator,
  kEnd,
};

struct LexerToken {
  TokenKind kind;
  int line;
  std::string text;
};

// FormatError: unclosed or unbalanced constructs, characters that stand for nothing.
std::vector<LexerToken> read_tokens(std::string_view source, const std::string& name);

// An error of syntax.
template <class... Parts>
[[noreturn]] void syntax_error(const std::string& name, int line, const Parts&... parts) {
  TS_THROW(FormatError, kChatTemplate, "'", name, "' line ", line, ": ", parts...);
}

}  // namespace tessera::data::jinja
