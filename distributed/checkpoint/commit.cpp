#include <tessera/distributed/checkpoint/commit.h>

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <exception>
#include <filesystem>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <system_error>

#include <tessera/core/io/atomic_file.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/core/thread.h>
#include <tessera/distributed/checkpoint/checksum.h>
#include <tessera/distributed/checkpoint/reader.h>
#include <tessera/distributed/rendezvous/store.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::distributed {
namespace {

namespace fs = std::filesystem;

constexpr const char* kCheckpointCommit = "checkpoint";

[[noreturn]] void fail(std::string_view what, const std::string& path, int error,
                       std::string_view remedy) {
  throw IoError(detail::concatenate(kCheckpointCommit, ": cannot ", what, " '", path, "': ",
                                    std::generic_category().message(error), "; ", remedy, "."));
}

// ---- Errors that travel ------------------------------------------------------------------------

// A class of the library's errors, by a letter.
struct ErrorKind {
  char letter;
  bool (*is)(const std::exception&);
  void (*raise)(const std::string&);
};
template <class E>
constexpr ErrorKind kind(char letter) {
  return {letter, [](const std::exception& e) { return dynamic_cast<const E*>(&e) != nullptr; },
          [](const std::string& text) { throw E(text); }};
}
constexpr ErrorKind kKinds[] = {
    kind<IoError>('i'),          kind<FormatError>('f'), kind<ConfigError>('c'),
    kind<ValueError>('v'),       kind<ShapeError>('s'),  kind<DTypeError>('t'),
    kind<DeviceError>('d'),      kind<OutOfMemory>('m'), kind<UnsupportedError>('u'),
    kind<DistributedError>('r'), kind<Error>('e'),
};

// Empty where nothing went wrong; else the kind's letter and the text.
std::string encode(std::exception_ptr error) {
  if (!error) return "";
  try {
    std::rethrow_exception(error);
  } catch (const std::bad_alloc&) {
    return "mno memory is left; save less at once";
  } catch (const std::exception& e) {
    for (const ErrorKind& known : kKinds) {
      if (known.is(e)) return known.letter + std::string(e.what());
    }
    return "e" + std::string(e.what());
  } catch (...) {
    return "ean exception that is no std::exception";
  }
}

void throw_first(const std::vector<std::string>& errors, const std::string& what) {
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    if (errors[rank].empty()) continue;
    std::string text = what + ": ";
    if (errors.size() > 1) text += "rank " + std::to_string(rank) + ": ";
    // Most name the operation themselves.
    const std::string_view own = std::string_view(errors[rank]).substr(1);
    text += own.starts_with(what + ": ") ? own.substr(what.size() + 2) : own;
    for (const ErrorKind& known : kKinds) {
      if (known.letter == errors[rank][0]) known.raise(text);
    }
    throw Error(text);
  }
}

// ---- Exchanges between ranks -------------------------------------------------------------------

std::vector<std::string> exchange(const std::string& own, Group& group, double timeout_seconds) {
  if (group.size() == 1) return {own};
  const TimeoutScope timeout(&Timeouts::save);
  std::vector<std::string> all;
  // As bytes: paths in messages need not be UTF-8.
  for (const auto& object :
       all_gather_objects(group, nlohmann::json::binary({own.begin(), own.end()}),
                          {.timeout_seconds = timeout_seconds, .tag = "checkpoint"})) {
    const auto& bytes = object.get_binary();
    all.emplace_back(bytes.begin(), bytes.end());
  }
  return all;
}

// Exchanges of a thread that must not issue collectives.
class StoreExchange {
 public:
  StoreExchange(std::shared_ptr<Store> store, std::string name, int rank, int ranks,
                double timeout_seconds, RankContext& context, const std::atomic<bool>& given_up)
      : store_(std::move(store)),
        name_(std::move(name)),
        rank_(rank),
        ranks_(ranks),
        timeout_seconds_(timeout_seconds),
        context_(context),
        given_up_(given_up) {}

