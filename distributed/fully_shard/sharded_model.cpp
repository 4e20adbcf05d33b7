#include <tessera/distributed/fully_shard/sharded_model.h>

#include <sstream>

#include <tessera/core/error.h>
#include <tessera/core/plain_text.h>

namespace tessera::distributed {

Join ShardedModel::join(const JoinOptions&) {
  TS_THROW(UnsupportedError, "join",
           "ranks whose parameters are sharded need every rank in each forward, and one that has "
           "no batches left cannot run the model; give all ranks as many batches "
           "(DataLoader's even batches), or train replicas");
}

void ShardedModel::set_forward_observer(std::function<BeforeBackward()> observer) {
  schedule_->observer = std::move(observer);
}

TensorList ShardedModel::wholes() const {
  TensorList wholes;
  for (const ParamGroup* part : schedule_->parts()) {
    for (const ShardedParam& param : part->params()) wholes.push_back(param.whole);
  }
  return wholes;
}

std::vector<UnitReport> ShardedModel::report() const {
  std::vector<UnitReport> units;
  for (const auto& weak : schedule_->units()) {
    const auto unit = weak.lock();
    if (!unit) continue;
    UnitReport one{.name = unit->name, .reshards_after_forward = unit->reshards_after_forward()};
    for (const auto& part : unit->parts) {
      for (const ShardedParam& param : part->params()) one.parameters += numel_of(param.shape);
      one.whole_bytes += part->whole_bytes();
      one.part_bytes += part->part_bytes();
      one.reduced_bytes += part->trains() ? part->reduced_bytes() : 0;
      ++one.gathers;
      one.reductions += part->trains();
      one.offload = part->offload();
      const bool again = one.reshards_after_forward && part->gathers_from_host_again();
      one.uploaded_bytes += (again ? 2 : 1) * part->uploaded_bytes();
      one.downloaded_bytes += part->downloaded_bytes(true);
      one.partial_downloaded_bytes += part->downloaded_bytes(false);
      one.continued_bytes += part->continued_bytes();
    }
    if (one.reshards_after_forward) one.gathers *= 2;
    units.push_back(std::move(one));
  }
  return units;
}

std::string ShardedModel::describe() const {
  PlainText<std::ostringstream> text;
  const Mesh& mesh = *root_->ranks.mesh;
  text << mode_ << " on " << mesh.describe() << "\n"
       << "unit                  elements   whole bytes    part bytes  gathers  reductions\n";
  UnitReport sum;
  for (const UnitReport& unit : report()) {
    std::string name = unit.name.empty() ? "(root)" : unit.name;
    name.resize(std::max<size_t>(name.size(), 20), ' ');
    char line[128];
    std::snprintf(line, sizeof line, "%10lld  %12lld  %12lld  %7lld  %10lld\n",
                  static_cast<long long>(unit.parameters), static_cast<long long>(unit.whole_bytes),
                  static_cast<long long>(unit.part_bytes), static_cast<long long>(unit.gathers),
                  static_cast<long long>(unit.reductions));
    text << name << line;
    sum.offload = unit.offload;
    sum.uploaded_bytes += unit.uploaded_bytes;
    sum.downloaded_bytes += unit.downloaded_bytes;
    sum.partial_downloaded_bytes += unit.partial_downloaded_bytes;
    sum.continued_bytes += unit.continued_bytes;
  }
  if (sum.offload != OffloadPolicy::kNone) {
    const bool parameters = sum.offload == OffloadPolicy::kParameters;
    text << (parameters ? "parameters, gradients" : "gradients")
         << " and optimizer states on the host: up " << sum.uploaded_bytes << " bytes a "
         << (parameters ? "micro-batch" : "step") << ", down " << sum.downloaded_bytes
         << " bytes a reduction";
    if (sum.continued_bytes > 0) {
      text << " (" << sum.partial_downloaded_bytes
           << " before the last one of a step, to which sums of " << sum.continued_bytes
           << " bytes travel up)";
    }
    text << '\n';
  }
  return text.str();
}

ShardedModel make_sharded_model(std::shared_ptr<UnitSchedule> schedule,
                                std::shared_ptr<ShardUnit> root, std::string_view mode) {
  return {std::move(schedule), std::move(root), mode};
}

}  // namespace tessera::distributed
