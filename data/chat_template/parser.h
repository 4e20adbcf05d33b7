// Reads a chat template. Included by this folder's .cpp files only.
#pragma once

#include <string>
#include <string_view>

#include <tessera/data/chat_template/syntax.h>

namespace tessera::data::jinja {

// FormatError naming the line; UnsupportedError for a statement that is not known.
Tree parse_template(std::string_view source, const std::string& name);

}  // namespace tessera::data::jinja
