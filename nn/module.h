// A module owns parameters, buffers and children, gives them names, and runs `forward`.
//
//     struct Mlp : nn::Module<Mlp> {
//       explicit Mlp(int64_t width)
//           : fc(add<nn::Linear>("fc", width, 4 * width)),
//             proj(add<nn::Linear>("proj", 4 * width, width)) {}
//       Tensor forward(const Tensor& x) { return proj(gelu(fc(x))); }
//       nn::Linear& fc;
//       nn::Linear& proj;
//     };
//     Mlp mlp(768);
//     Tensor y = mlp(x);  // operator(), never forward: hooks and names in errors hang on it
//
// `add` constructs, owns and names a child, `parameter` and `buffer` do so for tensors. The options
// of a library module are its last argument, in braces: add<nn::Linear>("fc", 4, 8, {.bias =
// false}); a class that declares `using Options = MyOptions;` gets its own the same way. Only what
// was registered this way is trained, saved and moved. A module held by value (`nn::Linear fc;`) in
// the class that Module<> names is an error at construction; one in a further derived class, one
// held by your own pointer, and a plain tensor member are not noticed. Names are local and joined
// by dots: "transformer.h.0.mlp.fc.weight". Modules are neither copied nor moved; use clone().
//
// Initial values depend on the seed and the dotted name alone (see initial_stream), not on the
// order of construction or the world size. Therefore two models made from one seed are equal, and
// so are the members of an ensemble; InitialName makes them differ:
//
//     for (int i = 0; i < 5; ++i) {
//       const nn::InitialName name("member" + std::to_string(i));
//       ensemble.push_back(std::make_unique<Mlp>(768));
//     }
#pragma once

#include <concepts>
#include <deque>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/checkpoint.h>
#include <tessera/core/random.h>
#include <tessera/core/state/state_dict.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/nn/visit_tensors.h>

namespace tessera::nn {

class ModuleBase;
class Boundary;  // parallel_style.h
struct StyledModules;

// ---- Hooks -------------------------------------------------------------------------------------

// The tensors in the arguments or results of a call, in order. Assigning to one replaces it.
using TensorRefs = std::span<Tensor* const>;
using ForwardPreHook = std::function<void(ModuleBase& module, TensorRefs inputs)>;
using ForwardHook = std::function<void(ModuleBase& module, TensorRefs inputs, TensorRefs outputs)>;
// The gradients of the loss to the inputs and outputs that require grad. Assigning to a grad_input
// replaces the gradient that flows on. Undefined if an output was not used. If no input requires
// grad, grad_inputs is empty.
using BackwardHook =
    std::function<void(ModuleBase& module, TensorRefs grad_inputs, TensorRefs grad_outputs)>;

// Its result lives from before the call's hooks until the call has ended, also by an exception: a
// guard (autocast, random numbers) around forward.
using CallScope = std::function<std::shared_ptr<void>(ModuleBase& module)>;

// ---- Where parameters are made -----------------------------------------------------------------

// The defaults of `ModuleBase::parameter(name, shape)`, per context.
struct ParameterDefaults {
  DType dtype = kF32;
  Device device = kCpu;    // kMeta: a model of any size without memory
  bool initialise = true;  // false: elements are uninitialized, for models that are loaded next
};
class ParameterDefaultsGuard {
 public:
  explicit ParameterDefaultsGuard(const ParameterDefaults& defaults)
      : scoped_(Context::current().slot<ParameterDefaults>(), defaults) {}
  static const ParameterDefaults& current() { return Context::current().slot<ParameterDefaults>(); }

 private:
  ScopedValue<ParameterDefaults> scoped_;
};

// Modules made in the scope draw their initial values as if they were children of `name`.
class InitialName {
 public:
  explicit InitialName(std::string name);
  static const std::string& current();

