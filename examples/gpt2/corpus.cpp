#include "corpus.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <vector>

#include <tessera/core/factory.h>
#include <tessera/core/random.h>
#include <tessera/data/bpe.h>

namespace tessera::gpt2 {

std::unique_ptr<data::Tokenizer> make_tokenizer(const std::string& name,
                                                const std::string& folder) {
  if (name == "bytes") return std::make_unique<data::ByteTokenizer>();
  TS_CHECK_AS(ConfigError, name == "gpt2", "tokenizer", "must be 'bytes' or 'gpt2'; got '", name,
              "'");
  TS_CHECK_AS(ConfigError, !folder.empty(), "tokenizer",
              "gpt2 needs its vocabulary; give --tokenizer-files a folder with vocab.json and "
              "merges.txt, or encoder.json and vocab.bpe");
  return std::make_unique<data::BpeTokenizer>(data::BpeTokenizer::from_folder(folder));
}

Corpus::Corpus(const std::string& text_file, const data::Tokenizer& tokenizer, int64_t context)
    : context_(context) {
  std::ifstream file(text_file, std::ios::binary);
  TS_CHECK_AS(IoError, file, "corpus", "cannot read the text '", text_file, "'");
  std::ostringstream text;
  text << file.rdbuf();
  const auto tokens =
      data::TokenArray::from_ids(tokenizer.encode(text.str()), tokenizer.vocab_size());
  const int64_t boundary = tokens.size() * 9 / 10;
  training_ = tokens.slice(0, boundary);
  validation_ = tokens.slice(boundary, tokens.size());
  TS_CHECK_AS(ConfigError, training_.size() > context && validation_.size() >= 2, "corpus", "'",
              text_file, "' has ", tokens.size(), " tokens; training with a context of ", context,
              " needs at least ", (context + 1) * 10 / 9 + 2,
              ". Give a longer text or a shorter --context");
}

Batch Corpus::gather(const data::TokenArray& tokens, const std::vector<int64_t>& starts,
                     int64_t length) const {
  const auto rows = static_cast<int64_t>(starts.size());
  Batch batch{raw::empty({rows, length}, kI64), raw::empty({rows, length}, kI64)};
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t start = starts[static_cast<size_t>(row)];
    tokens.copy(start, length, batch.inputs.data_as<int64_t>() + row * length);
    tokens.copy(start + 1, length, batch.targets.data_as<int64_t>() + row * length);
  }
  return batch;
}

Batch Corpus::batch(uint64_t seed, int64_t step, int64_t batch_size) const {
  constexpr uint64_t kStream = uint64_t{0xBA7C4} << 40;  // apart from the streams that ops take
  const auto choices = static_cast<uint64_t>(training_.size() - context_);
  std::vector<int64_t> starts;
  for (int64_t row = 0; row < batch_size; ++row) {
    const auto bits = philox4x32(seed, kStream, static_cast<uint64_t>(step * batch_size + row));
    const uint64_t number = (uint64_t{bits[0]} << 32) | bits[1];
    starts.push_back(static_cast<int64_t>(number % choices));
  }
  return gather(training_, starts, context_);
}

int64_t Corpus::num_windows() const { return (validation_.size() - 1 + context_ - 1) / context_; }

Batch Corpus::validation_batch(int64_t begin, int64_t count) const {
  const int64_t targets = validation_.size() - 1, whole = targets / context_;
  if (begin >= whole) return gather(validation_, {begin * context_}, targets - whole * context_);
  std::vector<int64_t> starts;
  for (int64_t i = begin; i < std::min(begin + count, whole); ++i) starts.push_back(i * context_);
  return gather(validation_, starts, context_);
}

}  // namespace tessera::gpt2
