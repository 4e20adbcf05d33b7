// An application around the library: X11's and C's macros before its header, threads with small
// stacks, a locale with a decimal comma, fork(), work after main. Its argument is a folder.
#include <complex.h>
#if __has_include(<X11/Xlib.h>)
#include <X11/Xlib.h>
#else  // the worst of it
#define None 0L
#define Bool int
#define Status int
#define Success 0
#define True 1
#define False 0
#define Always 2
#define Complex 0
#endif
#include <limits.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <clocale>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <locale>
#include <sstream>

#include <tessera.h>

using namespace tessera;

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "application: not so: %s\n", what);
  std::_Exit(1);
}

double step() {
  set_num_threads(2);
  manual_seed(1);
  nn::Linear model(64, 64);
  Tensor x = model(randn({256, 64})).sort().values;
  x.sum().backward();
  return x.sum().item() + model.weight.grad().sum().item();
}

double expected = 0;

// After main: products of f32 are rounded by another engine then.
bool still_computes() { return std::abs(step() - expected) < 0.1; }
struct AtExit {
  ~AtExit() { require(still_computes(), "a static object computes in its destructor"); }
};

void small_threads() {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  require(pthread_attr_setstacksize(&attributes, 64 << 10) == 0, "64 KiB are a stack");
  pthread_t thread;
  const auto body = [](void*) -> void* {
    if (tensor({1, 2}).sum().item() == 3) return &expected;
    return nullptr;
  };
  require(pthread_create(&thread, &attributes, body, nullptr) == 0,
          "threads with stacks of 64 KiB start beside the library");
  void* result = nullptr;
  pthread_join(thread, &result);
  require(result != nullptr, "and compute");
}

void decimal_comma(const std::string& folder) {
  const char* const named = std::setlocale(LC_ALL, "de_DE.UTF-8");
  if (named == nullptr) {
    std::puts("application: there is no locale de_DE.UTF-8: that part was left out");
    return;
  }
  std::locale::global(std::locale("de_DE.UTF-8"));
  char comma[32];
  std::snprintf(comma, sizeof comma, "%.1f", 0.5);
  require(std::strcmp(comma, "0,5") == 0, "the locale has a decimal comma");
  std::ostringstream out;
  out << tensor({0.5, 1e-9});
  require(out.str() == "tensor([5.0000e-01, 1.0000e-09])", "tensors print 0.5");
  {
    const auto tracker = make_csv_tracker();
    tracker->start({.folder = folder});
    tracker->store_configuration({{"lr", 0.001}});
    tracker->log({{"loss", 0.5}}, 12345);
    tracker->finish();
  }
  for (const char* name : {"/metrics.csv", "/configuration.csv"}) {
    std::ifstream file(folder + name);
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const bool metrics = name[1] == 'm';
    require(text.find(metrics ? "12345," : "lr,0.001") != text.npos, text.c_str());
    require(!metrics || text.find(",0.5") != text.npos, text.c_str());
    // A decimal comma would be a column more, or in quotation marks.
    std::istringstream lines(text);
    std::string header;
    std::getline(lines, header);
    for (std::string line; std::getline(lines, line);) {
      require(std::ranges::count(line, ',') == std::ranges::count(header, ','), text.c_str());
    }
    require(text.find('"') == text.npos, text.c_str());
  }
  const StateDict state = nn::Linear(2, 2).state_dict();
  save_safetensors(folder + "/model.safetensors", state.to_map());
  require(load_safetensors(folder + "/model.safetensors").size() == 2, "files of tensors");
  std::ofstream(folder + "/rows.csv") << "x\r0.5\r1.5\r";
  const data::CsvTable rows = data::read_csv(folder + "/rows.csv");
  require(rows.num_rows() == 2 && rows.number(1, "x") == 1.5, "a CSV whose lines end with CR");
  std::setlocale(LC_ALL, "C");
  std::locale::global(std::locale::classic());
}

void forked() {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(step() == expected ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  require(status == 0, "a child computes after fork()");
}

}  // namespace

int main(int, char** arguments) {
  expected = 0;
  std::atexit([] { require(still_computes(), "a function of atexit() computes"); });
  static const AtExit object;
  expected = step();
  small_threads();
  decimal_comma(arguments[1]);
  forked();
  for (const Tensor& row : tensor({1, 2, 3, 4}, {2, 2}) % 3) std::cout << row << '\n';
  std::cout << tensor({1, 2})[{NoneType(), 0}] << std::endl;
  return 0;
}
