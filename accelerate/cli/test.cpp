// tessera test: does training on several ranks work on this machine? It starts itself under
// `tessera launch`, checks what ranks can check of one another, and then that a rank which hangs or
// is killed is noticed.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>

#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <tessera/accelerate/cli/commands.h>
#include <tessera/accelerate/launch/command.h>
#include <tessera/accelerate/launch/process.h>
#include <tessera/accelerate/process/run.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/parallel.h>
#include <tessera/core/random.h>
#include <tessera/data/distributed_source.h>
#include <tessera/distributed/data_parallel/replicate.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/distributed/mesh/parallel_dims.h>
#include <tessera/distributed/tensor_parallel/parallelize.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/distributed/transport/process_group.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/optim/optimizers.h>

namespace tessera::cli {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// ---- What the ranks check

// What is wrong; empty: nothing.
using Check = std::function<std::string()>;

float sample(int rank, int64_t i) {
  return std::sin(0.37F * static_cast<float>(i)) * static_cast<float>(1 + rank) + 0.1F;
}

Tensor of_rank(int rank, int64_t size) {
  std::vector<float> values(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) values[static_cast<size_t>(i)] = sample(rank, i);
  return tensor(std::span<const float>(values), {size});
}

std::string compare(const std::vector<float>& got, const std::vector<float>& expected) {
  if (got.size() != expected.size()) return "has " + std::to_string(got.size()) + " elements";
  for (size_t i = 0; i < got.size(); ++i) {
    if (got[i] != expected[i]) {
      return "element " + std::to_string(i) + " is " + std::to_string(got[i]) + ", not " +
             std::to_string(expected[i]);
    }
  }
  return "";
}

std::string ranks_agree(distributed::Group& world) {
  const distributed::LaunchInfo info = distributed::detect();
  if (info.rank != world.rank() || info.world_size != world.size()) {
    return "the launcher says rank " + std::to_string(info.rank) + " of " +
           std::to_string(info.world_size);
  }
  const auto everyone = distributed::all_gather_objects(world, world.rank());
  for (int rank = 0; rank < world.size(); ++rank) {
    if (everyone[static_cast<size_t>(rank)] != rank) return "ranks are out of order";
  }
  return "";
}

// The sum in rank order, to the bit, for small and large tensors, again and again.
std::string all_reduce_is_exact(distributed::Group& world) {
  for (const int64_t size : {1, 1000, 100003}) {
    std::vector<float> expected = of_rank(0, size).to_vector<float>();
    for (int rank = 1; rank < world.size(); ++rank) {
      for (int64_t i = 0; i < size; ++i) expected[static_cast<size_t>(i)] += sample(rank, i);
    }
    for (int repeat = 0; repeat < 3; ++repeat) {
      const Tensor x = of_rank(world.rank(), size);
      distributed::all_reduce(x, distributed::ReduceOp::kSum, world);
      const std::string problem = compare(x.to_vector<float>(), expected);
      if (!problem.empty()) return "all_reduce of " + std::to_string(size) + ": " + problem;
    }
  }
  return "";
}

// Contributions in bf16 are added up in f32 and rounded once.
std::string bf16_adds_in_f32(distributed::Group& world) {
  const Tensor x = of_rank(world.rank(), 1000).to(kBF16);
  distributed::all_reduce(x, distributed::ReduceOp::kSum, world);
  std::vector<float> sum = of_rank(0, 1000).to(kBF16).to_vector<float>();
  for (int rank = 1; rank < world.size(); ++rank) {
    const auto other = of_rank(rank, 1000).to(kBF16).to_vector<float>();
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += other[i];
  }
  const Tensor expected = tensor(std::span<const float>(sum), {1000}).to(kBF16);
  return compare(x.to_vector<float>(), expected.to_vector<float>());
}

std::string parts_travel(distributed::Group& world) {
  const int n = world.size();
  const int last = n - 1;
  Tensor x = of_rank(world.rank(), 17);
  distributed::broadcast(x, last, world);
  std::string problem = compare(x.to_vector<float>(), of_rank(last, 17).to_vector<float>());
  if (!problem.empty()) return "broadcast: " + problem;

  std::vector<float> all;
  for (int rank = 0; rank < n; ++rank) {
    for (const float value : of_rank(rank, 5).to_vector<float>()) all.push_back(value);
  }
  const Tensor gathered = distributed::all_gather(of_rank(world.rank(), 5), world);
  problem = compare(gathered.to_vector<float>(), all);
  if (!problem.empty()) return "all_gather: " + problem;

  // Rank r's rows of the sum.
  const Tensor rows =
      distributed::reduce_scatter(of_rank(world.rank(), 4 * n), distributed::ReduceOp::kSum, world);
  std::vector<float> sum(4);
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t at = 4 * world.rank() + i;
    float value = sample(0, at);
    for (int rank = 1; rank < n; ++rank) value += sample(rank, at);
    sum[static_cast<size_t>(i)] = value;
  }
  problem = compare(rows.to_vector<float>(), sum);
  if (!problem.empty()) return "reduce_scatter: " + problem;

