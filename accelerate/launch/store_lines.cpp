#include <tessera/accelerate/launch/store_lines.h>

#include <algorithm>
#include <chrono>

#include <tessera/accelerate/launch/process.h>
#include <tessera/core/error.h>

namespace tessera::launch {
namespace {

using distributed::StoreChanges;
using distributed::StoreEntry;

constexpr std::string_view kLines = "lines/", kTaken = "taken/";
constexpr std::string_view kEnd = "lines/end";  // for the launcher's own thread
// A message of the store has at most 256 MiB.
constexpr size_t kMostBytes = size_t{64} << 20;

}  // namespace

LineSender::LineSender(std::shared_ptr<distributed::TcpStore> store, int rank,
                       std::string_view stream)
    : store_(std::move(store)) {
  const std::string place = std::to_string(rank) + "/" + std::string(stream);
  lines_ = std::string(kLines) + place;
  taken_ = std::string(kTaken) + place;
}

void LineSender::send(std::string_view lines) {
  try {
    while (!lines.empty() && !lost_) {
      wait_until_taken();
      const std::string_view piece = lines.substr(0, kMostBytes);
      store_->set(lines_, piece);
      sent_ = true;
      lines.remove_prefix(piece.size());
    }
  } catch (const DistributedError&) {
    lost_ = true;
  }
}

void LineSender::wait_until_taken() {
  while (sent_) {
    try {
      store_->wait(taken_, std::chrono::hours(1));
      store_->remove(taken_);
      sent_ = false;
    } catch (const distributed::StoreTimeout&) {
      // Whoever reads the launcher's output has stopped it; so the rank waits.
    }
  }
}

LineReceiver::LineReceiver(std::shared_ptr<distributed::Store> store, int output, int error)
    : store_(std::move(store)), output_(output), error_(error), thread_([this] { run(); }) {}

LineReceiver::~LineReceiver() {
  store_->set(kEnd, "");
  thread_.join();
}

void LineReceiver::run() {
  int64_t revision = 0;
  while (true) {
    const StoreChanges changes = store_->watch(kLines, revision, std::chrono::hours(1));
    revision = changes.revision;
    for (const StoreEntry& entry : changes.entries) {
      if (entry.key == kEnd) return;
      write_all(entry.key.ends_with("/error") ? error_ : output_, entry.value);
      store_->remove(entry.key);
      store_->set(std::string(kTaken) + entry.key.substr(kLines.size()), "");
    }
  }
}

}  // namespace tessera::launch
