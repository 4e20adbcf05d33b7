// A text as tokens: the first nine tenths to train on, the last tenth to validate with.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <tessera/core/tensor.h>
#include <tessera/data/token_file.h>
#include <tessera/data/tokenizer.h>

namespace tessera::gpt2 {

// "bytes", or "gpt2" with a folder that holds its vocabulary (vocab.json and merges.txt, or
// encoder.json and vocab.bpe). Throws ConfigError for another name.
std::unique_ptr<data::Tokenizer> make_tokenizer(const std::string& name, const std::string& folder);

struct Batch {
  Tensor inputs;   // [B, T] i64
  Tensor targets;  // [B, T] i64: the token that follows each input
};

class Corpus {
 public:
  // Throws IoError; ConfigError where the text is too short for `context`.
  Corpus(const std::string& text_file, const data::Tokenizer& tokenizer, int64_t context);

  const data::TokenArray& training() const { return training_; }
  const data::TokenArray& validation() const { return validation_; }

  // The batch of a step: random windows of the training part, a pure function of (seed, step), so
  // that a run that is resumed at any step goes on with the same data.
  Batch batch(uint64_t seed, int64_t step, int64_t batch_size) const;

  // The validation part cut into windows that cover it once: each token but the first is the target
  // of one prediction. Windows [begin, begin + count); the last one may be shorter and then stands
  // in a batch of its own: fewer than `count` may come.
  int64_t num_windows() const;
  Batch validation_batch(int64_t begin, int64_t count) const;

 private:
  Batch gather(const data::TokenArray& tokens, const std::vector<int64_t>& starts,
               int64_t length) const;

  data::TokenArray training_, validation_;
  int64_t context_;
};

}  // namespace tessera::gpt2
