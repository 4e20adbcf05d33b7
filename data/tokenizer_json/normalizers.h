// The normalizers of a tokenizer.json: what changes a text before it is cut. Included by this
// folder's .cpp files only.
#pragma once

#include <memory>
#include <string>

#include <tessera/data/tokenizer_json/aligned_text.h>
#include <tessera/data/tokenizer_json/json_fields.h>

namespace tessera::data {

class Normalizer {
 public:
  virtual ~Normalizer() = default;
  // `origin`: where the text begins in the original.
  virtual void run(AlignedText& text, uint32_t origin) const = 0;
};

// UnsupportedError for a type, FormatError for fields.
std::unique_ptr<Normalizer> read_normalizer(const Json& value, const std::string& place);

// Writes each byte as the character that byte-level vocabularies have for it.
void write_byte_chars(const AlignedText& source, size_t begin, size_t end, uint32_t origin,
                      AlignedText& out);

}  // namespace tessera::data
