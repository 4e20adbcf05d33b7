// Modules made without memory, and what they hold when they get it: the bits of a module that had
// it from the beginning, whole or by parts.
// ctest labels: threads
#include <tessera/nn/materialise.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/core/factory/initial_values.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/nn/conv.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/init.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/models/bert.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/nn/norm.h>
#include <tessera/nn/recurrent/recurrent.h>
#include <tessera/nn/transformer/attention.h>

#include "distributed/dtensor_fixture.h"

namespace tessera::nn::test_materialise {
namespace {

using distributed::compared_ranks;
using distributed::distribute_tensor;
using distributed::Mesh;
using distributed::Placements;
using distributed::Replicate;
using distributed::Shard;
using distributed::world;

// Rules that no module below uses, each on a parameter of its own, and fills by hand.
struct ManyRules : Module<ManyRules> {
  ManyRules() {
    const NoGradGuard no_grad;
    init::constant(parameter("constant", Shape{5, 3}), 0.3);
    init::trunc_normal(parameter("trunc", Shape{9, 4}), 0, 1, -1, 2, initial_stream("trunc"));
    init::eye(parameter("eye", Shape{5, 8}));
    init::dirac(parameter("dirac", Shape{6, 2, 3}), 2);
    init::xavier_normal(parameter("xavier", Shape{6, 5}), 2, initial_stream("xavier"));
    init::kaiming_uniform(parameter("kaiming", Shape{6, 5}), {}, initial_stream("kaiming"));
    init::orthogonal(parameter("orthogonal", Shape{4, 7}), 1, initial_stream("orthogonal"));
    init::sparse(parameter("sparse", Shape{7, 6}), 0.4, 1, initial_stream("sparse"));
    init::orthogonal(parameter("numbered", Shape{2, 7}));  // the context's next streams
    init::normal(parameter("next", Shape{2, 7}));
    bernoulli_(parameter("bernoulli", Shape{9, 9}), 0.4, initial_stream("bernoulli"));
    const Tensor table = numbered_table();
    init::by_range(parameter("by_range", Shape{6, 5}), [table](const Tensor& piece, int64_t first) {
      piece.copy_(table.narrow(0, first, piece.numel()));
    });
    init::by_index(parameter("by_index", Shape{7, 3}),
                   [](int64_t i) { return -std::log(1.0 + i); });
    // Rows and parts of rows, one over the other.
    const Tensor& rows = parameter("rows", Shape{6, 5});
    normal_(rows, 1, 2, initial_stream("rows"));
    uniform_(rows.narrow(0, 1, 3), 3, 4, initial_stream("three"));
    rows[2].narrow(0, 1, 3).fill_(7);
    rows[0].zero_();
    // Made by hand on the device that parameters have.
    const Device device = ParameterDefaultsGuard::current().device;
    parameter("ones", ones({3, 4}, {.device = device}));
    parameter("randn", randn({5, 2}, {.device = device}, initial_stream("randn")));
    buffer("rand", rand({5, 2}, {.device = device}, initial_stream("rand")));
    buffer("real", full({2}, 5));
  }
  static Tensor numbered_table() { return arange(30).to(kF32); }
  Tensor forward(const Tensor& x) { return x; }
};

// An entry of a transformer beside others, drawn under a name of its own.
struct Named : Module<Named> {
  Named() {
    const InitialName name("elsewhere");
    adopt("member", std::make_unique<Linear>(6, 4));
  }
  Tensor forward(const Tensor& x) { return x; }
};

nn::models::GptConfig gpt_config() {
  return {.vocab_size = 13, .context = 6, .width = 8, .layers = 2, .heads = 2};
}
nn::models::BertConfig bert_config() {
  return {.vocab_size = 13, .width = 8, .layers = 1, .heads = 2, .context = 6, .padding = 5};
}

using Maker = std::function<std::unique_ptr<ModuleBase>()>;
struct Kind {
  const char* name;
  Maker make;
};
template <class M, class... Args>
Kind kind(const char* name, Args... args) {
  return {name, [=]() -> std::unique_ptr<ModuleBase> { return std::make_unique<M>(args...); }};
}
const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      kind<Linear>("Linear", 7, 5),
      kind<Embedding>("Embedding", 11, 6, EmbeddingOptions{.padding_idx = 3}),
      kind<LayerNorm>("LayerNorm", Shape{5}),
      kind<BatchNorm2d>("BatchNorm2d", 5),
      kind<Conv2d>("Conv2d", 3, 5, 3),
      kind<MultiheadAttention>("MultiheadAttention", 8, 2),
      kind<LSTM>("LSTM", 5, 3),
      kind<ManyRules>("ManyRules"),
      kind<Named>("Named"),
      kind<nn::models::Gpt>("Gpt", gpt_config()),
      kind<nn::models::Bert>("Bert", bert_config()),
  };
  return all;
}

