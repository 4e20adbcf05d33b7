#include <tessera/nn/module.h>

#include <cxxabi.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <ostream>
#include <stdexcept>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>

#include <tessera/autograd/differentiable.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/initial_values.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/profile/profiler.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/placement.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/nn/call_scopes.h>
#include <tessera/nn/parallel_style.h>
#include <tessera/nn/structure.h>
#include <tessera/nn/tied_values.h>

namespace tessera::nn {
namespace {

std::string join(std::string_view prefix, std::string_view name) {
  if (prefix.empty()) return std::string(name);
  return std::string(prefix) + "." + std::string(name);
}

// An exception passes through several calls; the first one that sees it gives it a name.
struct NamedError {
  const void* error = nullptr;
};

// The name that modules made now take as their own, see InitialName.
struct InitialPath {
  std::string name;
};

}  // namespace

InitialName::InitialName(std::string name)
    : scoped_(Context::current().slot<InitialPath>().name, std::move(name)) {}
const std::string& InitialName::current() { return Context::current().slot<InitialPath>().name; }

// ---- Hooks -------------------------------------------------------------------------------------

// Held by pointer: a handle may outlive the module, and a hook may remove itself while it runs.
// A member class may look into the module, and so may its friend: call_scopes.h asks by it.
inline bool scopes_alone_of(const ModuleBase& module);

struct ModuleBase::Hooks {
  template <class Function>
  struct List {
    std::vector<std::pair<uint64_t, Function>> entries;
    uint64_t next_id = 0;
  };
  List<ForwardPreHook> pre_forward;
  List<ForwardHook> forward;
  List<BackwardHook> backward;
  List<CallScope> scopes;
  int checkpoints = 0;       // handles of checkpoint_calls() that stand
  bool module_lives = true;  // graphs hold hooks, too
  bool empty() const {
    return pre_forward.entries.empty() && forward.entries.empty() && backward.entries.empty() &&
           scopes.entries.empty() && checkpoints == 0;
  }
  bool are_scopes() const {
    return pre_forward.entries.empty() && forward.entries.empty() && backward.entries.empty() &&
           checkpoints == 0;
  }
  static bool are_scopes_of(const ModuleBase& module) {
    return !module.hooks_ || module.hooks_->are_scopes();
  }
  friend bool scopes_alone_of(const ModuleBase& module) { return are_scopes_of(module); }

  template <class Function>
  static HookHandle add(const std::shared_ptr<Hooks>& hooks, List<Function> Hooks::*list,
                        Function hook) {
    List<Function>& target = (*hooks).*list;
    const uint64_t id = target.next_id++;
    target.entries.emplace_back(id, std::move(hook));
    return HookHandle([weak = std::weak_ptr<Hooks>(hooks), list, id] {
      if (const auto alive = weak.lock()) {
        std::erase_if((*alive.*list).entries,
                      [id](const auto& entry) { return entry.first == id; });
      }
    });
  }
  template <class Function, class... Args>
  static void run(const List<Function>& list, Args&&... args) {
    const auto entries = list.entries;  // a hook may change the list
    for (const auto& [id, hook] : entries) hook(args...);
  }
};

ModuleBase::Hooks& ModuleBase::hooks() {
  if (!hooks_) hooks_ = std::make_shared<Hooks>();
  return *hooks_;
}
HookHandle ModuleBase::register_forward_pre_hook(ForwardPreHook hook) {
  hooks();
  return Hooks::add(hooks_, &Hooks::pre_forward, std::move(hook));
}
HookHandle ModuleBase::register_forward_hook(ForwardHook hook) {
  hooks();
  return Hooks::add(hooks_, &Hooks::forward, std::move(hook));
}
HookHandle ModuleBase::register_call_scope(CallScope scope) {
  hooks();
  return Hooks::add(hooks_, &Hooks::scopes, std::move(scope));
}
HookHandle ModuleBase::register_full_backward_hook(BackwardHook hook) {
  hooks();
  return Hooks::add(hooks_, &Hooks::backward, std::move(hook));
}
HookHandle ModuleBase::checkpoint_calls() {
  ++hooks().checkpoints;
  return HookHandle([weak = std::weak_ptr<Hooks>(hooks_)] {
    if (const auto alive = weak.lock()) --alive->checkpoints;
  });
}
bool ModuleBase::has_hooks() const { return hooks_ && !hooks_->empty(); }
bool has_scopes_alone(const ModuleBase& module) { return scopes_alone_of(module); }

// ---- Parts on several ranks --------------------------------------------------------------------

std::vector<StyledModules> ModuleBase::parallel_styles() const { return {}; }
void ModuleBase::set_boundary(std::shared_ptr<const Boundary> boundary) {
  boundary_ = std::move(boundary);
}

// ---- Calls -------------------------------------------------------------------------------------

namespace {

// Stands at the inputs and at the outputs of a module that has backward hooks: the same elements,
// and a place on the tape where all their gradients are known at once.
const Op kModuleBoundary{
    .name = "module_boundary", .marks = MarkRule::kLinear, .flops_per_element = 0};

TensorList boundary(const TensorList& tensors, BackwardFunction backward) {
  return differentiable(
      kModuleBoundary, tensors,
      [](Inputs in) {
        TensorList result;
        for (const Tensor& x : in) result.push_back(raw::alias(x));
        return result;
      },
      std::move(backward));
}

std::vector<Tensor*> pointers_to(TensorList& tensors) {
  std::vector<Tensor*> result;
  for (Tensor& tensor : tensors) result.push_back(&tensor);
  return result;
}

}  // namespace

struct ModuleCall::BackwardState {
  ModuleBase* module;
  std::shared_ptr<ModuleBase::Hooks> hooks;
  bool has_inputs = false;  // some input requires grad: its boundary runs the hooks
  TensorList grad_outputs;

