// Steps of models of full size on the dry device: what a GPU would be asked for.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/device_memory.h>
#include <tessera/core/cuda/dry/launches.h>
#include <tessera/core/cuda/dry/price.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/random.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/graphed_step.h>
#include <tessera/optim/optimizers.h>
#include <tessera/precision/autocast.h>

#include "../message_of.h"

namespace tessera::test_cuda_dry {
namespace {

namespace dry = gpu::dry;
using dry::Launch, dry::LaunchKind;

// A training step of GPT-2 as bench_step has it, in autocast to bf16.
class Training {
 public:
  Training(const nn::models::GptConfig& config, int64_t batch)
      : model_(made(config)), optimizer_(model_.named_parameters(), {.lr = 1e-4}) {
    tokens_ = zeros({batch, config.context + 1}, {.dtype = kI64, .device = cuda(0)});
  }
  Tensor step() {
    const int64_t context = tokens_.size(1) - 1;
    Tensor loss;
    {
      const AutocastGuard autocast(kBF16);
      loss = model_(tokens_.narrow(1, 0, context), tokens_.narrow(1, 1, context)).loss;
    }
    loss.backward();
    optim::clip_grad_norm(model_.parameters(), 1, {.fold_into = &optimizer_});
    optimizer_.step();
    optimizer_.zero_grad();
    return loss.detach();
  }
  std::vector<Launch> launches() {
    dry::take_launches();
    step();
    return dry::take_launches();
  }
  nn::models::Gpt& model() { return model_; }