  std::vector<std::string> operator()(const std::string& own) {
    if (ranks_ == 1) return {own};
    const int step = step_++;
    store_->set(key(step, rank_), own);
    std::vector<std::string> all;
    for (int rank = 0; rank < ranks_; ++rank) all.push_back(rank == rank_ ? own : get(step, rank));
    // Whoever is in this step has read all of the one before.
    if (step > 0) store_->remove(key(step - 1, rank_));
    return all;
  }
  // After the ranks have met elsewhere.
  void clean() {
    if (step_ > 0) store_->remove(key(step_ - 1, rank_));
  }

 private:
  std::string key(int step, int rank) const {
    return "checkpoint/" + name_ + "/" + std::to_string(step) + "/" + std::to_string(rank);
  }
  std::string get(int step, int rank) const {
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::duration<double>(timeout_seconds_);
    for (;;) {
      try {
        return store_->wait(key(step, rank), Milliseconds(200));
      } catch (const StoreTimeout&) {
        if (const auto failure = context_.failure()) std::rethrow_exception(failure);
        TS_CHECK_AS(DistributedError, !given_up_, kCheckpointCommit, "the save of '", name_,
                    "' was given up while another error passed.");
        TS_CHECK_AS(DistributedError, Clock::now() < end, kCheckpointCommit, "rank ", rank,
                    " did not finish its part of '", name_, "' within ", timeout_seconds_,
                    " s; give SaveOptions::timeout_seconds more time, or look at that rank.");
      }
    }
  }

  std::shared_ptr<Store> store_;
  std::string name_;
  int rank_, ranks_;
  double timeout_seconds_;
  RankContext& context_;  // of the thread that saves
  const std::atomic<bool>& given_up_;
  int step_ = 0;
};

// ---- Folders -----------------------------------------------------------------------------------

void sync_file(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) fail("open", path, errno, "check its permissions");
  const int error = ::fsync(descriptor) == 0 ? 0 : errno;
  ::close(descriptor);
  if (error != 0) fail("force to the disk", path, error, "check the disk");
}

std::string parent_of(const std::string& folder) {
  const std::string parent = fs::path(folder).parent_path().string();
  return parent.empty() ? "." : parent;
}

// "runs/../runs/step-1/" as an absolute path without its detours: the working folder may change
// while a thread writes.
std::string absolute(const std::string& folder) {
  TS_CHECK_AS(ConfigError, !folder.empty(), kCheckpointCommit,
              "needs the name of a folder; got none.");
  fs::path path = fs::absolute(folder).lexically_normal();
  if (!path.has_filename()) path = path.parent_path();
  TS_CHECK_AS(ConfigError, path.has_relative_path(), kCheckpointCommit,
              "the root folder cannot be a ", "checkpoint; got '", folder, "'.");
  return path.string();
}

bool is_empty_folder(const std::string& folder) {
  std::error_code error;
  return fs::is_directory(folder, error) && fs::is_empty(folder, error) && !error;
}

void check_target(const std::string& target, bool replace) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(target, error)) || is_empty_folder(target)) return;
  TS_CHECK_AS(ConfigError, is_checkpoint(target), kCheckpointCommit, "'", target,
              "' exists and is no checkpoint; it is left alone: choose another folder.");
  TS_CHECK_AS(ConfigError, replace, kCheckpointCommit, "'", target,
              "' exists; it is left alone: choose another folder, or remove it.");
}

std::string make_temporary(const std::string& target) {
  make_folders(parent_of(target));
  static std::atomic<uint64_t> counter{0};  // threads of one process
  for (int attempt = 0; attempt < 1000; ++attempt) {
    const std::string name = detail::concatenate(target, ".tmp-", ::getpid(), "-",
                                                 counter.fetch_add(1, std::memory_order_relaxed));
    if (::mkdir(name.c_str(), 0777) == 0) return name;
    if (errno != EEXIST) fail("make the folder", name, errno, "choose one that can be written");
  }
  fail("make a temporary folder beside", target, EEXIST, "remove what is left over there");
}

