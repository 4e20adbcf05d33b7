// The settings under which code runs. There is no global state: several trainings, and ranks as
// threads, share a process without affecting each other.
//
// A Context holds one value of each type (a slot): grad mode, random numbers, thread count, memory
// statistics... Higher libraries add theirs without changing core:
//
//     Context::current().slot<GradMode>().enabled = false;
//
// A thread that entered no Context gets its own with default values and its own random numbers (see
// thread_number). Worker threads enter the Context of their creator: `ContextGuard
// guard(creator_context);`. One running thread at a time uses a Context, except slots that say
// otherwise.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

namespace tessera {

class Context {
 public:
  Context();
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  static Context& current() { return *current_or_default(); }

  // 0 for a Context that was constructed explicitly and for the main thread's; 1, 2, ... for those
  // of other threads, in the order of their first use.
  uint64_t thread_number() const { return thread_number_; }

  // The slot's value, made at the first use: by T(context) where there is such a constructor, by
  // T() otherwise. O(1).
  template <class T>
  T& slot() {
    const size_t index = slot_index<T>();
    if (index >= slots_.size() || !slots_[index]) [[unlikely]] {
      set_slot(index, make_slot<T>());
    }
    return *static_cast<T*>(slots_[index].get());
  }
  // Shares one value with another context (for a worker that needs the same statistics).
  template <class T>
  void share_slot(Context& other) {
    slot<T>();
    other.set_slot(slot_index<T>(), slots_[slot_index<T>()]);
  }

 private:
  friend class ContextGuard;
  static Context* current_or_default();
  static size_t next_slot_index();
  template <class T>
  static size_t slot_index() {
    static const size_t index = next_slot_index();
    return index;
  }
  template <class T>
  std::shared_ptr<void> make_slot() const {
    if constexpr (std::is_constructible_v<T, const Context&>) {
      return std::make_shared<T>(*this);
    } else {
      return std::make_shared<T>();
    }
  }
  void set_slot(size_t index, std::shared_ptr<void> value);

  std::vector<std::shared_ptr<void>> slots_;
  uint64_t thread_number_ = 0;
};

// Makes a context the thread's current one for a scope.
class ContextGuard {
 public:
  explicit ContextGuard(Context& context);
  ~ContextGuard();
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  Context* previous_;
};

// Sets a field of a slot for a scope and restores it, also when an exception passes.
template <class T>
class ScopedValue {
 public:
  ScopedValue(T& target, T value) : target_(target), previous_(std::move(target)) {
    target_ = std::move(value);
  }
  ~ScopedValue() { target_ = std::move(previous_); }
  ScopedValue(const ScopedValue&) = delete;
  ScopedValue& operator=(const ScopedValue&) = delete;

 private:
  T& target_;
  T previous_;
};

}  // namespace tessera
