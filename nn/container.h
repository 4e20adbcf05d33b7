// Modules that hold modules.
#pragma once

#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include <tessera/nn/module.h>

namespace tessera::nn {

// A layer's constructor arguments, kept until its owner can name it:
//     Sequential net(layer<Linear>(784, 128), layer<ReLU>(), layer<Linear>(128, 10));
// As in add, the last argument may be options in braces: layer<Conv2d>(1, 8, 3, {.stride = 2}).
template <class T, class... Args>
struct Layer {
  using Type = T;
  std::tuple<Args...> args;
};
template <class T, class... Args>
Layer<T, std::decay_t<Args>...> layer(Args&&... args) {
  return {{std::forward<Args>(args)...}};
}

template <class T>
Layer<T, typename T::Options> layer(const typename T::Options& options) {
  return {{options}};
}
template <class T, class A>
Layer<T, A, typename T::Options> layer(const A& a, const typename T::Options& options) {
  return {{a, options}};
}
template <class T, class A, class B>
Layer<T, A, B, typename T::Options> layer(const A& a, const B& b,
                                          const typename T::Options& options) {
  return {{a, b, options}};
}
template <class T, class A, class B, class C>
Layer<T, A, B, C, typename T::Options> layer(const A& a, const B& b, const C& c,
                                             const typename T::Options& options) {
  return {{a, b, c, options}};
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
  template <class T>
  T& append(const typename T::Options& options) {
    return append<T, const typename T::Options&>(options);
  }
  template <class T, class A>
  T& append(const A& a, const typename T::Options& options) {
    return append<T, const A&, const typename T::Options&>(a, options);
  }
  template <class T, class A, class B>
  T& append(const A& a, const B& b, const typename T::Options& options) {
    return append<T, const A&, const B&, const typename T::Options&>(a, b, options);
  }
  template <class T, class A, class B, class C>
  T& append(const A& a, const B& b, const C& c, const typename T::Options& options) {
    return append<T, const A&, const B&, const C&, const typename T::Options&>(a, b, c, options);
  }
  template <class T, class... Args>
  T& append(const Layer<T, Args...>& layer) {
    return std::apply([this](const Args&... args) -> T& { return append<T>(args...); }, layer.args);
  }
  // Adds an existing module; its initial values were those of its own name.
  void append_module(std::unique_ptr<ModuleBase> module) {
    this->adopt(std::to_string(this->num_children()), std::move(module));
  }
  size_t size() const { return this->num_children(); }
  ModuleBase& operator[](size_t index) const;

 protected:
  // Constructs children as those of `source`.
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

// A list of modules for your own forward: blocks.at<Block>(i)(x).
class ModuleList : public detail::ListModule<ModuleList> {
 public:
  ModuleList() = default;
  template <class T>
  T& at(size_t index) const {
    return detail::checked_child<T>((*this)[index], "ModuleList");
  }
  // Equal neighbors are printed once, with their number.
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
  T& insert(std::string_view name, const typename T::Options& options) {
    return insert<T, const typename T::Options&>(name, options);
  }
  template <class T, class A>
  T& insert(std::string_view name, const A& a, const typename T::Options& options) {
    return insert<T, const A&, const typename T::Options&>(name, a, options);
  }
  template <class T, class A, class B>
  T& insert(std::string_view name, const A& a, const B& b, const typename T::Options& options) {
    return insert<T, const A&, const B&, const typename T::Options&>(name, a, b, options);
  }
  template <class T, class A, class B, class C>
  T& insert(std::string_view name, const A& a, const B& b, const C& c,
            const typename T::Options& options) {
    return insert<T, const A&, const B&, const C&, const typename T::Options&>(name, a, b, c,
                                                                               options);
  }
  template <class T>
  T& at(std::string_view name) {
    return detail::checked_child<T>(submodule(name), "ModuleDict");
  }
  bool contains(std::string_view name) const;
  std::unique_ptr<ModuleDict> remake() const;
};

}  // namespace tessera::nn
