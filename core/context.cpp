#include <tessera/core/context.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include <tessera/core/isa.h>

namespace tessera {
namespace {

thread_local Context* current_context = nullptr;

uint64_t number_of_this_thread() {
  static std::atomic<uint64_t> next{1};
  const bool main = ::syscall(SYS_gettid) == ::getpid();
  return main ? 0 : next.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

Context::Context() {
  kernels::cpu_isa();  // here, and not in a kernel's thread, a build for other machines fails
}
Context::~Context() = default;

Context* Context::current_or_default() {
  if (current_context == nullptr) [[unlikely]] {
    thread_local Context default_context;
    default_context.thread_number_ = number_of_this_thread();
    current_context = &default_context;
  }
  return current_context;
}

size_t Context::next_slot_index() {
  static std::atomic<size_t> next{0};
  return next.fetch_add(1);
}

void Context::set_slot(size_t index, std::shared_ptr<void> value) {
  if (index >= slots_.size()) slots_.resize(index + 1);
  slots_[index] = std::move(value);
}

ContextGuard::ContextGuard(Context& context) : previous_(current_context) {
  current_context = &context;
}
ContextGuard::~ContextGuard() { current_context = previous_; }

}  // namespace tessera
