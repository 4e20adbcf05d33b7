// A folder for a job's shared memory, which the launcher removes.
//
// Open MPI's segments stay in /dev/shm if mpirun or a rank is killed and cannot clean up, and take
// memory from later jobs. In a separate folder they are removed when the launcher ends, and if the
// launcher was killed itself by the next one.
#pragma once

#include <string>

#include <tessera/distributed/rendezvous/socket.h>

namespace tessera::launch {

class SegmentFolder {
 public:
  // Below `parent`; empty: none. If no folder can be made, MPI uses its own place, so this is not
  // an error.
  explicit SegmentFolder(const std::string& parent);
  ~SegmentFolder();
  SegmentFolder(const SegmentFolder&) = delete;
  SegmentFolder& operator=(const SegmentFolder&) = delete;

  const std::string& path() const { return path_; }  // empty: there is none

 private:
  std::string path_;
  distributed::FileDescriptor lock_;  // held for as long as the folder is in use
};

// Removes folders of launchers that no longer run.
void remove_left_segments(const std::string& parent);

}  // namespace tessera::launch
