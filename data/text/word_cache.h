// Ids of short words that were tokenized before. Included by tokenizers' .cpp files only.
//
// Direct-mapped: a word of up to 16 bytes has one place, its newest owner stays. An entry with up
// to 3 ids is half a cache line, and the whole is 1 MiB, half of a core's second-level cache.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include <tessera/data/text/tokenizer.h>

namespace tessera::data {

class WordCache {
 public:
  static constexpr size_t kMaxBytes = 16;
  static constexpr size_t kMaxIds = 3;

  struct Key {
    uint64_t low, high;
    uint32_t length;
  };
  struct alignas(32) Entry {
    uint64_t low = 0, high = 0;
    uint8_t length = 0;  // 0: empty
    uint8_t count = 0;
    TokenId ids[kMaxIds] = {};
  };
  static_assert(sizeof(Entry) == 32);

  // `word` has 1 to 16 bytes; `readable` says how many bytes may be read from its start.
  static Key key_of(std::string_view word, size_t readable) {
    Key key{0, 0, static_cast<uint32_t>(word.size())};
    if (readable >= kMaxBytes) [[likely]] {
      std::memcpy(&key.low, word.data(), 8);
      std::memcpy(&key.high, word.data() + 8, 8);
      // Shifts by 64 are undefined: lengths 8 and 16 take the branches that need none.
      if (word.size() <= 8) {
        key.high = 0;
        if (word.size() < 8) key.low &= (uint64_t{1} << (8 * word.size())) - 1;
      } else if (word.size() < 16) {
        key.high &= (uint64_t{1} << (8 * (word.size() - 8))) - 1;
      }
    } else {
      unsigned char bytes[kMaxBytes] = {};
      std::memcpy(bytes, word.data(), word.size());
      std::memcpy(&key.low, bytes, 8);
      std::memcpy(&key.high, bytes + 8, 8);
    }
    return key;
  }

  Entry& place(const Key& key) {
    const uint64_t mixed =
        (key.low ^ (key.high * 0x9E3779B97F4A7C15) ^ key.length) * 0xD6E8FEB86659FD93;
    return entries_[mixed >> (64 - kBits)];
  }
  static bool holds(const Entry& entry, const Key& key) {
    return entry.low == key.low && entry.high == key.high && entry.length == key.length;
  }
  static void store(Entry& entry, const Key& key, const TokenId* ids, size_t count) {
    entry.low = key.low;
    entry.high = key.high;
    entry.length = static_cast<uint8_t>(key.length);
    entry.count = static_cast<uint8_t>(count);
    for (size_t i = 0; i < count; ++i) entry.ids[i] = ids[i];
  }

 private:
  static constexpr int kBits = 15;
  std::vector<Entry> entries_ = std::vector<Entry>(size_t{1} << kBits);
};

// Lends caches to calls, so that a tokenizer serves several threads and its cache outlives a call.
class WordCachePool {
 public:
  class Lease {
   public:
    explicit Lease(WordCachePool& pool) : pool_(pool) {
      const std::lock_guard lock(pool.mutex_);
      if (!pool.free_.empty()) {
        cache_ = std::move(pool.free_.back());
        pool.free_.pop_back();
      }
    }
    ~Lease() {
      if (!cache_) return;
      const std::lock_guard lock(pool_.mutex_);
      if (pool_.free_.size() < pool_.free_.capacity()) pool_.free_.push_back(std::move(cache_));
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    WordCache& operator*() {
      if (!cache_) cache_ = std::make_unique<WordCache>();
      return *cache_;
    }

   private:
    WordCachePool& pool_;
    std::unique_ptr<WordCache> cache_;
  };

  // Room for the caches of 64 threads: giving one back allocates nothing.
  WordCachePool() { free_.reserve(64); }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<WordCache>> free_;
};

}  // namespace tessera::data
