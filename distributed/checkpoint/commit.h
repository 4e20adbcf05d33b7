// Saves a checkpoint: all ranks write, then the folder appears under its name, whole or not at all.
//
//     CheckpointSaver saver;                              // on every rank
//     saver.save("runs/1/step-12", items, {.metadata = {{"step", "12"}}});
//
// [Note: commit] Rank 0 makes NAME.tmp-PID-N beside the folder. Every rank writes its chunk files
// and its record there and forces them to the disk. All ranks exchange what went wrong: where one
// has failed, none commits, the temporary folder goes and every rank throws the same error, which
// names the rank and keeps the type (IoError for a full disk). Else rank 0 checks the records
// against each other and the files, writes the manifest, forces it and the folder to the disk,
// renames the folder to its name and forces the parent. A last exchange, and save() returns: from
// then on any rank may load. Whatever ends a process on the way, under the name stands the
// checkpoint that was there before, or the new one; a temporary folder that is left over goes with
// the next save to the same name.
//
// All ranks see one file system. A folder that is replaced is exchanged with the new one in one
// step (renameat2); where a file system cannot do that, it is renamed aside just before.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <tessera/distributed/checkpoint/writer.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

// Where a save is; for tests that end a process there.
enum class SaveStage : uint8_t {
  kBegun,            // nothing was done
  kFolderMade,       // the temporary folder is there
  kHalfWritten,      // half of this rank's bytes
  kChunksWritten,    // all of them, forced to the disk
  kRecordWritten,    // and its record
  kAgreed,           // every rank has written
  kManifestWritten,  // rank 0
  kRenamed,          // rank 0: the folder has its name
  kCommitted,        // every rank knows
};

struct SaveOptions {
  std::map<std::string, std::string> metadata = {};
  // Of a checkpoint that has the name already. False: ConfigError before anything is written.
  // Anything that is no checkpoint is never replaced.
  bool replace = true;
  // save() returns when this rank's part is copied; a thread writes and commits. Needs the ranks'
  // store (processes under `tessera launch` or mpirun, and rank threads have one).
  bool asynchronous = false;
  int64_t chunk_bytes = kChunkBytes;
  int64_t file_bytes = kFileBytes;
  double timeout_seconds = 0;  // of waits for other ranks; 0: the context's of saves
  std::function<void(SaveStage)> at_stage = {};
  // On rank 0, after the commit: rotation. What it throws every rank throws.
  std::function<void()> after_commit = {};
};

class CheckpointSaver {
 public:
  // The group must outlive it.
  explicit CheckpointSaver(Group& group = world());
  // Waits for a save under way; drops its error. While an exception passes it is given up.
  ~CheckpointSaver();
  CheckpointSaver(const CheckpointSaver&) = delete;
  CheckpointSaver& operator=(const CheckpointSaver&) = delete;

  // Collective. Waits for a save under way first, and throws what went wrong with it.
  // Parent folders are made. Throws what this or any other rank could not do: IoError, ConfigError,
  // ValueError (see plan_chunks), DistributedError where ranks save different lists of tensors.
  void save(const std::string& folder, std::span<const SaveItem> items,
            const SaveOptions& options = {});
  // `collect` is called with the temporary folder: other files that any rank puts there become
  // part of the checkpoint, with checksums. It may add to the metadata (rank 0's count).
  using Collect = std::function<std::vector<SaveItem>(
      const std::string& temporary, std::map<std::string, std::string>& metadata)>;
  void save(const std::string& folder, const Collect& collect, const SaveOptions& options = {});

  // Until the save under way is committed, or has failed: then its error, once.
  void wait();
  bool is_saving() const;  // not yet committed

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Throws on every rank what one or more have said went wrong: the class and text of the first, with
// its rank, by `what` in front. Collective; one small exchange.
void throw_together(std::exception_ptr own, const std::string& what, Group& group = world(),
                    double timeout_seconds = 0);

// Removes what saves that were interrupted have left under `parent`: NAME.tmp-*, for names that
// `is_own` says yes to. Errors are passed over: it is only tidying.
void remove_leftovers(const std::string& parent,
                      const std::function<bool(const std::string& name)>& is_own);
// Renames, then removes: a crash leaves nothing under the name. IoError.
void remove_checkpoint(const std::string& folder);

}  // namespace tessera::distributed
