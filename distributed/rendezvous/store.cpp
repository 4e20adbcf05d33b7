#include <tessera/distributed/rendezvous/store.h>

#include <algorithm>
#include <charconv>

#include <unistd.h>

#include <tessera/distributed/rendezvous/store_table.h>

namespace tessera::distributed {

void throw_not_set(std::string_view key, Milliseconds timeout) {
  TS_THROW(distributed::StoreTimeout, "store", "key ", key, " was not set within ",
           timeout.count() / 1000.0, " s; look for the rank that should have set it");
}

const std::string* StoreTable::find(std::string_view key) const {
  const auto at = entries.find(key);
  return at == entries.end() ? nullptr : &at->second.value;
}

void StoreTable::set(std::string_view key, std::string_view value) {
  auto at = entries.find(key);
  if (at == entries.end()) at = entries.emplace(std::string(key), Entry{}).first;
  at->second.value = value;
  at->second.revision = ++revision;
}

bool StoreTable::erase(std::string_view key) {
  const auto at = entries.find(key);
  if (at == entries.end()) return false;
  entries.erase(at);
  return true;
}

int64_t StoreTable::sum(std::string_view key, int64_t amount) const {
  const std::string* text = find(key);
  if (text == nullptr) return amount;
  int64_t number = 0;
  const char* const last = text->data() + text->size();
  const auto [end, problem] = std::from_chars(text->data(), last, number);
  TS_CHECK_AS(DistributedError, problem == std::errc() && end == last, "store",
              "add needs a whole number; key ", key, " holds ", text->size(),
              " bytes of something else; use another key");
  int64_t result = 0;
  TS_CHECK_AS(DistributedError, !__builtin_add_overflow(number, amount, &result), "store",
              "add leaves the range of 64 bits: key ", key, " holds ", number, ", plus ", amount);
  return result;
}

bool StoreTable::equals(std::string_view key, std::optional<std::string_view> expected) const {
  const std::string* value = find(key);
  return value == nullptr ? !expected.has_value() : expected.has_value() && *value == *expected;
}

bool StoreTable::contains(std::span<const std::string> keys) const {
  return std::all_of(keys.begin(), keys.end(),
                     [&](const std::string& key) { return find(key) != nullptr; });
}

std::vector<std::string> StoreTable::list(std::string_view prefix) const {
  std::vector<std::string> keys;
  for (auto at = entries.lower_bound(prefix); at != entries.end(); ++at) {
    if (!at->first.starts_with(prefix)) break;
    keys.push_back(at->first);
  }
  return keys;
}

StoreChanges StoreTable::changes(std::string_view prefix, int64_t after) const {
  std::vector<std::pair<int64_t, StoreEntry>> found;
  for (auto at = entries.lower_bound(prefix); at != entries.end(); ++at) {
    if (!at->first.starts_with(prefix)) break;
    if (at->second.revision > after) {
      found.push_back({at->second.revision, {at->first, at->second.value}});
    }
  }
  std::sort(found.begin(), found.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  StoreChanges result;
  result.revision = std::max(after, revision);
  for (auto& [written, entry] : found) result.entries.push_back(std::move(entry));
  return result;
}

void MemoryStore::State::set(std::string_view key, std::string_view value) {
  table.set(key, value);
  changed.notify_all();
  if (wake >= 0) {
    const uint64_t one = 1;
    // Fails only where 2^64 wakes are pending already.
    [[maybe_unused]] const ssize_t written = ::write(wake, &one, sizeof one);
  }
}

MemoryStore::MemoryStore() : state_(std::make_unique<State>()) {}
MemoryStore::~MemoryStore() = default;

void MemoryStore::set(std::string_view key, std::string_view value) {
  const std::lock_guard lock(state_->mutex);
  state_->set(key, value);
}

std::optional<std::string> MemoryStore::get(std::string_view key) {
  const std::lock_guard lock(state_->mutex);
  const std::string* value = state_->table.find(key);
  return value == nullptr ? std::nullopt : std::optional(*value);
}

std::string MemoryStore::wait(std::string_view key, Milliseconds timeout) {
  std::unique_lock lock(state_->mutex);
  const std::string* value = nullptr;
  state_->changed.wait_for(lock, timeout,
                           [&] { return (value = state_->table.find(key)) != nullptr; });
  if (value == nullptr) throw_not_set(key, timeout);
  return *value;
}

int64_t MemoryStore::add(std::string_view key, int64_t amount) {
  const std::lock_guard lock(state_->mutex);
  const int64_t sum = state_->table.sum(key, amount);
  state_->set(key, std::to_string(sum));
  return sum;
}

bool MemoryStore::compare_set(std::string_view key, std::optional<std::string_view> expected,
                              std::string_view desired) {
  const std::lock_guard lock(state_->mutex);
  if (!state_->table.equals(key, expected)) return false;
  state_->set(key, desired);
  return true;
}

bool MemoryStore::check(std::span<const std::string> keys) {
  const std::lock_guard lock(state_->mutex);
  return state_->table.contains(keys);
}

bool MemoryStore::remove(std::string_view key) {
  const std::lock_guard lock(state_->mutex);
  return state_->table.erase(key);
}

std::vector<std::string> MemoryStore::list(std::string_view prefix) {
  const std::lock_guard lock(state_->mutex);
  return state_->table.list(prefix);
}

StoreChanges MemoryStore::watch(std::string_view prefix, int64_t after, Milliseconds timeout) {
  std::unique_lock lock(state_->mutex);
  StoreChanges result;
  state_->changed.wait_for(lock, timeout, [&] {
    result = state_->table.changes(prefix, after);
    return !result.entries.empty();
  });
  return result;
}

PrefixStore::PrefixStore(std::string prefix, std::shared_ptr<Store> store)
    : prefix_(std::move(prefix)), store_(std::move(store)) {
  TS_CHECK(store_ != nullptr, "PrefixStore", "needs a store; got null");
}

std::string PrefixStore::full(std::string_view key) const { return prefix_ + std::string(key); }
void PrefixStore::set(std::string_view key, std::string_view value) {
  store_->set(full(key), value);
}
std::optional<std::string> PrefixStore::get(std::string_view key) { return store_->get(full(key)); }
std::string PrefixStore::wait(std::string_view key, Milliseconds timeout) {
  return store_->wait(full(key), timeout);
}
int64_t PrefixStore::add(std::string_view key, int64_t amount) {
  return store_->add(full(key), amount);
}
bool PrefixStore::compare_set(std::string_view key, std::optional<std::string_view> expected,
                              std::string_view desired) {
  return store_->compare_set(full(key), expected, desired);
}
bool PrefixStore::check(std::span<const std::string> keys) {
  std::vector<std::string> named;
  for (const std::string& key : keys) named.push_back(full(key));
  return store_->check(named);
}
bool PrefixStore::remove(std::string_view key) { return store_->remove(full(key)); }
std::vector<std::string> PrefixStore::list(std::string_view prefix) {
  std::vector<std::string> keys = store_->list(full(prefix));
  for (std::string& key : keys) key.erase(0, prefix_.size());
  return keys;
}
StoreChanges PrefixStore::watch(std::string_view prefix, int64_t after, Milliseconds timeout) {
  StoreChanges changes = store_->watch(full(prefix), after, timeout);
  for (StoreEntry& entry : changes.entries) entry.key.erase(0, prefix_.size());
  return changes;
}

}  // namespace tessera::distributed
