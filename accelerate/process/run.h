// The main function of a training program:
//
//     int main(int argc, char** argv) {
//       return tessera::run(argc, argv, [](std::span<const std::string> arguments) { ... });
//     }
//
// Flags of `tessera launch` that only an Accelerator reads (--mixed-precision) are an error at the
// end of a body that made none, so that a training in the wrong precision does not end with 0.
//
// It detects the launcher, sets this rank's number of threads, joins the job if `tessera launch`
// started it, and reports an exception of the body to the job: the launcher then prints the error
// as the first cause and the other ranks raise DistributedError within 2 s. Without it a throwing
// rank is noticed when its process ends, and its message is only in its own output.
#pragma once

#include <functional>
#include <span>
#include <string>

namespace tessera {

// The requests of SIGTERM and SIGUSR1 since run() began; a training loop checks once a step.
enum class RunRequest {
  kNone,
  kCheckpoint,         // SIGUSR1: save and continue
  kCheckpointAndStop,  // SIGTERM: save and return
};
RunRequest requested();
// Clears a served kCheckpoint; kCheckpointAndStop stays.
void clear_request();

// Runs the body with the program's arguments. Returns 0, or 1 after an exception, whose text goes
// to stderr and, under `tessera launch`, to the job.
int run(int argc, char** argv, const std::function<void(std::span<const std::string>)>& body);

}  // namespace tessera
