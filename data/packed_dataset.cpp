#include <tessera/data/packed_dataset.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>

namespace tessera::data {
namespace {

constexpr std::string_view kPacked = "PackedDataset";

// Finds the first of some rows that has room enough, in O(log rows): a tree of the largest rooms.
class FirstFit {
 public:
  FirstFit(int64_t rows, int64_t room)
      : leaves_(std::bit_ceil(static_cast<size_t>(std::max<int64_t>(rows, 1)))),
        most_(2 * leaves_, room) {}

  // The row that takes `length`, at most the room of an empty row.
  size_t place(int64_t length) {
    size_t node = 1;
    while (node < leaves_) node = 2 * node + (most_[2 * node] >= length ? 0 : 1);
    const size_t row = node - leaves_;
    most_[node] -= length;
    for (node /= 2; node > 0; node /= 2) {
      most_[node] = std::max(most_[2 * node], most_[2 * node + 1]);
    }
    return row;
  }

 private:
  size_t leaves_;
  std::vector<int64_t> most_;
};

std::vector<int64_t> lengths_of(const DatasetPtr<TokenDocument>& documents) {
  std::vector<int64_t> lengths;
  if (documents == nullptr) return lengths;
  if (const auto* tokens = dynamic_cast<const TokenDocuments*>(documents.get())) {
    return tokens->lengths();
  }
  for (int64_t i = 0; i < documents->size(); ++i) {
    lengths.push_back(static_cast<int64_t>(documents->get(i).size()));
  }
  return lengths;
}

}  // namespace

// ---- TokenDocuments ----------------------------------------------------------------------------

TokenDocuments::TokenDocuments(TokenArray tokens, TokenId end_of_document)
    : tokens_(std::move(tokens)) {
  constexpr int64_t kStretch = 1 << 16;
  std::vector<int64_t> ids(static_cast<size_t>(std::min(kStretch, tokens_.size())));
  for (int64_t at = 0; at < tokens_.size(); at += kStretch) {
    const int64_t count = std::min(kStretch, tokens_.size() - at);
    tokens_.copy(at, count, ids.data());
    for (int64_t i = 0; i < count; ++i) {
      if (ids[static_cast<size_t>(i)] == end_of_document) ends_.push_back(at + i + 1);
    }
  }
  if (tokens_.size() > 0 && (ends_.empty() || ends_.back() < tokens_.size())) {
    ends_.push_back(tokens_.size());
  }
}

int64_t TokenDocuments::length(int64_t index) const {
  detail::check_index(index, size(), "TokenDocuments");
  return ends_[static_cast<size_t>(index)] - begin(index);
}

std::vector<int64_t> TokenDocuments::lengths() const {
  std::vector<int64_t> result(ends_.size());
  std::adjacent_difference(ends_.begin(), ends_.end(), result.begin());
  return result;
}

TokenDocument TokenDocuments::get(int64_t index) const {
  std::vector<int64_t> ids(static_cast<size_t>(length(index)));
  tokens_.copy(begin(index), static_cast<int64_t>(ids.size()), ids.data());
  return {ids.begin(), ids.end()};
}

// ---- PackedDataset -----------------------------------------------------------------------------

PackedDataset::PackedDataset(DatasetPtr<TokenDocument> documents, const PackedOptions& options)
    : documents_(std::move(documents)), options_(options), lengths_(lengths_of(documents_)) {
  pack();
}

PackedDataset::PackedDataset(DatasetPtr<TokenDocument> documents, std::span<const int64_t> lengths,
                             const PackedOptions& options)
    : documents_(std::move(documents)),
      options_(options),
      lengths_(lengths.begin(), lengths.end()) {
  pack();
}

void PackedDataset::pack() {
  const int64_t context = options_.context;
  TS_CHECK(documents_ != nullptr, kPacked, "needs documents; got none.");
  TS_CHECK(context >= 1, kPacked, "the context must be at least 1; got ", context, ".");
  TS_CHECK(options_.buffer >= 1, kPacked, "the buffer must hold at least 1 document; got ",
           options_.buffer, ".");
  TS_CHECK(static_cast<int64_t>(lengths_.size()) == documents_->size(), kPacked, "there are ",
           documents_->size(), " documents and ", lengths_.size(), " lengths.");
  std::vector<Part> all;
  for (size_t i = 0; i < lengths_.size(); ++i) {
    const int64_t length = lengths_[i];
    TS_CHECK(length >= 0, kPacked, "document ", i, " has the length ", length, ".");
    TS_CHECK(length <= context || options_.long_documents == LongDocuments::kSplit, kPacked,
             "document ", i, " has ", length, " tokens and the context ", context,
             "; give a longer context, or split long documents with LongDocuments::kSplit.");
    num_tokens_ += length;
    for (int64_t begin = 0; begin < length; begin += context) {
      all.push_back({static_cast<int64_t>(i), begin, std::min(context, length - begin)});
    }
  }
  const auto add_row = [&](const std::vector<Part>& row) {
    rows_.push_back(static_cast<int64_t>(parts_.size()));
    parts_.insert(parts_.end(), row.begin(), row.end());
  };
  if (options_.packing == Packing::kSequential) {
    std::vector<Part> row;
    int64_t used = 0;
    for (const Part& part : all) {
      if (used + part.length > context) {
        add_row(row);
        row.clear();
        used = 0;
      }
      row.push_back(part);
      used += part.length;
    }
    if (!row.empty()) add_row(row);
  } else {
    const auto step = static_cast<size_t>(options_.buffer);
    for (size_t first = 0; first < all.size(); first += std::min(step, all.size() - first)) {
      const size_t count = std::min(step, all.size() - first);
      std::vector<size_t> order(count);
      std::iota(order.begin(), order.end(), first);
      std::stable_sort(order.begin(), order.end(),
                       [&](size_t a, size_t b) { return all[a].length > all[b].length; });
      FirstFit rooms(static_cast<int64_t>(count), context);
      std::vector<std::vector<size_t>> bins;
      for (const size_t i : order) {
        const size_t row = rooms.place(all[i].length);
        if (row >= bins.size()) bins.resize(row + 1);
        bins[row].push_back(i);
      }
      for (std::vector<size_t>& bin : bins) std::sort(bin.begin(), bin.end());
      std::sort(bins.begin(), bins.end());
      for (const std::vector<size_t>& bin : bins) {
        std::vector<Part> row;
        for (const size_t i : bin) row.push_back(all[i]);
        add_row(row);
      }
    }
  }
  rows_.push_back(static_cast<int64_t>(parts_.size()));
}

std::span<const PackedDataset::Part> PackedDataset::parts(int64_t index) const {
  detail::check_index(index, size(), kPacked);
  const auto row = static_cast<size_t>(index);
  return std::span(parts_).subspan(static_cast<size_t>(rows_[row]),
                                   static_cast<size_t>(rows_[row + 1] - rows_[row]));
}

double PackedDataset::fill() const {
  if (size() == 0) return 1;
  return static_cast<double>(num_tokens_) / static_cast<double>(size() * options_.context);
}

PackedExample PackedDataset::get(int64_t index) const {
  const int64_t context = options_.context;
  PackedExample example{raw::empty({context}, kI64), raw::empty({context}, kI64),
                        raw::empty({context}, kI64), raw::empty({context}, kF32)};
  auto* const inputs = example.inputs.data_as<int64_t>();
  auto* const targets = example.targets.data_as<int64_t>();
  auto* const places = example.position_ids.data_as<int64_t>();
  auto* const weights = example.weights.data_as<float>();
  int64_t at = 0;
  for (const Part& part : parts(index)) {
    const TokenDocument document = documents_->get(part.document);
    const auto length = static_cast<int64_t>(document.size());
    TS_CHECK(length == lengths_[static_cast<size_t>(part.document)], kPacked, "document ",
             part.document, " had ", lengths_[static_cast<size_t>(part.document)],
             " tokens when rows were packed, and has ", length, ".");
    const bool by_document = options_.weights == TargetWeights::kDocuments && length > 1;
    const float weight = by_document ? 1.0f / static_cast<float>(length - 1) : 1.0f;
    for (int64_t i = 0; i < part.length; ++i, ++at) {
      const int64_t next = part.begin + i + 1;
      const bool has_target = next < length;
      inputs[at] = document[static_cast<size_t>(next) - 1];
      targets[at] = has_target ? document[static_cast<size_t>(next)] : kIgnoreTarget;
      places[at] = i;
      weights[at] = has_target ? weight : 0.0f;
    }
  }
  for (int64_t i = 0; at < context; ++i, ++at) {
    inputs[at] = options_.padding;
    targets[at] = kIgnoreTarget;
    places[at] = i;
    weights[at] = 0.0f;
  }
  return example;
}

}  // namespace tessera::data