 private:
  static nn::models::Gpt made(const nn::models::GptConfig& config) {
    const nn::ParameterDefaultsGuard on_device({.device = cuda(0)});
    return nn::models::Gpt(config);
  }
  nn::models::Gpt model_;
  optim::AdamW optimizer_;
  Tensor tokens_;
};

double flops(const std::vector<Launch>& launches, LaunchKind kind) {
  double sum = 0;
  for (const Launch& launch : launches) sum += launch.kind == kind ? launch.flops : 0;
  return sum;
}
int64_t count(const std::vector<Launch>& launches, LaunchKind kind) {
  return std::ranges::count(launches, kind, &Launch::kind);
}

TEST(CudaDry, IsADeviceWithoutValues) {
  EXPECT_EQ(gpu::backend_kind(), gpu::BackendKind::kDry);
  const Tensor x = full({3}, 1.0, {.device = cuda(0)});
  const std::string message = message_of<UnsupportedError>([&] { (x * 2).to(kCpu); });
  EXPECT_NE(message.find("calculates nothing"), std::string::npos) << message;
  EXPECT_THROW(x.sum().item(), UnsupportedError);
  EXPECT_THROW(nonzero(x), UnsupportedError);
}

// The forms of a launch, as the op asked for it.
TEST(CudaDry, NotesWhatIsAskedFor) {
  const Tensor a = zeros({128, 64}, {.dtype = kBF16, .device = cuda(0)});
  const Tensor b = zeros({64, 256}, {.dtype = kBF16, .device = cuda(0)});
  dry::take_launches();
  const Tensor y = exp(matmul(a, b));
  const std::vector<Launch> launches = dry::take_launches();
  ASSERT_EQ(launches.size(), 2u);
  EXPECT_EQ(launches[0].kind, LaunchKind::kProduct);
  EXPECT_EQ(launches[0].flops, 2.0 * 128 * 64 * 256);
  EXPECT_NE(launches[0].request.find("k64"), std::string::npos) << launches[0].request;
  EXPECT_EQ(launches[1].kind, LaunchKind::kKernel);
  EXPECT_EQ(launches[1].name, "elementwise");
  EXPECT_NE(launches[1].function, nullptr);
  EXPECT_GE(int64_t{launches[1].grid[0]} * launches[1].block[0] * 16, y.numel());
  EXPECT_EQ(launches[1].device, 0);
  EXPECT_TRUE(dry::take_launches().empty());
}

TEST(CudaDry, MemoryIsThatOfADevice) {
  gpu::DeviceAllocator& allocator = gpu::caching_allocator(0);
  allocator.release_cached();
  const int64_t before = allocator.use().reserved;
  dry::set_device_bytes(before + (int64_t{1} << 30));
  {
    const Tensor half = raw::empty({int64_t{1} << 29}, kU8, cuda(0));
    EXPECT_EQ(allocator.use().reserved - before, int64_t{1} << 29);
    EXPECT_THROW(raw::empty({(int64_t{1} << 29) + 1}, kU8, cuda(0)), OutOfMemory);
    const Tensor rest = raw::empty({int64_t{1} << 29}, kU8, cuda(0));
    EXPECT_NE(rest.data(), half.data());
    EXPECT_GE(dry::peak_reserved_bytes(0), before + (int64_t{1} << 30));
  }
  allocator.release_cached();
  EXPECT_EQ(allocator.use().reserved, before);
  dry::set_device_bytes(int64_t{80} << 30);
}

// 6 operations a token for each parameter of blocks and head; attention has two products forward
// and five backward, of all queries with all keys. (The sums are whole numbers below 2^53.)
TEST(CudaDry, AStepOfGpt2HasItsProducts) {
  const struct {
    nn::models::GptConfig config;
    int64_t batch;
  } models[] = {{{.vocab_size = 50304}, 64},
                {{.vocab_size = 50304, .width = 1024, .layers = 24, .heads = 16}, 32}};
  for (const auto& [config, batch] : models) {
    SCOPED_TRACE(config.layers);
    Training training(config, batch);
    training.step();  // the optimizer's state
    const std::vector<Launch> launches = training.launches();
    const auto tokens = static_cast<double>(batch * config.context);
    const auto width = static_cast<double>(config.width);
    const double blocks = 12 * width * width * static_cast<double>(config.layers);
    const double head = width * static_cast<double>(config.vocab_size);
    EXPECT_EQ(flops(launches, LaunchKind::kProduct), 6 * (blocks + head) * tokens);
    EXPECT_EQ(
        flops(launches, LaunchKind::kAttention) + flops(launches, LaunchKind::kAttentionGradient),
        7 * 2 * tokens * static_cast<double>(config.context * config.layers) * width);
    EXPECT_EQ(count(launches, LaunchKind::kAttention), config.layers);
    EXPECT_EQ(count(launches, LaunchKind::kAttentionGradient), config.layers);
    // All kernels say what they move.
    std::map<std::string, int64_t> written;
    std::set<std::string> silent;
    for (const Launch& launch : launches) {
      if (launch.kind != LaunchKind::kKernel) continue;
      if (launch.traffic.is_known()) {
        written[launch.name] += launch.traffic.writes;
      } else {
        silent.insert(launch.name);
      }
    }
    // Values and two states of every parameter in f32, and in bf16 what autocast reads as a copy:
    // all but position embeddings and norms.
    const int64_t parameters = training.model().num_parameters();
    const int64_t uncopied = config.width * (config.context + 2 * (2 * config.layers + 1));
    EXPECT_EQ(written["AdamW"], 12 * parameters + 2 * (parameters - uncopied));
    EXPECT_EQ(silent, std::set<std::string>{});
    // Every step asks for the same.
    const std::vector<Launch> again = training.launches();
    ASSERT_EQ(again.size(), launches.size());
    for (size_t i = 0; i < launches.size(); ++i) {
      EXPECT_EQ(again[i].name, launches[i].name) << i;
      EXPECT_EQ(again[i].request, launches[i].request) << i;
      EXPECT_TRUE(std::ranges::equal(again[i].grid, launches[i].grid)) << i;
    }
  }
}

TEST(CudaDry, AGraphAsksForTheSame) {
  Training training({.vocab_size = 50304, .context = 256}, 8);
  optim::GraphedStep step(
      cuda(0), [&](const TensorList&) -> TensorList { return {training.step()}; }, {.warmup = 2});
  std::vector<Launch> eager, graphed;
  for (int call = 0; call < 4; ++call) {
    dry::take_launches();
    step({});
    (call < 2 ? eager : graphed) = dry::take_launches();
  }
  ASSERT_TRUE(step.captured());
  const auto kernels = [](const std::vector<Launch>& launches) {
    std::vector<std::string> names;
    for (const Launch& launch : launches) {
      const bool moves = launch.kind == LaunchKind::kCopy || launch.kind == LaunchKind::kFill;
      if (!moves) names.push_back(launch.name + " " + launch.request);
    }
    return names;
  };
  EXPECT_EQ(kernels(graphed), kernels(eager));
  for (const Launch& launch : graphed) {
    if (launch.kind == LaunchKind::kCopy) continue;
    EXPECT_TRUE(launch.replayed) << launch.name;
  }
}

// ---- Limits ------------------------------------------------------------------------------------

// Grids, and what is counted in 32 bits, of tensors beyond 2^31 elements: a launch that a GPU would
// refuse is an error here too. Values are not looked at, and there are none.
class CudaDryLimits : public testing::Test {
 protected:
  void SetUp() override { dry::set_device_bytes(int64_t{700} << 30); }
  void TearDown() override {
    gpu::caching_allocator(0).release_cached();
    dry::set_device_bytes(int64_t{80} << 30);
  }
};

constexpr int64_t kBeyond = (int64_t{1} << 31) + 40;
Tensor huge(const Shape& shape, DType dtype = kBF16) { return raw::empty(shape, dtype, cuda(0)); }
void expect_launches(const char* name, const std::function<void()>& work) {
  dry::take_launches();
  EXPECT_NO_THROW(work()) << name;
  EXPECT_FALSE(dry::take_launches().empty()) << name;
}

// Long, wide, tall and of many planes: all of a little more than 2^31 elements.
const Shape kShapes[] = {
    {kBeyond}, {40, kBeyond / 40 + 1}, {kBeyond / 40 + 1, 40}, {kBeyond / 96 + 1, 4, 24}};

TEST_F(CudaDryLimits, ElementByElement) {
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(shape);
    const Tensor x = huge(shape).set_requires_grad(), y = huge(shape);
    expect_launches("exp", [&] { exp(x).sum().backward(); });
    expect_launches("add", [&] { (x + y).sum().backward(); });
    expect_launches("gelu", [&] { gelu(x, Gelu::kTanh).sum().backward(); });
    expect_launches("where", [&] { where(gt(x, y), x, y); });
    expect_launches("to", [&] { x.to(kF32); });
    expect_launches("fill_", [&] { fill_(y, 1); });
    expect_launches("copy_", [&] { copy_(y, x.detach()); });
    expect_launches("dropout", [&] { dropout(x, 0.1).sum().backward(); });
    expect_launches("randn", [&] { randn_like(y); });
    if (shape.size() == 1) continue;
    const Tensor t = x.detach().transpose(0, 1);
    expect_launches("contiguous", [&] { t.contiguous(); });
    expect_launches("transposed +", [&] { t + t * 2; });
    expect_launches("row +", [&] { x + huge({shape[shape.size() - 1]}); });
    expect_launches("cat", [&] { cat({y, y}, 0); });
    expect_launches("cat", [&] { cat({y, y}, 1); });
    expect_launches("slice", [&] { x.slice(1, 1, shape[1]).clone(); });
    expect_launches("flip", [&] { flip(y, {0}); });
    expect_launches("tril", [&] { tril(y); });
  }
}

TEST_F(CudaDryLimits, ByRows) {
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(shape);
    const Tensor x = huge(shape).set_requires_grad();
    const int64_t last = shape[shape.size() - 1];
    expect_launches("sum", [&] { sum(x).backward(); });
    expect_launches("norm", [&] { norm(x.detach()); });
    expect_launches("max", [&] { max(x.detach()); });
    for (int64_t dim = 0; dim < static_cast<int64_t>(shape.size()); ++dim) {
      SCOPED_TRACE(dim);
      expect_launches("sum", [&] { sum(x, {dim}); });
      expect_launches("amax", [&] { amax(x, {dim}); });
      expect_launches("argmax", [&] { argmax(x, dim); });
      expect_launches("softmax", [&] { softmax(x, dim).sum().backward(); });
      expect_launches("log_softmax", [&] { log_softmax(x, dim); });
      expect_launches("cumsum", [&] { cumsum(x, dim); });
    }
    expect_launches("layer_norm", [&] { layer_norm(x, {last}).sum().backward(); });
    if (shape.size() != 2) continue;
    const Tensor w = huge({last}, kF32).set_requires_grad();
    expect_launches("layer_norm", [&] { layer_norm(x, {last}, w, w).sum().backward(); });
    const Tensor targets = huge({shape[0]}, kI64);
    expect_launches("cross_entropy", [&] { cross_entropy(x, targets).backward(); });
    expect_launches("index_select",
                    [&] { index_select(x, 0, huge({shape[0]}, kI64)).sum().backward(); });
    expect_launches("gather", [&] { gather(x, 1, huge(shape, kI64)); });
  }
  const Tensor table = huge({50, 40}).set_requires_grad();
  expect_launches("embedding",
                  [&] { embedding(huge({kBeyond / 40 + 1}, kI64), table).sum().backward(); });
}

