// Saves a checkpoint: all ranks write, then the folder appears under its name, whole or not at all.
//
//     CheckpointSaver saver;                              // on every rank
//     saver.save("runs/1/step-12", items, {.metadata = {{"step", "12"}}});
//
// [Note: commit] Rank 0 makes NAME.tmp-PID-N beside the folder. Every rank writes its chunk files
// and its record there and forces them to the disk. All ranks exchange their errors: if one has
// failed, none commits, the temporary folder is removed and every rank throws the same error, which
// names the rank and keeps the type (IoError for a full disk). Otherwise rank 0 checks the records
// against each other and the files, writes the manifest, forces it and the folder to the disk,
// renames the folder to its name and forces the parent. After a last exchange save() returns, and
// any rank may load. If a process ends at any point, the name leads to the previous checkpoint or
// to the new one; the next save to the same name removes a leftover temporary folder.
//
// All ranks must see one file system. A folder that is replaced is exchanged with the new one in
// one step (renameat2); if a file system cannot do that, it is renamed just before.
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

// The stages of a save, for tests that end a process there.
enum class SaveStage : uint8_t {
  kBegun,            // nothing was done yet
  kFolderMade,       // the temporary folder exists
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
  // Whether an existing checkpoint of the name is replaced. False: ConfigError before anything is
  // written. Anything that is not a checkpoint is never replaced.
  bool replace = true;
  // save() returns when this rank's data is copied; a thread writes and commits. Needs the ranks'
  // store (processes under `tessera launch` or mpirun, and rank threads have one).
  bool asynchronous = false;
  int64_t chunk_bytes = kChunkBytes;
  int64_t file_bytes = kFileBytes;
  double timeout_seconds = 0;  // of waits for other ranks; 0: the context's of saves
  std::function<void(SaveStage)> at_stage = {};
  // Called on rank 0 after the commit, for rotation. Every rank throws its error.
  std::function<void()> after_commit = {};
};

class CheckpointSaver {
 public:
  // The group must outlive it.
  explicit CheckpointSaver(Group& group = world());
  // Waits for a running save and ignores its error. While an exception passes the save is
  // abandoned.
  ~CheckpointSaver();
  CheckpointSaver(const CheckpointSaver&) = delete;
  CheckpointSaver& operator=(const CheckpointSaver&) = delete;

  // Collective. First waits for a running save and throws its error. Creates parent folders. Throws
  // the error of this or any other rank: IoError, ConfigError, ValueError (see plan_chunks),
  // DistributedError if ranks save different lists of tensors.
  void save(const std::string& folder, std::span<const SaveItem> items,
            const SaveOptions& options = {});
  // `collect` is called with the temporary folder: other files that any rank puts there become part
  // of the checkpoint, with checksums. It may add to the metadata (rank 0's is used).
  using Collect = std::function<std::vector<SaveItem>(
      const std::string& temporary, std::map<std::string, std::string>& metadata)>;
  void save(const std::string& folder, const Collect& collect, const SaveOptions& options = {});

  // Waits until the running save is committed or has failed; then throws its error, once.
  void wait();
  bool is_saving() const;  // not yet committed

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Throws on every rank if any rank passes an error: the class and text of the first, with its rank,
// after `what`. Collective; one small exchange.
void throw_together(std::exception_ptr own, const std::string& what, Group& group = world(),
                    double timeout_seconds = 0);

// Removes leftovers of interrupted saves under `parent`: NAME.tmp-*, for names that `is_own`
// accepts. Errors are ignored, since it only tidies up.
void remove_leftovers(const std::string& parent,
                      const std::function<bool(const std::string& name)>& is_own);
// Renames, then removes: a crash leaves nothing under the name. IoError.
void remove_checkpoint(const std::string& folder);

}  // namespace tessera::distributed
