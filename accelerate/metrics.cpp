#include <tessera/accelerate/metrics.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <sstream>

#include <tessera/autograd/autograd.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/plain_text.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::accelerate::detail {
namespace {

using distributed::CollectiveOptions;
using distributed::Group;

constexpr std::string_view kGatherForMetrics = "gather_for_metrics";

// What does not have a row for each of the batch's; empty where all do.
std::string misfits(const MetricLeaves& leaves, int64_t rows) {
  PlainText<std::ostringstream> out;
  for (const Tensor* leaf : leaves.tensors) {
    if (leaf->dim() > 0 && leaf->size(0) != rows) {
      out << (out.view().empty() ? "" : ", ") << leaf->describe();
    }
  }
  for (const SampleList& list : leaves.lists) {
    if (static_cast<int64_t>(list.size) != rows) {
      out << (out.view().empty() ? "" : ", ") << "a list of " << list.size;
    }
  }
  return out.str();
}

// Rank r's rows of an output with `counts` rows of each rank.
std::vector<Tensor> sections(const Tensor& output, std::span<const int64_t> counts) {
  std::vector<Tensor> parts;
  int64_t first = 0;
  for (const int64_t count : counts) {
    parts.push_back(raw::narrow(output, 0, first, count));
    first += count;
  }
  return parts;
}

std::vector<std::string> texts_of_all(const std::string& own, Group& group,
                                      const CollectiveOptions& options) {
  const Tensor bytes =
      raw::from_blob(const_cast<char*>(own.data()), {static_cast<int64_t>(own.size())}, kU8);
  std::vector<std::string> texts;
  for (const Tensor& part : distributed::all_gather_ragged(bytes, group, options)) {
    texts.emplace_back(part.data_as<const char>(), static_cast<size_t>(part.numel()));
  }
  return texts;
}

}  // namespace

void gather_for_metrics(MetricLeaves& leaves, const data::LoaderBase* loader, Group& group,
                        const OperationOptions& options) {
  if (loader == nullptr || group.size() == 1) gather(leaves.tensors, group, options);
  if (group.size() == 1) return;
  const NoGradGuard no_grad;
  const CollectiveOptions tagged{.tag = kGatherForMetrics, .where = options.where};
  const auto size = static_cast<size_t>(group.size());
  std::vector<int64_t> counts(size);  // rows that count, of each rank
  if (loader != nullptr) {
    // No rank that is here waits for one that will not come.
    const int64_t present = loader->ranks_in_turn();
    TS_CHECK_AS(DistributedError, present >= group.size(), kGatherForMetrics,
                "every rank calls it in every turn; this is the last one of uneven batches, in "
                "which ranks from ",
                present,
                " on have no batch; use even batches (no sample is counted twice), or "
                "leave the turn out");
    const std::string problem = misfits(leaves, loader->batch_rows());
    // Samples and whether the value fits: a rank that throws alone would leave the others waiting.
    const Device device = leaves.tensors.empty() ? kCpu : leaves.tensors.front()->device();
    const int64_t own[] = {loader->batch_samples(), problem.empty() ? 0 : 1};
    const Tensor all =
        distributed::all_gather(tensor(std::span(own), {2}).to(device), group, tagged).to(kCpu);
    bool fits = true;
    for (size_t rank = 0; rank < size; ++rank) {
      counts[rank] = all.data_as<int64_t>()[2 * rank];
      fits &= all.data_as<int64_t>()[2 * rank + 1] == 0;
    }
    if (!fits) {
      PlainText<std::ostringstream> table;
      const auto texts = texts_of_all(problem, group, tagged);
      for (size_t rank = 0; rank < size; ++rank) {
        if (!texts[rank].empty()) table << "\n  rank " << rank << ": " << texts[rank];
      }
      TS_THROW(ShapeError, kGatherForMetrics,
               "takes a row for each row of the batch in hand (here ", loader->batch_rows(),
               ") or a scalar for each rank; given", table.str(),
               "\n  use gather() for what does not belong to samples.");
    }
    const bool equal = std::ranges::all_of(counts, [&](int64_t n) { return n == counts[0]; });
    std::vector<Tensor*> whole;
    for (Tensor* leaf : leaves.tensors) {
      if (leaf->dim() == 0) {
        whole.push_back(leaf);
        continue;
      }
      *leaf = raw::narrow(leaf->detach(), 0, 0, counts[static_cast<size_t>(group.rank())]);
      if (equal) whole.push_back(leaf);
    }
    gather(whole, group, options);
    if (!equal) {
      const int64_t rows = std::accumulate(counts.begin(), counts.end(), int64_t{0});
      for (Tensor* leaf : leaves.tensors) {
        if (std::ranges::find(whole, leaf) != whole.end()) continue;
        Shape shape = leaf->shape();
        shape[0] = rows;
        const Tensor output = raw::empty(shape, leaf->dtype(), leaf->device());
        group.all_gather(sections(output, counts), *leaf, tagged).wait();
        *leaf = output;
      }
    }
  }
  const auto own_count = counts[static_cast<size_t>(group.rank())];
  for (const SampleList& list : leaves.lists) {
    ByteWriter out;
    list.encode(list.list, loader == nullptr ? list.size : static_cast<size_t>(own_count), out);
    list.replace(list.list, texts_of_all(out.take(), group, tagged));
  }
}

}  // namespace tessera::accelerate::detail
