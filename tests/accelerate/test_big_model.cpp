// A model whose weights lie on the disk runs with the bits of the model in memory, and its pages come and go with
// its blocks. BIG-1, LCD are Accelerate's tests.
#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>

#include <tessera/accelerate/big_model/dispatch.h>
#include <tessera/autograd/autograd.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/core/state/weight_files.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/nn/models/llama.h>

#include "finished_process.h"
#include "message_of.h"

namespace tessera::test_big_model {
namespace {

using namespace accelerate;
using nn::models::Llama;
using nn::models::LlamaConfig;

const LlamaConfig kConfig = {
    .vocab_size = 300, .width = 128, .inner = 256, .layers = 4, .heads = 4, .kv_heads = 2};
const WeightPlace kDisk = WeightPlace::disk();

Tensor tokens() { return remainder(arange(24).view({2, 12}) * 37, 300); }

// A folder with a model, and what the model in memory makes of tokens.
struct Saved {
  explicit Saved(LlamaConfig config = kConfig, DType dtype = kF32) {
    const NoGradGuard no_grad;
    Llama model(config);
    model.to(dtype);
    model.save_pretrained(folder.path("model"), "400KB");  // several shards
    model.to(kF32);
    logits = model(tokens()).logits;
  }
  std::string path() const { return folder.path("model"); }
  TestFolder folder;
  Tensor logits;
};

std::unique_ptr<Llama> empty_model(const LlamaConfig& config = kConfig) {
  const nn::ParameterDefaultsGuard without_memory({.device = kMeta, .initialise = false});
  return std::make_unique<Llama>(config);
}

Tensor run(Llama& model) {
  const NoGradGuard no_grad;
  return model(tokens()).logits;
}

void expect_same_bits(const Tensor& a, const Tensor& b) {
  ASSERT_EQ(a.shape(), b.shape());
  ASSERT_EQ(a.dtype(), b.dtype());
  EXPECT_EQ(std::memcmp(a.data(), b.data(), static_cast<size_t>(a.numel() * size_of(a.dtype()))),
            0);
}

// Pages of a tensor that this process holds now.
int64_t pages_held(const Tensor& tensor) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<uintptr_t>(tensor.data());
  const uintptr_t first = begin / page,
                  end = (begin + static_cast<uintptr_t>(tensor.numel() * size_of(tensor.dtype()))) /
                        page;
  const int file = open("/proc/self/pagemap", O_RDONLY);
  int64_t held = 0;
  for (uintptr_t at = first; at < end; ++at) {
    uint64_t entry = 0;
    EXPECT_EQ(pread(file, &entry, 8, static_cast<off_t>(at * 8)), 8);
    held += static_cast<int64_t>(entry >> 63);
  }
  close(file);
  return held;
}

TEST(BigModel, BIG1_RunsFromTheDiskWithTheBitsOfTheModelInMemory) {
  const Saved saved;
  for (const DeviceMap& map :
       {DeviceMap{{"", kDisk}}, DeviceMap{{"model", kDisk}, {"lm_head", kDisk}},
        DeviceMap{{"", kCpu}, {"model.layers.2", kDisk}},
        DeviceMap{{"", kDisk}, {"model.embed_tokens", kCpu}, {"lm_head", kCpu}}}) {
    const auto model = empty_model();
    const Dispatched dispatched =
        load_checkpoint_and_dispatch(*model, saved.path(), {.device_map = map});
    EXPECT_TRUE(dispatched.report.complete());
    expect_same_bits(run(*model), saved.logits);
    expect_same_bits(run(*model), saved.logits);
  }
}

TEST(BigModel, AMapIsMadeForTheMemoryThatIsGiven) {
  const Saved saved;
  const auto model = empty_model();
  const int64_t total = compute_module_sizes(*model).at("");
  const Dispatched dispatched = load_checkpoint_and_dispatch(
      *model, saved.path(), {.max_memory = {{kCpu, total * 3 / 4}}, .no_split = {"DecoderLayer"}});
  bool in_memory = false, on_disk = false;
  for (const auto& [name, place] : dispatched.device_map) {
    in_memory |= !place.is_disk(), on_disk |= place.is_disk();
  }
  EXPECT_TRUE(in_memory && on_disk);
  expect_same_bits(run(*model), saved.logits);
}

TEST(BigModel, PagesOfABlockAreThereWhileItRunsAndGoAfterwards) {
  const Saved saved;
  const auto model = empty_model();
  const Dispatched dispatched =
      load_checkpoint_and_dispatch(*model, saved.path(), {.device_map = {{"", kDisk}}});
  std::vector<int64_t> during;
  const auto weight_of = [&](int64_t i) {
    return model->get_parameter("model.layers." + std::to_string(i) + ".mlp.gate_proj.weight");
  };
  for (int64_t i = 0; i < 4; ++i) {
    model->submodule("model.layers." + std::to_string(i) + ".mlp")
        .register_forward_hook([&, i](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs) {
          for (int64_t j = 0; j < i; ++j) EXPECT_LE(pages_held(weight_of(j)), 16) << i << ' ' << j;
          during.push_back(pages_held(weight_of(i)));
        });
  }
  expect_same_bits(run(*model), saved.logits);  // users' hooks run as ever
  EXPECT_EQ(during.size(), 4U);
  for (const int64_t pages : during) EXPECT_GE(pages, 128 * 256 * 4 / 4096 - 1);
  // The kernel maps up to 16 pages around the one that is read.
  for (const auto& [name, tensor] : model->named_parameters()) {
    EXPECT_LE(pages_held(tensor), 16) << name;
  }
}

TEST(BigModel, BlocksConvertWhatTheFilesHaveInAnotherDtype) {
  const Saved saved(kConfig, kBF16);
  const auto model = empty_model();
  const Dispatched dispatched = load_checkpoint_and_dispatch(
      *model, saved.path(), {.device_map = {{"", kCpu}, {"model", kDisk}, {"lm_head", kDisk}}});
  expect_same_bits(run(*model), saved.logits);
  EXPECT_EQ(model->get_parameter("model.layers.1.mlp.up_proj.weight").dtype(), kBF16)
      << "between calls it lies there as the file has it";
  expect_same_bits(run(*model), saved.logits);
  const auto narrow = empty_model();
  load_checkpoint_and_dispatch(*narrow, saved.path(),
                               {.device_map = {{"", kDisk}}, .dtype = kBF16});
  EXPECT_EQ(run(*narrow).dtype(), kBF16);
}

TEST(BigModel, TransposedTablesOfGpt2AreTurnedForACall) {
  using nn::models::Gpt;
  const nn::models::GptConfig config{
      .vocab_size = 300, .context = 16, .width = 64, .layers = 3, .heads = 4};
  TestFolder folder;
  const NoGradGuard no_grad;
  Gpt whole(config);
  whole.save_pretrained(folder.path("gpt2"));
  const nn::ParameterDefaultsGuard without_memory({.device = kMeta, .initialise = false});
  Gpt model(config);
  load_checkpoint_and_dispatch(model, Gpt::read_weights(folder.path("gpt2/model.safetensors")),
                               {.device_map = {{"", kDisk}}});
  for (int i = 0; i < 2; ++i) expect_same_bits(model(tokens()).logits, whole(tokens()).logits);
  EXPECT_FALSE(model.get_parameter("transformer.h.0.attn.c_attn.weight").is_contiguous());
}

// A block that calls itself, as a recursive cell does: weights that lie as calls read them need not
// come and go, and others have one call at a time.
struct Recursive : nn::Module<Recursive> {
  Recursive() : fc(add<nn::Linear>("fc", 8, 8)) {}
  Tensor forward(const Tensor& x) {
    EXPECT_TRUE(fc.weight.is_contiguous());
    if (depth == 0) return fc(x);
    --depth;
    const Tensor y = (*this)(fc(x));
    ++depth;
    return y;
  }
  int depth = 0;
  nn::Linear& fc;
};

TEST(BigModel, BlocksThatNeedNoConversionMayRunInsideOfThemselves) {
  const NoGradGuard no_grad;
  Recursive whole;
  whole.depth = 2;
  const Tensor x = ones({3, 8});
  const Tensor expected = whole(x);
  const auto called = [&](const StateDict& weights, int depth) {
    TestFolder folder;
    save_weights(weights, folder.path("cell"));
    const nn::ParameterDefaultsGuard without_memory({.device = kMeta, .initialise = false});
    Recursive model;
    load_checkpoint_and_dispatch(model, folder.path("cell"),
                                 {.device_map = {{"", kDisk}}, .no_split = {"Recursive"}});
    model.depth = depth;
    return model(x);
  };
  expect_same_bits(called(whole.state_dict(), 2), expected);
  StateDict narrow;
  for (const auto& [name, tensor] : whole.state_dict()) narrow.set(name, tensor.to(kBF16));
  EXPECT_EQ(called(narrow, 0).dtype(), kF32);
  const std::string inside = message_of<UnsupportedError>([&] { called(narrow, 1); });
  EXPECT_TRUE(mentions(inside, "is called while a call of it runs")) << inside;
}

TEST(BigModel, TiedWeightsStayOneTensorAndAreOnTheDiskOnce) {
  LlamaConfig config = kConfig;
  config.tied = false;
  const Saved untied(config), tied;
  EXPECT_NE(untied.logits.data(), tied.logits.data());
  const auto model = empty_model();
  load_checkpoint_and_dispatch(*model, tied.path(), {.device_map = {{"", kDisk}}});
  EXPECT_EQ(model->lm_head.weight.data(), model->model.embed_tokens.weight.data());
  const auto other = empty_model(config);
  load_checkpoint_and_dispatch(*other, untied.path(), {.device_map = {{"", kDisk}}});
  expect_same_bits(run(*other), untied.logits);
}

TEST(BigModel, DiskOffloadWritesAModelThatIsInMemory) {
  TestFolder folder;
  Llama model(kConfig);
  const Tensor expected = run(model).clone();
  HookHandle handle = disk_offload(model, folder.path("weights"));
  EXPECT_TRUE(std::filesystem::exists(folder.path("weights/model.safetensors")));
  expect_same_bits(run(model), expected);
  EXPECT_LE(pages_held(model.get_parameter("model.layers.0.mlp.up_proj.weight")), 16);
  handle.remove();
  expect_same_bits(run(model), expected);
  EXPECT_GT(pages_held(model.get_parameter("model.layers.0.mlp.up_proj.weight")), 0);
  save_weights(model.state_dict(), folder.path("again"));
  const auto again = Llama(kConfig).remake();
  again->load_state_dict(load_weights(folder.path("again")));
  expect_same_bits(run(*again), expected);
}

TEST(BigModel, RefusesWhatWouldBeLost) {
  const Saved saved;
  const auto names = [](const std::string& word, const auto& call) {
    EXPECT_TRUE(mentions(message_of(call), word)) << word << ": " << message_of(call);
  };
  const auto dispatched = [&] {
    auto model = empty_model();
    load_checkpoint_and_dispatch(*model, saved.path(), {.device_map = {{"", kDisk}}});
    return model;
  };
  {
    const auto model = dispatched();
    const NoGradGuard no_grad;
    model->get_parameter("model.layers.1.mlp.up_proj.weight").fill_(0);
    names("'model.layers.1.mlp.up_proj.weight' was written to", [&] { run(*model); });
  }
  {
    const auto model = dispatched();
    model->to(kBF16);
    names("converted since", [&] { run(*model); });
  }
  Llama in_memory(kConfig);
  names("offload_folder", [&] { dispatch_model(in_memory, {{"", kDisk}}); });
  names("no view of a file", [&] {
    auto model = empty_model();
    load_checkpoint_in_model(*model, in_memory.state_dict(), {{"", kDisk}});
  });
  names("no values yet", [&] { dispatch_model(*empty_model(), {{"", kCpu}}); });
  StateDict partial = load_weights(saved.path()), more = load_weights(saved.path());
  more.set("model.extra.weight", zeros({2}));
  names("model.extra.weight", [&] {
    load_checkpoint_in_model(*empty_model(), more, {{"", kCpu}}, {.strict = true});
  });
  EXPECT_EQ(load_checkpoint_in_model(*empty_model(), more, {{"", kCpu}}).unexpected.size(), 1U);
  LlamaConfig deeper = kConfig;
  deeper.layers = 5;
  names("model.layers.4.", [&] {
    load_checkpoint_in_model(*empty_model(deeper), saved.path(), {{"", kCpu}});
  });
  for (const auto& file : std::filesystem::directory_iterator(saved.path())) {
    if (mentions(file.path().string(), "model-00001-")) std::filesystem::remove(file.path());
  }
  names("model-00001", [&] {
    load_checkpoint_in_model(*empty_model(), saved.path(), {{"", kCpu}});
  });
}

TEST(BigModel, OnlyPagesOfFilesAreEverDropped) {
  std::vector<std::byte> own(1 << 16);
  EXPECT_FALSE(are_file_pages(own));
  EXPECT_FALSE(are_file_pages({}));
  TestFolder folder;
  const std::string path = folder.write("bytes", std::string(3 << 12, 'x'));
  const MappedFile file(path, FileAccess::kCopyOnWrite);
  EXPECT_TRUE(are_file_pages(file.bytes()));
  EXPECT_TRUE(are_file_pages(file.bytes().subspan(100, 5000)));
  // With a page behind it that is no file's; behind `file` there may be another one.
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t bytes = 3 << 12;
  void* const room = mmap(nullptr, bytes + page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(room, MAP_FAILED);
  const int descriptor = open(path.c_str(), O_RDONLY);
  ASSERT_EQ(mmap(room, bytes, PROT_READ, MAP_PRIVATE | MAP_FIXED, descriptor, 0), room);
  close(descriptor);
  const auto* const begin = static_cast<const std::byte*>(room);
  EXPECT_TRUE(are_file_pages({begin, bytes}));
  EXPECT_FALSE(are_file_pages({begin, bytes + 1}));
  munmap(room, bytes + page);
  drop_file_pages(file.bytes());
  EXPECT_EQ(file.text()[5000], 'x');
}

}  // namespace
}  // namespace tessera::test_big_model