  std::vector<Tensor> sends, receives;
  for (int rank = 0; rank < n; ++rank) {
    sends.push_back(full({3}, 100 * world.rank() + rank, {.dtype = kF32}));
    receives.push_back(zeros({3}, {.dtype = kF32}));
  }
  world.all_to_all(receives, sends).wait();
  for (int rank = 0; rank < n; ++rank) {
    const auto value = static_cast<float>(100 * rank + world.rank());
    problem =
        compare(receives[static_cast<size_t>(rank)].to_vector<float>(), {value, value, value});
    if (!problem.empty()) return "all_to_all: " + problem;
  }
  return "";
}

std::string objects_travel(distributed::Group& world) {
  const nlohmann::json object = {
      {"rank", world.rank()}, {"list", {1, 2.5, "text"}}, {"none", nullptr}};
  const auto all = distributed::all_gather_objects(world, object);
  for (int rank = 0; rank < world.size(); ++rank) {
    nlohmann::json expected = object;
    expected["rank"] = rank;
    if (all[static_cast<size_t>(rank)] != expected) return "an object arrived changed";
  }
  return "";
}

std::string random_numbers(distributed::Group& world) {
  manual_seed(42);
  const Tensor drawn = randn({64});
  const std::vector<float> own = drawn.to_vector<float>();
  const Tensor first = drawn.clone();
  distributed::broadcast(first, 0, world);
  std::string problem = compare(own, first.to_vector<float>());
  if (!problem.empty()) return "one seed, but not one sequence: " + problem;
  manual_seed(42 + 1000003ULL * static_cast<uint64_t>(world.rank() + 1));
  const Tensor all = distributed::all_gather(randn({8}), world);
  const std::vector<float> values = all.to_vector<float>();
  for (size_t rank = 1; rank < values.size() / 8; ++rank) {
    if (std::equal(values.begin(), values.begin() + 8,
                   values.begin() + static_cast<std::ptrdiff_t>(8 * rank))) {
      return "two seeds gave one sequence";
    }
  }
  return "";
}

// y = 2 x + 3 with noise: 64 samples for each rank.
struct Regression {
  std::vector<float> x, y;
  explicit Regression(int64_t size) {
    manual_seed(7);
    x = randn({size}).to_vector<float>();
    const std::vector<float> noise = randn({size}).to_vector<float>();
    for (size_t i = 0; i < x.size(); ++i) y.push_back(2 * x[i] + 3 + 0.1F * noise[i]);
  }
  Tensor column(const std::vector<float>& of, std::span<const int64_t> indices) const {
    std::vector<float> values;
    for (const int64_t i : indices) values.push_back(of[static_cast<size_t>(i)]);
    return tensor(std::span<const float>(values), {static_cast<int64_t>(values.size()), 1});
  }
};

struct Line {
  float slope, offset;
};

