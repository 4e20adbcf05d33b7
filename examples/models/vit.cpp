// A vision transformer (Dosovitskiy et al. 2021): patches of an image as tokens, with a class token
// and learned places, through a transformer's encoder.
//
//     vit                        made-up images: which quarter holds a bright square
//     vit --data FOLDER          t10k-images-idx3-ubyte.gz and t10k-labels-idx1-ubyte.gz of MNIST
//
// Ends with 1 where fewer than 95% of images that it never saw are told right (85% of MNIST's).
#include <CLI/CLI.hpp>
#include <cstdio>

#include <tessera.h>

using namespace tessera;

struct VitOptions {
  int64_t image = 28, patch = 7, channels = 1, width = 64, heads = 4, layers = 2, classes = 10;
};

struct VisionTransformer : nn::Module<VisionTransformer> {
  explicit VisionTransformer(const VitOptions& o)
      : options(o),
        patches(add<nn::Conv2d>("patches", o.channels, o.width, o.patch,
                                nn::ConvLayerOptions{.stride = {o.patch}})),
        class_token(parameter("class_token", Shape{1, 1, o.width})),
        places(
            parameter("places", Shape{1, (o.image / o.patch) * (o.image / o.patch) + 1, o.width})),
        layers(add<nn::ModuleList>("layers")),
        norm(add<nn::LayerNorm>("norm", o.width)),
        head(add<nn::Linear>("head", o.width, o.classes)) {
    for (int64_t i = 0; i < o.layers; ++i) {
      layers.append<nn::TransformerEncoderLayer>(
          o.width, o.heads,
          nn::TransformerLayerOptions{.dim_feedforward = 2 * o.width,
                                      .dropout = 0,
                                      .activation = nn::TransformerLayerOptions::Activation::kGelu,
                                      .batch_first = true,
                                      .norm_first = true});
    }
    nn::init::zeros(class_token);
    nn::init::normal(places, 0, 0.5, initial_stream("places"));
  }
  // images: [B, channels, image, image] -> [B, classes]
  Tensor forward(const Tensor& images) {
    const int64_t B = images.size(0);
    const Tensor tokens = patches(images).flatten(2, 3).transpose(1, 2);  // [B, patches, width]
    Tensor x = cat({class_token.expand({B, 1, options.width}), tokens}, 1) + places;
    for (size_t i = 0; i < layers.size(); ++i) x = layers.at<nn::TransformerEncoderLayer>(i)(x);
    return head(norm(x).select(1, 0));
  }

  const VitOptions options;
  nn::Conv2d& patches;
  const Tensor& class_token;
  const Tensor& places;
  nn::ModuleList& layers;
  nn::LayerNorm& norm;
  nn::Linear& head;
};

struct Images {
  Tensor pixels;  // [N, 1, size, size]
  Tensor labels;  // [N]
};

// Noise, and in one of sixteen fields a square that is brighter: the field's column is the label.
Images make_images(int64_t count) {
  const Tensor pixels = randn({count, 1, 16, 16}) * 0.5;
  const Tensor labels = randint(0, 4, {count}), rows = randint(0, 4, {count});
  const auto columns = labels.to_vector<int64_t>(), lines = rows.to_vector<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    const auto at = static_cast<size_t>(i);
    pixels.select(0, i).narrow(1, 4 * lines[at], 4).narrow(2, 4 * columns[at], 4).add_(1.5);
  }
  return {pixels, labels};
}

double share_right(VisionTransformer& model, const Images& images) {
  const NoGradGuard no_grad;
  model.eval();
  const Tensor right = model(images.pixels).argmax(-1).eq(images.labels);
  model.train();
  return to(right, kF32).mean().item();
}

int main(int argc, char** argv) {
  std::string folder;
  int64_t steps = 300;
  CLI::App app("A vision transformer.");
  app.add_option("--data", folder, "folder with the t10k files of MNIST");
  app.add_option("--steps", steps, "batches of 32 images")->check(CLI::PositiveNumber);
  CLI11_PARSE(app, argc, argv);
  manual_seed(1);
  Images train, test;
  VitOptions options;
  if (folder.empty()) {
    train = make_images(2048), test = make_images(256);
    options = {.image = 16, .patch = 4, .width = 32, .classes = 4};
  } else {
    const Tensor pixels =
        to(data::read_idx(folder + "/t10k-images-idx3-ubyte.gz"), kF32).unsqueeze(1) / 255;
    const Tensor labels = to(data::read_idx(folder + "/t10k-labels-idx1-ubyte.gz"), kI64);
    train = {pixels.narrow(0, 0, 9000), labels.narrow(0, 0, 9000)};
    test = {pixels.narrow(0, 9000, 1000), labels.narrow(0, 9000, 1000)};
  }
  VisionTransformer model(options);
  optim::AdamW optimizer(model.named_parameters(), {.lr = 2e-3, .weight_decay = 0.01});
  optim::CosineSchedule schedule(optimizer, {.warmup = steps / 10, .total = steps});
  for (int64_t step = 1; step <= steps; ++step) {
    const Tensor chosen = randint(0, train.labels.size(0), {32});
    const Tensor loss = cross_entropy(model(index_select(train.pixels, 0, chosen)),
                                      index_select(train.labels, 0, chosen));
    loss.backward();
    optim::clip_grad_norm(model.parameters(), 1.0);
    optimizer.step(), schedule.step(), optimizer.zero_grad();
    if (step % 100 == 0) std::printf("step %3d  loss %.4f\n", static_cast<int>(step), loss.item());
  }
  const double right = share_right(model, test);
  std::printf("%.1f%% of unseen images right\n", 100 * right);
  return right >= (folder.empty() ? 0.95 : 0.85) ? 0 : 1;
}