// Gives the folder its name; what had it goes.
void rename_folder(const std::string& temporary, const std::string& target) {
  std::error_code error;
  if (!fs::exists(fs::symlink_status(target, error)) || is_empty_folder(target)) {
    if (::rename(temporary.c_str(), target.c_str()) != 0) {
      fail("rename to", target, errno, "check the folder's permissions");
    }
    return sync_folder(parent_of(target));
  }
  std::string old = temporary;
  if (::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, target.c_str(), RENAME_EXCHANGE) != 0) {
    if (errno != EINVAL && errno != ENOSYS && errno != ENOTSUP) {
      fail("exchange with", target, errno, "check the folder's permissions");
    }
    old = temporary + "-old";
    if (::rename(target.c_str(), old.c_str()) != 0 ||
        ::rename(temporary.c_str(), target.c_str()) != 0) {
      fail("rename to", target, errno, "check the folder's permissions");
    }
  }
  sync_folder(parent_of(target));
  fs::remove_all(old, error);  // what stays is swept by the next save
}

// ---- What rank 0 does --------------------------------------------------------------------------

// Records of all ranks as one manifest, checked against the files.
Manifest join_records(const std::string& folder, int ranks) {
  Manifest manifest;
  manifest.ranks = ranks;
  std::error_code error;
  for (int rank = 0; rank < ranks; ++rank) {
    const std::string path = (fs::path(folder) / record_name(rank)).string();
    const MappedFile file(path);
    Manifest record = parse_manifest(file.text(), path, false);
    for (const auto& [name, saved] : record.files) {
      const uint64_t bytes = fs::file_size(fs::path(folder) / name, error);
      TS_CHECK_AS(IoError, !error && bytes == saved.bytes, kCheckpointCommit, "rank ", rank,
                  " wrote ", saved.bytes, " bytes to '", name, "' and this rank sees ",
                  error ? 0 : bytes, "; all ranks must see one file system.");
      manifest.files[name] = saved;
    }
    for (auto& [name, tensor] : record.tensors) {
      SavedTensor& joined =
          manifest.tensors.try_emplace(name, tensor.dtype, tensor.shape).first->second;
      TS_CHECK_AS(DistributedError, joined.dtype == tensor.dtype && joined.shape == tensor.shape,
                  kCheckpointCommit, "ranks save ", shown(name), " as ", joined.dtype, joined.shape,
                  " and, rank ", rank, ", as ", tensor.dtype, tensor.shape,
                  "; all ranks must give a tensor one shape and dtype.");
      joined.chunks.insert(joined.chunks.end(), tensor.chunks.begin(), tensor.chunks.end());
    }
  }
  std::vector<Box> boxes;
  for (const auto& [name, tensor] : manifest.tensors) {
    boxes.clear();
    for (const SavedChunk& chunk : tensor.chunks) boxes.push_back(chunk.box);
    if (const auto problem = tiling_problem(tensor.shape, boxes)) {
      TS_THROW(ValueError, kCheckpointCommit, "the parts that ranks save of ", shown(name), ", ",
               tensor.dtype, tensor.shape, ", must hold every element once: ", *problem,
               "; save each part on one rank.");
    }
  }
  return manifest;
}

// The ranks' records, and files that hooks have put there.
void add_other_files(const std::string& folder, Manifest& manifest) {
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string path = entry.path().string();
    if (entry.is_directory()) {
      sync_folder(path);
      continue;
    }
    const std::string name = fs::relative(entry.path(), folder).string();
    if (manifest.files.contains(name)) continue;
    TS_CHECK(entry.is_regular_file() && name != kManifestName, kCheckpointCommit, "'", path,
             "' must be a regular file under another name to be part of a checkpoint; a hook has ",
             "put it there.");
    sync_file(path);
    const MappedFile file(path, FileAccess::kSequential);
    manifest.files[name] = {file.size(), checksum_of(file.text())};
  }
}

}  // namespace

// ---- CheckpointSaver ---------------------------------------------------------------------------

struct CheckpointSaver::State {
  explicit State(Group& ranks) : group(ranks) {}

  Group& group;
  std::vector<Tensor> staging;
  Thread thread;
  std::atomic<bool> saving{false};
  std::atomic<bool> given_up{false};
  std::exception_ptr error;  // of the thread, read after it was joined
  std::unique_ptr<StoreExchange> store_exchange;