 private:
  ScopedValue<std::string> scoped_;
};

// ---- ModuleBase --------------------------------------------------------------------------------

// What another file adds to an existing module (children, hooks) and clone() must add to the copy
// too: an adapter.
class ModuleExtension {
 public:
  virtual ~ModuleExtension() = default;
  // Adds the same to `copy`, a new module of the same construction; values are copied afterwards.
  virtual void extend(ModuleBase& copy) const = 0;
};

struct NamedModule {
  std::string name;
  ModuleBase* module;
};

// Where a module keeps a parameter, or a buffer.
struct ParameterPlace {
  std::string name;  // dotted
  Tensor* tensor;    // its current tensor; undefined where the parameter is absent
};

struct LoadOptions {
  bool strict = true;  // missing and unexpected names are errors
};
// Mismatches. A tied parameter needs only one of its names.
struct LoadReport {
  std::vector<std::string> missing;
  std::vector<std::string> unexpected;
  std::vector<std::string> misshapen;  // "name: needs f32[2, 3], the state has f32[3, 2]"
  bool complete() const { return missing.empty() && unexpected.empty() && misshapen.empty(); }
  std::string describe() const;
};

class ModuleBase {
 public:
  virtual ~ModuleBase();
  ModuleBase(const ModuleBase&) = delete;
  ModuleBase& operator=(const ModuleBase&) = delete;

  // ---- Names and printing
  const std::string& name() const { return name_; }                // in the parent: "fc"
  const std::string& dotted_name() const { return dotted_name_; }  // from the root: "h.0.mlp.fc"
  virtual std::string type_name() const;                           // "Linear"
  virtual std::string extra_repr() const { return {}; }            // "in_features=4, ..."
  virtual std::string repr() const;                                // the tree, as torch prints it

  // ---- Walking the tree: a module before its children, in the order of construction
  std::vector<NamedModule> named_modules();   // itself included, under ""
  std::vector<NamedModule> named_children();  // direct ones
  size_t num_children() const { return children_.size(); }
  ModuleBase& child(size_t index) const { return *children_[index]; }
  ModuleBase& submodule(std::string_view dotted_name);  // throws ValueError
  template <class Function>
  void apply(Function&& function) {  // children first, as in torch
    for (auto& child : children_) child->apply(function);
    function(*this);
  }

  // Each parameter once, under its first name.
  NamedTensors named_parameters() const;
  TensorList parameters() const;
  NamedTensors named_buffers() const;
  const Tensor& get_parameter(std::string_view dotted_name) const;  // throws ValueError
  // Every place of a parameter, also each place of a tied one, for code that temporarily replaces
  // the tensors, as sharded units do in their calls. Valid as long as the modules.
  std::vector<ParameterPlace> parameter_places();
  std::vector<ParameterPlace> buffer_places();  // also of buffers that are not persistent
  // The number of elements, each counted once; for sharded parameters those of the whole.
  int64_t num_parameters() const;

  // ---- Mode, dtype, device: in place, under all holders of the tensors
  virtual void train(bool training = true);
  void eval() { train(false); }
  bool is_training() const { return training_; }
  void to(DType dtype);  // floating parameters, their gradients and buffers
  void to(const Device& device);
  void requires_grad_(bool value = true);
  void zero_grad(bool set_to_none = true);

  // ---- State: parameters and persistent buffers by dotted name. A tied parameter appears under
  // each of its names. The tensors share elements with the module.
  StateDict state_dict() const;
  // Copies into the module's tensors and converts dtypes; from a whole tensor each shard is copied.
  // On a mismatch nothing is written: one ValueError lists all missing, unexpected and misshapen
  // names. Not strict: the first two are returned instead; a misshapen one is always an error.
  LoadReport load_state_dict(const StateDict& state, const LoadOptions& options = {});
  // The mismatches of a state, whose tensors may be on kMeta. Nothing is written.
  LoadReport compare_state_dict(const StateDict& state) const;

