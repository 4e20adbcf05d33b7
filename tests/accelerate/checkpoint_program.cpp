// A rank that trains, saves after every second update and, in its second save, is killed at the
// stage that it is told: test_checkpoint_kill looks at what it leaves.
//
//     checkpoint_program FOLDER STAGE RANK synchronous|asynchronous replicas|parts
#include <atomic>
#include <csignal>
#include <cstdlib>

#include <unistd.h>

#include <tessera/accelerate/process/run.h>
#include <tessera/accelerate/state/state_io.h>
#include <tessera/distributed/checkpoint/commit.h>
#include <tessera/distributed/transport/process_group.h>

#include "accelerate/checkpoint_training.h"

int main(int argc, char** argv) {
  using namespace tessera;
  return run(argc, argv, [](std::span<const std::string> arguments) {
    distributed::ProcessGroup processes;
    manual_seed(1);
    CheckpointTraining training(2, arguments[4] == "parts");
    accelerate::StateIoOptions options;
    options.project_dir = arguments[0];
    options.automatic_naming = true;
    options.asynchronous = arguments[3] == "asynchronous";
    const auto fatal = static_cast<distributed::SaveStage>(std::stoi(arguments[1]));
    const bool here = std::stoi(arguments[2]) == distributed::rank();
    std::atomic<int> saves{0};
    options.at_stage = [&](distributed::SaveStage stage) {
      if (stage == distributed::SaveStage::kBegun) ++saves;
      if (here && stage == fatal && saves == 2) ::kill(::getpid(), SIGKILL);
    };
    accelerate::StateIo io(options);
    for (int update = 2; update <= 8; update += 2) {
      training.train(update);
      io.save_state(training.state());
    }
    io.wait();
    processes.shutdown();
  });
}
