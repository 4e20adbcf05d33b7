#include <tessera/distributed/fully_shard/param_group.h>

#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/mark_rules.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/optim/multi_tensor_copy.h>
#include <tessera/core/memory/meta_memory.h>
#include <tessera/core/tensor/element_guard.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/backward/mutant.h>
#include <tessera/distributed/fully_shard/part_memory.h>
#include <tessera/distributed/fully_shard/released_storage.h>
#include <tessera/distributed/mesh/dtensor.h>

namespace tessera::distributed {

FlatRun::FlatRun(const std::vector<ShardedParam>& params, int ranks, int64_t alignment) {
  int64_t numel = 0;
  for (const ShardedParam& param : params) {
    offsets.push_back(numel);
    numel += aligned_to(param.shard.numel(), alignment);
  }
  part_numel = aligned((numel + ranks - 1) / ranks);  // parts begin at cache lines
}

FlatShards::FlatShards(std::string tag, const ShardRanks& ranks, std::vector<ShardedParam> params,
                       const GroupDTypes& dtypes, bool rows, bool local_sums, OffloadPolicy offload,
                       bool keeps_wholes)
    : ParamGroup({.tag = std::move(tag),
                  .ranks = ranks,
                  .dtypes = dtypes,
                  .keeps_wholes = keeps_wholes,
                  .offload = offload},
                 std::move(params)),
      rows_(rows) {
  const NoGradGuard no_grad;
  const int count = shards().size();
  alone_ = count == 1 && !is_offloaded();
  const FlatRun run(params_, count, alignment_of({dtype_, gradient_dtype_, reduce_dtype_}));
  offsets_ = run.offsets;
  part_numel_ = gradient_numel_ = run.part_numel;
  const bool frees = !keeps_wholes_ && !alone_;
  {
    const MemoryCategoryGuard category(frees ? MemoryCategory::kUnsharded
                                             : MemoryCategory::kParameter);
    run_ = raw::zeros({part_numel_ * count}, dtype_, device_);
  }
  if (is_offloaded() || frees) part_ = new_part();
  const CheckedMarks of_the_same_elements;  // that the tensor of calls has marks is no other value
  for (size_t i = 0; i < params_.size(); ++i) {
    ShardedParam& param = params_[i];
    param.whole = leaf_over(part_view(run_, param.shape, offsets_[i]), param);
    Tensor part = home_of(i);
    if (param.shard.is_meta() && !MetaMemoryGuard::holds()) {
      part = raw::empty(part.shape(), dtype_, device_);  // by itself, as in RowShards
    } else {
      copy_(part_view(run_, param.shape, offsets_[i]), raw::alias(param.shard));
      if (part_.defined()) copy_(part, own_part(i));
    }
    const int counted = TS_MUTANT(kFlatOfWhole) && param.across ? param.across->mesh->size() : 1;
    const FlatShard flat{ranks_.first * part_numel_ + counted * offsets_[i], part_numel_};
    become_shard(param, part, rows_ ? Placement(Shard(param.shard_dim)) : flat);
  }
  if (frees) {
    for (ShardedParam& param : params_) {
      param.whole.impl()->guard = std::make_unique<ReleasedStorage>(param.name, tag_);
    }
    FlatShards::free_wholes(false);
  }
  if (!local_sums || alone_) return;
  const MemoryCategoryGuard category(MemoryCategory::kGradient);
  gradients_ = raw::zeros({part_numel_ * count}, gradient_dtype_, device_);
  for (size_t i = 0; i < params_.size(); ++i) {
    homes_.push_back(part_view(gradients_, params_[i].shape, offsets_[i]));
  }
  FlatShards::follow_trained();
}

FlatShards::~FlatShards() {
  for (size_t i = 0; i < homes_.size(); ++i) set_main_grad(params_[i].whole, Tensor());
}

void FlatShards::follow_trained() {
  for (size_t i = 0; i < homes_.size(); ++i) {
    set_main_grad(params_[i].whole, params_[i].trains() ? homes_[i] : Tensor());
  }
}

// Elements of a parameter that this rank holds, counted in it.
std::pair<int64_t, int64_t> FlatShards::run_of(size_t param) const {
  return distributed::run_of({offsets_[param], part_numel_}, numel_of(params_[param].shape),
                             shard_index());
}

Tensor FlatShards::own_part(size_t param) const {
  const auto [begin, end] = run_of(param);
  const Shape shape = rows_ ? params_[param].shape : Shape{end - begin};
  return part_view(run_, shape, offsets_[param] + begin);
}

// Of a parameter in a rank's part; 0 where this rank has nothing of it.
int64_t FlatShards::place_in_part(size_t param) const {
  const auto [begin, end] = run_of(param);
  return begin == end ? 0 : offsets_[param] + begin - part_numel_ * shard_index();
}

// Where the shard lies.
Tensor FlatShards::home_of(size_t param) const {
  if (!part_.defined()) return own_part(param);
  const auto [begin, end] = run_of(param);
  return part_view(part_, {end - begin}, place_in_part(param));
}

void FlatShards::issue_gather(std::optional<DType>) {
  bring_home();
  if (alone_) return;
  if (!keeps_wholes_) {
    const MemoryCategoryGuard category(MemoryCategory::kUnsharded);
    run_.storage()->resize(run_.numel() * size_of(dtype_));
    gather_ = shards().all_gather(run_, part_, on(Channel::kParameter));
    return;
  }
  const Tensor own = raw::narrow(run_, 0, part_numel_ * shard_index(), part_numel_);
  const auto gather = [&] { gather_ = shards().all_gather(run_, own, on(Channel::kParameter)); };
  if (!is_offloaded()) return gather();
  // see [Note: parts on the host]
  uploaded_ = transfers().on_upload_stream([&] {
    transfers().upload(own, part_);
    gather();
  });
}

// All wholes are views of the run.
void FlatShards::free_wholes(bool) {
  if (part_.defined() && !keeps_wholes_) run_.storage()->resize(0);
}

void FlatShards::bring_home() {
  for (size_t i = 0; i < params_.size(); ++i) {
    const Tensor& shard = params_[i].shard;
    if (shard.is_meta()) continue;
    if (run_.is_meta()) take_memory(shard.device());
    const Tensor home = home_of(i);
    if (shard.storage() == home.storage() && shard.offset() == home.offset()) continue;
    move_home(params_[i], home);
  }
}

// For a unit that was made without. (ZeRO-1, which has gradients here too, is not.)
void FlatShards::take_memory(const Device& device) {
  take_device(device);
  if (is_offloaded()) part_ = new_part();
  const MemoryCategoryGuard category(MemoryCategory::kParameter);
  run_ = raw::zeros(run_.shape(), dtype_, device_);
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].whole.set_data(part_view(run_, params_[i].shape, offsets_[i]));
  }
}