  void run_hooks(TensorList& grad_inputs) {
    const std::vector<Tensor*> inputs = pointers_to(grad_inputs);
    const std::vector<Tensor*> outputs = pointers_to(grad_outputs);
    ModuleBase::Hooks::run(hooks->backward, *module, TensorRefs(inputs), TensorRefs(outputs));
  }

  // Replaces the tensors that are on the tape by those behind a boundary.
  template <class Backward>
  static bool insert(TensorRefs refs, Backward backward) {
    std::vector<Tensor*> wanted;
    TensorList tensors;
    for (Tensor* tensor : refs) {
      if (!tensor->requires_grad()) continue;
      wanted.push_back(tensor);
      tensors.push_back(*tensor);
    }
    if (tensors.empty()) return false;
    const TensorList results = boundary(tensors, std::move(backward));
    for (size_t i = 0; i < wanted.size(); ++i) *wanted[i] = results[i];
    return true;
  }
  static TensorList take(Grads grads) {
    TensorList list;
    for (int i = 0; i < grads.size(); ++i) list.push_back(grads[i]);
    return list;
  }
};

namespace {

// The calls that have begun a range, the innermost last. It may be switched on or off within them.
struct MarkedCalls {
  std::vector<std::pair<const ModuleCall*, RangeListener*>> open;
};

}  // namespace

ModuleCall::ModuleCall(ModuleBase& module) : module_(module), outer_site_(call_site()) {
  if (RangeListener* const timeline =
          Context::current().slot<tessera::detail::ProfilerSlot>().timeline;
      timeline != nullptr) [[unlikely]] {
    const std::string& name = module.dotted_name();
    timeline->enter(name.empty() ? module.type_name() : name);
    Context::current().slot<MarkedCalls>().open.push_back({this, timeline});
  }
  if (module.has_hooks()) hooks_ = module.hooks_;
  call_site() = module.dotted_name();
  Context::current().slot<NamedError>().error = nullptr;
}
ModuleCall::~ModuleCall() {
  while (!scopes_.empty()) scopes_.pop_back();  // the last one first, as guards on the stack
  if (auto& open = Context::current().slot<MarkedCalls>().open;
      !open.empty() && open.back().first == this) [[unlikely]] {
    open.back().second->leave();
    open.pop_back();
  }
  call_site() = std::move(outer_site_);
}

void ModuleCall::enter_scopes() {
  const auto scopes = hooks_->scopes.entries;  // one may change the list
  for (const auto& [id, scope] : scopes) scopes_.push_back(scope(module_));
}

void ModuleCall::before(TensorRefs inputs) {
  enter_scopes();
  ModuleBase::Hooks::run(hooks_->pre_forward, module_, inputs);
  if (hooks_->backward.entries.empty() || !grad_enabled()) return;
  backward_ = std::make_shared<BackwardState>();
  backward_->module = &module_;
  backward_->hooks = hooks_;
  backward_->has_inputs =
      BackwardState::insert(inputs, [state = backward_](Grads grads, const Saved&) -> TensorList {
        TensorList grad_inputs = BackwardState::take(grads);
        state->run_hooks(grad_inputs);
        return grad_inputs;
      });
}

void ModuleCall::after(TensorRefs inputs, TensorRefs outputs) {
  ModuleBase::Hooks::run(hooks_->forward, module_, inputs, outputs);
  if (!backward_) return;
  BackwardState::insert(outputs, [state = backward_](Grads grads, const Saved&) -> TensorList {
    state->grad_outputs = BackwardState::take(grads);
    if (!state->has_inputs) {
      TensorList none;
      state->run_hooks(none);
    }
    return state->grad_outputs;
  });
}

bool ModuleCall::is_checkpointed() const { return hooks_->checkpoints > 0 && grad_enabled(); }

CheckpointScope ModuleCall::checkpoint(TensorList inputs, Again again) const {
  ModuleBase* const module = &module_;
  return CheckpointScope(
      [module, again = std::move(again)](const TensorList& values) { again(*module, values); },
      std::move(inputs),
      [module, hooks = hooks_, type = module_.type_name()]() -> std::shared_ptr<void> {
        TS_CHECK_AS(AutogradError, hooks->module_lives, "checkpoint_calls", "a ", type,
                    " whose call is calculated again in backward is gone; keep the model until "
                    "its backwards are done");
        auto call = std::make_shared<ModuleCall>(*module);
        call->hooks_ = hooks;  // also where it has none any more
        call->enter_scopes();
        return call;
      });
}

void detail::refuse_checkpoint(const ModuleBase& module, size_t argument) {
  TS_THROW(UnsupportedError, "checkpoint_calls", "argument ", argument, " of a call of ",
           module.type_name(),
           " is an object that forward may write to, a pointer or a span, which cannot be kept "
           "for the second run in backward; call it under NoGradGuard, without that argument, or "
           "leave this module's calls as they are");
}

namespace detail {

// As Module<Derived>::run does for other arguments.
Tensor call_with_one_tensor(ModuleBase& module,
                            Tensor (*forward)(ModuleBase& module, const Tensor& x),
                            const Tensor& x) {
  ModuleCall call(module);
  try {
    const Boundary* const boundary = module.boundary();
    if (!call.has_hooks()) [[likely]] {
      if (boundary == nullptr) [[likely]]
        return forward(module, x);
      return boundary->leave(forward(module, boundary->enter(x)));
    }
    Tensor input = boundary == nullptr ? x : boundary->enter(x);  // which hooks may change
    const std::vector<Tensor*> inputs =
        input.defined() ? std::vector<Tensor*>{&input} : std::vector<Tensor*>{};
    call.before(inputs);
    Tensor output;
    {
      std::optional<CheckpointScope> scope;
      if (call.is_checkpointed()) {
        const auto again = [forward](ModuleBase& same, const TensorList& values) {
          forward(same, values.empty() ? Tensor() : values[0]);
        };
        scope.emplace(call.checkpoint(input.defined() ? TensorList{input} : TensorList{}, again));
      }
      output = forward(module, input);
    }
    const std::vector<Tensor*> outputs =
        output.defined() ? std::vector<Tensor*>{&output} : std::vector<Tensor*>{};
    call.after(inputs, outputs);
    return boundary == nullptr ? output : boundary->leave(output);
  } catch (...) {
    call.rethrow_named();
  }
}

}  // namespace detail

void ModuleCall::rethrow_named() const {
  // True for the innermost module that has a name.
  const auto first = [this](const void* error) {
    const void*& named = Context::current().slot<NamedError>().error;
    if (named == error || module_.dotted_name().empty()) return false;
    named = error;
    return true;
  };
  const std::string prefix = module_.dotted_name() + ": ";
  try {
    throw;
  } catch (Error& error) {
    if (first(&error)) error.add_context(module_.dotted_name());
    throw;
  } catch (std::runtime_error& error) {
    // Assigning to the base changes the message of a derived exception and leaves its type.
    if (first(&error)) error = std::runtime_error(prefix + error.what());
    throw;
  } catch (std::logic_error& error) {
    if (first(&error)) error = std::logic_error(prefix + error.what());
    throw;
  }
}

// ---- Modules by value --------------------------------------------------------------------------

namespace {

std::string short_name(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> demangled(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), std::free);
  std::string name = status == 0 ? demangled.get() : type.name();
  const size_t arguments = name.find('<');
  const size_t scope = name.rfind("::", arguments);
  return scope == std::string::npos ? name : name.substr(scope + 2);
}

}  // namespace