// Three epochs of SGD over batches of indices.
Line train(const Regression& data, const data::IndexSource& source, distributed::Mesh* mesh) {
  nn::Linear model(1, 1);
  {
    const NoGradGuard no_grad;
    for (const Tensor& parameter : model.parameters()) parameter.fill_(0);
  }
  std::optional<distributed::Replica> replica;
  if (mesh != nullptr) replica.emplace(distributed::replicate(model, *mesh));
  optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    for (int64_t position = 0; source.batches_after(position) > 0;
         position = source.position_after(position, 1)) {
      const std::vector<int64_t> indices = source.batch(epoch, position);
      mse_loss(model(data.column(data.x, indices)), data.column(data.y, indices)).backward();
      optimizer.step();
      optimizer.zero_grad();
    }
  }
  return {model.weight.to_vector<float>()[0], model.bias.to_vector<float>()[0]};
}

// N ranks with batches of 8 end where one process with batches of 8 N ends; `deal` says who has
// which samples of the large batch.
std::string parity(distributed::Group& world, data::Deal deal) {
  constexpr int64_t kBatch = 8;
  const int64_t size = 8 * kBatch * world.size();
  const Regression data(size);
  const auto sampler = std::make_shared<data::RandomSampler>(size, 11);
  const data::DistributedBatchSource share(
      sampler, kBatch, {.rank = world.rank(), .world_size = world.size(), .deal = deal});
  const data::DistributedBatchSource whole(sampler, kBatch * world.size(), {});
  distributed::Mesh mesh(world);
  const Line together = train(data, share, &mesh);
  const Line alone = train(data, whole, nullptr);
  const auto differs = [](float a, float b) { return std::abs(a - b) > 1e-6F * (1 + std::abs(b)); };
  if (differs(together.slope, alone.slope) || differs(together.offset, alone.offset)) {
    return "y = " + std::to_string(together.slope) + " x + " + std::to_string(together.offset) +
           "; one process has " + std::to_string(alone.slope) + " x + " +
           std::to_string(alone.offset);
  }
  if (std::abs(together.slope - 2) > 0.3F || std::abs(together.offset - 3) > 0.3F) {
    return "nothing was learned: y = " + std::to_string(together.slope) + " x + " +
           std::to_string(together.offset);
  }
  const Tensor own = tensor({together.slope, together.offset});
  const Tensor first = own.clone();
  distributed::broadcast(first, 0, world);
  return compare(own.to_vector<float>(), first.to_vector<float>());
}

// A small GPT whose layers `tp` ranks share learns what a whole one learns.
std::string shared_layers(distributed::Group& world, int tp) {
  constexpr int kSteps = 3;
  constexpr double kTolerance = 1e-9;
  distributed::ParallelDims dims(world, {.dp_shard = -1, .tp = tp});
  const auto losses = [&](bool divided) {
    manual_seed(5);
    nn::models::Gpt model(
        {.vocab_size = 61, .context = 4L * tp, .width = 8L * tp, .layers = 2, .heads = tp});
    model.to(kF64);
    if (divided) {
      distributed::parallelize_module(model, dims.mesh()["tp"], {.sequence = true});
    }
    optim::SGD optimizer(model.named_parameters(), {.lr = 0.3});
    std::vector<double> values;
    for (int step = 0; step < kSteps; ++step) {
      const Tensor tokens = randint(0, 61, {2, 4L * tp}, kI64, RandomStream{7, 0});
      const Tensor loss = model(tokens, tokens).loss;
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      values.push_back(loss.item());
    }
    return values;
  };
  const std::vector<double> alone = losses(false), together = losses(true);
  for (size_t step = 0; step < alone.size(); ++step) {
    if (std::abs(alone[step] - together[step]) > kTolerance * alone[step]) {
      return "loss " + std::to_string(together[step]) + " in step " + std::to_string(step) +
             "; one process has " + std::to_string(alone[step]);
    }
  }
  return alone.back() < alone.front() ? "" : "nothing was learned";
}

void print_row(const std::string& name, double seconds, const std::string& problem) {
  std::printf("%-44s %-6s %8.3f s  %s\n", name.c_str(), problem.empty() ? "pass" : "FAIL", seconds,
              problem.c_str());
  std::fflush(stdout);
}