std::unique_ptr<ModuleBase> made_without_memory(const Maker& make, DType dtype = kF32) {
  const ParameterDefaultsGuard guard({.dtype = dtype, .device = kMeta});
  return make();
}

// The tensor becomes its part, under all who hold it.
void become_part(const Tensor& tensor, Mesh& mesh, const Placements& placements) {
  const Tensor part = distribute_tensor(tensor, mesh, placements);
  copy_guard(part, tensor);
  tensor.set_data(part);
}

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() && a.device() == b.device() &&
         (a.numel() == 0 || std::memcmp(a.data(), b.data(), static_cast<size_t>(a.nbytes())) == 0);
}

void expect_same_module(ModuleBase& got, ModuleBase& expected, const std::string& what) {
  const auto compare = [&](const NamedTensors& a, const NamedTensors& b) {
    ASSERT_EQ(a.size(), b.size()) << what;
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_EQ(a[i].name, b[i].name) << what;
      EXPECT_TRUE(same_bits(a[i].tensor, b[i].tensor)) << what << ", " << a[i].name;
      EXPECT_EQ(a[i].tensor.requires_grad(), b[i].tensor.requires_grad()) << what;
      EXPECT_EQ(a[i].tensor.storage()->category(), b[i].tensor.storage()->category())
          << what << ", " << a[i].name;
    }
  };
  compare(got.named_parameters(), expected.named_parameters());
  compare(got.named_buffers(), expected.named_buffers());
}

TEST(Materialise, GivesTheBitsOfAModuleThatHadMemoryFromTheBeginning) {
  for (const DType dtype : {kF32, kBF16, kF64}) {
    for (const Kind& one : kinds()) {
      manual_seed(11);
      const ParameterDefaultsGuard guard({.dtype = dtype});
      const auto expected = one.make();
      const RandomState after = random_state();
      manual_seed(11);
      const auto got = made_without_memory(one.make, dtype);
      EXPECT_EQ(random_state().next_stream, after.next_stream) << one.name;
      for (const auto& [name, tensor] : got->named_parameters()) EXPECT_TRUE(tensor.is_meta());
      manual_seed(12);  // too late to change anything
      materialise(*got);
      expect_same_module(*got, *expected, one.name);
      const RandomState now = random_state();
      EXPECT_EQ(now.next_stream, 0u);
      materialise(*got);  // what has memory stays
      expect_same_module(*got, *expected, one.name);
    }
  }
}

