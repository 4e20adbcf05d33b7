// A small language model whose head is its embedding, on random tokens.
#include "compositions/subject.h"

#include <algorithm>
#include <span>

#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/nn/container.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/norm.h>

namespace tessera::compositions {
namespace {

constexpr int64_t kWords = 23, kWidth = 6, kRows = 2, kLength = 5, kIgnored = -100;

struct Block : nn::Module<Block> {
  Block()
      : norm(add<nn::LayerNorm>("norm", kWidth)),
        up(add<nn::Linear>("up", kWidth, 3 * kWidth)),
        down(add<nn::Linear>("down", 3 * kWidth, kWidth)) {}
  Tensor forward(const Tensor& x) { return x + down(gelu(up(norm(x)))); }
  nn::LayerNorm& norm;
  nn::Linear& up;
  nn::Linear& down;
};

struct Words : nn::Module<Words> {
  Words()
      : embedding(add<nn::Embedding>("embedding", kWords, kWidth)),
        blocks(add<nn::ModuleList>("blocks")),
        norm(add<nn::LayerNorm>("norm", kWidth)) {
    for (int i = 0; i < 3; ++i) blocks.append<Block>();
  }
  Tensor forward(const Tensor& tokens) {
    Tensor x = embedding(tokens);
    for (size_t i = 0; i < blocks.num_children(); ++i) x = blocks.child(i).call_tensor(x);
    return matmul(norm(x), embedding.weight.t());
  }
  nn::Embedding& embedding;
  nn::ModuleList& blocks;
  nn::LayerNorm& norm;
};

class WordsSubject : public Subject {
 public:
  nn::ModuleBase& model() override { return model_; }
  MicroLoss loss(int64_t index, double share) override {
    const auto stream = static_cast<uint64_t>(index);
    const Tensor tokens = randint(0, kWords, {kRows, kLength + 1}, kI64, RandomStream{77, stream});
    std::vector<int64_t> targets =
        raw::narrow(tokens, 1, 1, kLength).reshape({-1}).to_vector<int64_t>();
    const auto kept = static_cast<size_t>(share * static_cast<double>(targets.size()) + 0.5);
    for (size_t i = kept; i < targets.size(); ++i) targets[i] = kIgnored;
    const Tensor logits = model_(raw::narrow(tokens, 1, 0, kLength)).reshape({-1, kWords});
    const Tensor sum = cross_entropy(
        logits, tensor(std::span<const int64_t>(targets), {static_cast<int64_t>(targets.size())}),
        {.ignore_index = kIgnored, .reduction = Reduction::kSum});
    return {sum / static_cast<double>(std::max<size_t>(kept, 1)), static_cast<double>(kept)};
  }
  std::vector<std::string> parts() override {
    return {"embedding", "blocks.0", "blocks.1", "blocks.2", "norm"};
  }
  std::vector<std::string> adapted() override { return {"up", "down"}; }

 private:
  Words model_;
};

}  // namespace

std::unique_ptr<Subject> make_subject() { return std::make_unique<WordsSubject>(); }

}  // namespace tessera::compositions
