// PretrainedTokenizer::apply_chat_template.
#include <tessera/data/tokenizer_json/chat.h>

#include <mutex>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include <tessera/core/error.h>
#include <tessera/core/io/bounded_json.h>
#include <tessera/data/text/text.h>
#include <tessera/data/tokenizer_json/chat_template_cache.h>
#include <tessera/data/tokenizer_json/json_fields.h>
#include <tessera/data/tokenizer_json/pretrained_tokenizer.h>

namespace tessera::data {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr size_t kMostCached = 16;  // templates of a program are few

std::string json_text(const std::string& text) {
  const bool valid = !find_invalid_utf8(text);
  return nlohmann::json(valid ? text : replace_invalid_utf8(text)).dump();
}

OrderedJson object_of(const std::string& text, const std::string& what) {
  std::string why;
  auto json = parse_bounded_json<OrderedJson>(text, what, &why);
  TS_CHECK_AS(
      FormatError, json.is_object(), kPretrained, what, " must be a JSON object; ",
      json.is_discarded() ? replace_invalid_utf8(why) : "it is a " + std::string(json.type_name()),
      "; correct it.");
  return json;
}

std::string json_of(const std::vector<ChatMessage>& messages) {
  std::string list = "[";
  for (const ChatMessage& message : messages) {
    if (list.size() > 1) list += ',';
    list += "{\"role\":" + json_text(message.role) + ",\"content\":" + json_text(message.content);
    if (!message.fields.empty()) {
      // Of a name that stands twice the last value counts.
      const std::string fields = object_of(message.fields, "fields of a message").dump();
      if (fields.size() > 2) list += "," + fields.substr(1, fields.size() - 2);
    }
    list += '}';
  }
  return list + ']';
}

const std::string& chosen_template(const PretrainedConfig& config, const ChatOptions& options) {
  if (!options.chat_template.empty()) {
    const std::string* const named = config.chat_template(options.chat_template);
    return named != nullptr ? *named : options.chat_template;
  }
  const std::string* found = options.tools.empty() ? nullptr : config.chat_template("tool_use");
  if (found == nullptr) found = config.chat_template();
  TS_CHECK(found != nullptr, kPretrained, "the tokenizer has ",
           config.chat_templates.empty() ? "no chat template" : "no chat template called default",
           "; give ChatOptions::chat_template ",
           config.chat_templates.empty()
               ? "one"
               : "the name of one: '" + config.chat_templates[0].first + "'...",
           ".");
  return *found;
}

std::vector<ChatVariable> variables_of(const PretrainedConfig& config, std::string_view messages,
                                       const ChatOptions& options) {
  std::vector<ChatVariable> variables = {
      {"messages", std::string(messages)},
      {"tools", options.tools.empty() ? "null" : options.tools},
      {"documents", options.documents.empty() ? "null" : options.documents},
      {"add_generation_prompt", options.add_generation_prompt ? "true" : "false"},
  };
  const auto add = [&](const char* name, const std::optional<std::string>& token) {
    if (token) variables.push_back({name, json_text(*token)});
  };
  add("bos_token", config.bos_token);
  add("eos_token", config.eos_token);
  add("unk_token", config.unk_token);
  add("sep_token", config.sep_token);
  add("pad_token", config.pad_token);
  add("cls_token", config.cls_token);
  add("mask_token", config.mask_token);
  if (options.variables.empty()) return variables;
  const OrderedJson more = object_of(options.variables, "ChatOptions::variables");
  for (const auto& [name, value] : more.items()) {
    for (const char* const own : {"messages", "tools", "documents", "add_generation_prompt"}) {
      TS_CHECK(name != own, kPretrained, "'", own,
               "' is an option or argument of its own; leave it out of variables.");
    }
    variables.push_back({name, value.dump()});
  }
  return variables;
}

}  // namespace

ChatTemplate ChatTemplateCache::get(const std::string& source) {
  const std::lock_guard lock(mutex_);
  const auto found = templates_.find(source);
  if (found != templates_.end()) return found->second;
  if (templates_.size() >= kMostCached) templates_.clear();
  return templates_.emplace(source, ChatTemplate::parse(source, "chat_template")).first->second;
}

std::vector<TokenId> token_mask(const std::vector<TokenOffset>& offsets,
                                const std::vector<CharacterSpan>& spans) {
  std::vector<TokenId> mask(offsets.size(), 0);
  size_t span = 0;
  for (size_t i = 0; i < offsets.size(); ++i) {
    while (span < spans.size() && offsets[i].begin >= spans[span].end) ++span;
    if (span == spans.size()) break;
    if (offsets[i].end > spans[span].begin) mask[i] = 1;
  }
  return mask;
}

Chat PretrainedTokenizer::apply_chat_template(const std::vector<ChatMessage>& messages,
                                              const ChatOptions& options) const {
  return apply_chat_template_json(json_of(messages), options);
}

RenderedChat PretrainedTokenizer::render_chat(std::string_view messages,
                                              const ChatOptions& options) const {
  TS_CHECK(!options.continue_final_message || !options.add_generation_prompt, kPretrained,
           "continue_final_message ends within a message and add_generation_prompt begins one; "
           "choose one of them.");
  return chat_templates_->get(chosen_template(config(), options))
      .render(variables_of(config(), messages, options),
              {.continue_final_message = options.continue_final_message,
               .now = options.now,
               .limits = options.limits});
}

bool PretrainedTokenizer::marks_generation(const ChatOptions& options) const {
  return chat_templates_->get(chosen_template(config(), options)).marks_generation();
}

Chat PretrainedTokenizer::apply_chat_template_json(std::string_view messages,
                                                   const ChatOptions& options) const {
  RenderedChat rendered = render_chat(messages, options);
  Chat chat;
  chat.text = std::move(rendered.text);
  if (options.continue_final_message || !marks_generation(options)) {
    encode(chat.text, chat.ids);
    return chat;
  }
  PretrainedEncoding encoding = encode_text(chat.text, PretrainedEncodeOptions::whole(false));
  chat.ids = std::move(encoding.ids);
  chat.assistant_mask = token_mask(encoding.offsets, rendered.generated);
  return chat;
}

}  // namespace tessera::data
