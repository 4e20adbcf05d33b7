#include <tessera/core/regex.h>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <tessera/core/error.h>

namespace tessera {
namespace {

constexpr size_t kMostPatternBytes =
    4096;  // a link of PCRE2 has 16 bits: 64 KiB are compiled at most
constexpr uint32_t kMostParentheses = 64;
constexpr uint32_t kMostKibibytes = 1024;

template <auto free>
struct Free {
  void operator()(auto* pointer) const { free(pointer); }
};
using Code = std::unique_ptr<pcre2_code, Free<pcre2_code_free>>;
using CompileContext = std::unique_ptr<pcre2_compile_context, Free<pcre2_compile_context_free>>;
using MatchContext = std::unique_ptr<pcre2_match_context, Free<pcre2_match_context_free>>;
using MatchData = std::unique_ptr<pcre2_match_data, Free<pcre2_match_data_free>>;

std::string text_of(int error) {
  unsigned char text[256] = {};
  pcre2_get_error_message(error, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}
PCRE2_SPTR bytes_of(std::string_view text) {
  return reinterpret_cast<PCRE2_SPTR>(text.empty() ? "" : text.data());
}

}  // namespace

struct Regex::Compiled {
  std::string name, pattern;
  Code code;
  MatchContext limits;

  // The groups, where there is a match.
  MatchData match(std::string_view text, uint32_t options) const {
    MatchData data(pcre2_match_data_create_from_pattern(code.get(), nullptr));
    return match_from(text, 0, options | PCRE2_ANCHORED, data.get()) ? std::move(data) : nullptr;
  }

  bool match_from(std::string_view text, size_t start, uint32_t options,
                  pcre2_match_data* data) const {
    int found =
        pcre2_match(code.get(), bytes_of(text), text.size(), start, options, data, limits.get());
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) {  // the interpreter has its own, larger memory
      found = pcre2_match(code.get(), bytes_of(text), text.size(), start, options | PCRE2_NO_JIT,
                          data, limits.get());
    }
    if (found == PCRE2_ERROR_NOMATCH) return false;
    TS_CHECK_AS(ConfigError, found > 0, name, "'", pattern.substr(0, 200),
                "' cannot be matched with '", text.substr(0, 200), "': ", text_of(found),
                "; write an expression that has one way to match");
    return true;
  }
};

Regex::Regex(std::string_view pattern, std::string name, const RegexOptions& options)
    : compiled_(std::make_unique<Compiled>()) {
  Compiled& made = *compiled_;
  made.name = std::move(name);
  made.pattern = pattern;
  const CompileContext context(pcre2_compile_context_create(nullptr));
  pcre2_set_max_pattern_length(context.get(), kMostPatternBytes);
  pcre2_set_parens_nest_limit(context.get(), kMostParentheses);
  int error = 0;
  size_t place = 0;
  made.code.reset(pcre2_compile(bytes_of(pattern), pattern.size(),
                                PCRE2_UTF | PCRE2_NEVER_BACKSLASH_C |
                                    (options.many_matches ? 0 : PCRE2_MATCH_INVALID_UTF) |
                                    (options.unicode ? PCRE2_UCP : 0),
                                &error, &place, context.get()));
  TS_CHECK_AS(ConfigError, made.code != nullptr, made.name, "'", pattern.substr(0, 200),
              "' is no regular expression that is read here: ", text_of(error), " (at byte ", place,
              ")");
  made.limits.reset(pcre2_match_context_create(nullptr));
  pcre2_set_match_limit(made.limits.get(), options.most_steps);
  pcre2_set_depth_limit(made.limits.get(), options.most_steps);
  pcre2_set_heap_limit(made.limits.get(), kMostKibibytes);
  // Without machine code it matches the same, and slower.
  if (options.many_matches) pcre2_jit_compile(made.code.get(), PCRE2_JIT_COMPLETE);
}
Regex::~Regex() = default;
Regex::Regex(Regex&&) noexcept = default;
Regex& Regex::operator=(Regex&&) noexcept = default;

void Regex::for_each_match(std::string_view text,
                           const std::function<void(size_t, size_t)>& visit) const {
  const MatchData data(pcre2_match_data_create_from_pattern(compiled_->code.get(), nullptr));
  const size_t* const places = pcre2_get_ovector_pointer(data.get());
  std::optional<size_t> last_end;
  for (size_t start = 0; start <= text.size();) {
    if (!compiled_->match_from(text, start, PCRE2_NO_UTF_CHECK, data.get())) return;
    const size_t begin = places[0], end = places[1];
    if (begin == end && last_end == end) {
      do ++start;
      while (start < text.size() && (text[start] & 0xC0) == 0x80);
      continue;
    }
    visit(begin, end);
    start = end;
    last_end = end;
  }
}

bool Regex::matches(std::string_view text) const {
  return compiled_->match(text, PCRE2_ENDANCHORED) != nullptr;
}

std::optional<std::string> Regex::group(std::string_view text, const char* name) const {
  const MatchData data = compiled_->match(text, 0);
  if (data == nullptr) return {};
  const int number =
      pcre2_substring_number_from_name(compiled_->code.get(), reinterpret_cast<PCRE2_SPTR>(name));
  if (number < 0) return {};
  const size_t* const places = pcre2_get_ovector_pointer(data.get()) + 2 * number;
  if (places[0] == PCRE2_UNSET || places[0] > places[1]) return {};
  return std::string(text.substr(places[0], places[1] - places[0]));
}

}  // namespace tessera
