// see [Note: stages that are sharded] in staged_model.h
#include <algorithm>
#include <functional>
#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/fully_shard/local_parts.h>
#include <tessera/distributed/fully_shard/shard_setup.h>
#include <tessera/distributed/mesh/divided_parameter.h>
#include <tessera/distributed/pipeline/staged_model_impl.h>

namespace tessera::distributed {

uint64_t marks_of(const Tensor& parameter) {
  const DividedParameter* divided = divided_parameter(parameter);
  return divided != nullptr ? divided->marks : 0;
}

void StagedModel::Impl::shard() {
  const std::string data = mesh->has("dp_shard") ? "dp_shard" : "dp_replicate";
  Mesh& parts = mesh->view({{"pp_" + data, {"pp", data}}});
  // Those whose gradients are summands among the ranks that divide a layer lie on these, too.
  Group& holders = mesh->group(data);
  Group& wider = is_divided ? mesh->group({data, "tp"}) : holders;
  let_go_of_local_parts({model});
  for (Parameter& one : parameters) {  // before the elements go
    for (Use& use : one.uses) {
      if (!has(use.stage) || rank_of(one.uses.front().stage) == rank) continue;
      use.whole = clone(raw::alias(one.parameter));
      use.whole.impl()->marks = marks_of(one.parameter);
      use.whole.set_requires_grad(one.parameter.requires_grad());
    }
  }
  std::vector<ShardedParam> all;
  for (const Parameter& one : parameters) {
    ShardedParam& param = all.emplace_back(
        ShardedParam{.name = one.name, .shard = one.parameter, .whole = {}, .places = {}});
    lie_across(param, parts, kStages);
    if (!param.across) continue;
    const std::vector<int64_t> numels = param.across->part_numels();
    TS_CHECK_AS(UnsupportedError,
                std::ranges::adjacent_find(numels, std::not_equal_to<>()) == numels.end(), kStages,
                "takes parts of one size, and '", param.name, "' is ", param.shard,
                ", of which ranks hold more than others; pad it to a multiple of the ranks");
  }
  for (int stage = 0; stage < stages; ++stage) {
    std::vector<std::vector<size_t>> lists;  // of one dtype and device each
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].uses.front().stage != stage) continue;
      const auto same = std::ranges::find_if(lists, [&](const std::vector<size_t>& list) {
        const ShardedParam& other = all[list.front()];
        return other.shard.dtype() == all[i].shard.dtype() &&
               other.shard.device() == all[i].shard.device() && other.mesh == all[i].mesh;
      });
      (same == lists.end() ? lists.emplace_back() : *same).push_back(i);
    }
    for (std::vector<size_t>& list : lists) {
      std::vector<ShardedParam> params;
      for (const size_t i : list) {
        parameters[i].parameter.set_grad(Tensor());
        params.push_back(all[i]);
      }
      Mesh& over = params.front().mesh != nullptr ? *params.front().mesh : parts;
      Group& ranks_of_list = params.front().mesh != nullptr ? wider : holders;
      const int count = ranks_of_list.size(), first = rank_of(stage) * count;
      if (has(stage)) {
        auto own =
            std::make_unique<Shards>(Shards{.stage = stage, .group = {}, .parameters = list});
        const bool keeps = sharding != StageSharding::kParameters;
        own->group = std::make_unique<FlatShards>(
            "stage " + std::to_string(stage),
            ShardRanks{
                .mesh = &over, .shards = &ranks_of_list, .batches = &holders, .first = first},
            std::move(params), GroupDTypes{}, false, keeps, OffloadPolicy::kNone,
            keeps || count == 1);
        for (size_t i = 0; i < list.size(); ++i) {
          parameters[list[i]].shards = own.get();
          parameters[list[i]].uses.front().whole = own->group->params()[i].whole;
        }
        shards.push_back(std::move(own));
        continue;
      }
      const DType dtype = params.front().shard.dtype();
      const FlatRun run(params, count, alignment_of({dtype}));
      for (size_t i = 0; i < params.size(); ++i) {
        params[i].shape = params[i].shard.shape();
        become_part(params[i], raw::empty({0}, dtype, params[i].shard.device()), over,
                    FlatShard{first * run.part_numel + run.offsets[i], run.part_numel});
      }
    }
  }
  for (Parameter& one : parameters) {
    if (rank_of(one.uses.front().stage) != rank) continue;
    for (Use& use : one.uses) {
      if (!has(use.stage) || use.whole.defined()) continue;
      use.whole = raw::alias(one.uses.front().whole);
      use.whole.impl()->marks = marks_of(one.parameter);
      use.whole.set_requires_grad(one.parameter.requires_grad());
    }
  }
}

void StagedModel::Impl::finish_gathers(int stage) {
  for (const auto& own : shards) {
    if (own->stage != stage) continue;
    own->group->start_gather();
    own->group->finish_gather();
  }
}

void StagedModel::Impl::release(int stage) {
  for (const auto& own : shards) {
    if (own->stage != stage) continue;
    own->group->check_unwritten();
    own->group->release();
  }
}

// Those of tied parameters wait for the gradients of the other places.
void StagedModel::Impl::start_reductions(int stage, bool tied) {
  for (const auto& own : shards) {
    if (own->stage != stage || own->reduces) continue;
    const bool is_tied = std::ranges::any_of(
        own->parameters, [&](size_t i) { return parameters[i].uses.size() > 1; });
    if (is_tied && !tied) continue;
    for (const size_t i : own->parameters) {
      parameters[i].arrived = parameters[i].uses.front().whole.grad().defined();
    }
    own->group->start_reduce(false, true);
    own->reduces = true;
  }
}

// What a step that failed left behind, without waiting for ranks that may have failed as well.
void StagedModel::Impl::forget_shards() {
  for (const auto& own : shards) {
    own->group->let_go();
    own->reduces = false;
  }
}

void StagedModel::finish_reductions(const std::vector<bool>& has) {
  const NoGradGuard no_grad;
  for (const auto& own : impl_->shards) {
    ParamGroup& group = *own->group;
    if (!own->reduces || !group.trains()) continue;
    try {
      group.wait_reduce(true);
    } catch (Error& error) {
      error.add_context("reduction of stage " + std::to_string(own->stage));
      throw;
    }
    group.finish_sum(1);
    for (size_t i = 0; i < own->parameters.size(); ++i) {
      if (has[own->parameters[i]] && group.params()[i].trains()) group.hand_out(i);
    }
    group.end_backward();
    own->reduces = false;
  }
}

}  // namespace tessera::distributed
