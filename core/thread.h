// std::thread as the library starts it. Internal.
//
// A thread that the system refuses (limits of a container, no memory for its stack) is an IoError.
// A process that fork() made has but the thread that called it: there the others' objects are let
// go, as nobody can wait for a thread that is not.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

namespace tessera {

// How often fork() stands between this process and the first one that started a Thread.
uint64_t process_generation();

class Thread {
 public:
  Thread() = default;
  explicit Thread(std::function<void()> run);  // throws IoError
  ~Thread() { abandon(); }  // std::terminate where it is joinable, as std::thread
  Thread(Thread&&) = default;
  Thread& operator=(Thread&& other) noexcept {
    abandon();
    thread_ = std::move(other.thread_);
    generation_ = other.generation_;
    return *this;
  }

  bool joinable() const { return thread_ != nullptr && thread_->joinable(); }
  // False in a child of the process that started it.
  bool is_of_this_process() const { return generation_ == process_generation(); }
  std::thread::id get_id() const { return thread_ ? thread_->get_id() : std::thread::id(); }
  void join();
  void detach();

 private:
  void abandon() {
    if (!is_of_this_process()) static_cast<void>(thread_.release());
  }

  std::unique_ptr<std::thread> thread_;
  uint64_t generation_ = process_generation();
};

}  // namespace tessera