// One rank's program. Rank 0 prints the table; a check fails where it fails on any rank.
void check_ranks(int tp_size) {
  distributed::ProcessGroup processes;
  distributed::Group& world = distributed::world();
  set_num_threads(1);
  std::vector<std::pair<std::string, Check>> checks = {
      {"ranks know each other", [&] { return ranks_agree(world); }},
      {"all_reduce: the sum in rank order, to the bit", [&] { return all_reduce_is_exact(world); }},
      {"all_reduce: bf16 is added up in f32", [&] { return bf16_adds_in_f32(world); }},
      {"broadcast, gather, scatter, all_to_all", [&] { return parts_travel(world); }},
      {"objects", [&] { return objects_travel(world); }},
      {"random numbers of equal and unequal seeds", [&] { return random_numbers(world); }},
      {"training as one process: batches dealt",
       [&] { return parity(world, data::Deal::kBatches); }},
      {"training as one process: batches split",
       [&] { return parity(world, data::Deal::kSamples); }},
  };
  if (tp_size > 1) {
    checks.emplace_back("training as one process: layers on " + std::to_string(tp_size) + " ranks",
                        [&] { return shared_layers(world, tp_size); });
  }
  int failed = 0;
  for (const auto& [name, check] : checks) {
    const auto begin = Clock::now();
    std::string problem;
    try {
      problem = check();
    } catch (const DistributedError&) {
      throw;  // the group is broken
    } catch (const std::exception& error) {
      problem = error.what();
    }
    const double seconds = seconds_since(begin);
    const auto problems = distributed::all_gather_objects(world, problem);
    for (size_t rank = problems.size(); rank-- > 0;) {
      const auto text = problems[rank].get<std::string>();
      if (!text.empty()) problem = "rank " + std::to_string(rank) + ": " + text;
    }
    failed += problem.empty() ? 0 : 1;
    if (world.rank() == 0) print_row(name, seconds, problem);
  }
  const Tensor large = full({1 << 20}, 1, {.dtype = kF32});
  distributed::all_reduce(large, distributed::ReduceOp::kSum, world);
  const auto begin = Clock::now();
  distributed::all_reduce(large, distributed::ReduceOp::kSum, world);
  if (world.rank() == 0) {
    std::printf("all_reduce of 4 MiB: %.2f ms\n", 1e3 * seconds_since(begin));
    std::fflush(stdout);
  }
  processes.shutdown();
  TS_CHECK_AS(DistributedError, failed == 0, "tessera test", failed, " checks failed");
}

// A rank that the others wait for in vain.
void fail_on_purpose(const std::string& how) {
  distributed::ProcessGroup processes;
  distributed::barrier();
  if (distributed::rank() == distributed::world_size() - 1) {
    if (how == "killed") ::kill(::getpid(), SIGKILL);
    while (true) std::this_thread::sleep_for(std::chrono::seconds(1));
  }
  distributed::barrier();
}

// ---- What starts them

struct Ended {
  int code = 0;
  double seconds = 0;
  std::string output, error;
};

std::string executable() {
  return launch::this_machine(distributed::process_environment()).executable;
}

