// Trains a small GPT on the paragraphs of a text, packed into rows or padded, and prints the rate.
//
//     pack_documents wiki.valid.raw packed 20
//     pack_documents wiki.valid.raw padded 20
//
// A paragraph is a document: its tokens see nothing of the others.
#include <chrono>
#include <cstdio>
#include <string>

#include <tessera.h>

using namespace tessera;

static constexpr int64_t kContext = 512;

// Each line of the text that is not empty, as bytes, with its line end.
struct Paragraphs : data::Dataset<data::TokenDocument> {
  explicit Paragraphs(const std::string& file) : text(data::read_text(file)) {
    for (const std::string_view line : data::split_lines(text)) {
      if (line.size() > 1) lines.push_back(line);
    }
  }
  int64_t size() const override { return static_cast<int64_t>(lines.size()); }
  data::TokenDocument get(int64_t index) const override {
    data::TokenDocument ids;
    data::ByteTokenizer().encode(lines[static_cast<size_t>(index)], ids);
    ids.push_back('\n');
    return ids;
  }
  std::string text;
  std::vector<std::string_view> lines;
};

int main(int argc, char** argv) {
  if (argc != 4) return std::fprintf(stderr, "usage: pack_documents FILE packed|padded STEPS\n"), 2;
  const auto paragraphs = std::make_shared<Paragraphs>(argv[1]);
  const bool pack = std::string(argv[2]) == "packed";
  // A buffer of one document packs nothing: each has a row, and padding.
  const data::PackedDataset rows(paragraphs, {.context = kContext,
                                              .packing = data::Packing::kFirstFitDecreasing,
                                              .buffer = pack ? 1024 : 1,
                                              .long_documents = data::LongDocuments::kSplit});
  data::DataLoader loader(rows, {.batch_size = 8, .shuffle = true, .seed = 1, .workers = 1});

  manual_seed(1);
  nn::models::Gpt model(
      {.vocab_size = 256, .context = kContext, .width = 128, .layers = 2, .heads = 4});
  optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-3});
  int64_t tokens = 0;
  double loss_of_tokens = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int64_t step = 0; step < std::stoll(argv[3]); ++step) {
    auto batch = loader.next();
    if (!batch) batch = loader.next();  // of the next epoch
    const nn::Documents documents = nn::document_bounds(batch->position_ids);
    const Tensor loss = model({batch->inputs, documents}, batch->targets).loss;
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    const auto targets = static_cast<int64_t>(ne(batch->targets, data::kIgnoreTarget).sum().item());
    tokens += targets;
    loss_of_tokens += loss.item() * static_cast<double>(targets);
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf("%lld rows, %.1f%% tokens; loss %.3f; %.0f tokens/s\n",
              static_cast<long long>(rows.size()), 100 * rows.fill(),
              loss_of_tokens / static_cast<double>(tokens),
              static_cast<double>(tokens) / seconds.count());
  return 0;
}
