#include <tessera/nn/parametrizations.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/checkpoint.h>
#include <tessera/autograd/ops.h>
#include <tessera/nn/conv.h>

namespace tessera::nn {
namespace {

// ---- What the original tensors are, and how the parameter is made of them
// --------------------------

// Holds children alone: "parametrizations" of a module.
struct Parametrizations : Module<Parametrizations> {};

// Of one parameter: a module of its name under that.
struct Recipe {
  virtual ~Recipe() = default;
  // A child that holds the originals of `value`. initialise: see ParameterDefaults.
  virtual std::unique_ptr<ModuleBase> make(const Tensor& value, bool initialise,
                                           const RandomStream& stream) const = 0;
  // update: it is a call, in training.
  virtual Tensor value(const ModuleBase& originals, bool update) const = 0;
};

// The norm over all dimensions but `dim`, which stays.
Tensor norm_except(const Tensor& x, std::optional<int64_t> dim) {
  if (!dim) return norm(x);
  Shape others;
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (d != *dim) others.push_back(d);
  }
  return others.empty() ? abs(x) : norm(x, 2, others, true);
}

struct WeightNormOriginals : Module<WeightNormOriginals> {
  WeightNormOriginals(const Tensor& g, const Tensor& v)
      : original0(parameter("original0", g)), original1(parameter("original1", v)) {}
  const Tensor& original0;
  const Tensor& original1;
};
struct WeightNorm : Recipe {
  explicit WeightNorm(std::optional<int64_t> dim) : dim(dim) {}
  std::unique_ptr<ModuleBase> make(const Tensor& value, bool, const RandomStream&) const override {
    return std::make_unique<WeightNormOriginals>(norm_except(value, dim), value);
  }
  Tensor value(const ModuleBase& originals, bool) const override {
    const auto& own = static_cast<const WeightNormOriginals&>(originals);
    return mul(own.original1, div(own.original0, norm_except(own.original1, dim)));
  }
  const std::optional<int64_t> dim;
};

struct SingularVectors : Module<SingularVectors> {
  SingularVectors(const Tensor& u, const Tensor& v) : u(buffer("_u", u)), v(buffer("_v", v)) {}
  const Tensor& u;
  const Tensor& v;
};
struct SpectralNormOriginal : Module<SpectralNormOriginal> {
  SpectralNormOriginal(const Tensor& value, const Tensor& u, const Tensor& v)
      : original(parameter("original", value)), vectors(add<SingularVectors>("0", u, v)) {}
  const Tensor& original;
  SingularVectors& vectors;
};
struct SpectralNorm : Recipe {
  SpectralNorm(const SpectralNormOptions& options, int64_t dim) : options(options), dim(dim) {}

