// Runs a chat template. Included by this folder's .cpp files only.
#pragma once

#include <string>
#include <vector>

#include <tessera/data/chat_template/rendered_chat.h>
#include <tessera/data/chat_template/syntax.h>

namespace tessera::data::jinja {

// `variables`: a dict. `now`: what strftime_now() shows, in seconds since 1970.
RenderedChat render(const Tree& tree, Run& run, const Value& variables, int64_t now);

}  // namespace tessera::data::jinja
