#include <tessera/data/prefetch.h>

#include <atomic>
#include <condition_variable>
#include <exception>
#include <limits>
#include <mutex>
#include <vector>

#include <tessera/core/context.h>
#include <tessera/core/error.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/parallel.h>
#include <tessera/core/thread.h>

namespace tessera::data {
namespace {

struct Slot {
  bool ready = false;
  MadeBatch made;
  std::exception_ptr error;
};

thread_local const std::atomic<bool>* stopping_of_this_worker = nullptr;

}  // namespace

bool prefetch_is_stopping() {
  return stopping_of_this_worker != nullptr &&
         stopping_of_this_worker->load(std::memory_order_relaxed);
}

// [Note: tickets] A ticket is the number of a batch in this epoch. Workers draw tickets in order
// and put what they made into slot ticket % capacity; the consumer takes ticket `delivered`. A
// ticket is drawn only while ticket < delivered + capacity, so a slot is never written before it
// was emptied.
struct Prefetcher::Shared {
  std::unique_ptr<BatchMaker> maker;
  std::mutex mutex;
  std::condition_variable slot_ready, room_free;
  std::vector<Slot> slots;
  int64_t position = 0;                               // where ticket `drawn` starts
  int64_t drawn = 0, delivered = 0;                   // tickets
  int64_t end = std::numeric_limits<int64_t>::max();  // no ticket from here on
  std::atomic<bool> stopping{false};
  std::vector<std::unique_ptr<Context>> contexts;
  std::vector<Thread> threads;
  uint64_t generation = process_generation();  // before a fork() that left the threads behind

  int64_t capacity() const { return static_cast<int64_t>(slots.size()); }

  void work(Context& context) {
    const ContextGuard guard(context);
    set_num_threads(1);
    stopping_of_this_worker = &stopping;
    for (;;) {
      int64_t ticket, start;
      Slot slot;
      std::optional<int64_t> next;
      {
        std::unique_lock lock(mutex);
        room_free.wait(lock,
                       [&] { return stopping || drawn >= end || drawn < delivered + capacity(); });
        if (stopping || drawn >= end) return;
        try {
          next = maker->next_position(position);
        } catch (...) {
          slot.error = std::current_exception();
        }
        if (!next && !slot.error) {
          end = drawn;
          slot_ready.notify_all();
          room_free.notify_all();
          return;
        }
        ticket = drawn++;
        start = position;
        if (next) position = *next;
      }
      if (next) {
        try {
          slot.made = maker->make(start, *next);
        } catch (...) {
          slot.error = std::current_exception();
        }
      }
      slot.ready = true;
      const std::lock_guard lock(mutex);
      // After an error or the end of a stream no batch is worth making.
      if (slot.error || slot.made.batch == nullptr) {
        end = std::min(end, ticket + 1);
        room_free.notify_all();
      }
      slots[static_cast<size_t>(ticket % capacity())] = std::move(slot);
      slot_ready.notify_all();
    }
  }

  MadeBatch next_from_workers() {
    Slot slot;
    {
      std::unique_lock lock(mutex);
      Slot& place = slots[static_cast<size_t>(delivered % capacity())];
      slot_ready.wait(lock, [&] { return place.ready || delivered >= end; });
      if (!place.ready) return {};
      slot = std::move(place);
      place = Slot();
      ++delivered;
    }
    room_free.notify_one();
    if (slot.error) std::rethrow_exception(slot.error);
    return std::move(slot.made);
  }

  MadeBatch next_here() {
    if (delivered >= end) return {};
    const std::optional<int64_t> next = maker->next_position(position);
    MadeBatch made;
    if (next) made = maker->make(position, *next);
    if (made.batch == nullptr) {
      end = delivered;
      return {};
    }
    ++delivered;
    position = *next;
    return made;
  }
};

Prefetcher::Prefetcher(std::unique_ptr<BatchMaker> maker, int64_t position, int workers,
                       int64_t prefetch)
    : shared_(std::make_unique<Shared>()) {
  TS_CHECK(workers >= 0, "DataLoader", "the number of workers must not be negative; got ", workers,
           ".");
  TS_CHECK(prefetch >= 1, "DataLoader", "prefetch must be at least 1 batch a worker; got ",
           prefetch, ".");
  shared_->maker = std::move(maker);
  shared_->position = position;
  shared_->slots.resize(static_cast<size_t>(workers * prefetch));
  try {
    for (int i = 0; i < workers; ++i) {
      shared_->contexts.push_back(std::make_unique<Context>());
      share_memory_stats(*shared_->contexts.back());
    }
    for (const auto& context : shared_->contexts) {
      shared_->threads.emplace_back([shared = shared_.get(), &context] { shared->work(*context); });
    }
  } catch (...) {  // no further thread to be had: the destructor does not run, stop those there are
    shared_->stopping = true;
    shared_->room_free.notify_all();
    for (Thread& thread : shared_->threads) thread.join();
    throw;
  }
}

Prefetcher::~Prefetcher() {
  if (shared_->generation != process_generation() && !shared_->threads.empty()) {
    // Threads that this process has not hold the mutex or wait at the condition: it stays.
    static_cast<void>(shared_.release());
    return;
  }
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stopping = true;
  }
  shared_->room_free.notify_all();
  for (Thread& thread : shared_->threads) thread.join();
}

MadeBatch Prefetcher::next() {
  TS_CHECK_AS(UnsupportedError,
              shared_->threads.empty() || shared_->generation == process_generation(), "DataLoader",
              "its workers are of the process that called fork(); begin a loop over the loader in "
              "the child, or give it no workers");
  return shared_->threads.empty() ? shared_->next_here() : shared_->next_from_workers();
}

}  // namespace tessera::data
