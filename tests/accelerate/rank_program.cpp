// A rank that trains a small model and, in a phase that it is told, is killed, exits, throws or
// hangs (in the phase pipeline it trains by stages): test_failures starts several and looks at what the others do.
//
//     rank_program --rank R --phase P --action A [--mark FILE] [--checkpoint FILE]
//
// The failing rank writes the time (CLOCK_MONOTONIC, seconds) to FILE when it fails. A rank that
// catches a DistributedError prints "raised TIME MESSAGE" and ends with it.
#include <atomic>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <thread>

#include <time.h>
#include <unistd.h>

#include <tessera.h>
#include <tessera/accelerate/process/run.h>
#include <tessera/distributed/data_parallel/replicate.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/distributed/rendezvous/detect.h>
#include <tessera/distributed/transport/collectives.h>
#include <tessera/distributed/transport/process_group.h>

namespace {

using namespace tessera;

double now() {
  timespec time;
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void sleep_for(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

struct Fault {
  int rank = -1;
  std::string phase, action, mark;
  int own_rank = 0;

  bool is_due(const std::string& here) const { return rank == own_rank && phase == here; }

  void act() const {
    if (!mark.empty()) std::ofstream(mark) << std::fixed << now();
    if (action == "kill") ::kill(::getpid(), SIGKILL);
    if (action == "exit") std::exit(3);
    if (action == "claim") {  // a call that no other rank made
      distributed::CommRecord record;
      record.group = "world";
      record.group_size = distributed::world_size();
      distributed::world().trace().add(record);
      return;
    }
    if (action == "stop") ::kill(::getpid(), SIGSTOP);  // every thread of it
    if (action == "hang") {
      while (true) sleep_for(1);
    }
    throw ValueError("rank_program: this rank was told to throw");
  }
  void at(const std::string& here) const {
    if (is_due(here)) act();
  }
  // While the main thread waits in a phase that it cannot leave by itself.
  void soon(const std::string& here, double seconds) const {
    if (!is_due(here)) return;
    std::thread([this, seconds] {
      sleep_for(seconds);
      act();
    }).detach();
  }
};

struct Net : nn::Module<Net> {
  Net() : first(add<nn::Linear>("first", 8, 32)), last(add<nn::Linear>("last", 32, 1)) {}
  Tensor forward(const Tensor& x) { return last(gelu(first(x))); }
  nn::Linear& first;
  nn::Linear& last;
};

// A checkpoint of rank 0, which the others wait for.
void save(const nn::ModuleBase& model, int step, const std::string& path, const Fault& fault) {
  fault.at("save");
  const distributed::PhaseScope phase("save");
  if (distributed::rank() == 0 && !path.empty()) {
    save_safetensors(path, model.state_dict().to_map(), {{"step", std::to_string(step)}});
  }
  distributed::barrier();
}

// The number of steps that the checkpoint has seen; 0 where there is none.
int load(nn::ModuleBase& model, const std::string& path) {
  if (path.empty() || !std::ifstream(path).is_open()) return 0;
  model.load_state_dict(StateDict::from_map(load_safetensors(path)));
  return std::stoi(SafeTensorsFile(path).metadata().at("step"));
}

// Something of the program's that has to be let go of, whatever happens.
struct Resource {
  ~Resource() { std::printf("cleaned up\n"); }
};

void train(const Fault& fault, const std::string& checkpoint) {
  const Resource resource;
  fault.at("before-init");
  const bool late = fault.phase == "init" && fault.rank != fault.own_rank;
  fault.soon("init", 0.15);
  if (late) sleep_for(0.5);  // the failing rank waits in its start until then, or fails there
  distributed::ProcessGroup processes;

  Net model;
  distributed::Mesh mesh(distributed::world());
  distributed::Replica replica = distributed::replicate(model, mesh);
  int step = load(model, checkpoint);
  std::printf("steps from %d of %d ranks\n", step, distributed::world_size());
  std::fflush(stdout);
  optim::SGD optimizer(model.named_parameters(), {.lr = 0.01});
  register_hook(model.first.weight, [&](const Tensor& gradient) {
    if (step == 2) fault.at("backward");
    return gradient;
  });
  for (; step < 4; ++step) {
    const Tensor x = full({4, 8}, 0.1 * (1 + distributed::rank() + step));
    Tensor loss = mean(square(model(x)));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (step == 2) {
      fault.at("between");
      fault.soon("collective", 0.1);
      if (fault.phase == "collective" && fault.rank != fault.own_rank) sleep_for(0.3);
      Tensor sum = detach(loss);
      distributed::all_reduce(sum);
    }
    if (step >= 1) save(model, step + 1, checkpoint, fault);
  }
  fault.at("shutdown");
  processes.shutdown();
}

// The same by two stages, which more ranks share out among them (fsdp). The failing rank is in the
// forward of its stage's second micro-batch, or calculates what comes before it.
void train_by_stages(const Fault& fault) {
  const Resource resource;
  AcceleratorOptions settings{.gradient_accumulation_steps = 4, .cpu = true};
  settings.pp.size = 2;
  settings.sharding = Sharding::kFsdp;
  Accelerator accelerator(settings);
  Net model;
  Pipeline pipeline = accelerator.pipeline(model, {.cuts = {"last"}});
  optim::SGD optimizer(model.named_parameters(), {.lr = 0.01});
  accelerator.prepare(optimizer);
  for (int step = 0; step < 4; ++step) {
    const std::vector<int> window = {0, 1, 2, 3};
    pipeline.step(window, [&](int micro) -> Tensor {
      if (step == 2 && micro == 1) fault.at("pipeline");
      return mean(square(model(full({4, 8}, 0.1 * (1 + micro + step)))));
    });
    optimizer.step();
    optimizer.zero_grad();
  }
  accelerator.end_training();
}

}  // namespace

int main(int argc, char** argv) {
  return run(argc, argv, [](std::span<const std::string> arguments) {
    std::map<std::string, std::string> options;
    for (size_t i = 0; i + 1 < arguments.size(); i += 2) options[arguments[i]] = arguments[i + 1];
    Fault fault;
    const distributed::LaunchInfo info = distributed::detect();
    fault.own_rank = info.rank;
    const auto number = [&](const char* name, int otherwise) {
      return options.count(name) != 0 ? std::stoi(options[name]) : otherwise;
    };
    // A restarted job runs through, unless its first restarts shall fail too.
    if (info.restart_count <= number("--restarts-with-fault", 0)) fault.rank = number("--rank", -1);
    fault.phase = options["--phase"];
    fault.action = options["--action"];
    fault.mark = options["--mark"];
    try {
      fault.phase == "pipeline" ? train_by_stages(fault) : train(fault, options["--checkpoint"]);
      std::printf("done\n");
    } catch (const DistributedError& error) {
      std::printf("raised %.6f %s\n", now(), error.what());
      std::fflush(stdout);
      throw;
    }
  });
}
