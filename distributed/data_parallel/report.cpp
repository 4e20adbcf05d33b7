#include <tessera/distributed/data_parallel/report.h>

#include <sstream>

#include <tessera/core/plain_text.h>

namespace tessera::distributed {

ShardReport make_report(const BucketSchedule& schedule) {
  ShardReport report;
  report.ranks = schedule.pass().ranks().size();
  report.hook = schedule.hook().name();
  report.parameters = static_cast<int64_t>(schedule.pass().params().size());
  report.rebuilds = schedule.rebuilds();
  const bool alone = report.ranks == 1;  // issues nothing
  for (const auto& held : schedule.buckets()) {
    ShardReport::Bucket bucket{.index = held->index(),
                               .dtype = held->dtype(),
                               .parameters = {},
                               .elements = held->gradients().numel(),
                               .bytes = held->bytes(),
                               .traffic = alone ? Traffic{} : schedule.hook().traffic(*held)};
    for (size_t slot = 0; slot < held->size(); ++slot) {
      bucket.parameters.push_back(held->param(slot).name);
    }
    report.gradient_bytes += bucket.bytes;
    report.gradients += bucket.traffic;
    report.buckets.push_back(std::move(bucket));
  }
  if (!alone) report.used_map = {1, schedule.used_map_bytes()};
  if (!alone && schedule.pass().average() == GradientAverage::kWeight) {
    report.window_weight = {1, BackwardPass::kWindowWeightBytes};
  }
  return report;
}

std::string ShardReport::describe() const {
  PlainText<std::ostringstream> out;
  out << "replicate over " << ranks << " ranks, hook " << hook << ", buckets made anew " << rebuilds
      << " times\n";
  for (const Bucket& bucket : buckets) {
    out << "  bucket " << bucket.index << ": " << bucket.dtype << '[' << bucket.elements << "], "
        << bucket.bytes << " bytes, " << bucket.parameters.size() << " parameters ("
        << bucket.parameters.front();
    if (bucket.parameters.size() > 1) out << " ... " << bucket.parameters.back();
    out << ")\n";
  }
  out << "  each synchronising backward: " << gradients.collectives << " collectives of "
      << gradients.bytes << " bytes for gradients, " << used_map.collectives << " of "
      << used_map.bytes << " bytes for the used map, " << window_weight.collectives << " of "
      << window_weight.bytes << " bytes for the window's weight\n"
      << "  each synchronised forward: " << buffers_per_forward.collectives << " broadcasts of "
      << buffers_per_forward.bytes << " bytes for buffers\n";
  return out.str();
}

}  // namespace tessera::distributed
