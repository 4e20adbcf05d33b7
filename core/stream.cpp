#include <tessera/core/stream.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include <tessera/core/context.h>
#include <tessera/core/error.h>
#include <tessera/core/gpu/backend.h>

namespace tessera {

struct Event::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = true;
  std::chrono::steady_clock::time_point time = {};  // when it happened
  std::exception_ptr error;
  std::shared_ptr<gpu::EventHandle> of_gpu;  // a GPU's event: nothing else here counts

  void finish(std::exception_ptr with) {
    {
      std::lock_guard lock(mutex);
      done = true;
      time = std::chrono::steady_clock::now();
      error = std::move(with);
    }
    changed.notify_all();
  }
  void wait() {
    if (of_gpu) return gpu::synchronize_event(*of_gpu);
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return done; });
  }
};

Event::Event() : state_(std::make_shared<State>()) {}

bool Event::done() const {
  if (state_->of_gpu) return gpu::event_done(*state_->of_gpu);
  std::lock_guard lock(state_->mutex);
  return state_->done;
}

void Event::wait() const {
  state_->wait();
  std::lock_guard lock(state_->mutex);
  if (state_->error) std::rethrow_exception(state_->error);
}

double Event::milliseconds_since(const Event& start) const {
  constexpr const char* kWhere = "event";
  State& first = *start.state_;
  State& last = *state_;
  TS_CHECK(static_cast<bool>(first.of_gpu) == static_cast<bool>(last.of_gpu), kWhere,
           "the time between an event of a GPU and one of the CPU is on no clock");
  TS_CHECK_DEVICE(start.done() && done(), kWhere, "has not happened yet; wait() for it");
  if (last.of_gpu) {
    return static_cast<double>(gpu::elapsed_milliseconds(*first.of_gpu, *last.of_gpu));
  }
  const std::scoped_lock lock(first.mutex);
  return std::chrono::duration<double, std::milli>(last.time - first.time).count();
}

struct Stream::Impl {
  std::shared_ptr<gpu::StreamHandle> of_gpu;  // a GPU's stream: nothing else here counts
  int device = 0;

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
  if (device.is_cuda()) {
    impl_->device = device.index;
    impl_->of_gpu = gpu::make_stream(device.index);
    return;
  }
  TS_CHECK_DEVICE(device.is_cpu(), "stream", "there is nothing to run on ", device);
  impl_->worker = std::thread([impl = impl_.get()] { impl->run(); });
}

Stream::~Stream() {
  if (impl_->of_gpu) return;  // the handle waits
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stopping = true;
  }
  impl_->changed.notify_one();
  impl_->worker.join();
}

void Stream::enqueue(std::function<void()> work) {
  if (!impl_->of_gpu) return impl_->push({std::move(work), nullptr});
  const gpu::CurrentDevice device(impl_->device);
  const gpu::CurrentStream stream(impl_->of_gpu);
  work();
}

Event Stream::record() {
  Event event;
  if (impl_->of_gpu) {
    event.state_->of_gpu = gpu::record_event(*impl_->of_gpu);
    return event;
  }
  event.state_->done = false;
  impl_->push({nullptr, event.state_});
  return event;
}

void Stream::wait(const Event& event) {
  if (impl_->of_gpu) {
    if (event.state_->of_gpu) {
      gpu::wait_event(*impl_->of_gpu, *event.state_->of_gpu);
    } else {
      event.wait();
    }
    return;
  }
  // An error of the other stream is raised by whoever synchronises with it.
  impl_->push({[state = event.state_] { state->wait(); }, nullptr});
}

void Stream::synchronize() {
  if (impl_->of_gpu) return gpu::synchronize_stream(*impl_->of_gpu);
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