  // ---- Registration
  // Makes the parameter `name` one tensor with `tensor` (tied weights); replaces an existing
  // parameter or adds it.
  const Tensor& share_parameter(std::string_view name, const Tensor& tensor);
  // adopt takes an existing module; release returns a child. Both throw ValueError: for a name that
  // is taken, or that no child has.
  void adopt(std::string_view name, std::unique_ptr<ModuleBase> child);
  std::unique_ptr<ModuleBase> release(std::string_view name);
  // Puts a new module of the same type in the child's place, and references to the child then mean
  // the new one: model.replace<nn::Linear>("head.fc", 512, 10). The arguments are those of its
  // constructor, its initial values those of its name. The old parameters and hooks are destroyed;
  // optimizers that hold them update tensors that nobody uses. ValueError: no such child, or one of
  // another type.
  template <class T, class... Args>
  T& replace(std::string_view dotted_name, const Args&... args) {
    return replace_child<T>(dotted_name, args...);
  }
  // clang-format off
  template <class T>
  T& replace(std::string_view dotted_name, const typename T::Options& o) { return replace_child<T>(dotted_name, o); }
  template <class T, class A>
  T& replace(std::string_view dotted_name, const A& a, const typename T::Options& o) { return replace_child<T>(dotted_name, a, o); }
  template <class T, class A, class B>
  T& replace(std::string_view dotted_name, const A& a, const B& b, const typename T::Options& o) { return replace_child<T>(dotted_name, a, b, o); }
  template <class T, class A, class B, class C>
  T& replace(std::string_view dotted_name, const A& a, const B& b, const C& c, const typename T::Options& o) { return replace_child<T>(dotted_name, a, b, c, o); }
  // clang-format on
  // There is at most one; nullptr removes it.
  void set_extension(std::unique_ptr<ModuleExtension> extension);
  ModuleExtension* extension() const { return extension_.get(); }

  HookHandle register_forward_pre_hook(ForwardPreHook hook);
  HookHandle register_forward_hook(ForwardHook hook);
  HookHandle register_call_scope(CallScope scope);
  HookHandle register_full_backward_hook(BackwardHook hook);
  // Calls of this module keep only their inputs, as checkpoint() does (autograd/checkpoint.h):
  // forward runs again, in the scopes of its call, when a backward needs what its ops would have
  // saved. Forward and backward hooks of this module run once, those of modules in it twice. The
  // module must live until then: AutogradError. With gradients, arguments that cannot be kept are
  // an UnsupportedError: an object that forward writes to, a span, a pointer that is not null.
  HookHandle checkpoint_calls();
  // Whether a call does more than forward: hooks, or a scope of a policy, an adapter or a sharded
  // unit. If not, a fused op may read this module's weights instead of calling it (nn/fused.h).
  // Costs one load and a few comparisons.
  bool has_hooks() const;

  // ---- Parts on several ranks (parallel_style.h)
  // How the modules inside of this one may be divided, by names in this one. None: they are whole.
  virtual std::vector<StyledModules> parallel_styles() const;
  // Of calls that map one tensor to one; nullptr takes it away. The module keeps it.
  void set_boundary(std::shared_ptr<const Boundary> boundary);
  const Boundary* boundary() const { return boundary_.get(); }

  // forward of modules that map one tensor to one, by a type-erased call, for Sequential. Throws
  // UnsupportedError for others.
  virtual Tensor call_tensor(const Tensor& x) = 0;
  // A new module of the same construction, from Derived's `remake()`. Throws UnsupportedError.
  virtual std::unique_ptr<ModuleBase> remake_module() const = 0;
  // Makes this module's tensors copies of those of `source`, a module of the same construction:
  // values, dtypes, devices, requires_grad, ties, modes. Throws ValueError if the trees differ.
  void copy_state_from(const ModuleBase& source);

 protected:
  // The most derived object of a ModuleBase.
  struct Object {
    const std::type_info* type;
    size_t bytes;
    const void* (*begin)(const ModuleBase& module);
  };
  // Throws ValueError if the object lies inside of another module: a member by value.
  explicit ModuleBase(const Object& object);

  // The references stay valid as long as the module and follow share_parameter: keep them as
  // members, `const Tensor& weight`. The parameter has the context's ParameterDefaults. Its
  // elements are NaN until they are filled (init.h), so a forgotten one shows in the first loss.
  const Tensor& parameter(std::string_view name, const Shape& shape);
  // `tensor` becomes a parameter: a leaf that requires grad. Undefined: an absent one (bias=false).
  const Tensor& parameter(std::string_view name, const Tensor& tensor);
  // A tensor that is state but not a parameter: running statistics, masks. A buffer that is not
  // persistent is left out of state_dict.
  const Tensor& buffer(std::string_view name, const Tensor& tensor, bool persistent = true);

