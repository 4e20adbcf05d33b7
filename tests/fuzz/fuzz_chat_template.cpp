// A chat template of a stranger with a conversation: what it makes is bounded, and the same again.
#include <tessera/data/chat_template/chat_template.h>
#include <tessera/data/text/text.h>

#include "driver.h"

using namespace tessera;
using namespace tessera::data;

FUZZ(text) {
  const std::string_view source = fuzz::take_part(text);
  fuzz::feed([&] {
    const ChatTemplate parsed = ChatTemplate::parse(source, "input");
    const std::string messages = text.empty()
                                     ? R"([{"role": "user", "content": "Hi"}, {"role": "assistant",
                                        "content": ["a", 1.5, null, {"b": true}]}])"
                                     : std::string(text);
    const ChatRenderOptions options{
        .now = 1732449600,
        .limits = {.steps = 200'000, .output_bytes = 1 << 20},
    };
    const std::vector<ChatVariable> variables = {{"messages", messages},
                                                 {"tools", "[{\"a\": [1]}]"}};
    const RenderedChat chat = parsed.render(variables, options);
    fuzz::require(chat.text.size() <= 1 << 20, "the text is bounded");
    fuzz::require(!find_invalid_utf8(chat.text), "the text is UTF-8");
    for (const CharacterSpan& span : chat.generated) {
      fuzz::require(span.begin <= span.end, "spans have a length");
    }
    fuzz::require(parsed.render(variables, options).text == chat.text,
                  "the text is the same again");
  });
}