  // From the chunks to the commit, on either thread.
  template <class Exchange>
  void write(const std::string& target, const std::string& temporary,
             const std::vector<ChunkToWrite>& chunks, const SaveOptions& options,
             Exchange&& exchange_all) {
    const int rank = group.rank(), ranks = group.size();
    const std::string what = "checkpoint '" + target + "' was not saved";
    const auto reach = [&](SaveStage stage) {
      if (options.at_stage) options.at_stage(stage);
    };
    // What each of the ranks does, and what went wrong anywhere.
    const auto step = [&](auto&& body) {
      std::exception_ptr own;
      try {
        body();
      } catch (...) {
        own = std::current_exception();
      }
      throw_first(exchange_all(encode(own)), what);
    };
    bool named = false;
    try {
      step([&] {
        write_rank(temporary, rank, ranks, chunks, options.file_bytes, [&](bool all) {
          reach(all ? SaveStage::kChunksWritten : SaveStage::kHalfWritten);
        });
        reach(SaveStage::kRecordWritten);
      });
      reach(SaveStage::kAgreed);
      step([&] {
        if (rank != 0) return;
        Manifest manifest = join_records(temporary, ranks);
        manifest.metadata = options.metadata;
        add_other_files(temporary, manifest);
        write_file_atomically((fs::path(temporary) / kManifestName).string(),
                              manifest_text(manifest));
        reach(SaveStage::kManifestWritten);
        rename_folder(temporary, target);
        named = true;
        reach(SaveStage::kRenamed);
        if (options.after_commit) options.after_commit();
      });
    } catch (...) {
      // A rank that still writes finds its folder gone, and fails as all others do.
      if (rank == 0 && !named && !given_up) remove_quietly(temporary);
      throw;
    }
    reach(SaveStage::kCommitted);
  }

  static void remove_quietly(const std::string& folder) {
    std::error_code error;
    fs::remove_all(folder, error);
  }

  void join() {
    if (thread.joinable()) thread.join();
  }
};

CheckpointSaver::CheckpointSaver(Group& group) : state_(std::make_unique<State>(group)) {}

CheckpointSaver::~CheckpointSaver() {
  if (std::uncaught_exceptions() > 0) state_->given_up = true;
  state_->join();
}

void CheckpointSaver::wait() {
  state_->join();
  if (state_->error) std::rethrow_exception(std::exchange(state_->error, nullptr));
}

bool CheckpointSaver::is_saving() const { return state_->saving; }

void CheckpointSaver::save(const std::string& folder, std::span<const SaveItem> items,
                           const SaveOptions& options) {
  const auto collect = [&](const std::string&, auto&) {
    return std::vector<SaveItem>(items.begin(), items.end());
  };
  save(folder, Collect(collect), options);
}

