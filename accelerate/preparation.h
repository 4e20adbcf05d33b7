// The objects of one call of Accelerator::prepare(), by their kind.
#pragma once

#include <concepts>
#include <cstddef>
#include <functional>
#include <type_traits>
#include <vector>

#include <tessera/accelerate/loaders/loader_plan.h>

namespace tessera {

namespace nn {
class ModuleBase;
}
namespace optim {
class Optimizer;
class PlateauSchedule;
class Schedule;
}  // namespace optim

namespace accelerate {

struct LoaderRequest {
  data::LoaderBase* loader;
  std::function<void(LoaderPlan&)> prepare;  // knows its type
};

struct Preparation {
  std::vector<nn::ModuleBase*> models;
  std::vector<optim::Optimizer*> optimizers;
  std::vector<LoaderRequest> loaders;
  std::vector<optim::Schedule*> schedules;
  std::vector<optim::PlateauSchedule*> plateau_schedules;

  // The object that a pointer of any kind points to; null is ignored.
  template <class T>
  void add(T& object) {
    if constexpr (std::is_same_v<std::remove_const_t<T>, std::nullptr_t>) {
    } else if constexpr (requires { object.get(), *object; }) {  // a smart pointer
      if (object) add(*object);
    } else if constexpr (std::is_pointer_v<T>) {
      if (object != nullptr) add(*object);
    } else if constexpr (std::derived_from<T, nn::ModuleBase>) {
      models.push_back(&object);
    } else if constexpr (std::derived_from<T, optim::Optimizer>) {
      optimizers.push_back(&object);
    } else if constexpr (std::derived_from<T, optim::Schedule>) {
      schedules.push_back(&object);
    } else if constexpr (std::derived_from<T, optim::PlateauSchedule>) {
      plateau_schedules.push_back(&object);
    } else if constexpr (std::derived_from<T, data::LoaderBase>) {
      loaders.push_back({&object, [&object](LoaderPlan& plan) { plan.prepare(object); }});
    } else {
      static_assert(!sizeof(T*), "prepare() takes models, optimizers, loaders and schedules");
    }
  }
};

}  // namespace accelerate
}  // namespace tessera