  template <class T, class... Args>
  T& add(std::string_view name, Args&&... args) {
    static_assert(std::derived_from<T, ModuleBase>,
                  "add makes modules: classes derived from nn::Module");
    static_assert(std::is_constructible_v<T, Args...>,
                  "add: the module has no constructor for the arguments after the name");
    check_new_name(name);
    const InitialName scope(initial_name_of(name));
    auto child = std::make_unique<T>(std::forward<Args>(args)...);
    T& reference = *child;
    adopt(name, std::move(child));
    return reference;
  }
  // add<nn::Conv2d>("conv", 1, 8, 3, {.stride = 2}), for modules that name their T::Options.
  template <class T>
  T& add(std::string_view name, const typename T::Options& options) {
    return add<T, const typename T::Options&>(name, options);
  }
  template <class T, class A>
  T& add(std::string_view name, const A& a, const typename T::Options& options) {
    return add<T, const A&, const typename T::Options&>(name, a, options);
  }
  template <class T, class A, class B>
  T& add(std::string_view name, const A& a, const B& b, const typename T::Options& options) {
    return add<T, const A&, const B&, const typename T::Options&>(name, a, b, options);
  }
  template <class T, class A, class B, class C>
  T& add(std::string_view name, const A& a, const B& b, const C& c,
         const typename T::Options& options) {
    return add<T, const A&, const B&, const C&, const typename T::Options&>(name, a, b, c, options);
  }

  // The random stream for the initial values of a parameter, from the seed and the dotted name
  // under which this module was made.
  RandomStream initial_stream(std::string_view parameter) const;
  std::string initial_name_of(std::string_view name) const;

 private:
  friend class ModuleCall;
  // The name of `child`, and where it is.
  struct ChildPlace {
    ModuleBase* parent;
    std::unique_ptr<ModuleBase>* child;
    std::string name;
  };
  ChildPlace place_of_child(std::string_view dotted_name);  // throws ValueError
  void renew_child(const ChildPlace& place);
  void forget_child(const ChildPlace& place);
  [[noreturn]] static void refuse_replacement(const ChildPlace& place);

  // The new module takes the old one's address: references are kept as members.
  template <class T, class... Args>
  T& replace_child(std::string_view dotted_name, const Args&... args) {
    static_assert(std::is_constructible_v<T, const Args&...>,
                  "replace: the module has no constructor for the arguments after the name");
    const ChildPlace place = place_of_child(dotted_name);
    ModuleBase& child = **place.child;
    if (typeid(child) != typeid(T)) refuse_replacement(place);
    T* const old = static_cast<T*>(&child);
    const InitialName scope(place.parent->initial_name_of(place.name));
    std::make_unique<T>(args...);  // whatever it throws, it throws here
    old->~T();
    try {
      T* const made = ::new (static_cast<void*>(old)) T(args...);
      place.parent->renew_child(place);
      return *made;
    } catch (...) {  // no memory for a second one: there is no child then
      place.parent->forget_child(place);
      throw;
    }
  }
  struct Buffer {
    NamedTensor named;
    bool persistent;
  };
  struct Hooks;
  struct Living;
  static Living& living();
  void check_new_name(std::string_view name) const;
  void refresh_names(const ModuleBase* parent);
  template <class Visit>
  void visit_state(const std::string& prefix, const Visit& visit) const;
  template <class Convert>
  void convert_tensors(const Convert& convert);
  // Calls take(own tensor, what the state has for it) where it fits.
  template <class Take>
  LoadReport fit_state_dict(const StateDict& state, const Take& take) const;
  Hooks& hooks();

  std::string name_;
  std::string dotted_name_;
  std::string initial_name_;
  std::vector<std::unique_ptr<ModuleBase>> children_;
  std::deque<NamedTensor> parameters_;  // deque: references stay valid
  std::deque<Buffer> buffers_;
  std::shared_ptr<Hooks> hooks_;  // none while nobody registered one
  std::unique_ptr<ModuleExtension> extension_;
  std::shared_ptr<const Boundary> boundary_;
  bool training_ = true;
};

std::ostream& operator<<(std::ostream& out, const ModuleBase& module);

// ---- Calls -------------------------------------------------------------------------------------

// The scope of one call, which names errors and the call site and runs hooks. Made by
// Module<Derived>.
class ModuleCall {
 public:
  explicit ModuleCall(ModuleBase& module);
  ModuleCall(const ModuleCall&) = delete;
  ModuleCall& operator=(const ModuleCall&) = delete;
  ~ModuleCall();