TEST(Materialise, GivesEachRankTheBitsOfItsPart) {
  for (const int size : {1, 2, 3, 4}) {
    compared_ranks(size, [&](int) {
      Mesh line(world());
      std::vector<std::pair<Mesh*, Placements>> ways = {
          {&line, {Shard(0)}}, {&line, {Shard(1)}}, {&line, {Replicate()}}};
      std::unique_ptr<Mesh> square;
      if (size == 4) {
        square = std::make_unique<Mesh>(
            world(), std::vector<distributed::MeshAxis>{{"dp_replicate", 2}, {"dp_shard", 2}});
        ways.push_back({square.get(), {Replicate(), Shard(0)}});
        ways.push_back({square.get(), {Shard(1), Shard(0)}});
        ways.push_back({square.get(), {distributed::StridedShard{0, 2}, Shard(0)}});
        ways.push_back({square.get(), {Replicate(), distributed::BlockShard{0, 2}}});
        ways.push_back(
            {square.get(), {distributed::StridedShard{1, 2}, distributed::BlockShard{1, 3}}});
      }
      for (const auto& [mesh, way] : ways) {
        for (const Kind& one : kinds()) {
          manual_seed(11);
          const auto expected = one.make();
          manual_seed(11);
          const auto got = made_without_memory(one.make);
          const NamedTensors whole = expected->named_parameters();
          NamedTensors parts = got->named_parameters();
          ASSERT_EQ(parts.size(), whole.size());
          for (size_t i = 0; i < parts.size(); ++i) {
            Placements placements = way;
            for (distributed::Placement& placement : placements) {
              if (distributed::shard_dim(placement) >= whole[i].tensor.dim()) placement = Shard(0);
            }
            const int dim = distributed::shard_dim(way.back());
            const bool in_blocks = distributed::blocks_of(placements.back()) > 1;
            if (in_blocks && whole[i].tensor.size(dim) % distributed::blocks_of(way.back()) != 0) {
              placements = {Replicate(), Shard(0)};
            }
            become_part(parts[i].tensor, *mesh, placements);
          }
          manual_seed(12);
          materialise(*got);
          for (size_t i = 0; i < parts.size(); ++i) {
            const Tensor& part = parts[i].tensor;
            ASSERT_TRUE(distributed::is_dtensor(part));
            EXPECT_TRUE(part.requires_grad() && part.is_leaf());
            const Tensor by_hand = distributed::part_by_hand(whole[i].tensor.detach(), *mesh,
                                                             distributed::placements_of(part));
            EXPECT_TRUE(same_bits(part, by_hand))
                << one.name << " " << parts[i].name << " " << part.describe();
          }
          const NamedTensors buffers = got->named_buffers();
          for (size_t i = 0; i < buffers.size(); ++i) {
            EXPECT_TRUE(same_bits(buffers[i].tensor, expected->named_buffers()[i].tensor));
          }
        }
      }
    });
  }
}

// As ZeRO cuts what tensor parallelism leaves.
TEST(Materialise, GivesEachRankTheBitsOfItsRunOfAPart) {
  compared_ranks(4, [&](int) {
    Mesh mesh(world(), std::vector<distributed::MeshAxis>{{"dp_shard", 2}, {"tp", 2}});
    for (const Kind& one : kinds()) {
      manual_seed(11);
      const NamedTensors whole = one.make()->named_parameters();
      manual_seed(11);
      const auto got = made_without_memory(one.make);
      const NamedTensors parts = got->named_parameters();
      for (size_t i = 0; i < parts.size(); ++i) {
        const Tensor& all = whole[i].tensor;
        distributed::Placement across = Replicate();
        for (int dim = all.dim(); dim-- > 0;) {
          if (all.size(dim) % 2 == 0) across = Shard(dim);
          if (all.size(dim) % 6 == 0) across = distributed::BlockShard{dim, 3};
        }
        const int64_t numel =
            across == distributed::Placement(Replicate()) ? all.numel() : all.numel() / 2;
        constexpr int64_t kBefore = 3;  // of the unit's other parameters
        const distributed::FlatShard run{kBefore, (kBefore + numel + 1) / 2};
        become_part(parts[i].tensor, mesh, {run, across});
      }
      manual_seed(12);
      materialise(*got);
      for (size_t i = 0; i < parts.size(); ++i) {
        const Tensor& part = parts[i].tensor;
        const Tensor by_hand = distributed::part_by_hand(whole[i].tensor.detach(), mesh,
                                                         distributed::placements_of(part));
        EXPECT_TRUE(same_bits(part, by_hand))
            << one.name << " " << parts[i].name << " " << part.describe();
      }
    }
  });
}

