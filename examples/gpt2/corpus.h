// A text as tokens: the first nine tenths to train on, the last tenth to validate with.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <tessera/data/text/tokenizer.h>
#include <tessera/data/token_dataset.h>

namespace tessera::examples {

// "bytes", or "gpt2" with a folder that holds its vocabulary (vocab.json and merges.txt, or
// encoder.json and vocab.bpe). Throws ConfigError for another name.
std::unique_ptr<data::Tokenizer> make_tokenizer(const std::string& name, const std::string& folder);

// Puts the files of that vocabulary into `target` as vocab.json and merges.txt, where generate and
// transformers look for them. Nothing to do for "bytes", and where they are there. Throws IoError.
void copy_tokenizer_files(const std::string& name, const std::string& folder,
                          const std::string& target);

struct Corpus {
  data::TokenArray training;
  data::TokenArray validation;
};
// Throws IoError; ConfigError where the text is too short for windows of `context` tokens.
Corpus read_corpus(const std::string& text_file, const data::Tokenizer& tokenizer, int64_t context);

}  // namespace tessera::examples
