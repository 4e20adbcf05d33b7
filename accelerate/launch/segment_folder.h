// A folder for the memory that a job's ranks share, which goes with the launcher.
//
// Open MPI's segments stay in /dev/shm where mpirun or a rank is killed and cannot clean up, and
// take its room from later jobs. In a folder of their own they are removed when the launcher ends,
// and where the launcher was killed itself by the next one.
#pragma once

#include <string>

#include <tessera/distributed/rendezvous/socket.h>

namespace tessera::launch {

class SegmentFolder {
 public:
  // Below `parent`; empty: none. Without one MPI's own place is as good, so that it is no error
  // where none can be made.
  explicit SegmentFolder(const std::string& parent);
  ~SegmentFolder();
  SegmentFolder(const SegmentFolder&) = delete;
  SegmentFolder& operator=(const SegmentFolder&) = delete;

  const std::string& path() const { return path_; }  // empty: there is none

 private:
  std::string path_;
  distributed::FileDescriptor lock_;  // held for as long as the folder is in use
};

// Removes folders of launchers that are no more.
void remove_left_segments(const std::string& parent);

}  // namespace tessera::launch
