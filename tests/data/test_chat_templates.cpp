// Chat templates: texts, ids and masks of transformers for conversations in the form of each
// family, the language as jinja2 has it, and templates of strangers.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/data/chat_template/chat_template.h>
#include <tessera/data/tokenizer_json/pretrained_tokenizer.h>

#include "golden_files.h"
#include "message_of.h"

namespace tessera::data::test_chat_templates {
namespace {

using Json = nlohmann::ordered_json;  // templates show dicts in their order
using Ids = std::vector<TokenId>;

Json golden(const std::string& name) {
  std::ifstream file(tests::golden_path("chat_templates/" + name));
  return Json::parse(file);
}

std::string source_of(const std::string& name) {
  std::ifstream file(tests::golden_path("chat_templates/" + name + ".jinja"));
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_FALSE(text.str().empty()) << name;
  return text.str();
}

const PretrainedTokenizer& tokenizer() {
  static const auto made =
      PretrainedTokenizer::from_pretrained(tests::golden_path("tokenizers/qwen2"));
  return made;
}

std::string text_at(const Json& json, const char* key) {
  return json.contains(key) ? json[key].dump() : "";
}

ChatOptions options_of(const Json& given, int64_t now) {
  Json variables = {{"bos_token", "<s>"}, {"eos_token", "</s>"}, {"pad_token", "<pad>"}};
  if (given.contains("variables")) variables.update(given["variables"]);
  return {.add_generation_prompt = given.value("add_generation_prompt", false),
          .tools = text_at(given, "tools"),
          .documents = text_at(given, "documents"),
          .variables = variables.dump(),
          .now = now};
}

TEST(ChatTemplates, EveryFamilysFormGivesTheTextsOfTransformers) {
  const Json cases = golden("cases.json");
  size_t texts = 0, errors = 0;
  for (const auto& [name, list] : cases["templates"].items()) {
    const std::string source = source_of(name);
    for (const Json& one : list) {
      const Json& conversation = cases["conversations"][one["conversation"].get<size_t>()];
      ChatOptions options =
          options_of(cases["options"][one["options"].get<size_t>()], cases["now"].get<int64_t>());
      options.chat_template = source;
      SCOPED_TRACE(name + " " + one["conversation"].dump() + " " + one["options"].dump());
      const auto apply = [&] {
        return tokenizer().apply_chat_template_json(conversation.dump(), options);
      };
      if (one.contains("error")) {
        ++errors;
        const std::string message = message_of<ValueError>(apply);
        EXPECT_TRUE(mentions(message, " line ")) << message;
        continue;
      }
      ++texts;
      const Chat chat = apply();
      EXPECT_EQ(chat.text, one["text"].get<std::string>());
      EXPECT_EQ(chat.ids, tokenizer().encode(chat.text));
      EXPECT_EQ(chat.assistant_mask.empty(), !one.contains("mask"));
      if (!one.contains("mask")) continue;
      EXPECT_EQ(chat.ids, one["ids"].get<Ids>());
      EXPECT_EQ(chat.assistant_mask, one["mask"].get<Ids>());
    }
  }
  EXPECT_GT(texts, 350u);
  EXPECT_GT(errors, 50u);
}

std::vector<ChatVariable> variables_of(const Json& values) {
  std::vector<ChatVariable> variables;
  for (const auto& [name, value] : values.items()) variables.push_back({name, value.dump()});
  return variables;
}

TEST(ChatTemplates, TheLanguageIsJinjas) {
  const Json file = golden("language.json");
  const std::vector<ChatVariable> variables = variables_of(file["variables"]);
  const ChatRenderOptions options{.now = file["now"].get<int64_t>()};
  for (const Json& snippet : file["snippets"]) {
    const auto source = snippet["template"].get<std::string>();
    SCOPED_TRACE(source);
    const auto render = [&] {
      return ChatTemplate::parse(source, "t").render(variables, options).text;
    };
    if (snippet.contains("error")) {
      const std::string message = message_of<Error>(render);
      EXPECT_TRUE(mentions(message, "'t' line 1")) << message;
    } else {
      try {
        EXPECT_EQ(render(), snippet["text"].get<std::string>());
      } catch (const Error& error) {
        ADD_FAILURE() << error.what();
      }
    }
  }
}

TEST(ChatTemplates, AMessageIsContinuedWhereItEnds) {
  const Json file = golden("language.json");
  for (const Json& one : file["continued"]) {
    const Chat chat = tokenizer().apply_chat_template_json(
        one["conversation"].dump(), {.continue_final_message = true,
                                     .variables = R"({"bos_token": "<s>", "eos_token": "</s>"})",
                                     .chat_template = source_of(one["template"])});
    EXPECT_EQ(chat.text, one["text"].get<std::string>());
  }
  const std::vector<ChatMessage> chat = {{"user", "Hi"}, {"assistant", "I"}};
  const auto refused = [&](const ChatOptions& options) {
    return message_of<ValueError>([&] { tokenizer().apply_chat_template(chat, options); });
  };
  EXPECT_TRUE(mentions(refused({.add_generation_prompt = true, .continue_final_message = true}),
                       "choose one"));
  EXPECT_TRUE(mentions(
      refused({.continue_final_message = true, .chat_template = "{{ messages[0].content }}"}),
      "leaves out the last message"));
  EXPECT_TRUE(
      mentions(refused({.continue_final_message = true, .chat_template = "x"}), "no use for"));
}

TEST(ChatTemplates, OptionsReachTheTemplate) {
  const auto text = [&](const ChatOptions& options) {
    return tokenizer()
        .apply_chat_template({{"user", "\"H\xffi\"", R"({"content": "x", "k": [1]})"}}, options)
        .text;
  };
  EXPECT_EQ(text({.chat_template = "{{ messages }}"}),
            "[{'role': 'user', 'content': 'x', 'k': [1]}]");
  EXPECT_EQ(text({.chat_template = "{{ tools }}{{ documents }}{{ add_generation_prompt }}"}),
            "NoneNoneFalse");
  EXPECT_EQ(text({.variables = R"({"a": {"z": 1, "y": 2}})", .chat_template = "{{ a }}"}),
            "{'z': 1, 'y': 2}");
  EXPECT_TRUE(mentions(message_of<ValueError>([&] { text({.variables = R"({"tools": []})"}); }),
                       "chat template"));
  EXPECT_TRUE(mentions(message_of<ValueError>(
                           [&] { text({.variables = R"({"tools": []})", .chat_template = "x"}); }),
                       "option"));
  EXPECT_TRUE(
      mentions(message_of<FormatError>([&] { text({.variables = "[]", .chat_template = "x"}); }),
               "variables"));
  EXPECT_TRUE(mentions(message_of<FormatError>([&] { text({.tools = "[", .chat_template = "x"}); }),
                       "'tools'"));
  EXPECT_TRUE(mentions(
      message_of<ValueError>([&] { tokenizer().apply_chat_template({}, {.chat_template = "x"}); }),
      "at least one"));
}

TEST(ChatTemplates, ErrorsNameLineAndConstruct) {
  const auto message = [](const std::string& source) {
    return message_of<Error>([&] { ChatTemplate::parse(source, "file").render({{"n", "7"}}); });
  };
  EXPECT_TRUE(mentions(message("\n\n{{ n | join }}"), "'file' line 3, join: "));
  EXPECT_TRUE(mentions(message("\n{{ x.y }}"), "'file' line 2, y: 'x' is undefined"));
  EXPECT_TRUE(mentions(message("{{ n }}\n{{ n\n + 'a' }}"),
                       "line 3, +: '+' does not take a int and a str"));
  EXPECT_TRUE(mentions(message("{% if n %}\n{% include 'a' %}"), "line 2: {% include %}"));
  EXPECT_TRUE(mentions(message("{% if n %}\n\n"), "line 2: the block {% endif %} is missing"));
  EXPECT_TRUE(mentions(message("{{ raise_exception('be kind') }}"), "be kind"));
  for (const char* const source :
       {"{{ n|escape }}", "{{ 'a'.format() }}", "{{ 'a'.encode() }}", "{{ ('a'|safe) + 'b' }}",
        "{{ 2 ** 99 }}", "{{ [1].append(2) }}", "{{ range }}"}) {
    EXPECT_THROW(ChatTemplate::parse(source, "f").render({{"n", "7"}}), UnsupportedError) << source;
  }
  EXPECT_THROW(ChatTemplate::parse("{{ n|nothing }}", "f").render({{"n", "7"}}), FormatError);
  EXPECT_THROW(ChatTemplate::parse("{% extends 'x' %}", "f"), UnsupportedError);
}

TEST(ChatTemplates, TemplatesOfStrangersAreBounded) {
  const auto refused = [](const std::string& source, const ChatTemplateLimits& limits = {}) {
    return message_of<FormatError>([&] {
      ChatTemplate::parse(source, "f")
          .render({{"l", "[1,2,3,4,5,6,7,8,9,10]"}}, {.limits = limits});
    });
  };
  std::string loops;
  for (int i = 0; i < 12; ++i) loops += "{% for a in l %}";
  loops += "x";
  for (int i = 0; i < 12; ++i) loops += "{% endfor %}";
  EXPECT_TRUE(mentions(refused(loops, {.steps = 100'000}), "100000 steps"));
  EXPECT_TRUE(mentions(refused("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"), "levels"));
  EXPECT_TRUE(mentions(refused("{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set "
                               "ns.s = ns.s ~ ns.s %}{% endfor %}"),
                       "the rendering"));
  EXPECT_TRUE(mentions(refused("{{ 'x' * 1000000000000 }}"), "bytes"));
  EXPECT_TRUE(mentions(refused("{{ 'x'.ljust(1000000000000) }}"), "bytes"));
  EXPECT_TRUE(mentions(
      refused("{% for i in l %}{{ 'abcdefghij' }}{% endfor %}", {.output_bytes = 99}), "99 bytes"));
  EXPECT_TRUE(mentions(refused("{{ l }}", {.steps = 3}), "3 steps"));
  EXPECT_TRUE(mentions(refused("{% set ns = namespace(v=[]) %}{% for i in range(200) %}{% set ns.v "
                               "= [ns.v] %}{% endfor %}"),
                       "levels"));
  for (const char* const brackets : {"()", "[]"}) {
    const std::string nested =
        std::string(5000, brackets[0]) + "1" + std::string(5000, brackets[1]);
    EXPECT_TRUE(mentions(refused("{{ " + nested + " }}"), "levels"));
  }
  std::string chain = "{{ 1", filters = "{{ 1", blocks;
  for (int i = 0; i < 5000; ++i) chain += "+1", filters += "|abs", blocks += "{% if 1 %}";
  EXPECT_TRUE(mentions(refused(chain + " }}"), "levels"));
  EXPECT_TRUE(mentions(refused(filters + " }}"), "levels"));
  EXPECT_TRUE(mentions(refused(blocks), "levels"));
  EXPECT_TRUE(mentions(refused(std::string((1 << 20) + 1, 'x')), "bytes"));
}

// What is stored would otherwise hold itself, and never be freed.
TEST(ChatTemplates, NoValueHoldsItself) {
  for (const char* const source :
       {"{% set ns = namespace() %}{% set ns.a = ns %}", "{% macro m() %}{% endmacro %}{{ [m] }}",
        "{% for i in [1] %}{% set ns = namespace(a=loop) %}{% endfor %}",
        "{{ {'a': namespace()} }}"}) {
    EXPECT_THROW(ChatTemplate::parse(source, "f").render({}), UnsupportedError) << source;
  }
}

}  // namespace
}  // namespace tessera::data::test_chat_templates
