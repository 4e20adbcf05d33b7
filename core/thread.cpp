#include <tessera/core/thread.h>

#include <pthread.h>

#include <atomic>
#include <system_error>

#include <tessera/core/error.h>

namespace tessera {
namespace {

std::atomic<uint64_t> generation{0};

}  // namespace

uint64_t process_generation() { return generation.load(std::memory_order_relaxed); }

Thread::Thread(std::function<void()> run) {
  static const int counts_forks = ::pthread_atfork(
      nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  TS_CHECK_AS(IoError, counts_forks == 0, "thread", "the system has no memory for pthread_atfork");
  try {
    thread_ = std::make_unique<std::thread>(std::move(run));
  } catch (const std::system_error& error) {
    TS_THROW(IoError, "thread", "the system starts no further thread (", error.what(),
             "); raise the limit of threads or of memory, or call set_num_threads(1)");
  }
}

void Thread::join() {
  abandon();
  if (thread_) thread_->join();
  thread_.reset();
}

void Thread::detach() {
  abandon();
  if (thread_) thread_->detach();
  thread_.reset();
}

}  // namespace tessera