// Where the modules of the process lie, by address. An address belongs to one object, whoever asks:
// this is a fact and no setting.
struct ModuleBase::Living {
  std::mutex mutex;
  std::map<const ModuleBase*, Object, std::less<>> modules;
};
ModuleBase::Living& ModuleBase::living() {
  static Living* living = new Living;  // outlives static modules
  return *living;
}

ModuleBase::ModuleBase(const Object& object) : initial_name_(InitialName::current()) {
  const std::lock_guard lock(living().mutex);
  auto& modules = living().modules;
  // The members of an object lie behind its base, and before the next module.
  const auto next = modules.upper_bound(this);
  if (next != modules.begin()) {
    const auto& [owner, outer] = *std::prev(next);
    const void* here = this;
    // Only where it may matter is `begin` asked: it casts down to a type of which the owner becomes
    // an object when its members are made, and not before.
    const auto lies_before = [&](const void* start) {
      return std::less<>()(here,
                           static_cast<const void*>(static_cast<const char*>(start) + outer.bytes));
    };
    TS_CHECK(!lies_before(owner) || !lies_before(outer.begin(*owner)), short_name(*outer.type),
             "holds a ", short_name(*object.type),
             " by value, which would be neither trained nor saved; make it with add<",
             short_name(*object.type), ">(\"name\", ...) and keep the reference");
  }
  modules.emplace(this, object);
}
ModuleBase::~ModuleBase() {
  if (hooks_) hooks_->module_lives = false;
  const std::lock_guard lock(living().mutex);
  living().modules.erase(this);
}

