#include "corpus.h"

#include <filesystem>
#include <fstream>
#include <utility>
#include <vector>

#include <tessera/core/io/atomic_file.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/data/text/bpe.h>

namespace tessera::examples {

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

void copy_tokenizer_files(const std::string& name, const std::string& folder,
                          const std::string& target) {
  if (name != "gpt2") return;
  const auto files = data::BpeTokenizer::files_in(folder);
  const std::filesystem::path to(target);
  for (const auto& [source, copy] : {std::pair(files.vocabulary, to / "vocab.json"),
                                     std::pair(files.merges, to / "merges.txt")}) {
    std::error_code absent;  // the copy may not be there yet
    if (std::filesystem::equivalent(source, copy, absent)) continue;
    write_file_atomically(copy.string(), MappedFile(source).text());
  }
}

Corpus read_corpus(const std::string& text_file, const data::Tokenizer& tokenizer,
                   int64_t context) {
  std::ifstream file(text_file, std::ios::binary);
  std::error_code ignored;  // a folder opens, and reads as an empty file
  bool readable = file && !std::filesystem::is_directory(text_file, ignored);
  std::string text;
  std::vector<char> piece(size_t{1} << 20);
  while (readable && file) {
    file.read(piece.data(), static_cast<std::streamsize>(piece.size()));
    text.append(piece.data(), static_cast<size_t>(file.gcount()));
    readable = !file.bad();  // an error on the way
  }
  TS_CHECK_AS(IoError, readable, "corpus", "cannot read the text '", text_file,
              "'; give --data a file that exists and can be read");
  const std::vector<data::TokenId> ids = tokenizer.encode(text);
  const auto tokens = data::TokenArray::from_ids(ids, tokenizer.vocab_size());
  const int64_t boundary = tokens.size() * 9 / 10;
  TS_CHECK_AS(ConfigError, boundary > context && tokens.size() - boundary >= 2, "corpus", "'",
              text_file, "' has ", tokens.size(), " tokens, of which ", boundary,
              " are to train on; windows of ", context,
              " need more. Give a longer text or a shorter --context");
  return {tokens.slice(0, boundary), tokens.slice(boundary, tokens.size())};
}

}  // namespace tessera::examples
