// Modules that hold modules.
#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include <tessera/nn/module.h>

namespace tessera::nn {

// What it takes to make a layer, kept until its owner can name it:
//     Sequential net(layer<Linear>(784, 128), layer<ReLU>(), layer<Linear>(128, 10));
template <class T, class... Args>
struct Layer {
  using Type = T;
  std::tuple<Args...> args;
};
template <class T, class... Args>
Layer<T, std::decay_t<Args>...> layer(Args&&... args) {
  return {{std::forward<Args>(args)...}};
}

namespace detail {
// Children "0", "1", ... of one owner.
template <class Derived>
class ListModule : public Module<Derived> {
 public:
  template <class T, class... Args>
  T& append(Args&&... args) {
    return this->template add<T>(std::to_string(this->num_children()), std::forward<Args>(args)...);
  }
  template <class T, class... Args>
  T& append(const Layer<T, Args...>& layer) {
    return std::apply([this](const Args&... args) -> T& { return append<T>(args...); }, layer.args);
  }
  // A module that was made elsewhere; its initial values were those of its own name.
  void append_module(std::unique_ptr<ModuleBase> module) {
    this->adopt(std::to_string(this->num_children()), std::move(module));
  }
  size_t size() const { return this->num_children(); }
  ModuleBase& operator[](size_t index) const;

 protected:
  // Children made again, as those of `source`.
  void remake_children(const ModuleBase& source);
};
template <class T>
T& checked_child(ModuleBase& module, std::string_view owner) {
  T* typed = dynamic_cast<T*>(&module);
  TS_CHECK(typed != nullptr, owner, "the child '", module.name(), "' is a ", module.type_name(),
           ", not of the type asked for");
  return *typed;
}
}  // namespace detail

// Layers that each map one tensor to one, run one after the other.
class Sequential : public detail::ListModule<Sequential> {
 public:
  template <class... Layers>
  explicit Sequential(const Layers&... layers) {
    (append(layers), ...);
  }
  Tensor forward(const Tensor& x);
  std::unique_ptr<Sequential> remake() const;
};

// A list of modules for a forward of one's own: blocks.at<Block>(i)(x).
class ModuleList : public detail::ListModule<ModuleList> {
 public:
  ModuleList() = default;
  template <class T>
  T& at(size_t index) const {
    return detail::checked_child<T>((*this)[index], "ModuleList");
  }
  // Equal neighbours are printed once, with their number.
  std::string repr() const override;
  std::unique_ptr<ModuleList> remake() const;
};

// Modules by name, in the order of insertion.
class ModuleDict : public Module<ModuleDict> {
 public:
  ModuleDict() = default;
  template <class T, class... Args>
  T& insert(std::string_view name, Args&&... args) {
    return add<T>(name, std::forward<Args>(args)...);
  }
  template <class T>
  T& at(std::string_view name) {
    return detail::checked_child<T>(submodule(name), "ModuleDict");
  }
  bool contains(std::string_view name) const;
  std::unique_ptr<ModuleDict> remake() const;
};

}  // namespace tessera::nn