// ---- Names and registration --------------------------------------------------------------------

namespace {

// Of the process, as modules are built on any thread; it says that something changed, not what.
std::atomic<uint64_t> changes_of_structure = 1;

void count_change() { changes_of_structure.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

uint64_t structure_changes() { return changes_of_structure.load(std::memory_order_relaxed); }

std::string ModuleBase::initial_name_of(std::string_view name) const {
  return join(initial_name_, name);
}
RandomStream ModuleBase::initial_stream(std::string_view parameter) const {
  return named_random_stream(initial_name_of(parameter));
}

void ModuleBase::check_new_name(std::string_view name) const {
  TS_CHECK(!name.empty() && name.find('.') == std::string_view::npos, type_name(),
           "a name must be non-empty and without dots; got '", name, "'");
  bool taken = false;
  for (const auto& child : children_) taken |= child->name_ == name;
  for (const auto& parameter : parameters_) taken |= parameter.name == name;
  for (const auto& buffer : buffers_) taken |= buffer.named.name == name;
  TS_CHECK(!taken, type_name(), "the name '", name, "' is taken; names in a module are unique");
}

void ModuleBase::adopt(std::string_view name, std::unique_ptr<ModuleBase> child) {
  TS_CHECK(child != nullptr, type_name(), "there is no module to take as '", name, "'");
  check_new_name(name);
  child->name_ = name;
  child->refresh_names(this);
  children_.push_back(std::move(child));
  count_change();
}

std::unique_ptr<ModuleBase> ModuleBase::release(std::string_view name) {
  const auto found =
      std::ranges::find_if(children_, [&](const auto& child) { return child->name_ == name; });
  TS_CHECK(found != children_.end(), type_name(), "there is no child '", name, "' to give back");
  std::unique_ptr<ModuleBase> child = std::move(*found);
  children_.erase(found);
  count_change();
  child->name_.clear();
  child->dotted_name_.clear();
  for (const auto& grandchild : child->children_) grandchild->refresh_names(child.get());
  return child;
}

ModuleBase::ChildPlace ModuleBase::place_of_child(std::string_view dotted_name) {
  const size_t dot = dotted_name.rfind('.');
  const bool is_own = dot == std::string_view::npos;
  ModuleBase& parent = is_own ? *this : submodule(dotted_name.substr(0, dot));
  const std::string_view name = is_own ? dotted_name : dotted_name.substr(dot + 1);
  const auto found = std::ranges::find_if(parent.children_,
                                          [&](const auto& child) { return child->name_ == name; });
  TS_CHECK(found != parent.children_.end(), parent.type_name(), "there is no child '", name,
           "' to replace; see repr()");
  return {&parent, &*found, std::string(name)};
}
void ModuleBase::renew_child(const ChildPlace& place) {
  ModuleBase& child = **place.child;
  child.name_ = place.name;
  child.refresh_names(this);
  count_change();
}
void ModuleBase::forget_child(const ChildPlace& place) {
  (void)place.child->release();  // its memory is lost, not given back: nothing stands there
  children_.erase(children_.begin() + (place.child - children_.data()));
  count_change();
}
void ModuleBase::refuse_replacement(const ChildPlace& place) {
  TS_THROW(ValueError, place.parent->type_name(), "the child '", place.name, "' is a ",
           (*place.child)->type_name(),
           "; replace puts one of the same type in its place, which references to it rely on. For "
           "another type, release() it and adopt() another");
}

void ModuleBase::set_extension(std::unique_ptr<ModuleExtension> extension) {
  TS_CHECK(extension == nullptr || extension_ == nullptr, type_name(),
           "has an extension already, and takes one; remove the adapter that is there");
  extension_ = std::move(extension);
}

void ModuleBase::refresh_names(const ModuleBase* parent) {
  dotted_name_ = join(parent->dotted_name_, name_);
  for (const auto& child : children_) child->refresh_names(this);
}

const Tensor& ModuleBase::parameter(std::string_view name, const Shape& shape) {
  const ParameterDefaults& defaults = ParameterDefaultsGuard::current();
  const MemoryCategoryGuard category(MemoryCategory::kParameter);
  const Tensor tensor = raw::empty(shape, defaults.dtype, defaults.device);
  if (defaults.initialise && !tensor.is_meta()) {
    kernels::fill(tensor, std::numeric_limits<double>::quiet_NaN());
  }
  return parameter(name, tensor);
}

const Tensor& ModuleBase::parameter(std::string_view name, const Tensor& tensor) {
  check_new_name(name);
  if (tensor.defined()) {
    TS_CHECK_AS(AutogradError, tensor.is_leaf(), type_name(), "the parameter '", name,
                "' must be a leaf, it is the result of an op; detach() it");
    if (!tensor.storage()->is_foreign()) tensor.storage()->set_category(MemoryCategory::kParameter);
    if (is_floating(tensor.dtype())) tensor.set_requires_grad(true);
  }
  count_change();
  return parameters_.emplace_back(NamedTensor{std::string(name), tensor}).tensor;
}

const Tensor& ModuleBase::share_parameter(std::string_view name, const Tensor& tensor) {
  for (NamedTensor& own : parameters_) {
    if (own.name != name) continue;
    TS_CHECK_SHAPE(!own.tensor.defined() || own.tensor.shape() == tensor.shape(), type_name(),
                   "the parameter '", name, "' is ", own.tensor, " and cannot be tied to ", tensor,
                   "; tied parameters have one shape");
    own.tensor = tensor;
    return own.tensor;
  }
  return parameter(name, tensor);
}

const Tensor& ModuleBase::buffer(std::string_view name, const Tensor& tensor, bool persistent) {
  check_new_name(name);
  return buffers_.emplace_back(Buffer{{std::string(name), tensor}, persistent}).named.tensor;
}

// ---- Walking -----------------------------------------------------------------------------------

namespace {

void append_modules(const std::string& name, ModuleBase& module, std::vector<NamedModule>& result) {
  result.push_back({name, &module});
  for (size_t i = 0; i < module.num_children(); ++i) {
    append_modules(join(name, module.child(i).name()), module.child(i), result);
  }
}

}  // namespace

std::vector<NamedModule> ModuleBase::named_modules() {
  std::vector<NamedModule> result;
  append_modules("", *this, result);
  return result;
}

std::vector<NamedModule> ModuleBase::named_children() {
  std::vector<NamedModule> result;
  for (const auto& child : children_) result.push_back({child->name_, child.get()});
  return result;
}

ModuleBase& ModuleBase::submodule(std::string_view dotted_name) {
  ModuleBase* module = this;
  for (std::string_view rest = dotted_name; !rest.empty();) {
    const size_t dot = rest.find('.');
    const std::string_view part = rest.substr(0, dot);
    const auto found = std::ranges::find_if(
        module->children_, [&](const auto& child) { return child->name_ == part; });
    TS_CHECK(found != module->children_.end(), module->type_name(), "there is no child '", part,
             "' on the way to '", dotted_name, "'; see repr()");
    module = found->get();
    rest = dot == std::string_view::npos ? std::string_view() : rest.substr(dot + 1);
  }
  return *module;
}

// visit(name, slot, persistent, is_parameter) for every parameter and buffer slot, defined or not,
// in torch's order: a module's parameters, its buffers, its children.
template <class Visit>
void ModuleBase::visit_state(const std::string& prefix, const Visit& visit) const {
  for (const NamedTensor& own : parameters_) visit(join(prefix, own.name), own.tensor, true, true);
  for (const Buffer& own : buffers_) {
    visit(join(prefix, own.named.name), own.named.tensor, own.persistent, false);
  }
  for (const auto& child : children_) child->visit_state(join(prefix, child->name_), visit);
}

NamedTensors ModuleBase::named_parameters() const {
  NamedTensors result;
  std::unordered_set<const TensorImpl*> seen;
  visit_state("", [&](std::string name, const Tensor& tensor, bool, bool is_parameter) {
    if (is_parameter && tensor.defined() && seen.insert(tensor.impl()).second) {
      result.push_back({std::move(name), tensor});
    }
  });
  return result;
}

TensorList ModuleBase::parameters() const {
  TensorList result;
  for (auto& named : named_parameters()) result.push_back(std::move(named.tensor));
  return result;
}

std::vector<ParameterPlace> ModuleBase::parameter_places() {
  std::vector<ParameterPlace> places;
  for (const auto& [name, module] : named_modules()) {
    for (NamedTensor& own : module->parameters_) {
      places.push_back({join(name, own.name), &own.tensor});
    }
  }
  return places;
}

std::vector<ParameterPlace> ModuleBase::buffer_places() {
  std::vector<ParameterPlace> places;
  for (const auto& [name, module] : named_modules()) {
    for (Buffer& own : module->buffers_) {
      places.push_back({join(name, own.named.name), &own.named.tensor});
    }
  }
  return places;
}

NamedTensors ModuleBase::named_buffers() const {
  NamedTensors result;
  visit_state("", [&](std::string name, const Tensor& tensor, bool, bool is_parameter) {
    if (!is_parameter && tensor.defined()) result.push_back({std::move(name), tensor});
  });
  return result;
}

const Tensor& ModuleBase::get_parameter(std::string_view dotted_name) const {
  const Tensor* found = nullptr;
  visit_state("", [&](const std::string& name, const Tensor& tensor, bool, bool is_parameter) {
    if (is_parameter && name == dotted_name) found = &tensor;
  });
  TS_CHECK(found != nullptr, type_name(), "there is no parameter '", dotted_name,
           "'; named_parameters() lists them");
  return *found;
}

int64_t ModuleBase::num_parameters() const {
  int64_t total = 0;
  for (const auto& [name, tensor] : named_parameters()) {
    total += numel_of(whole_shape(tensor));
  }
  return total;
}

// ---- Mode, dtype, device -----------------------------------------------------------------------

void ModuleBase::train(bool training) {
  training_ = training;
  for (const auto& child : children_) child->train(training);
}

// convert(tensor) returns the tensor's new contents. Gradients follow their parameters.
template <class Convert>
void ModuleBase::convert_tensors(const Convert& convert) {
  const NoGradGuard no_grad;
  for (const auto& [name, tensor] : named_parameters()) {
    const ElementGuard* guard = element_guard(tensor);
    TS_CHECK_AS(UnsupportedError, guard == nullptr, type_name(),
                "to() is of whole parameters, and '", name, "' is ", guard->describe(tensor),
                "; call it before the model is sharded, or let a mixed precision policy say in "
                "which dtypes the parts travel and ops calculate");
  }
  std::unordered_set<const TensorImpl*> seen;
  visit_state("", [&](const std::string&, const Tensor& tensor, bool, bool is_parameter) {
    if (!tensor.defined() || !seen.insert(tensor.impl()).second) return;
    const MemoryCategoryGuard category(tensor.storage()->category());
    const Tensor grad = is_parameter ? tensor.grad() : Tensor();
    if (grad.defined()) {
      const MemoryCategoryGuard gradient(MemoryCategory::kGradient);
      grad.set_data(convert(grad));
    }
    tensor.set_data(convert(tensor));
  });
}
void ModuleBase::to(DType dtype) {
  TS_CHECK_DTYPE(is_floating(dtype), type_name(), "to() takes a floating dtype; got ", dtype);
  convert_tensors([dtype](const Tensor& tensor) {
    if (!is_floating(tensor.dtype())) return tensor.detach();
    Tensor converted = tensor.detach().to(dtype);
    pass_initial_values(tensor, converted);
    return converted;
  });
}
void ModuleBase::to(const Device& device) {
  convert_tensors([&](const Tensor& tensor) { return tensor.detach().to(device); });
}

void ModuleBase::requires_grad_(bool value) {
  for (const Tensor& tensor : parameters()) {
    if (is_floating(tensor.dtype())) tensor.set_requires_grad(value);
  }
}
void ModuleBase::zero_grad(bool set_to_none) {
  for (const Tensor& tensor : parameters()) tensor.zero_grad(set_to_none);
}

// ---- Copies ------------------------------------------------------------------------------------

void ModuleBase::copy_state_from(const ModuleBase& source) {
  const auto extend = [](const auto& self, ModuleBase& to, const ModuleBase& from) -> void {
    // Children first: those that an extension adds come with what they need.
    for (size_t i = 0; i < std::min(to.children_.size(), from.children_.size()); ++i) {
      self(self, *to.children_[i], *from.children_[i]);
    }
    if (from.extension_ && !to.extension_) from.extension_->extend(to);
  };
  extend(extend, *this, source);
  TS_CHECK(type_name() == source.type_name() && children_.size() == source.children_.size() &&
               parameters_.size() == source.parameters_.size() &&
               buffers_.size() == source.buffers_.size(),
           type_name(), "remake() gave a module that differs from the original at '",
           source.dotted_name(), "'; it must construct one with the same arguments");
  const NoGradGuard no_grad;
  std::unordered_map<const TensorImpl*, Tensor> copies;
  const auto copy_slot = [&](Tensor& target, const Tensor& original, bool is_parameter) {
    if (!original.defined()) {
      target = Tensor();
      return;
    }
    const auto [found, added] = copies.try_emplace(original.impl(), target);
    if (added && target.defined()) {  // under the handles that the new module gave out
      const MemoryCategoryGuard category(original.storage()->category());
      const Tensor copy = original.detach().clone();
      pass_initial_values(original, copy);
      target.set_data(copy);
      if (is_parameter) target.set_requires_grad(original.requires_grad());
    } else if (added) {
      found->second = original.detach().clone();
      pass_initial_values(original, found->second);
      if (is_parameter) found->second.set_requires_grad(original.requires_grad());
    }
    target = found->second;
  };
  const auto copy_module = [&](const auto& self, ModuleBase& to, const ModuleBase& from) -> void {
    to.training_ = from.training_;
    for (size_t i = 0; i < to.parameters_.size(); ++i) {
      copy_slot(to.parameters_[i].tensor, from.parameters_[i].tensor, true);
    }
    for (size_t i = 0; i < to.buffers_.size(); ++i) {
      copy_slot(to.buffers_[i].named.tensor, from.buffers_[i].named.tensor, false);
    }
    for (size_t i = 0; i < to.children_.size(); ++i) {
      self(self, *to.children_[i], *from.children_[i]);
    }
  };
  copy_module(copy_module, *this, source);
}

// ---- State -------------------------------------------------------------------------------------

StateDict ModuleBase::state_dict() const {
  StateDict state;
  visit_state("", [&](const std::string& name, const Tensor& tensor, bool persistent, bool) {
    if (!persistent || !tensor.defined()) return;
    TS_CHECK_AS(UnsupportedError, tensor.impl()->marks == 0, "state_dict", "'", name, "' is ",
                tensor,
                ", this rank's part in a call of a divided model "
                "(parallelize_module); take the state outside of the call");
    state.set(name, tensor.detach());
  });
  return state;
}

std::string LoadReport::describe() const {
  std::string text;
  const auto append = [&](std::string_view title, const std::vector<std::string>& names) {
    if (names.empty()) return;
    text += "\n  " + std::string(title) + " (" + std::to_string(names.size()) + "):";
    for (const std::string& name : names) text += "\n    " + name;
  };
  append("missing in the state", missing);
  append("unexpected in the state", unexpected);
  append("of another shape", misshapen);
  return text;
}

namespace {

// A line on stderr where a state has two values for one parameter: PyTorch takes the last in
// silence. Nobody could learn it from the module, which holds one of them.
void warn_of_two_values(const std::string& first, const Tensor& a, const std::string& last,
                        const Tensor& b, DType dtype) {
  if (a.is_meta() || b.is_meta() || element_guard(a) || element_guard(b)) return;  // none to read
  const auto differ = first_difference(a, b, dtype);
  if (!differ) return;
  std::fprintf(stderr,
               "tessera: load_state_dict: '%s' and '%s' are one parameter, and the state has two "
               "values for it (%s); that of '%s' is taken: make the module untied to have both\n",
               first.c_str(), last.c_str(), differ->c_str(), last.c_str());
}

}  // namespace

template <class Take>
LoadReport ModuleBase::fit_state_dict(const StateDict& state, const Take& take) const {
  LoadReport report;
  std::unordered_set<std::string> known;
  std::unordered_map<const TensorImpl*, NamedTensor> found;  // with what it is given last
  NamedTensors absent;
  visit_state("", [&](const std::string& name, const Tensor& tensor, bool persistent, bool weight) {
    if (!persistent || !tensor.defined()) return;
    known.insert(name);
    const Tensor* source = state.find(name);
    if (source == nullptr) return absent.push_back({name, tensor});
    // Bytes of a packed weight are no numbers, to be converted to others or from them.
    const bool would_pack = weight && is_floating(tensor.dtype()) != is_floating(source->dtype());
    const Tensor part = would_pack ? Tensor() : fitting_part(tensor, *source);
    const auto [other, is_first] = found.try_emplace(tensor.impl(), NamedTensor{name, *source});
    if (part.defined()) {
      if (!is_first && other->second.tensor.shape() == source->shape()) {
        warn_of_two_values(other->second.name, other->second.tensor, name, *source, tensor.dtype());
      }
      other->second = {name, *source};
      take(tensor, part);
    } else {
      report.misshapen.push_back(name + ": the module has " + described_whole(tensor) +
                                 ", the state has " + described_whole(*source));
    }
  });
  for (const auto& [name, tensor] : absent) {
    if (!found.contains(tensor.impl())) report.missing.push_back(name);
  }
  for (const auto& [name, tensor] : state) {
    if (!known.contains(name)) report.unexpected.push_back(name);
  }
  return report;
}

LoadReport ModuleBase::compare_state_dict(const StateDict& state) const {
  return fit_state_dict(state, [](const Tensor&, const Tensor&) {});
}

LoadReport ModuleBase::load_state_dict(const StateDict& state, const LoadOptions& options) {
  struct Copy {
    Tensor target;
    Tensor source;
  };
  std::vector<Copy> copies;
  LoadReport report = fit_state_dict(state, [&](const Tensor& target, const Tensor& source) {
    copies.push_back({target, source});
  });
  TS_CHECK(
      options.strict ? report.complete() : report.misshapen.empty(), "load_state_dict",
      "the state does not fit ", type_name(), ":", report.describe(),
      report.misshapen.empty()
          ? "\n  pass {.strict = false} to load what fits by name"
          : "\n  a tensor of another shape cannot be loaded; make the module of the shape that "
            "the state has, or remove the tensor from the state");
  const NoGradGuard no_grad;
  for (const auto& [target, source] : copies) {
    if (target.is_meta()) {
      // A model without bytes takes those of the state, with the dtype that it was made for.
      const MemoryCategoryGuard category(MemoryCategory::kParameter);
      const Tensor converted = source.detach().to(target.dtype());
      target.set_data(converted.storage() == source.storage() ? converted.clone() : converted);
    } else {
      copy_(raw::alias(target), source);
    }
  }
  return report;
}

// ---- Printing ----------------------------------------------------------------------------------

std::string ModuleBase::type_name() const { return short_name(typeid(*this)); }

std::string ModuleBase::repr() const {
  const std::string extra = extra_repr();
  if (children_.empty()) return type_name() + "(" + extra + ")";
  std::string text = type_name() + "(\n";
  if (!extra.empty()) text += "  " + extra + "\n";
  for (const auto& child : children_) {
    text += "  (" + child->name_ + "): ";
    for (const char c : child->repr()) {
      text += c;
      if (c == '\n') text += "  ";
    }
    text += '\n';
  }
  return text + ")";
}

std::ostream& operator<<(std::ostream& out, const ModuleBase& module) {
  return out << module.repr();
}

}  // namespace tessera::nn
