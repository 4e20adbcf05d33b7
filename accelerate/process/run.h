// The frame of a training program:
//
//     int main(int argc, char** argv) {
//       return tessera::run(argc, argv, [](std::span<const std::string> arguments) { ... });
//     }
//
// Flags of `tessera launch` that only an Accelerator reads (--mixed-precision) are an error at the
// end of a body that made none: a training in another precision than asked for does not end with 0.
//
// It detects the launcher, sets this rank's number of threads, joins the job where `tessera launch`
// started it, and tells the job when the body throws: the launcher then prints the error as the
// first cause and the other ranks raise DistributedError within 2 s. Without it a throwing rank is
// noticed when its process ends, and its message stands in its output alone.
#pragma once

#include <functional>
#include <span>
#include <string>

namespace tessera {

// What SIGTERM and SIGUSR1 asked for since run() began; a training loop looks once a step.
enum class RunRequest {
  kNone,
  kCheckpoint,         // SIGUSR1: save and go on
  kCheckpointAndStop,  // SIGTERM: save and return
};
RunRequest requested();
// A kCheckpoint that was served; kCheckpointAndStop stays.
void clear_request();

// Runs the body with the words after the program's name. Returns 0, or 1 after an exception, whose
// text goes to stderr and, under `tessera launch`, to the job.
int run(int argc, char** argv, const std::function<void(std::span<const std::string>)>& body);

}  // namespace tessera
