// Chat templates: what makes one text of a conversation, as tokenizer_config.json brings it.
//
//     auto chat = ChatTemplate::parse("{{ bos_token }}{{ messages[0].content }}", "my template");
//     chat.render({{"messages", R"([{"role": "user", "content": "Hi"}])"},
//                  {"bos_token", R"("<s>")"}, {"add_generation_prompt", "true"}}).text;
//
// PretrainedTokenizer::apply_chat_template() is this with a model's own template and tokens.
//
// The language is Jinja's, as transformers runs it: trim_blocks and lstrip_blocks, loop controls,
// a sandbox in which lists and dicts do not change, raise_exception(), strftime_now(), its tojson,
// and {% generation %} around what the assistant says. Known are expressions with their operators,
// slices, calls, inline if, filters and tests; if, for, set (blocks and namespaces, too), macro,
// call, filter, with, raw, break and continue; methods of texts and dicts. Templates of other files
// (include, import, extends), autoescaping and HTML's filters are not: UnsupportedError names the
// line and the construct.
//
// Templates come from strangers: steps, depth and bytes are bounded, and nothing outside of the
// variables can be read but the time.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/data/chat_template/rendered_chat.h>

namespace tessera::data {

// A variable of the template, as JSON.
struct ChatVariable {
  std::string name, json;
};

struct ChatRenderOptions {
  // The text ends where the last message does, for a model that goes on with it.
  bool continue_final_message = false;
  std::optional<int64_t> now = {};  // seconds since 1970 of strftime_now(); absent: the clock's
  ChatTemplateLimits limits = {};
};

class ChatTemplate {
 public:
  // `name` stands in errors. FormatError naming line and construct for what is no template;
  // UnsupportedError for a statement that is not known here.
  static ChatTemplate parse(std::string_view source, const std::string& name);

  // `messages` is a list of objects, and becomes what transformers passes: fields of messages that
  // are null are left out, and what a model thought has the names reasoning_content and thinking.
  // ValueError naming line and construct for values that do not fit the template, and with its
  // words where it calls raise_exception(), and for a conversation that cannot be continued;
  // UnsupportedError; FormatError for what is no JSON, an unknown filter or test, and beyond the
  // limits. Threads may share a template.
  RenderedChat render(const std::vector<ChatVariable>& variables,
                      const ChatRenderOptions& options = {}) const;

  // Whether it has {% generation %}.
  bool marks_generation() const;

 private:
  struct Program;
  std::shared_ptr<const Program> program_;
};

}  // namespace tessera::data
