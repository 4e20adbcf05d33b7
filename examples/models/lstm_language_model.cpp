// A language model with an LSTM, trained by truncated backpropagation through time: the state goes
// on from window to window of a text, the gradient stops at each window's beginning.
//
//     lstm_language_model               a made-up text whose sense lies further back than a window
//     lstm_language_model --data FILE   the bytes of a text
//
// The made-up text is Abbbbb, again and again, and windows are of four: of bbbb nobody knows how
// many came before, but by the state that was carried on. The program trains with and without, and
// ends with 1 unless carrying it on pays.
#include <CLI/CLI.hpp>
#include <cstdio>

#include <tessera.h>
#include <tessera/core/io/mapped_file.h>

using namespace tessera;

struct LanguageModel : nn::Module<LanguageModel> {
  explicit LanguageModel(int64_t width)
      : table(add<nn::Embedding>("table", 256, width)),
        lstm(add<nn::LSTM>("lstm", width, width, nn::RecurrentOptions{.batch_first = true})),
        head(add<nn::Linear>("head", width, 256)) {}
  struct Result {
    Tensor logits;  // [B, T, 256]
    nn::LstmState state;
    void visit_tensors(auto&& visit) { visit(logits), state.visit_tensors(visit); }
  };
  Result forward(const Tensor& bytes, const nn::LstmState& state) {
    nn::LstmResult result = lstm(table(bytes), state);
    return {head(result.output), std::move(result.state)};
  }
  nn::Embedding& table;
  nn::LSTM& lstm;
  nn::Linear& head;
};

std::string make_text(int64_t words) {
  std::string text;
  for (int64_t i = 0; i < words; ++i) text += "Abbbbb";
  return text;
}

struct TrainOptions {
  int64_t rows = 16, window = 4, epochs = 24, width = 32;
  bool carry = true;  // the state from window to window
};

// The mean loss of the last epoch. Row r reads the r-th part of the text from its beginning to its
// end.
double train(const std::string& text, const TrainOptions& options) {
  manual_seed(2);
  LanguageModel model(options.width);
  optim::AdamW optimizer(model.named_parameters(), {.lr = 3e-3, .weight_decay = 0});
  const int64_t length = static_cast<int64_t>(text.size()) / options.rows;
  std::vector<int64_t> numbers;
  for (const char byte : text) numbers.push_back(static_cast<unsigned char>(byte));
  numbers.resize(static_cast<size_t>(length * options.rows));
  const Tensor bytes = tensor(std::span<const int64_t>(numbers), {options.rows, length});
  double mean = 0;
  for (int64_t epoch = 0; epoch < options.epochs; ++epoch) {
    nn::LstmState state;  // zeros
    mean = 0;
    int64_t windows = 0;
    for (int64_t at = 0; at + options.window < length; at += options.window, ++windows) {
      if (!options.carry) state = {};
      const auto [logits, next] = model(bytes.narrow(1, at, options.window).contiguous(), state);
      const Tensor targets = bytes.narrow(1, at + 1, options.window).reshape({-1});
      const Tensor loss = cross_entropy(logits.reshape({-1, 256}), targets);
      loss.backward();
      optim::clip_grad_norm(model.parameters(), 1.0);
      optimizer.step(), optimizer.zero_grad();
      state = {next.hidden.detach(), next.cell.detach()};  // here the gradient stops
      mean += loss.item();
    }
    mean /= static_cast<double>(windows);
  }
  return mean;
}

int main(int argc, char** argv) {
  std::string file;
  TrainOptions options;
  CLI::App app("A language model with an LSTM.");
  app.add_option("--data", file, "a text");
  app.add_option("--window", options.window, "bytes through which the gradient goes");
  app.add_option("--epochs", options.epochs, "times through the text");
  app.add_option("--width", options.width, "of the state");
  CLI11_PARSE(app, argc, argv);
  if (!file.empty()) {
    const MappedFile mapped(file);
    std::printf("loss %.4f\n", train(std::string(mapped.text()), options));
    return 0;
  }
  const std::string text = make_text(960);
  const double carried = train(text, options);
  options.carry = false;
  const double forgotten = train(text, options);
  // Who forgets does not know, in two windows of three, whether A follows the second b: a coin's
  // throw, log(2) * 2 / 3 / 4 = 0.116.
  std::printf("loss with the state carried on %.3f, without %.3f\n", carried, forgotten);
  return carried < 0.03 && forgotten > 0.1 ? 0 : 1;
}
