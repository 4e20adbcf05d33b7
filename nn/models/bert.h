// BERT (Devlin et al. 2018) for classifying texts and pairs of texts, with the parameter names and
// files of HuggingFace transformers' BertForSequenceClassification.
//
//     nn::models::Bert model({.width = 128, .layers = 2, .heads = 2, .labels = 77});
//     const Tensor lengths = full({ids.size(0)}, 64, {.dtype = kI64});  // of padded rows
//     auto out = model(ids, nn::models::TokenFeatures{.lengths = lengths}, targets);
//     out.loss.backward();
//     model.save_pretrained("folder");                          // config.json, model.safetensors
//     auto same = nn::models::Bert::from_pretrained("folder");  // also any BERT from the hub
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/nn/container.h>
#include <tessera/nn/dropout.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/fused.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/module.h>
#include <tessera/nn/norm.h>
#include <tessera/nn/parallel_style.h>
#include <tessera/nn/transformer/documents.h>

namespace tessera::nn::models {

struct BertConfig {
  int64_t vocab_size = 30522;
  int64_t width = 768;    // hidden_size
  int64_t layers = 12;    // num_hidden_layers
  int64_t heads = 12;     // num_attention_heads
  int64_t inner = 0;      // intermediate_size, 0: 4 * width
  int64_t context = 512;  // max_position_embeddings: the longest sequence
  int64_t types = 2;      // type_vocab_size
  int64_t labels = 2;
  double dropout = 0.1;            // of embeddings and of each layer's updates
  double attention_dropout = 0.1;  // of attention weights
  double classifier_dropout = -1;  // negative: `dropout`
  double layer_norm_eps = 1e-12;
  double initializer_range = 0.02;
  int64_t padding = 0;                        // pad_token_id: its embedding is zero and stays so
  std::vector<std::string> label_names = {};  // empty, or one a label

  int64_t inner_width() const { return inner > 0 ? inner : 4 * width; }
  void check() const;  // throws ConfigError

  // config.json of transformers' BertConfig. FormatError, IoError, ConfigError name file and field.
  static BertConfig read(const std::string& path);
  void write(const std::string& path, DType dtype) const;
};

struct TokenFeatures {
  Tensor type_ids = {};        // [B, T] i64: 0 for the first text, 1 for the second; undefined: 0
  Tensor attention_mask = {};  // [B, T], 0 for padding; undefined: no padding
  // [B] i64, number of tokens, instead of the mask, for padding on the right: attention skips it.
  Tensor lengths = {};
  void visit_tensors(auto&& visit) { visit(type_ids), visit(attention_mask), visit(lengths); }
};

// The parts of the model, by the names of transformers.
namespace bert {

struct Embeddings : Module<Embeddings> {
  explicit Embeddings(const BertConfig& config);
  Tensor forward(const TokenRows& ids, const Tensor& type_ids);  // [B, T] -> [B, T, C]

  const BertConfig config;
  Embedding& word_embeddings;
  Embedding& position_embeddings;
  Embedding& token_type_embeddings;
  LayerNorm& norm;
};

// Which keys a token sees: by a mask, by lengths or by documents, or all.
struct VisibleKeys {
  Tensor mask = {};               // [B, 1, 1, T] bool
  Tensor lengths = {};            // [B], of rows that are padded on the right
  Tensor starts = {}, ends = {};  // [B, T], of packed rows
  void visit_tensors(auto&& visit) { visit(mask), visit(lengths), visit(starts), visit(ends); }
};

struct SelfAttention : Module<SelfAttention> {
  explicit SelfAttention(const BertConfig& config);
  Tensor forward(const Tensor& x, const VisibleKeys& keys);

  const int64_t heads;
  const double dropout;
  Linear& query;
  Linear& key;
  Linear& value;
};

// dense, dropout, and the layer norm of its sum with the sublayer's input.
struct SublayerOutput : Module<SublayerOutput> {
  SublayerOutput(int64_t inputs, const BertConfig& config);
  Tensor forward(const Tensor& x, const Tensor& residual);

  const double dropout;
  Linear& dense;
  LayerNorm& norm;
};

struct Attention : Module<Attention> {
  explicit Attention(const BertConfig& config);
  Tensor forward(const Tensor& x, const VisibleKeys& keys);

  SelfAttention& self;
  SublayerOutput& output;
};

struct Intermediate : Module<Intermediate> {
  explicit Intermediate(const BertConfig& config);
  Tensor forward(const Tensor& x);

  Linear& dense;
};

struct Layer : Module<Layer> {
  explicit Layer(const BertConfig& config);
  Tensor forward(const Tensor& x, const VisibleKeys& keys);

  Attention& attention;
  Intermediate& intermediate;
  SublayerOutput& output;
};

struct Encoder : Module<Encoder> {
  explicit Encoder(const BertConfig& config);
  Tensor forward(const Tensor& x, const VisibleKeys& keys);

  ModuleList& layer;
};

struct Pooler : Module<Pooler> {
  explicit Pooler(const BertConfig& config);
  Tensor forward(const Tensor& x);  // [B, T, C] -> [B, C], of the first token

  Linear& dense;
};

struct Model : Module<Model> {
  explicit Model(const BertConfig& config);
  // The last layer's states [B, T, C].
  Tensor forward(const TokenRows& ids, const TokenFeatures& features);

  Embeddings& embeddings;
  Encoder& encoder;
  Pooler& pooler;
};

}  // namespace bert

struct BertOutput {
  Tensor logits;  // [B, labels], or of packed rows [documents, labels]
  Tensor loss;    // mean cross-entropy over labels other than -100, or undefined
  void visit_tensors(auto&& visit) { visit(logits), visit(loss); }
};

class Bert : public Module<Bert> {
 public:
  explicit Bert(const BertConfig& config);

  // ids: [B, T] i64 or i32, T <= context; labels: [B]. Of packed rows, which may be longer than the
  // context, logits and labels are one for each document, in their order over all rows; padding is
  // a document, with the label -100. The host reads how many there are.
  BertOutput forward(const TokenRows& ids, const TokenFeatures& features = {},
                     const Tensor& labels = {});

  // Reads a folder of transformers: config.json and model.safetensors. A checkpoint of the encoder
  // alone (any BERT before fine-tuning) leaves the classifier, and a missing pooler, at their
  // initial values: `fresh` gets their names; without `fresh` they are an error. Heads of
  // pre-training and position id buffers are ignored; LayerNorm's old names gamma and beta are
  // accepted. FormatError, IoError, ValueError.
  // `divide`: called with the model before it has memory, to divide it among ranks (fully_shard(),
  // parallelize_module()): then this rank reads and keeps its parts alone.
  static std::unique_ptr<Bert> from_pretrained(
      const std::string& folder, std::vector<std::string>* fresh = nullptr,
      const std::function<void(ModuleBase& model)>& divide = {});
  void load_weights(const std::string& safetensors_path, std::vector<std::string>* fresh = nullptr);
  // Creates a missing folder. Files appear whole or not at all, model.safetensors last.
  void save_pretrained(const std::string& folder) const;
  // The same with whole weights that were gathered from shards (distributed::full_state_dict).
  void save_pretrained(const StateDict& weights, const std::string& folder) const;

  std::unique_ptr<Bert> remake() const { return std::make_unique<Bert>(config); }
  std::vector<StyledModules> parallel_styles() const override;

  const BertConfig config;
  models::bert::Model& bert;
  Linear& classifier;

 private:
  void initialise();
};

}  // namespace tessera::nn::models