  Tensor matrix_of(const Tensor& x) const {
    if (dim == 0) return flatten(x, 1);
    // As torch has them: `dim` first, the others in their order.
    Shape order = {dim};
    for (int64_t d = 0; d < x.dim(); ++d) {
      if (d != dim) order.push_back(d);
    }
    return flatten(permute(x, order), 1);
  }
  void improve(const Tensor& matrix, const SingularVectors& vectors, int64_t times) const {
    const NoGradGuard no_grad;
    const Tensor fixed = detach(matrix);
    for (int64_t i = 0; i < times; ++i) {
      copy_(vectors.u, normalize(matmul(fixed, vectors.v), 2, 0, options.eps));
      copy_(vectors.v, normalize(matmul(transpose(fixed, 0, 1), vectors.u), 2, 0, options.eps));
    }
  }
  std::unique_ptr<ModuleBase> make(const Tensor& value, bool initialise,
                                   const RandomStream& stream) const override {
    Tensor u, v;
    const TensorOptions like{.dtype = value.dtype(), .device = value.device()};
    if (value.dim() > 1) {
      const Tensor matrix = matrix_of(value);
      const int64_t rows = matrix.size(0);
      const Tensor drawn = randn({rows + matrix.size(1)}, like, stream);
      u = clone(normalize(narrow(drawn, 0, 0, rows), 2, 0, options.eps));
      v = clone(normalize(narrow(drawn, 0, rows, matrix.size(1)), 2, 0, options.eps));
    }
    auto made = std::make_unique<SpectralNormOriginal>(value, u, v);
    if (u.defined() && initialise) improve(matrix_of(value), made->vectors, 15);
    return made;
  }
  Tensor value(const ModuleBase& originals, bool update) const override {
    const auto& own = static_cast<const SpectralNormOriginal&>(originals);
    const Tensor& x = own.original;
    if (x.dim() <= 1) return normalize(x, 2, 0, options.eps);
    const Tensor matrix = matrix_of(x);
    if (update) improve(matrix, own.vectors, options.n_power_iterations);
    // Copies: the next call writes to the buffers, and this one's backward reads these.
    const Tensor u = clone(own.vectors.u), v = clone(own.vectors.v);
    return div(x, dot(u, matmul(matrix, v)));
  }
  const SpectralNormOptions options;
  const int64_t dim;
};

// ---- In a module
// -----------------------------------------------------------------------------------

constexpr const char* kParametrizations = "parametrizations";

Tensor* place_of(ModuleBase& module, std::string_view name) {
  for (const ParameterPlace& place : module.parameter_places()) {
    if (place.name == name) return place.tensor;
  }
  return nullptr;
}

// Owned by the module that it extends.
class ParametrizedModule : public ModuleExtension {
 public:
  explicit ParametrizedModule(ModuleBase& module) : module_(module) {
    handle_ = module.register_call_scope(
        [this](ModuleBase&) -> std::shared_ptr<void> { return std::make_shared<Scope>(*this); });
  }
  ~ParametrizedModule() override { handle_.remove(); }

  struct Entry {
    std::string name;
    std::shared_ptr<const Recipe> recipe;
    Tensor* place;
    ModuleBase* originals;
  };

  static ParametrizedModule* of(const ModuleBase& module) {
    return dynamic_cast<ParametrizedModule*>(module.extension());
  }
  static void install(ModuleBase& module, std::string_view name,
                      std::shared_ptr<const Recipe> recipe) {
    Tensor* const place = place_of(module, name);
    const Tensor value = detach(*place);
    const bool initialise = ParameterDefaultsGuard::current().initialise;
    std::unique_ptr<ModuleBase> originals;
    {
      const NoGradGuard no_grad;
      std::string dotted = module.dotted_name();
      for (const std::string_view part : {std::string_view(kParametrizations), name}) {
        if (!dotted.empty()) dotted += ".";
        dotted += part;
      }
      originals = recipe->make(value, initialise, named_random_stream(dotted));
    }
    ParametrizedModule* own = of(module);
    if (own == nullptr) {
      auto made = std::make_unique<ParametrizedModule>(module);
      own = made.get();
      module.set_extension(std::move(made));
      module.adopt(kParametrizations, std::make_unique<Parametrizations>());
    }
    ModuleBase* const kept = originals.get();
    const bool learns = place->requires_grad();
    module.submodule(kParametrizations).adopt(name, std::move(originals));
    if (!learns) kept->requires_grad_(false);
    own->entries_.push_back({std::string(name), std::move(recipe), place, kept});
    *place = Tensor();
  }

  const Entry* find(std::string_view name) const {
    const auto found = std::ranges::find(entries_, name, &Entry::name);
    return found == entries_.end() ? nullptr : &*found;
  }
  void extend(ModuleBase& copy) const override {
    const ParameterDefaultsGuard values_come(
        {.dtype = ParameterDefaultsGuard::current().dtype, .initialise = false});
    for (const Entry& entry : entries_) install(copy, entry.name, entry.recipe);
  }
  // The last one takes this object along.
  static void remove(ModuleBase& module, std::string_view name) {
    ParametrizedModule& own = *of(module);
    const auto found = std::ranges::find(own.entries_, name, &Entry::name);
    bool learns = false;
    for (const Tensor& original : found->originals->parameters()) {
      learns = learns || original.requires_grad();
    }
    {
      const NoGradGuard no_grad;
      *found->place = detach(found->recipe->value(*found->originals, false));
    }
    found->place->set_requires_grad(learns);
    module.submodule(kParametrizations).release(name);
    own.entries_.erase(found);
    if (!own.entries_.empty()) return;
    module.release(kParametrizations);
    module.set_extension(nullptr);
  }

