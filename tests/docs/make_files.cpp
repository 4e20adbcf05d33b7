// Files that the pages' commands read and nobody wants to keep in the repository: a table of
// points, texts, a tokenizer.json, and a small BERT in a folder of transformers.
#include <cstdio>
#include <fstream>
#include <string>

#include <tessera/core/random.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/nn/models/bert.h>

using namespace tessera;

int main() {
  manual_seed(1);
  std::ofstream points("data.csv");
  points << "x,y,label\n";
  const Tensor places = rand({400, 2});
  const auto* place = places.data_as<float>();
  for (int row = 0; row < 400; ++row, place += 2) {
    points << place[0] << ',' << place[1] << ',' << (place[0] > place[1] ? 1 : 0) << '\n';
  }

  std::ofstream("tokenizer.json") << R"({"pre_tokenizer": {"type": "Whitespace"}, "model":
      {"type": "WordPiece", "vocab": {"[UNK]": 0, "Hello": 1, "world": 2}}})";
  std::ofstream("texts.jsonl") << "\"Hello world\"\n\"\"\n";
  std::ofstream("README.txt") << "Hello world\n";

  std::ofstream texts("texts.csv");
  texts << "text,label\n";
  for (int row = 0; row < 60; ++row) {
    texts << (row % 3 == 0   ? "where is my card"
              : row % 3 == 1 ? "a new pin please"
                             : "thank you")
          << ','
          << (row % 3 == 0   ? "card"
              : row % 3 == 1 ? "pin"
                             : "other")
          << '\n';
  }

  // With a classifier, and as it is before fine-tuning.
  for (const std::string folder : {"classifier", "bert-base-uncased"}) {
    nn::models::Bert({.vocab_size = 16, .width = 32, .layers = 1, .heads = 2, .context = 16})
        .save_pretrained(folder);
    std::ofstream vocabulary(folder + "/vocab.txt");
    for (const char* word : {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "where", "is", "my",
                             "card", "a", "new", "pin", "please", "thank", "you", "?"}) {
      vocabulary << word << '\n';
    }
  }
  const std::string weights = "bert-base-uncased/model.safetensors";
  auto tensors = load_safetensors(weights);
  std::erase_if(tensors, [](const auto& entry) { return entry.first.starts_with("classifier."); });
  save_safetensors(weights, tensors);
}
