// The pre-tokenizers of a tokenizer.json: what cuts a normalized text into the pieces that a model
// makes tokens of. Included by this folder's .cpp files only.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <tessera/data/tokenizer_json/aligned_text.h>
#include <tessera/data/tokenizer_json/json_fields.h>

namespace tessera::data {

class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;
  virtual void run(PreTokenized& work) const = 0;
};

struct PreTokenizers {
  std::vector<std::unique_ptr<PreTokenizer>> steps;
  // The last step leaves bytes as they are, where its name (ByteLevel) says to write each as a
  // character: the model is to do so with its vocabulary instead.
  bool bytes = false;
  // A step asks where pieces begin in the original, which only a tracked text knows exactly.
  bool needs_spans = false;
};

// `bytes_allowed`: whether the model can take bytes. UnsupportedError for a type, FormatError for
// fields.
PreTokenizers read_pre_tokenizers(const Json& value, const std::string& place, bool bytes_allowed);

}  // namespace tessera::data
