#include <tessera/core/stream.h>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include <tessera/core/context.h>
#include <tessera/core/error.h>

namespace tessera {

struct Event::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = true;
  std::exception_ptr error;

  void finish(std::exception_ptr with) {
    {
      std::lock_guard lock(mutex);
      done = true;
      error = std::move(with);
    }
    changed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done; });
  }
};

Event::Event() : state_(std::make_shared<State>()) {}

bool Event::done() const {
  std::lock_guard lock(state_->mutex);
  return state_->done;
}

void Event::wait() const {
  state_->wait();
  std::lock_guard lock(state_->mutex);
  if (state_->error) std::rethrow_exception(state_->error);
}

struct Stream::Impl {
  // Work and markers run in order; a marker runs even after an error, which it is told of.
  struct Item {
    std::function<void()> work;
    std::shared_ptr<Event::State> marker;
  };
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Item> queue;
  std::exception_ptr error;
  bool stopping = false;
  std::thread worker;

  void push(Item item) {
    {
      std::lock_guard lock(mutex);
      queue.push_back(std::move(item));
    }
    changed.notify_one();
  }

  void run() {
    Context context;
    ContextGuard guard(context);
    while (true) {
      Item item;
      std::exception_ptr failed;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return stopping || !queue.empty(); });
        if (queue.empty()) return;
        item = std::move(queue.front());
        queue.pop_front();
        failed = error;
      }
      if (item.marker) {
        item.marker->finish(failed);
      } else if (!failed) {
        try {
          item.work();
        } catch (...) {
          std::lock_guard lock(mutex);
          error = std::current_exception();
        }
      }
    }
  }
};

Stream::Stream(const Device& device) : impl_(std::make_unique<Impl>()) {
  TS_CHECK_DEVICE(device.is_cpu(), "stream", "this program has no backend for ", device);
  impl_->worker = std::thread([impl = impl_.get()] { impl->run(); });
}

Stream::~Stream() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->changed.notify_one();
  impl_->worker.join();
}

void Stream::enqueue(std::function<void()> work) { impl_->push({std::move(work), nullptr}); }

Event Stream::record() {
  Event event;
  event.state_->done = false;
  impl_->push({nullptr, event.state_});
  return event;
}

void Stream::wait(const Event& event) {
  // An error of the other stream is raised by whoever synchronises with it.
  impl_->push({[state = event.state_] { state->wait(); }, nullptr});
}

void Stream::synchronize() {
  const Event event = record();
  event.state_->wait();
  std::exception_ptr error;
  {
    std::lock_guard lock(impl_->mutex);
    error = std::exchange(impl_->error, nullptr);
  }
  if (error) std::rethrow_exception(error);
}

}  // namespace tessera
