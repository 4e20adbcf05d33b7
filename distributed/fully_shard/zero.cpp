#include <tessera/distributed/fully_shard/zero.h>

#include <algorithm>
#include <functional>
#include <ranges>
#include <utility>

#include <tessera/core/error.h>
#include <tessera/distributed/fully_shard/local_parts.h>
#include <tessera/distributed/fully_shard/shard_setup.h>

namespace tessera::distributed {
namespace {

// Units lie alike on all ranks: what other axes leave of a parameter has one size.
void check_parts(const std::vector<ShardedParam>& params, std::string_view where) {
  for (const ShardedParam& param : params) {
    if (!param.across) continue;
    TS_CHECK_AS(UnsupportedError, param.shard.requires_grad(), where,
                "leaves what is frozen as it ", "is, and '", param.name, "' is ", param.shard,
                ", which calls could not read; take fully_shard()");
    const DTensorSpec& spec = *param.across;
    const std::vector<int64_t> numels = spec.part_numels();
    TS_CHECK_AS(UnsupportedError,
                std::ranges::adjacent_find(numels, std::not_equal_to<>()) == numels.end(), where,
                "cuts parts of one size, and '", param.name, "' is ", param.shard,
                ", of which ranks hold more than others; take fully_shard()");
  }
}

}  // namespace

ShardedModel zero(nn::ModuleBase& model, Mesh& mesh, const ZeroOptions& options) {
  const std::string_view where = "zero";
  TS_CHECK_AS(ConfigError, options.stage == 1 || options.stage == 2, where,
              "has the stages 1 and 2; got ", options.stage,
              "; stage 3, which shards parameters too, is fully_shard()");
  TS_CHECK_AS(ConfigError, !is_sharded(model), where, "'", model.type_name(),
              "' is sharded already; call it once for a model");
  for (const auto& inner : units_under({&model})) {
    TS_CHECK_AS(ConfigError, inner->alone != nullptr, where, inner->title(), " of '",
                model.type_name(),
                "' is sharded already by fully_shard(); take one mode for a model");
  }
  TS_CHECK_AS(ConfigError, mesh.axes().size() == 1, where, "takes a mesh of one axis; got ",
              mesh.describe(), "; take a sub-mesh, mesh.submesh({...})");
  TS_CHECK_AS(ConfigError, options.offload_policy != OffloadPolicy::kParameters, where, "stage ",
              options.stage,
              " keeps whole parameters where ops read them; offload the optimizer alone "
              "(OffloadPolicy::kOptimizer), or shard parameters too, with fully_shard()");
  auto unit = std::make_shared<ShardUnit>();
  unit->modules = {&model};
  unit->ranks = shard_ranks(mesh, where);
  unit->reshard_after_forward = false;
  unit->settings = {.average = options.average,
                    .local_sums = options.stage == 1,
                    .reduces_every_backward = options.stage == 2};
  unit->broadcasts_buffers = options.broadcast_buffers;
  std::vector<ShardedParam> params = free_parameters(*unit, options.ignored, where);
  check_parts(params, where);
  check_offload(params, options.offload_policy, where);
  synchronise_parameters(
      params, mesh, options.init_sync, where,
      tessera::detail::concatenate(
          "stage ", options.stage, ", first_bucket_bytes ", options.first_bucket_bytes,
          ", bucket_bytes ", options.bucket_bytes, ", gradient_dtype ",
          words_of(options.gradient_dtype), ", average ", words_of(options.average), ", init_sync ",
          options.init_sync, ", broadcast_buffers ", options.broadcast_buffers, ", offload ",
          words_of(options.offload_policy)));
  let_go_of_local_parts({&model});
  // What is not trained stays whole, as the other ranks have it.
  std::erase_if(params, [&](const ShardedParam& param) {
    if (param.shard.requires_grad()) return false;
    unit->left_whole.push_back({param.name, param.shard});
    unit->left_out.insert(param.places.begin(), param.places.end());
    return true;
  });
  // As their gradients come: from the last to the first.
  std::ranges::reverse(params);
  const int64_t caps[] = {options.first_bucket_bytes, options.bucket_bytes};
  while (!params.empty()) {  // those of the same ranks together
    Mesh* const cut_over = params.front().mesh;
    const ShardRanks ranks = cut_over != nullptr ? shard_ranks(*cut_over, where) : unit->ranks;
    std::vector<ShardedParam> same;
    for (ShardedParam& param : params) {
      if (param.mesh == cut_over) same.push_back(std::move(param));
    }
    std::erase_if(params, [](const ShardedParam& param) { return !param.shard.defined(); });
    std::vector<BucketItem> items;
    for (const ShardedParam& param : same) {
      items.push_back({param.shard.nbytes(), param.shard.dtype(), param.shard.device()});
    }
    for (const std::vector<size_t>& members : assign_buckets(items, caps)) {
      std::vector<ShardedParam> list;
      for (const size_t member : members) list.push_back(same[member]);
      unit->parts.push_back(std::make_unique<FlatShards>(
          "bucket " + std::to_string(unit->parts.size()), ranks, std::move(list),
          GroupDTypes{.gradient_dtype = options.gradient_dtype}, false, options.stage == 1,
          options.offload_policy));
    }
  }
  install_unit(unit);
  auto schedule = schedule_under(unit);
  return make_sharded_model(std::move(schedule), std::move(unit),
                            options.stage == 1 ? "zero1" : "zero2");
}

}  // namespace tessera::distributed