TEST(Materialise, TakesTheMemoryOfAPartAndLittleMore) {
  struct Two : Module<Two> {
    Two() : a(add<Linear>("a", 1000, 300)), b(add<Embedding>("b", 700, 501)) {
      init::trunc_normal(a.bias, 0, 1, -2, 2, initial_stream("bias"));
    }
    Tensor forward(const Tensor& x) { return x; }
    Linear& a;
    Embedding& b;
  };
  for (const Placements& way : {Placements{Shard(0)}, Placements{Shard(1)}}) {
    compared_ranks(4, [&](int) {
      Mesh mesh(world());
      const auto stats = memory_stats();
      const auto before = stats->begin_peaks();
      const int64_t held = stats->current(MemoryCategory::kParameter);
      const int64_t total = stats->peak();
      const auto model = made_without_memory([] { return std::make_unique<Two>(); });
      int64_t own = 0;
      for (const auto& [name, tensor] : model->named_parameters()) {
        become_part(tensor, mesh, tensor.dim() == 1 ? Placements{Shard(0)} : way);
        own += (tensor.nbytes() + 511) / 512 * 512;
      }
      const int64_t small = 64 << 10;
      EXPECT_LE(stats->peak() - total, small);  // nothing yet
      materialise(*model);
      EXPECT_LE(stats->current(MemoryCategory::kParameter) - held, own);
      EXPECT_GE(stats->current(MemoryCategory::kParameter) - held, own / 2);
      EXPECT_LE(stats->peak(MemoryCategory::kParameter) - held, own + small);
      EXPECT_LE(stats->peak() - total, own + small);
      stats->end_peaks(before);
    });
  }
}

TEST(Materialise, KeepsTiesAndSharedMemory) {
  struct Shared : Module<Shared> {
    Shared() : weight(parameter("weight", Shape{4, 3})) {
      init::uniform(weight, 0, 1, initial_stream("weight"));
      buffer("row", weight.detach()[2]);
    }
    Tensor forward(const Tensor& x) { return x; }
    const Tensor& weight;
  };
  const auto gpt = made_without_memory(kinds()[9].make);
  materialise(*gpt);
  EXPECT_TRUE(
      gpt->get_parameter("lm_head.weight").is(gpt->get_parameter("transformer.wte.weight")));
  const auto shared = made_without_memory([] { return std::make_unique<Shared>(); });
  materialise(*shared);
  const Tensor row = shared->named_buffers()[0].tensor, weight = shared->parameters()[0];
  EXPECT_EQ(row.data_as<float>(), weight.data_as<float>() + 6);
  EXPECT_EQ(row.to_vector(), weight.detach()[2].to_vector());
}

TEST(Materialise, FollowsConversionsAndClonesOfTheModule) {
  struct Cloned : Module<Cloned> {
    Cloned() : inner(add<Linear>("inner", 600, 1300)) {  // conversions go by 1 MiB
      init::trunc_normal(parameter("long", Shape{300, 301}), 0, 1, -2, 2, initial_stream("long"));
    }
    std::unique_ptr<Cloned> remake() const { return std::make_unique<Cloned>(); }
    Tensor forward(const Tensor& x) { return inner(x); }
    Linear& inner;
  };
  const auto make = [] { return std::make_unique<Cloned>(); };
  manual_seed(3);
  Cloned expected;
  expected.to(kBF16);
  const auto got = made_without_memory(make);
  got->to(kBF16);
  std::unique_ptr<Cloned> clone;
  {
    const ParameterDefaultsGuard guard({.device = kMeta});
    clone = static_cast<Cloned&>(*got).clone();
  }
  for (ModuleBase* one : {got.get(), static_cast<ModuleBase*>(clone.get())}) {
    materialise(*one);
    expect_same_module(*one, expected, "bf16");
  }
  // Rounded twice is not what it was.
  const auto twice = made_without_memory(make);
  twice->to(kBF16);
  twice->to(kF32);
  EXPECT_THROW(materialise(*twice), ValueError);
}

TEST(Materialise, LeavesElementsToBeLoadedWhereItIsToldTo) {
  const ParameterDefaultsGuard guard({.device = kMeta, .initialise = false});
  Linear layer(3, 2);
  EXPECT_THROW(materialise(layer), ValueError);
  materialise(layer, kCpu, {.initialise = false});
  EXPECT_TRUE(layer.weight.device().is_cpu());
  EXPECT_EQ(layer.weight.shape(), Shape({2, 3}));
}