TEST_F(CudaDryLimits, ProductsAndImages) {
  for (const bool libraries : {true, false}) {
    SCOPED_TRACE(libraries ? "by libraries" : "on own kernels");
    dry::set_libraries(libraries);
    const Tensor tall = huge({kBeyond / 40 + 1, 40}).set_requires_grad();
    const Tensor w = huge({24, 40}).set_requires_grad();
    expect_launches("linear", [&] { linear(tall, w, huge({24})).sum().backward(); });
    const Tensor wide = huge({kBeyond / 40 + 1, 40}, kF64).set_requires_grad();
    expect_launches("matmul", [&] { matmul(wide, huge({40, 3}, kF64)).sum().backward(); });
    expect_launches("matmul", [&] { matmul(huge({3, 40}, kF64), wide.detach().t()); });
    for (const DType dtype : {kBF16, kF32}) {
      const Tensor batches = huge({100000, 150, 160}, dtype).set_requires_grad();
      expect_launches("bmm", [&] { bmm(batches, huge({100000, 160, 2}, dtype)).sum().backward(); });
      const Tensor q = huge({100000, 2, 64, 168}, dtype).set_requires_grad();
      expect_launches("attention", [&] { scaled_dot_product_attention(q, q, q).sum().backward(); });
      const Tensor images = huge({70000, 3, 102, 103}, dtype).set_requires_grad();
      const Tensor kernel = huge({4, 3, 3, 3}, dtype).set_requires_grad();
      expect_launches("conv2d", [&] { conv2d(images, kernel).sum().backward(); });
      expect_launches("max_pool2d", [&] { max_pool2d(images, {2, 2}).sum().backward(); });
      expect_launches("batch_norm", [&] {
        const Tensor statistics = huge({3}, kF32);
        batch_norm(images, statistics, statistics, Tensor(), Tensor(), true).sum().backward();
      });
    }
  }
  dry::set_libraries(true);
}

}  // namespace
}  // namespace tessera::test_cuda_dry
