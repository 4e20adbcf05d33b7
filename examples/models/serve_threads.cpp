// A model that two threads serve: requests wait in a queue, each thread takes the next, and both
// call one Llama that nobody writes. (`serve` of the recipes does this behind a port.)
//
// Ends with 1 unless every answer is that of a thread alone, whoever made it, and two requests with
// one seed get one text.
#include <condition_variable>
#include <cstdio>
#include <deque>
#include <future>
#include <mutex>
#include <thread>

#include <tessera.h>

using namespace tessera;
using Tokens = std::vector<int64_t>;

struct Question {
  Tokens prompt;
  nn::models::GenerateOptions options;
  std::promise<Tokens> answer;  // an error of generate() goes there, too
};

class Server {
 public:
  Server(nn::models::Llama& model, int threads) : model_(model) {
    model.eval();  // once, here: threads only read the model
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
  }
  ~Server() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    more_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  std::future<Tokens> ask(Tokens prompt, const nn::models::GenerateOptions& options) {
    Question request{std::move(prompt), options, {}};
    std::future<Tokens> answer = request.answer.get_future();
    {
      const std::lock_guard lock(mutex_);
      waiting_.push_back(std::move(request));
    }
    more_.notify_one();
    return answer;
  }

 private:
  void work() {
    set_num_threads(1);  // a thread's own setting: the threads share the cores
    while (true) {
      std::unique_lock lock(mutex_);
      more_.wait(lock, [this] { return ended_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      Question request = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      try {
        request.answer.set_value(nn::models::generate(model_, request.prompt, request.options));
      } catch (...) {
        request.answer.set_exception(std::current_exception());
      }
    }
  }

  nn::models::Llama& model_;
  std::mutex mutex_;
  std::condition_variable more_;
  std::deque<Question> waiting_;
  bool ended_ = false;
  std::vector<std::thread> threads_;
};

int main() {
  manual_seed(1);
  nn::models::Llama model({.vocab_size = 64, .width = 32, .inner = 64, .layers = 2});
  const auto prompt = [](int64_t i) { return Tokens(static_cast<size_t>(1 + i % 5), i % 64); };
  const auto options = [](int64_t i) {
    return nn::models::GenerateOptions{.max_tokens = 12, .temperature = 2, .seed = uint64_t(i / 2)};
  };
  std::vector<Tokens> expected;
  for (int64_t i = 0; i < 40; ++i) {
    expected.push_back(nn::models::generate(model, prompt(i), options(i)));
  }
  Server server(model, 2);
  std::vector<std::future<Tokens>> answers;
  for (int64_t i = 0; i < 40; ++i) answers.push_back(server.ask(prompt(i), options(i)));
  int right = 0;
  for (size_t i = 0; i < answers.size(); ++i) right += answers[i].get() == expected[i] ? 1 : 0;
  const bool same_seed =
      server.ask(prompt(3), options(8)).get() == server.ask(prompt(3), options(9)).get();
  bool told = false;
  try {
    server.ask({}, {}).get();  // an empty prompt: its error comes to who asked
  } catch (const ValueError&) {
    told = true;
  }
  std::printf("%d of 40 answers as of one thread; one seed, one text: %s; errors arrive: %s\n",
              right, same_seed ? "yes" : "no", told ? "yes" : "no");
  return right == 40 && same_seed && told ? 0 : 1;
}