 private:
  struct Scope {
    explicit Scope(ParametrizedModule& owner) : owner(owner) {
      const bool update = owner.module_.is_training() && !is_recomputing();
      for (const Entry& entry : owner.entries_) {
        before.push_back(*entry.place);
        *entry.place = entry.recipe->value(*entry.originals, update);
      }
    }
    ~Scope() {
      for (size_t i = 0; i < before.size(); ++i) *owner.entries_[i].place = before[i];
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
    ParametrizedModule& owner;
    TensorList before;  // undefined, but for calls inside of a call
  };

  ModuleBase& module_;
  std::vector<Entry> entries_;
  HookHandle handle_;
};

void check_parameter_name(const char* where, ModuleBase& module, std::string_view name) {
  const ParametrizedModule* own = ParametrizedModule::of(module);
  TS_CHECK(own == nullptr || own->find(name) == nullptr, where, "'", name, "' of ",
           module.type_name(), " is parametrized already; remove_parametrizations() first");
  const Tensor* place = place_of(module, name);
  TS_CHECK(name.find('.') == std::string_view::npos && place != nullptr && place->defined(), where,
           module.type_name(), " has no parameter '", name, "' of its own");
  TS_CHECK(!place->is_meta(), where, "'", name, "' of ", module.type_name(),
           " has no bytes yet; materialise() first");
}
const ParametrizedModule::Entry& entry_of(const char* where, const ModuleBase& module,
                                          std::string_view name) {
  const ParametrizedModule* own = ParametrizedModule::of(module);
  const ParametrizedModule::Entry* entry = own != nullptr ? own->find(name) : nullptr;
  TS_CHECK(entry != nullptr, where, "'", name, "' of ", module.type_name(), " is not parametrized");
  return *entry;
}

}  // namespace

void weight_norm(ModuleBase& module, std::string_view name, std::optional<int64_t> dim) {
  check_parameter_name("weight_norm", module, name);
  if (dim) dim = wrap_dim(*dim, place_of(module, name)->dim(), "weight_norm");
  ParametrizedModule::install(module, name, std::make_shared<WeightNorm>(dim));
}

void spectral_norm(ModuleBase& module, std::string_view name, const SpectralNormOptions& options) {
  check_parameter_name("spectral_norm", module, name);
  TS_CHECK(options.n_power_iterations > 0, "spectral_norm",
           "n_power_iterations must be positive; got ", options.n_power_iterations);
  const int dims = place_of(module, name)->dim();
  const bool transposed = dynamic_cast<const ConvTranspose1d*>(&module) != nullptr ||
                          dynamic_cast<const ConvTranspose2d*>(&module) != nullptr;
  const int64_t dim = options.dim.value_or(transposed && dims > 1 ? 1 : 0);
  ParametrizedModule::install(module, name,
                              std::make_shared<SpectralNorm>(
                                  options, dims == 0 ? 0 : wrap_dim(dim, dims, "spectral_norm")));
}

bool is_parametrized(const ModuleBase& module, std::string_view name) {
  const ParametrizedModule* own = ParametrizedModule::of(module);
  return own != nullptr && own->find(name) != nullptr;
}

Tensor parametrized(const ModuleBase& module, std::string_view name) {
  const ParametrizedModule::Entry& entry = entry_of("parametrized", module, name);
  return entry.recipe->value(*entry.originals, false);
}

void remove_parametrizations(ModuleBase& module, std::string_view name) {
  entry_of("remove_parametrizations", module, name);
  ParametrizedModule::remove(module, name);
}

}  // namespace tessera::nn
