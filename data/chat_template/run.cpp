#include <tessera/data/chat_template/run.h>

#include <tessera/data/text/text.h>

namespace tessera::data::jinja {

std::string Run::place() const {
  std::string text = "'" + name_ + "' line " + std::to_string(line_);
  if (!construct_.empty()) text += ", " + replace_invalid_utf8(construct_.substr(0, 80));
  return text + ": ";
}

void Run::too_much(std::string_view what, size_t limit, std::string_view unit) const {
  TS_THROW(FormatError, kChatTemplate, place(), "the rendering ", what, " ", limit, " ", unit,
           "; the template is hostile or the conversation long: raise the limits.");
}

}  // namespace tessera::data::jinja