// What is held from an earlier reduction lies where the next gradients will: it is set aside, and
// the sum goes on there until it is cleared.
void FlatShards::begin_backward() {
  ParamGroup::begin_backward();
  if (homes_.empty()) return;
  const NoGradGuard no_grad;
  bool any = false;
  for (size_t i = 0; i < num_trained(); ++i) {
    const Tensor grad = trained(i).shard.grad();
    any = any || (grad.defined() && grad.storage() == gradients_.storage());
  }
  if (!any) return;
  const Tensor aside = ParamGroup::new_sums();
  zero_(aside);  // between the gradients, too
  for (size_t i = 0; i < num_trained(); ++i) {
    const Tensor& shard = trained(i).shard;
    const Tensor grad = shard.grad();
    if (!grad.defined()) continue;
    const Tensor place = sum_of(aside, i);
    copy_(place, raw::alias(grad));
    // It lies elsewhere and is still what it was.
    place.impl()->version = grad.impl()->version;
    copy_guard(shard, place);
    shard.set_grad(place);
  }
  note_handed_out(aside);
}

Tensor FlatShards::new_sums() {
  if (homes_.empty()) return ParamGroup::new_sums();
  return raw::narrow(gradients_, 0, part_numel_ * shard_index(), part_numel_);
}

// Where gradients add up locally most of them lie there already.
Tensor FlatShards::reduce_input(bool zeros) {
  const int64_t numel = part_numel_ * shards().size();
  const bool local = !homes_.empty() && reduce_dtype_ == gradient_dtype_;
  Tensor input = gradients_;
  if (!local) {
    const MemoryCategoryGuard category(MemoryCategory::kCommunication);
    input = zeros ? raw::zeros({numel}, reduce_dtype_, device_)
                  : raw::empty({numel}, reduce_dtype_, device_);
  } else if (zeros) {
    zero_(input);
  }
  if (zeros) return input;
  char* const to = input.data_as<char>();
  const int64_t element = size_of(reduce_dtype_);
  std::vector<kernels::CopySegment> segments, added_up;
  TensorList keep;
  for (size_t i = 0; i < params_.size(); ++i) {
    const int64_t size = numel_of(params_[i].shape), end = offsets_[i] + size;
    const int64_t next = i + 1 < params_.size() ? offsets_[i + 1] : numel;
    if (!local && end < next) segments.push_back({nullptr, to + end * element, next - end});
    Tensor gradient = params_[i].trains() ? params_[i].whole.grad() : Tensor();
    if (local && gradient.defined() && gradient.is(homes_[i])) continue;
    if (gradient.defined()) keep.push_back(gradient = kernels::contiguous(raw::alias(gradient)));
    if (device_.is_meta()) continue;
    const void* const from = gradient.defined() ? gradient.data() : nullptr;
    const bool own_dtype = from == nullptr || gradient.dtype() == whole_dtype_;
    (own_dtype ? segments : added_up).push_back({from, to + offsets_[i] * element, size});
  }
  if (device_.is_meta()) return input;
  if (!segments.empty()) {
    kernels::copy_segments(segments, whole_dtype_, reduce_dtype_, device_);
  }
  if (!added_up.empty()) {
    kernels::copy_segments(added_up, gradient_dtype_, reduce_dtype_, device_);
  }
  return input;
}

Tensor FlatShards::sum_of(const Tensor& sums, size_t trained) const {
  const size_t param = trained_[trained];
  const auto [begin, end] = run_of(param);
  return part_view(sums, {end - begin}, TS_MUTANT(kWrongOwner) ? 0 : place_in_part(param));
}

}  // namespace tessera::distributed
