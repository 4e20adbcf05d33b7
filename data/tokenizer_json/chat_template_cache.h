// The chat templates that a tokenizer has read. Included by this folder's .cpp files only.
#pragma once

#include <mutex>
#include <string>
#include <unordered_map>

#include <tessera/data/chat_template/chat_template.h>

namespace tessera::data {

class ChatTemplateCache {
 public:
  ChatTemplate get(const std::string& source);

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, ChatTemplate> templates_;
};

}  // namespace tessera::data