// Everything that is not known is named at once, with the reason, and nothing gets memory.
TEST(Materialise, NamesWhatIsNotKnown) {
  struct Unknown : Module<Unknown> {
    Unknown() : known(add<Linear>("known", 3, 2)) {
      const NoGradGuard no_grad;
      parameter("forgotten", Shape{4});
      parameter("copied", Shape{2, 3}).copy_(ones({2, 3}, {.device = kMeta}));
      const Tensor& scaled = parameter("scaled", Shape{5});
      init::ones(scaled);
      scaled.mul_(2);
      init::zeros(parameter("half", Shape{4, 2}).narrow(0, 0, 3));
      const Tensor& column = parameter("column", Shape{4, 2});
      init::zeros(column);
      init::ones(column.select(1, 0));
      // Written by what is not known, and then over and over by what is.
      const Tensor& again = parameter("again", Shape{4});
      again.copy_(ones({4}, {.device = kMeta}));
      init::zeros(again);
      const Tensor& row = parameter("row", Shape{2, 3});
      init::zeros(row);
      row.copy_(ones({2, 3}, {.device = kMeta}));
      init::ones(row[1]);
      buffer("table", parameter("source", ones({2}, {.device = kMeta})).detach().clone());
    }
    Tensor forward(const Tensor& x) { return x; }
    Linear& known;
  };
  const auto module = made_without_memory([] { return std::make_unique<Unknown>(); });
  EXPECT_EQ(message_of<ValueError>([&] { materialise(*module); }),
            "materialise: initial values that are not known:\n"
            "  forgotten (f32[4] meta): nothing has filled it\n"
            "  copied (f32[2, 3] meta): it was written by copy_\n"
            "  scaled (f32[5] meta): it was written by mul after its initial values\n"
            "  half (f32[4, 2] meta): nothing that is known has filled elements [6, 8)\n"
            "  column (f32[4, 2] meta): it was written by fill_ after its initial values\n"
            "  row (f32[2, 3] meta): nothing that is known has filled elements [0, 3)\n"
            "  table (f32[2] meta): nothing has filled it\n"
            "  fill these with nn::init when the module is made, whole or by contiguous views "
            "(init::by_range takes any rule), or pass {.initialise = false} and load them");
  EXPECT_TRUE(module->get_parameter("known.weight").is_meta());
  EXPECT_THROW(materialise(*module, kMeta), ValueError);
}

// What a part of unknown values would have is not known either; what had memory needs nothing.
TEST(Materialise, KnowsNoMoreOfAPartThanOfTheWhole) {
  compared_ranks(2, [&](int) {
    Mesh mesh(world());
    const auto model = made_without_memory([] { return std::make_unique<Linear>(4, 6); });
    auto& layer = static_cast<Linear&>(*model);
    {
      const NoGradGuard no_grad;
      layer.weight.mul_(2);
    }
    become_part(layer.weight, mesh, {Shard(0)});
    EXPECT_THROW(materialise(layer), ValueError);
    init::zeros(layer.bias);
    become_part(layer.bias, mesh, {Shard(0)});
    EXPECT_THROW(materialise(layer), ValueError);
    EXPECT_TRUE(layer.bias.is_meta());
    EXPECT_THROW(init::by_index(layer.bias, [](int64_t) { return 1.0; }), UnsupportedError);
    const auto other = made_without_memory([] { return std::make_unique<Linear>(4, 6); });
    const Tensor weight = other->get_parameter("weight");
    become_part(weight, mesh, {Shard(0)});
    fill_(raw::alias(weight), 3);  // of the elements that this rank has, not of the whole's first
    EXPECT_THROW(materialise(*other), ValueError);
  });
}

// A view hands on what would lie in it.
TEST(Materialise, KnowsAPartOfAView) {
  struct View : Module<View> {
    View(const Tensor& whole, Mesh& mesh) {
      const Tensor view = whole.detach().narrow(0, 2, 5);
      const Tensor& x = parameter("x", raw::empty({5, 3}, kF32, kMeta));
      pass_initial_values(view, x);
      become_part(x, mesh, {Shard(1)});
    }
    Tensor forward(const Tensor& x) { return x; }
  };
  const auto fill = [](const Tensor& x) {
    init::normal(x, 0, 1, RandomStream{5, 6});
    init::uniform(x.narrow(0, 1, 3), 0, 1, RandomStream{5, 7});
    return x;
  };
  compared_ranks(2, [&](int) {
    Mesh mesh(world());
    View module(fill(empty({9, 3}, {.device = kMeta})), mesh);
    materialise(module);
    const Tensor expected = fill(empty({9, 3})).narrow(0, 2, 5);
    EXPECT_TRUE(
        same_bits(module.parameters()[0], distributed::part_by_hand(expected, mesh, {Shard(1)})));
  });
}

}  // namespace
}  // namespace tessera::nn::test_materialise
