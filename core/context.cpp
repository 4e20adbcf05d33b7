#include <tessera/core/context.h>

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

#include <tessera/core/error.h>
#include <tessera/core/isa.h>

namespace tessera {
namespace {

thread_local Context* current_context = nullptr;

uint64_t number_of_this_thread() {
  static std::atomic<uint64_t> next{1};
  const bool main = ::syscall(SYS_gettid) == ::getpid();
  return main ? 0 : next.fetch_add(1, std::memory_order_relaxed);
}

// [Note: after main] Destructors of static and thread_local objects may compute, and functions that
// atexit() calls. The Context of a thread outlives them: the destructor of a pthread key comes after
// those of thread_local objects, and never for the thread that leaves main.
pthread_key_t key_of_default() {
  static const pthread_key_t key = [] {
    pthread_key_t made = 0;
    const int problem = ::pthread_key_create(&made, [](void* context) {
      current_context = nullptr;  // a slot's destructor that asks for one gets another
      delete static_cast<Context*>(context);
    });
    TS_CHECK_AS(IoError, problem == 0, "Context", "the system has no more keys of threads");
    return made;
  }();
  return key;
}

}  // namespace

Context::Context() {
  kernels::cpu_isa();  // here, and not in a kernel's thread, a build for other machines fails
}
Context::~Context() = default;

Context* Context::current_or_default() {
  if (current_context == nullptr) [[unlikely]] {
    const pthread_key_t key = key_of_default();
    auto made = std::make_unique<Context>();
    made->thread_number_ = number_of_this_thread();
    TS_CHECK_AS(IoError, ::pthread_setspecific(key, made.get()) == 0, "Context",
                "the system has no memory for a thread's value");
    current_context = made.release();
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
