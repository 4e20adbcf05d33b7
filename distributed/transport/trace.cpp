#include <tessera/distributed/transport/trace.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>

#include <tessera/core/plain_text.h>

namespace tessera::distributed {
namespace {

int64_t now_in_nanoseconds() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

std::string_view name_of(ReduceOp op) {
  constexpr std::string_view kNames[] = {"sum", "mean", "max", "min", "product"};
  return kNames[static_cast<size_t>(op)];
}

std::string_view name_of(Channel channel) {
  constexpr std::string_view kNames[] = {"user",   "gradient", "parameter",
                                         "module", "peer",     "control"};
  return kNames[static_cast<size_t>(channel)];
}

std::string describe_seconds(double seconds) {
  char text[32];
  plain_snprintf(text, sizeof text, seconds < 100 ? "%.3g s" : "%.0f s", seconds);
  return text;
}

std::string CommRecord::describe() const {
  std::string text = std::string(name_of(operation)) + " #" + std::to_string(sequence);
  if (const Movement movement = movement_of(operation); movement != Movement::kNothing) {
    text += " (";
    if (movement == Movement::kReduction)
      text += std::string(name_of(reduce)) + (onto ? " onto, " : ", ");
    text += std::string(tessera::name_of(dtype)) + "[" +
            (count < 0 ? "uneven" : std::to_string(count)) + "]";
    if (root >= 0) {
      text += (movement == Movement::kMessage ? ", peer " : ", root ") + std::to_string(root);
    }
    text += ")";
  }
  if (!tag.empty()) text += " '" + tag + "'";
  return text;
}

std::string CommRecord::place() const {
  const std::string_view path(file);
  return std::string(path.substr(path.rfind('/') + 1)) + ":" + std::to_string(line);
}

double CommRecord::wire_bytes() const {
  return traits_of(operation).wire(group_size) * static_cast<double>(bytes);
}

CommTrace::CommTrace(size_t capacity) : capacity_(capacity), start_(now_in_nanoseconds()) {}

int64_t CommTrace::add(CommRecord record) {
  const std::lock_guard lock(mutex_);
  records_.push_back(std::move(record));
  trim();
  return first_ + static_cast<int64_t>(records_.size()) - 1;
}

void CommTrace::trim() {
  while (scopes_ == 0 && records_.size() > capacity_) {
    records_.pop_front();
    ++first_;
  }
}

void CommTrace::finish(int64_t number, bool failed, double seconds) {
  const std::lock_guard lock(mutex_);
  if (number < first_) return;
  CommRecord& record = records_[static_cast<size_t>(number - first_)];
  record.state = failed ? CommRecord::State::kFailed : CommRecord::State::kDone;
  record.done = seconds;
}

void CommTrace::waited(int64_t number, double begin, double end) {
  const std::lock_guard lock(mutex_);
  if (number < first_) return;
  CommRecord& record = records_[static_cast<size_t>(number - first_)];
  record.wait_begin = begin;
  record.wait_end = end;
}

std::vector<CommRecord> CommTrace::records(int64_t first) const {
  const std::lock_guard lock(mutex_);
  const int64_t skip =
      std::clamp<int64_t>(first - first_, 0, static_cast<int64_t>(records_.size()));
  return {records_.begin() + skip, records_.end()};
}

int64_t CommTrace::next() const {
  const std::lock_guard lock(mutex_);
  return first_ + static_cast<int64_t>(records_.size());
}

double CommTrace::seconds() const {
  if (clock_) return clock_();
  return static_cast<double>(now_in_nanoseconds() - start_) * 1e-9;
}

std::string CommTrace::to_json(int rank) const {
  nlohmann::json list = nlohmann::json::array();
  for (const CommRecord& record : records()) {
    list.push_back({{"group", record.group},
                    {"channel", name_of(record.channel)},
                    {"sequence", record.sequence},
                    {"operation", name_of(record.operation)},
                    {"reduce", name_of(record.reduce)},
                    {"onto", record.onto},
                    {"dtype", tessera::name_of(record.dtype)},
                    {"count", record.count},
                    {"bytes", record.bytes},
                    {"root", record.root},
                    {"tag", record.tag},
                    {"phase", record.phase},
                    {"where", std::string(record.file) + ":" + std::to_string(record.line)},
                    {"state", record.state == CommRecord::State::kQueued ? "queued"
                              : record.state == CommRecord::State::kDone ? "done"
                                                                         : "failed"},
                    {"queued", record.queued},
                    {"done", record.done},
                    {"wait_begin", record.wait_begin},
                    {"wait_end", record.wait_end}});
  }
  return nlohmann::json{{"rank", rank}, {"records", std::move(list)}}.dump(1);
}

CommTrace::Scope::Scope(CommTrace& trace) : trace_(&trace), first_(trace.next()) {
  const std::lock_guard lock(trace.mutex_);
  ++trace.scopes_;
}

CommTrace::Scope::~Scope() {
  const std::lock_guard lock(trace_->mutex_);
  --trace_->scopes_;
  trace_->trim();
}

int64_t count(const std::vector<CommRecord>& records, Operation operation) {
  return std::ranges::count(records, operation, &CommRecord::operation);
}

int64_t count(const std::vector<CommRecord>& records, Operation operation, Channel channel) {
  return std::ranges::count_if(records, [&](const CommRecord& record) {
    return record.operation == operation && record.channel == channel;
  });
}

int64_t bytes(const std::vector<CommRecord>& records, Operation operation) {
  int64_t sum = 0;
  for (const CommRecord& record : records) {
    if (record.operation == operation) sum += record.bytes;
  }
  return sum;
}

double hidden_share(const std::vector<CommRecord>& records, Channel channel) {
  double taken = 0, seen = 0;
  for (const CommRecord& record : records) {
    if (record.channel != channel || record.done < 0) continue;
    taken += record.done - record.queued;
    if (record.wait_begin < 0) continue;
    seen += std::max(0.0, std::min(record.done, record.wait_end) - record.wait_begin);
  }
  return taken > 0 ? 1 - seen / taken : 1;
}

}  // namespace tessera::distributed