void CheckpointSaver::save(const std::string& folder, const Collect& collect,
                           const SaveOptions& given) {
  wait();
  State& state = *state_;
  SaveOptions options = given;
  Group& group = state.group;
  const PhaseScope phase("save");
  const double timeout = options.timeout_seconds;
  const auto reach = [&](SaveStage stage) {
    if (options.at_stage) options.at_stage(stage);
  };
  const std::string what = "checkpoint '" + folder + "' was not saved";
  std::string target, temporary;
  reach(SaveStage::kBegun);

  // Rank 0 makes the folder and names it to the others: 'n' and the name, or the error.
  std::exception_ptr own;
  try {
    target = absolute(folder);
    const auto& store = rank_context().store;
    TS_CHECK_AS(UnsupportedError, !options.asynchronous || group.size() == 1 || store,
                kCheckpointCommit,
                "asynchronous saving of several ranks needs their store, and there is none; ",
                "start them with `tessera launch`, or save synchronously.");
    if (group.rank() == 0) {
      check_target(target, options.replace);
      const std::string prefix = fs::path(target).filename().string();
      remove_leftovers(parent_of(target), [&](const std::string& name) { return name == prefix; });
      temporary = make_temporary(target);
    }
  } catch (...) {
    own = std::current_exception();
  }
  // Errors first; a name is no error.
  std::vector<std::string> all = exchange(own ? encode(own) : "n" + temporary, group, timeout);
  if (state.store_exchange) state.store_exchange->clean();
  state.store_exchange.reset();
  const bool failed = std::ranges::any_of(all, [](const auto& said) { return said[0] != 'n'; });
  if (failed) {
    if (!temporary.empty()) State::remove_quietly(temporary);
    for (std::string& said : all) {
      if (said[0] == 'n') said.clear();
    }
    throw_first(all, what);
  }
  temporary = all[0].substr(1);
  // Rank 0's is the name under which it appears.
  target = temporary.substr(0, temporary.rfind(".tmp-"));
  reach(SaveStage::kFolderMade);

  std::vector<ChunkToWrite> chunks;
  uint64_t fingerprint = 0;
  own = nullptr;
  try {
    std::error_code error;
    TS_CHECK_AS(IoError, fs::is_directory(temporary, error), kCheckpointCommit,
                "this rank does not see '", temporary, "'; all ranks must see one file system.");
    const std::vector<SaveItem> items = collect(temporary, options.metadata);
    fingerprint = fingerprint_of(items);
    const auto plan = plan_chunks(items, group.rank(), group.size(), options.chunk_bytes);
    chunks = collect_chunks(items, plan, group.rank(), options.asynchronous, state.staging);
  } catch (...) {
    own = std::current_exception();
  }
  try {
    all = exchange(own ? encode(own) : "n" + checksum_text(fingerprint), group, timeout);
    std::vector<std::string> errors = all;
    for (size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank][0] != 'n') continue;
      errors[rank].clear();
      if (all[0][0] == 'n' && all[rank] != all[0]) {
        errors[rank] =
            "rits list of tensors that all ranks hold differs from rank 0's; save the "
            "same names, dtypes and shapes everywhere, in one order";
      }
    }
    throw_first(errors, what);
  } catch (...) {
    if (group.rank() == 0) State::remove_quietly(temporary);
    throw;
  }

  if (!options.asynchronous) {
    const auto exchange_all = [&](const std::string& said) {
      return exchange(said, group, timeout);
    };
    state.write(target, temporary, chunks, options, exchange_all);
    return;
  }
  state.store_exchange = std::make_unique<StoreExchange>(
      rank_context().store, temporary, group.rank(), group.size(),
      timeout > 0 ? timeout
                  : std::max(rank_context().timeouts.collective, rank_context().timeouts.save),
      rank_context(), state.given_up);
  state.saving = true;
  state.thread = Thread([&state, target, temporary, chunks = std::move(chunks), options] {
    try {
      state.write(target, temporary, chunks, options, *state.store_exchange);
    } catch (...) {
      state.error = std::current_exception();
    }
    state.saving = false;
  });
}

// ---- The rest ----------------------------------------------------------------------------------

void throw_together(std::exception_ptr own, const std::string& what, Group& group,
                    double timeout_seconds) {
  throw_first(exchange(encode(own), group, timeout_seconds), what);
}

void remove_leftovers(const std::string& parent,
                      const std::function<bool(const std::string& name)>& is_own) {
  std::error_code error;
  std::vector<fs::path> left;
  for (fs::directory_iterator entry(parent, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const size_t at = name.rfind(".tmp-");
    if (at == name.npos || !is_own(name.substr(0, at))) continue;
    // Moved aside by a save that did not come to naming the new one: all that is left of it.
    if (name.ends_with("-old") && !fs::exists(fs::path(parent) / name.substr(0, at))) continue;
    left.push_back(entry->path());
  }
  for (const fs::path& path : left) fs::remove_all(path, error);
}

void remove_checkpoint(const std::string& folder) {
  const std::string going = detail::concatenate(folder, ".tmp-", ::getpid(), "-removed");
  if (::rename(folder.c_str(), going.c_str()) != 0) {
    fail("rename", folder, errno, "check the folder's permissions");
  }
  sync_folder(parent_of(folder));  // the name goes before the files do
  std::error_code error;
  fs::remove_all(going, error);
  if (error) fail("remove", going, error.value(), "remove it by hand");
}

}  // namespace tessera::distributed
