// Examples for fine-tuning a language model: what is asked, and the answers that it learns.
//
//     auto tokenizer = data::PretrainedTokenizer::from_pretrained("Llama-3.2-1B-Instruct");
//     data::FineTuningDataset train("train.jsonl", tokenizer, {.max_length = 2048});
//     data::DataLoader loader(train, {.batch_size = 4, .shuffle = true});
//     for (auto& batch : loader) loss = model(batch.inputs, batch.targets).loss;
//
// A line of the file is one of
//
//     {"prompt": "What is 1 + 1?", "completion": " 2"}
//     {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", ...}]}
//     {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
//
// and may have "tools" and "documents", arrays, where there are messages. Other fields are ignored.
// Texts get the tokenizer's special tokens as encode_text() adds them, and its eos_token at the
// end. Messages go through the chat template, which has all tokens.
//
// [Note: answers] Only tokens of answers are targets, others are kIgnoreTarget. Of messages the
// answers are what the template marks by {% generation %}. A template without marks is rendered up
// to each message of the assistant, with the beginning of an answer, and the answer is what the
// whole text has behind that, up to where its tokens differ from those of the rendering that ends
// with the answer.
// So the tokens that end a turn are learned, too. A template that changes earlier turns (it may
// leave out what the model thought) does not show where their answers are: FormatError.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/data/collate.h>
#include <tessera/data/dataset.h>
#include <tessera/data/token_dataset.h>
#include <tessera/data/tokenizer_json/pretrained_tokenizer.h>

namespace tessera::data {

enum class TooLong : uint8_t {
  kTruncateRight,  // loses the end
  kTruncateLeft,   // loses the beginning
  kSkip,           // the line is left out; skipped() counts them
  kRefuse,         // ValueError naming the line
};

struct FineTuningOptions {
  int64_t max_length = 1024;  // tokens of an example
  TooLong too_long = TooLong::kTruncateRight;
  bool answers_only = true;  // false: every token is a target
  bool append_eos = true;    // to the completions of texts
  ChatOptions chat = {};     // template, variables and limits
};

// One example, and the id that fills up shorter ones of its batch.
struct FineTuningExample {
  std::vector<TokenId> ids;
  std::vector<bool> learned;  // of each id, whether it is a target
  TokenId padding = 0;
};

// Makes an example of one line. `place` names it in errors. Nothing: it is left out, because it is
// too long, or because truncation has left no target. FormatError, ValueError.
std::optional<FineTuningExample> fine_tuning_example(std::string_view line,
                                                     const std::string& place,
                                                     const PretrainedTokenizer& tokenizer,
                                                     const FineTuningOptions& options = {});

class FineTuningDataset : public Dataset<FineTuningExample> {
 public:
  // Reads the whole file and keeps its ids: 5 bytes a token. Lines are encoded on all cores.
  // FormatError and ValueError name file and line, the first that is wrong; ValueError where
  // nothing is left. IoError.
  FineTuningDataset(const std::string& path, const PretrainedTokenizer& tokenizer,
                    const FineTuningOptions& options = {});

  int64_t size() const override { return static_cast<int64_t>(examples_.size()); }
  FineTuningExample get(int64_t index) const override;

  int64_t skipped() const { return skipped_; }  // lines that were left out
  int64_t num_targets() const { return num_targets_; }
  int64_t longest() const { return longest_; }  // tokens of an example

 private:
  std::vector<FineTuningExample> examples_;
  int64_t skipped_ = 0, num_targets_ = 0, longest_ = 0;
};

// i64 [B, T] with the T of the longest example, less its last token, which predicts nothing. They
// are filled up at the right: a causal model does not see what stands behind a token.
template <>
struct Collate<FineTuningExample> {
  static TokenExample batch(std::span<FineTuningExample> examples);
};

}  // namespace tessera::data