Ended run_ranks_of(int ranks, const std::vector<std::string>& flags, const std::string& part,
                   bool show, int tp_size = 1) {
  std::vector<std::string> command = {executable(), "launch", "-n", std::to_string(ranks),
                                      "--no-prefix"};
  command.insert(command.end(), flags.begin(), flags.end());
  command.insert(command.end(),
                 {executable(), "test", "--as-rank", part, "--tp-size", std::to_string(tp_size)});
  // Settings of the user are not what is tested.
  launch::Environment environment = distributed::process_environment();
  std::erase_if(environment, [](const auto& entry) {
    return entry.first.starts_with("TESSERA_") && entry.first != "TESSERA_ISA";
  });
  environment["XDG_CONFIG_HOME"] = "/nonexistent";
  const auto begin = Clock::now();
  launch::Child child = launch::spawn(
      {.command = command, .environment = environment, .capture = true, .death_signal = SIGTERM});
  Ended ended;
  const auto drain = [](launch::FileDescriptor& source, std::string& text, FILE* target) {
    char buffer[4096];
    const ssize_t size = ::read(source.get(), buffer, sizeof buffer);
    if (size <= 0) {
      if (size == 0 || (errno != EAGAIN && errno != EINTR)) source.reset();
      return;
    }
    text.append(buffer, static_cast<size_t>(size));
    if (target == nullptr) return;
    std::fwrite(buffer, 1, static_cast<size_t>(size), target);
    std::fflush(target);
  };
  while (child.output || child.error) {
    pollfd sources[2] = {{child.output.get(), POLLIN, 0}, {child.error.get(), POLLIN, 0}};
    ::poll(sources, 2, -1);
    if (child.output && sources[0].revents != 0)
      drain(child.output, ended.output, show ? stdout : nullptr);
    if (child.error && sources[1].revents != 0)
      drain(child.error, ended.error, show ? stderr : nullptr);
  }
  int status = 0;
  while (::waitpid(child.pid, &status, 0) < 0 && errno == EINTR) {
  }
  ended.code = launch::ExitStatus::from_wait(status).shell_code();
  ended.seconds = seconds_since(begin);
  return ended;
}

int test(int ranks, int tp_size) {
  TS_CHECK_AS(UsageError, ranks % tp_size == 0, "tessera test", "--tp-size ", tp_size,
              " does not divide the ", ranks, " ranks; give -n a multiple of it");
  std::printf("%d rank%s\n%-44s %-6s %8s\n", ranks, ranks == 1 ? "" : "s", "check", "", "time");
  const Ended checks = run_ranks_of(ranks, {}, "checks", true, tp_size);
  bool passed = checks.code == 0;
  print_row("all ranks end well", checks.seconds,
            passed ? "" : "the job's code is " + std::to_string(checks.code));
  if (ranks > 1 && passed) {
    const auto expect = [&](const std::string& name, const Ended& ended, bool noticed) {
      print_row(name, ended.seconds,
                noticed ? "" : "code " + std::to_string(ended.code) + ": " + ended.error);
      passed = passed && noticed;
    };
    const Ended hung =
        run_ranks_of(ranks, {"--collective-timeout", "1.5", "--grace", "0.5"}, "hung", false);
    expect("a rank that hangs: the timeout names it", hung,
           hung.code != 0 && hung.error.find("waited") != std::string::npos);
    const Ended killed = run_ranks_of(ranks, {"--grace", "2"}, "killed", false);
    expect("a rank that is killed: 128 + its signal", killed, killed.code == 128 + SIGKILL);
  }
  std::printf("%s\n", passed ? "all passed" : "FAILED");
  return passed ? 0 : 1;
}

int as_rank(const std::string& part, int tp_size) {
  char name[] = "tessera test";
  char* arguments[] = {name, nullptr};
  return run(1, arguments, [&](std::span<const std::string>) {
    if (part == "checks") {
      check_ranks(tp_size);
    } else {
      fail_on_purpose(part);
    }
  });
}

}  // namespace

void add_test(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand(
      "test", "starts ranks on this machine and checks that training on several works");
  const auto ranks = std::make_shared<int>(2);
  const auto part = std::make_shared<std::string>();
  command->add_option("-n,--ranks,--num-processes", *ranks, "number of ranks")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  const auto tp_size = std::make_shared<int>(1);
  command
      ->add_option("--tp-size,--tp_size", *tp_size,
                   "also checks a model whose layers so many ranks share")
      ->capture_default_str()
      ->check(CLI::Range(1, 1024));
  command->add_option("--as-rank", *part)->group("");  // what it starts itself with
  command->callback([ranks, part, tp_size, &exit_code] {
    exit_code = part->empty() ? test(*ranks, *tp_size) : as_rank(*part, *tp_size);
  });
}

}  // namespace tessera::cli
