// A conversation, and what a tokenizer's chat template makes of it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <tessera/data/chat_template/chat_template.h>
#include <tessera/data/text/tokenizer.h>
#include <tessera/data/tokenizer_json/pretrained_encoding.h>

namespace tessera::data {

struct ChatMessage {
  std::string role, content;
  // Further fields as a JSON object, such as tool_calls. They stand behind the others, and one that
  // is called content is in the place of that.
  std::string fields = {};
};

struct ChatOptions {
  bool add_generation_prompt = false;  // the beginning of an answer at the end
  // The text ends where the last message does, so that a model goes on with it. Not with
  // add_generation_prompt.
  bool continue_final_message = false;
  std::string tools = {};      // a JSON array of functions' schemas
  std::string documents = {};  // a JSON array of objects, mostly with title and text
  // A JSON object of further variables, such as {"enable_thinking": false}. They are in the place of
  // special tokens with these names.
  std::string variables = {};
  // The name of one of the tokenizer's templates, or a template itself. Empty: tool_use where there
  // are tools and it exists, else default.
  std::string chat_template = {};
  ChatTemplateLimits limits = {};
  std::optional<int64_t> now = {};  // seconds since 1970, for templates that show the date
};

struct Chat {
  std::string text;
  std::vector<TokenId> ids;  // of the text, to which no special tokens are added
  // 1 for ids that overlap what the template marks by {% generation %}; empty where it marks none.
  std::vector<TokenId> assistant_mask;
};

// For tokens and spans in the order of a text: 1 for tokens that overlap a span.
std::vector<TokenId> token_mask(const std::vector<TokenOffset>& offsets,
                                const std::vector<CharacterSpan>& spans);

}  // namespace tessera::data