  bool has_hooks() const { return hooks_ != nullptr; }
  void before(TensorRefs inputs);
  // Whether forward's saved tensors are recomputed.
  bool is_checkpointed() const;
  // Wraps forward in that case: `again` runs it on other inputs.
  using Again = std::function<void(ModuleBase& module, const TensorList& inputs)>;
  CheckpointScope checkpoint(TensorList inputs, Again again) const;
  void after(TensorRefs inputs, TensorRefs outputs);
  // Rethrows the current exception. The innermost module that it passes puts its dotted name before
  // the message of an Error, a std::runtime_error or a std::logic_error; those keep their type.
  [[noreturn]] void rethrow_named() const;

 private:
  struct BackwardState;
  void enter_scopes();
  ModuleBase& module_;
  std::shared_ptr<ModuleBase::Hooks> hooks_;
  std::shared_ptr<BackwardState> backward_;
  std::vector<std::shared_ptr<void>> scopes_;
  std::string outer_site_;
};

namespace detail {

// How a call with hooks keeps argument I: as a copy that hooks may change, or as a reference to the
// caller's object if forward writes to it (a cache) or it cannot be copied.
template <class Function, class Derived, class Args, size_t kArg, class Indices>
struct Held;
template <class Function, class Derived, class... Args, size_t kArg, size_t... J>
struct Held<Function, Derived, std::tuple<Args...>, kArg, std::index_sequence<J...>> {
  using Arg = std::tuple_element_t<kArg, std::tuple<Args...>>;
  using Value = std::remove_cvref_t<Arg>;
  static constexpr bool kCopy =
      std::is_constructible_v<Value, Arg> &&
      std::is_invocable_v<Function, Derived&, std::conditional_t<kArg == J, const Value&, Args>...>;
  using type = std::conditional_t<kCopy, Value, Arg&&>;
};

// Arguments that a recomputed call cannot keep, since it does not own them.
template <class T>
struct Borrows : std::bool_constant<!std::is_copy_constructible_v<T>> {};
template <class T, size_t N>
struct Borrows<std::span<T, N>> : std::true_type {};
template <class T>
struct Borrows<std::basic_string_view<T>> : std::true_type {};
template <class T>
struct Borrows<std::reference_wrapper<T>> : std::true_type {};

// `Held`: how a call with hooks keeps the argument. The number of the argument, from 1, or 0.
template <class Held>
size_t borrowed(const std::remove_cvref_t<Held>& value, size_t number) {
  if constexpr (std::is_reference_v<Held> || Borrows<Held>::value) {
    return number;
  } else if constexpr (std::is_pointer_v<Held>) {
    return value != nullptr ? number : 0;
  } else {
    return 0;
  }
}
[[noreturn]] void refuse_checkpoint(const ModuleBase& module, size_t argument);

// False at compile time.
template <class Derived, class... Args>
inline constexpr bool takes = false;

// The type of argument I of Derived's forward, if it has one.
template <class Method>
struct MethodArgs {};
template <class Class, class Result, class... Args>
struct MethodArgs<Result (Class::*)(Args...)> {
  template <size_t kArg>
  requires(kArg < sizeof...(Args)) using At = std::tuple_element_t<kArg, std::tuple<Args...>>;
};
template <class Class, class Result, class... Args>
struct MethodArgs<Result (Class::*)(Args...) const> : MethodArgs<Result (Class::*)(Args...)> {};
template <class Derived, size_t kArg>
using ForwardArg = typename MethodArgs<decltype(&Derived::forward)>::template At<kArg>;

// Most calls map one tensor to one. They are one function for all modules, since otherwise each
// file that includes the layers would compile its own.
using OneTensor = const Tensor&;
template <class Derived>
concept MapsOneTensor = requires(Derived& self, OneTensor x) {
  requires std::same_as<ForwardArg<Derived, 0>, OneTensor>;
  { self.forward(x) } -> std::same_as<Tensor>;
};
Tensor call_with_one_tensor(ModuleBase& module,
                            Tensor (*forward)(ModuleBase& module, const Tensor& x),
                            const Tensor& x);

template <class... Args>
inline constexpr bool is_one_tensor = false;
template <class Arg>
inline constexpr bool is_one_tensor<Arg> = std::is_convertible_v<Arg, OneTensor>;

}  // namespace detail

// Base of every module: struct Mlp : nn::Module<Mlp>. Derived has a `forward` (or overloads) that
// takes and returns anything visit_tensors can look into, and for clone() a
// `std::unique_ptr<Derived> remake() const` that constructs a module like itself.
template <class Derived>
class Module : public ModuleBase {
 public:
  Module()
      : ModuleBase({&typeid(Derived), sizeof(Derived), [](const ModuleBase& module) {
                      return static_cast<const void*>(static_cast<const Derived*>(&module));
                    }}) {}

