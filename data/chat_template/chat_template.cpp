#include <tessera/data/chat_template/chat_template.h>

#include <algorithm>
#include <array>
#include <ctime>

#include <tessera/data/chat_template/evaluator.h>
#include <tessera/data/chat_template/operators.h>
#include <tessera/data/chat_template/parser.h>
#include <tessera/data/chat_template/texts.h>

namespace tessera::data {

struct ChatTemplate::Program {
  std::string name, source;
  jinja::Tree tree;
};

namespace {

using jinja::DictBuilder;
using jinja::DictData;
using jinja::ListData;
using jinja::Run;
using jinja::Value;

// Names that transformers takes for what a model thought; the first one is for templates.
constexpr std::array<std::string_view, 3> kThoughts = {"reasoning_content", "thinking",
                                                       "reasoning"};

// Marks the place up to which a conversation is kept.
constexpr std::string_view kMark = "CONTINUE_FINAL_MESSAGE_TAG ";

template <class... Parts>
void require(bool holds, const Parts&... parts) {
  TS_CHECK(holds, jinja::kChatTemplate, parts...);
}

Value message_for_template(Run& run, const Value& message) {
  require(message.dict() != nullptr, "a message is a JSON object; one is a ", message.type_name(),
          ".");
  const DictData& fields = *message.dict();
  const Value* thought = nullptr;
  for (const std::string_view name : kThoughts) {
    const Value* const found = fields.find(name);
    if (thought == nullptr && found != nullptr && !found->is_none()) thought = found;
  }
  DictBuilder dict;
  if (thought != nullptr) dict.put(run, Value::of(std::string(kThoughts[1])), *thought);
  for (const auto& [name, value] : fields.items) {
    if (!value.is_none()) dict.put(run, name, value);
  }
  if (thought != nullptr) dict.put(run, Value::of(std::string(kThoughts[0])), *thought);
  return dict.finish(run);
}

Value with_field(Run& run, const Value& dict, std::string_view name, const Value& changed) {
  DictBuilder made;
  for (const auto& [key, value] : dict.dict()->items) {
    made.put(run, key, key.text() != nullptr && *key.text() == name ? changed : value);
  }
  return made.finish(run);
}

Value with_mark(const std::string& text) { return Value::of(text + std::string(kMark)); }

// The content with the mark at its end, or at that of its last part that has a text.
Value marked_content(Run& run, const Value& content, std::string& last_text) {
  if (const std::string* const text = content.text()) {
    last_text = *text;
    return with_mark(*text);
  }
  require(content.list() != nullptr,
          "the last message must have a text to be continued; its content is a ",
          content.type_name(), ".");
  std::vector<Value> parts = content.list()->items;
  const auto last = std::find_if(parts.rbegin(), parts.rend(), [](const Value& part) {
    const Value* const text =
        part.dict() == nullptr ? nullptr : part.dict()->find(std::string_view("text"));
    return text != nullptr && text->text() != nullptr;
  });
  require(last != parts.rend(), "the last message must have a text to be continued; it has none.");
  last_text = *last->dict()->find(std::string_view("text"))->text();
  *last = with_field(run, *last, "text", with_mark(last_text));
  return make_list(run, std::move(parts));
}

std::vector<Value> messages_of(Run& run, const Value& value) {
  require(value.list() != nullptr && !value.list()->items.empty(),
          "messages are a list of at least one; got a ", value.type_name(), ".");
  std::vector<Value> messages;
  for (const Value& message : value.list()->items)
    messages.push_back(message_for_template(run, message));
  return messages;
}

// Cuts a text at the mark.
void cut_at_mark(std::string& text, std::string_view last_text) {
  const size_t mark = jinja::find_last_part(text, kMark.substr(0, kMark.size() - 1));
  const std::string_view said = jinja::strip_spaces(last_text, true, true);
  require(mark != text.npos && jinja::find_part(text, said) != text.npos,
          "the template changes or leaves out the last message, so it cannot be continued; give a "
          "last message that it keeps.");
  const bool keeps_spaces = text.compare(mark, kMark.size(), kMark) == 0;
  text.resize(mark);
  if (!keeps_spaces) text.resize(jinja::strip_spaces(text, false, true).size());
}

}  // namespace

ChatTemplate ChatTemplate::parse(std::string_view source, const std::string& name) {
  ChatTemplate made;
  made.program_ = std::make_shared<const Program>(
      Program{name, std::string(source), jinja::parse_template(source, name)});
  return made;
}

RenderedChat ChatTemplate::render(const std::vector<ChatVariable>& variables,
                                  const ChatRenderOptions& options) const {
  Run run(program_->name, options.limits);
  DictBuilder values;
  std::string last_text;
  bool has_messages = false;
  for (const ChatVariable& variable : variables) {
    run.at(1, "");
    Value value = jinja::value_of_json(run, variable.json, variable.name);
    if (variable.name == "messages") {
      has_messages = true;
      std::vector<Value> messages = messages_of(run, value);
      if (options.continue_final_message) {
        require(program_->source.find("content") != std::string::npos,
                "the template has no use for a message's content, so it cannot be continued.");
        Value& last = messages.back();
        const Value* const content = last.dict()->find(std::string_view("content"));
        require(content != nullptr,
                "the last message must have a content to be continued; it has none.");
        last = with_field(run, last, "content", marked_content(run, *content, last_text));
      }
      value = make_list(run, std::move(messages));
    }
    values.put(run, Value::of(variable.name), std::move(value));
  }
  require(has_messages || !options.continue_final_message,
          "only messages can be continued; give some.");
  const Value all = values.finish(run);
  RenderedChat chat =
      jinja::render(program_->tree, run, all, options.now.value_or(std::time(nullptr)));
  if (options.continue_final_message) cut_at_mark(chat.text, last_text);
  return chat;
}

bool ChatTemplate::marks_generation() const { return program_->tree.marks_generation; }

}  // namespace tessera::data
