// The library inside an application that has a life of its own: destructors after main, threads
// that the system refuses, fork(), a locale with a decimal comma.
// ctest own program: it forks, exits and changes the process's locale
#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <future>
#include <locale>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <tessera.h>
#include <tessera/accelerate/settings/deepspeed_config.h>

#include "distributed/compared_ranks.h"
#include "message_of.h"

namespace tessera::test_embedded {
namespace {

// Its parts run on the workers of the calling thread, and its gradient frees a chain of nodes.
double step() {
  set_num_threads(3);
  manual_seed(1);
  nn::Linear model(64, 64);
  Tensor y = randn({256, 64});
  for (int i = 0; i < 3; ++i) y = model(y).sort().values;
  y.sum().backward();
  return model.weight.grad().sum().item() + y.sum().item();
}
double expected() {
  static const double value = std::async(std::launch::async, step).get();
  return value;
}

// ---- After main --------------------------------------------------------------------------------

// Computes and saves where it is destroyed; the process's code says how that went.
struct Late {
  explicit Late(std::string name) : path(std::move(name)) {}
  ~Late() {
    const double value = step();
    save_safetensors(path, {{"value", tensor({value}, kF64)}});
  }
  std::string path;
};

double saved(const std::string& path) { return load_safetensors(path).at("value").item(); }

std::string fresh(const std::string& name) {
  const std::string path =
      testing::TempDir() + "test_embedded-" + std::to_string(::getpid()) + "-" + name;
  ::unlink(path.c_str());
  return path;
}

TEST(AfterMain, DestructorsOfStaticObjectsAndFunctionsOfAtexitComputeAndSave) {
  static std::string at_exit, of_static, of_thread;
  at_exit = fresh("atexit"), of_static = fresh("static"), of_thread = fresh("thread_local");
  EXPECT_EXIT(
      {
        ::alarm(60);
        std::atexit([] { Late late(at_exit); });
        static Late object(of_static);
        thread_local Late own(of_thread);
        step();  // begins what the objects above outlive: the context, workers, oneDNN
        std::exit(0);
      },
      testing::ExitedWithCode(0), "");
  const double value = expected();  // here: the child begins before its first product
  // Products of f32 are rounded by another engine then, see gemm_cpu.cpp.
  const double bound = 1e-5 * 64 * 256;
  EXPECT_NEAR(saved(at_exit), value, bound);
  EXPECT_NEAR(saved(of_static), value, bound);
  EXPECT_NEAR(saved(of_thread), value, bound);
}

TEST(AfterMain, AThreadsOwnObjectsComputeInTheirDestructors) {
  const std::string path = fresh("worker");
  std::thread([&] {
    thread_local Late own(path);
    step();
  }).join();
  EXPECT_EQ(saved(path), expected());
}

// ---- Threads that cannot start -----------------------------------------------------------------

// No thread gets a stack of 2^46 bytes.
class NoThreads {
 public:
  NoThreads() {
    ::pthread_getattr_default_np(&before_);
    pthread_attr_t huge;
    ::pthread_attr_init(&huge);
    ::pthread_attr_setstacksize(&huge, size_t{1} << 46);
    ::pthread_setattr_default_np(&huge);
  }
  ~NoThreads() { ::pthread_setattr_default_np(&before_); }

 private:
  pthread_attr_t before_;
};

struct Numbers : data::Dataset<Tensor> {
  int64_t size() const override { return 8; }
  Tensor get(int64_t index) const override { return tensor(static_cast<double>(index)); }
};

TEST(Threads, ThatCannotStartAreAnErrorAndTheNextCallGoesOn) {
  const double value = expected();
  std::thread([&] {
    {
      const NoThreads none;
      for (int i = 0; i < 2; ++i) EXPECT_THROW(step(), IoError);
      EXPECT_THROW(distributed::failing_ranks("none begins", 2, [](int) {}), IoError);
      const Numbers numbers;
      const auto read = [&] {
        for (auto& batch : data::DataLoader(numbers, {.batch_size = 2, .workers = 2})) (void)batch;
      };
      EXPECT_THROW(read(), IoError);
    }
    EXPECT_EQ(step(), value);
  }).join();
}

// ---- fork() ------------------------------------------------------------------------------------

// The code of a child that runs f.
template <class F>
int code_of_child(F&& f) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    int code = 1;
    try {
      code = f() ? 0 : 2;
    } catch (...) {
    }
    ::_exit(code);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST(Fork, TheChildHasThreadsOfItsOwn) {
  const double value = step();
  EXPECT_EQ(code_of_child([&] { return step() == value; }), 0);
  EXPECT_EQ(step(), value);
}

TEST(Fork, AnotherThreadsAllocationsDoNotHoldTheChild) {
  std::atomic<bool> stop = false;
  std::thread other([&] {
    while (!stop) (void)zeros({1000});
  });
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(code_of_child([] { return zeros({1000}).numel() == 1000; }), 0);
  }
  stop = true;
  other.join();
}

TEST(Fork, ALoopOverALoaderThatBeganInTheParentIsRefusedInTheChild) {
  const Numbers numbers;
  data::DataLoader loader(numbers, {.batch_size = 2, .workers = 2});
  auto batch = loader.begin();
  EXPECT_EQ(
      code_of_child([&] {
        const std::string message = message_of([&] { ++batch; });
        int64_t count = 0;
        for (auto& own : loader) count += own.numel();  // one of the child's own
        return message.find("DataLoader: its workers are of the process that called fork()") !=
                   message.npos &&
               count == 8;
      }),
      0);
}

// ---- Locale ------------------------------------------------------------------------------------

struct Comma : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

TEST(Locale, NumbersAreWrittenAndReadWithoutIt) {
  const std::locale before = std::locale::global(std::locale(std::locale::classic(), new Comma));
  std::ostringstream comma;
  comma << 12345.5;
  EXPECT_EQ(comma.str(), "12.345,5");  // the locale is there
  std::ostringstream out;
  out << tensor({0.5, 0.25});
  EXPECT_EQ(out.str(), "tensor([0.5000, 0.2500])");
  EXPECT_EQ(zeros({12345}).describe(), "f32[12345] cpu");
  EXPECT_NE(message_of([] { zeros({12345}).view(7); }).find("12345"), std::string::npos);
  EXPECT_EQ(to_text(TrackedValue(0.001).plain()), "0.001");
  const auto config = accelerate::parse_deepspeed_config(R"({"gradient_clipping": 0.25})", "file");
  ASSERT_EQ(config.says.size(), 1u);
  EXPECT_EQ(config.says[0].text, "0.25");
  std::locale::global(before);
}

}  // namespace
}  // namespace tessera::test_embedded