  // Constness is that of the handle, as for a Tensor: forward of a const module may run.
  template <class... Args>
  auto operator()(Args&&... args) const {
    if constexpr (detail::is_one_tensor<Args&&...> && detail::MapsOneTensor<Derived>) {
      return call_with_one_tensor(args...);
    } else if constexpr (requires(Derived & self) { self.forward(std::forward<Args>(args)...); }) {
      return run(
          [](Derived& self, auto&&... values) -> decltype(self.forward(
                                                  std::forward<decltype(values)>(values)...)) {
            return self.forward(std::forward<decltype(values)>(values)...);
          },
          std::forward<Args>(args)...);
    } else {
      static_assert(detail::takes<Derived, Args...>,
                    "the module called here has no public forward() that takes these arguments: "
                    "compare their number and types with its declaration");
    }
  }
  // model(x, {}), model(x, {.causal = true}): if Derived has one forward, an argument in braces has
  // the parameter's type.
  template <class D = Derived>
  auto operator()(detail::ForwardArg<D, 0> a, detail::ForwardArg<D, 1> b) const {
    return call_forward(static_cast<decltype(a)&&>(a), static_cast<decltype(b)&&>(b));
  }
  template <class D = Derived>
  auto operator()(detail::ForwardArg<D, 0> a, detail::ForwardArg<D, 1> b,
                  detail::ForwardArg<D, 2> c) const {
    return call_forward(static_cast<decltype(a)&&>(a), static_cast<decltype(b)&&>(b),
                        static_cast<decltype(c)&&>(c));
  }
  template <class D = Derived>
  auto operator()(detail::ForwardArg<D, 0> a, detail::ForwardArg<D, 1> b,
                  detail::ForwardArg<D, 2> c, detail::ForwardArg<D, 3> d) const {
    return call_forward(static_cast<decltype(a)&&>(a), static_cast<decltype(b)&&>(b),
                        static_cast<decltype(c)&&>(c), static_cast<decltype(d)&&>(d));
  }

  // Calls another entry point, with all that operator() does: model.call(&Bert::pool, hidden).
  template <class Method, class... Args>
  requires std::is_member_function_pointer_v<Method>
  auto call(Method method, Args&&... args) const {
    return run(
        [method](Derived& self, auto&&... values) -> decltype((self.*method)(
                                                      std::forward<decltype(values)>(values)...)) {
          return (self.*method)(std::forward<decltype(values)>(values)...);
        },
        std::forward<Args>(args)...);
  }

  // A module of the same construction with copies of all tensors. Hooks are not copied;
  // extensions, such as adapters, are.
  std::unique_ptr<Derived> clone() const {
    std::unique_ptr<ModuleBase> copy = remake_module();
    copy->copy_state_from(*this);
    return std::unique_ptr<Derived>(static_cast<Derived*>(copy.release()));
  }

  Tensor call_tensor(const Tensor& x) override {
    if constexpr (detail::MapsOneTensor<Derived>) {
      return call_with_one_tensor(x);
    } else if constexpr (requires(Derived & self) {
                           { self.forward(x) } -> std::convertible_to<Tensor>;
                         }) {
      return (*this)(x);
    } else {
      TS_THROW(UnsupportedError, type_name(),
               "forward does not map one tensor to one tensor; call the module by its own type");
    }
  }
  std::unique_ptr<ModuleBase> remake_module() const override {
    if constexpr (requires(const Derived& self) {
                    { self.remake() } -> std::convertible_to<std::unique_ptr<ModuleBase>>;
                  }) {
      const ParameterDefaultsGuard guard(
          {.dtype = ParameterDefaultsGuard::current().dtype, .initialise = false});
      return static_cast<const Derived&>(*this).remake();
    } else {
      TS_THROW(UnsupportedError, "clone", type_name(),
               " cannot be made again; give it `std::unique_ptr<", type_name(),
               "> remake() const` that constructs one with the same arguments");
    }
  }

 private:
  Tensor call_with_one_tensor(const Tensor& x) const {
    return detail::call_with_one_tensor(
        const_cast<Derived&>(static_cast<const Derived&>(*this)),
        [](ModuleBase& module, const Tensor& input) {
          return static_cast<Derived&>(module).forward(input);
        },
        x);
  }

  template <class... Args>
  auto call_forward(Args&&... args) const {
    return this->template operator()<Args...>(std::forward<Args>(args)...);
  }

  template <class Function, class... Args>
  auto run(Function function, Args&&... args) const {
    using Result = std::invoke_result_t<Function&, Derived&, Args...>;
    if constexpr (!(detail::is_visible<Result> && ... && detail::is_visible<Args>)) {
      detail::check_visible<sizeof(Derived) == 0>();
      return function(const_cast<Derived&>(static_cast<const Derived&>(*this)),
                      std::forward<Args>(args)...);
    } else {
      return run_visible(function, std::forward<Args>(args)...);
    }
  }

  template <class Function, class... Args>
  auto run_visible(Function& function, Args&&... args) const {
    Derived& self = const_cast<Derived&>(static_cast<const Derived&>(*this));
    ModuleCall call(self);
    try {
      if (!call.has_hooks()) [[likely]]
        return function(self, std::forward<Args>(args)...);
      return run_with_hooks(call, self, function, std::index_sequence_for<Args...>{},
                            std::forward<Args>(args)...);
    } catch (...) {
      call.rethrow_named();
    }
  }

  template <class Function, size_t... kArg, class... Args>
  static auto run_with_hooks(ModuleCall& call, Derived& self, Function& function,
                             [[maybe_unused]] std::index_sequence<kArg...> indices,
                             Args&&... args) {
    using Indices = decltype(indices);
    std::tuple<
        typename detail::Held<Function, Derived, std::tuple<Args...>, kArg, Indices>::type...>
    held(std::forward<Args>(args)...);
    const auto collect = [](auto&... values) {
      std::vector<Tensor*> tensors;
      const auto keep = [&](Tensor& tensor) {
        if (tensor.defined()) tensors.push_back(&tensor);
      };
      (nn::visit_tensors(values, keep), ...);
      return tensors;
    };
    const std::vector<Tensor*> inputs = std::apply(collect, held);
    call.before(inputs);
    const auto invoke = [&]() {
      const std::optional<CheckpointScope> scope =
          call.is_checkpointed() ? std::optional(keep<Args...>(call, self, function, held, indices))
                                 : std::nullopt;
      return std::apply(
          [&](auto&... values) { return function(self, static_cast<Args&&>(values)...); }, held);
    };
    if constexpr (std::is_void_v<decltype(invoke())>) {
      invoke();
      call.after(inputs, {});
    } else {
      auto result = invoke();
      call.after(inputs, collect(result));
      return result;
    }
  }

  // The scope of a call that is recomputed from copies of its arguments.
  template <class... Args, class Function, class... Values, size_t... kArg>
  static CheckpointScope keep(const ModuleCall& call, const Derived& self, const Function& function,
                              const std::tuple<Values...>& held, std::index_sequence<kArg...>) {
    size_t argument = 0;
    ((argument =
          argument != 0 ? argument : detail::borrowed<Values>(std::get<kArg>(held), kArg + 1)),
     ...);
    if (argument != 0) detail::refuse_checkpoint(self, argument);
    if constexpr (((!std::is_reference_v<Values> && std::is_copy_constructible_v<Values>)&&...)) {
      const auto each_tensor = [](std::tuple<Values...>& values, auto&& visit) {
        const auto defined = [&](Tensor& tensor) {
          if (tensor.defined()) visit(tensor);
        };
        (nn::visit_tensors(std::get<kArg>(values), defined), ...);
      };
      auto kept = std::make_shared<std::tuple<Values...>>(held);
      TensorList inputs;
      each_tensor(*kept, [&](Tensor& tensor) { inputs.push_back(tensor); });
      return call.checkpoint(std::move(inputs), [kept, function, each_tensor](
                                                    ModuleBase& module, const TensorList& again) {
        std::tuple<Values...> values = *kept;
        size_t next = 0;
        each_tensor(values, [&](Tensor& tensor) { tensor = again[next++]; });
        function(static_cast<Derived&>(module), static_cast<Args&&>(std::get<kArg>(values))...);
      });
    } else {
      detail::refuse_checkpoint(self, 0);
    }
  }
};

}  // namespace tessera::nn
