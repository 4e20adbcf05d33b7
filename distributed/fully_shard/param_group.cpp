#include <tessera/distributed/fully_shard/param_group.h>

#include <algorithm>
#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/leaf_hooks.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/weight_cache.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/initial_values.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/memory/meta_memory.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/backward/mutant.h>
#include <tessera/distributed/fully_shard/part_memory.h>
#include <tessera/distributed/fully_shard/released_storage.h>
#include <tessera/distributed/mesh/divided_parameter.h>
#include <tessera/distributed/mesh/dtensor.h>

namespace tessera::distributed {

ParamGroup::ParamGroup(Options options, std::vector<ShardedParam> params)
    : tag_(std::move(options.tag)),
      call_tag_(tag_),
      ranks_(options.ranks),
      dtype_(params.front().shard.dtype()),
      whole_dtype_(options.dtypes.param_dtype.value_or(dtype_)),
      reduce_dtype_(dtype_),
      gradient_dtype_(wider(dtype_, options.dtypes.gradient_dtype)),
      device_(params.front().shard.device()),
      keeps_wholes_(options.keeps_wholes),
      offload_(options.offload),
      params_(std::move(params)) {
  reduce_dtype_ = options.dtypes.reduce_dtype.value_or(gradient_dtype_);
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].shape = params_[i].shard.shape();
    if (params_[i].shard.requires_grad()) trained_.push_back(i);
  }
}

ParamGroup::~ParamGroup() {
  for (const ShardedParam& param : params_) {
    if (param.shard.defined()) set_replaced(param.shard, false);
  }
}

bool ParamGroup::follow_requires_grad() {
  const auto differs = [](const ShardedParam& param) {
    return param.shard.requires_grad() != param.whole.requires_grad();
  };
  if (std::ranges::none_of(params_, differs)) return false;
  trained_.clear();
  for (size_t i = 0; i < params_.size(); ++i) {
    ShardedParam& param = params_[i];
    if (differs(param)) {
      param.whole.set_grad(Tensor());
      param.whole.set_requires_grad(param.shard.requires_grad());
    }
    if (param.trains()) trained_.push_back(i);
  }
  handed_out_.reset();  // what lies there is arranged for other parameters
  follow_trained();
  return true;
}

int64_t ParamGroup::gradient_bytes() const { return gradient_numel_ * size_of(gradient_dtype_); }

// ---- see [Note: parts on the host]

int64_t ParamGroup::downloaded_bytes(bool is_last) const {
  if (!is_offloaded() || trained_.empty()) return 0;
  const bool sums = is_last && ranks_.replicas != nullptr;
  return gradient_numel_ * size_of(sums ? gradient_dtype_ : reduce_dtype_);
}

int64_t ParamGroup::continued_bytes() const {
  if (!is_offloaded() || trained_.empty() || ranks_.replicas == nullptr) return 0;
  return gradient_bytes();
}

HostTransfers& ParamGroup::transfers() {
  if (!transfers_) transfers_ = HostTransfers::of(device_);
  return *transfers_;
}

void ParamGroup::take_device(const Device& device) {
  TS_CHECK_AS(UnsupportedError, !is_offloaded() || device.is_cuda(), tag_,
              "parts lie in memory of the host for a GPU that calculates, and the parameters were "
              "given memory on ",
              device, "; give it to them on the GPU, from where they move");
  device_ = device;
}

void ParamGroup::settle() {
  if (transfers_) transfers_->wait_uploads();
}

Tensor ParamGroup::new_part() const {
  if (!is_offloaded() || device_.is_meta()) {
    const MemoryCategoryGuard category(MemoryCategory::kParameter);
    return raw::zeros({part_numel_}, dtype_, device_);
  }
  const Tensor part = HostTransfers::empty({part_numel_}, dtype_, MemoryCategory::kParameter);
  zero_(part);
  return part;
}

std::vector<uint32_t> ParamGroup::shard_versions() const {
  std::vector<uint32_t> versions;
  for (const ShardedParam& param : params_) versions.push_back(param.shard.version());
  return versions;
}

Tensor ParamGroup::leaf_over(const Tensor& elements, const ShardedParam& param) {
  Tensor leaf = raw::as_parameter(elements);
  if (param.shard.requires_grad()) leaf.set_requires_grad();
  if (const DividedParameter* divided = divided_parameter(param.shard)) {
    leaf.impl()->marks = divided->marks;
    note_divided(leaf, divided->name, divided->marks);
  }
  return leaf;
}

namespace {

// What is cut by `placement` along the last axis of a mesh, and before along the axes of `across`.
DTensorSpec cut_once_more(const DTensorSpec& across, const Mesh& mesh, const Placement& placement) {
  Mesh& all = joined(mesh, *across.mesh);
  DTensorSpec spec{&all, {}, across.shape};
  int parts = 1;  // into which the axes to the right cut the dimension
  const int dim = shard_dim(placement);
  for (size_t i = all.axes().size(); i-- > 0;) {
    const MeshAxis& axis = all.axes()[i];
    const auto before = std::ranges::find(across.mesh->axes(), axis.name, &MeshAxis::name);
    Placement own = Replicate();
    if (before != across.mesh->axes().end()) {
      own = across.placements[static_cast<size_t>(before - across.mesh->axes().begin())];
      if (dim >= 0 && shard_dim(own) == dim) parts *= axis.size;
    } else if (axis.name == mesh.axes().back().name) {
      const bool strided = parts > 1 && !TS_MUTANT(kStridedAsShard);
      own = strided ? Placement(StridedShard(dim, parts)) : placement;
    }
    spec.placements.insert(spec.placements.begin(), own);
  }
  return spec;
}

}  // namespace

void become_part(ShardedParam& param, const Tensor& part, Mesh& mesh, const Placement& placement) {
  DTensorSpec spec{&mesh, Placements(mesh.axes().size(), Replicate()), param.shape};
  spec.placements.back() = placement;
  if (param.across) spec = cut_once_more(*param.across, mesh, placement);
  const Tensor model = from_local(part, *spec.mesh, spec.placements, {.shape = spec.shape});
  pass_initial_values(param.shard, model);
  param.shard.set_data(part);
  param.shard.bump_version("a cut into shards");
  copy_guard(model, param.shard);
  set_replaced(param.shard, true);
}

void ParamGroup::show_wholes() {
  for (ShardedParam& param : params_) {
    for (Tensor* place : param.places) {
      TS_CHECK_AS(UnsupportedError,
                  place->impl() == param.shard.impl() || place->impl() == param.whole.impl(), tag_,
                  "'", param.name, "' was replaced by ", *place,
                  ", which is no part of what the ranks gather; copy_() the values into the "
                  "parameter, or replace it before the model is sharded");
      *place = param.whole;
    }
  }
}

void ParamGroup::show_shards() {
  for (ShardedParam& param : params_) {
    for (Tensor* place : param.places) *place = param.shard;
  }
}

void ParamGroup::mark_parts(bool marked) {
  for (ShardedParam& param : params_) {
    if (!param.across) continue;
    if (!marked) {
      param.whole.impl()->guard = nullptr;
      continue;
    }
    const NoGradGuard no_grad;
    copy_guard(from_local(raw::alias(param.whole), *param.across->mesh, param.across->placements,
                          {.shape = param.across->shape}),
               param.whole);
  }
}

void ParamGroup::move_home(ShardedParam& param, const Tensor& home) {
  TS_CHECK_SHAPE(param.shard.shape() == home.shape(), tag_, "'", param.name, "' was given data of ",
                 param.shard.shape(), ", and this rank's part has ", home.shape(),
                 "; copy_() whole values within a scope that gathers them");
  copy_(home, raw::alias(param.shard));
  param.shard.set_data(home);
  param.shard.bump_version("other memory");  // set_data() leaves it, and what is kept is of the old
}

bool ParamGroup::is_as_gathered() const {
  return std::ranges::all_of(params_, [](const ShardedParam& param) {
    return param.shard.version() == param.gathered_shard;
  });
}

void ParamGroup::start_gather(std::optional<DType> cast) {
  if (state_ == State::kGathering || is_current(cast)) return;
  for (const ShardedParam& param : params_) {
    TS_CHECK_DEVICE(!param.shard.is_meta() || MetaMemoryGuard::holds(), tag_, "'", param.name,
                    "' is ", param.shard,
                    "; give the model memory and values before its first call");
  }
  const NoGradGuard no_grad;
  issue_gather(cast);
  for (ShardedParam& param : params_) param.issued_shard = param.shard.version();
  state_ = State::kGathering;
}

void ParamGroup::gather_whole(size_t) {}

void ParamGroup::set_fp8(size_t param, std::optional<WeightKey> key,
                         const std::shared_ptr<Fp8Maxima>& maxima) {
  ShardedParam& own = params_[param];
  own.fp8 = nullptr;
  if (!key) return;
  own.fp8 = std::make_shared<Fp8Part>(own.shard, room_of(param), std::move(*key), maxima);
}

// see [Note: versions]
void ParamGroup::finish_gather() {
  if (state_ != State::kGathering) return;
  const NoGradGuard no_grad;
  if (!TS_MUTANT(kSkipWait)) gather_.wait();
  gather_ = {};
  if (uploaded_) transfers().wait_here(std::exchange(uploaded_, nullptr));  // a group of one rank
  state_ = State::kWhole;
  for (ShardedParam& param : params_) {
    VersionCounter& version = *param.whole.impl()->version;
    if (param.issued_shard == param.gathered_shard || TS_MUTANT(kStaleGather)) {
      version.value = param.gathered_whole;
    } else {
      param.whole.bump_version("a gather of other values");
    }
    param.gathered_shard = param.issued_shard;
    param.gathered_whole = param.whole.version();
    param.whole.impl()->guard = nullptr;
  }
  take_gathered();
}

void ParamGroup::release(bool keep_part) noexcept {
  if (state_ == State::kGathering) {  // what is under way writes
    try {
      finish_gather();
    } catch (...) {  // nobody reads it; the group says so to who calls it next
      gather_ = {};
      uploaded_ = nullptr;
      state_ = State::kWhole;
    }
  }
  if (keeps_wholes_) return;
  if (state_ == State::kSharded) {
    if (!keep_part) free_wholes(false);
    return;
  }
  for (ShardedParam& param : params_) {
    weight_cache::release(param.whole);
    param.whole.impl()->guard = std::make_unique<ReleasedStorage>(param.name, tag_);
  }
  free_wholes(keep_part);
  state_ = State::kSharded;
}

void ParamGroup::check_unwritten() const {
  if (state_ != State::kWhole) return;
  for (const ShardedParam& param : params_) {
    TS_CHECK_AS(AutogradError, param.whole.version() == param.gathered_whole, tag_, "'", param.name,
                "' was written while it was gathered, and the write would be lost; write in a "
                "scope of full_parameters(), or write the shard");
  }
}

void ParamGroup::keep_written() {
  const NoGradGuard no_grad;
  for (size_t i = 0; i < params_.size(); ++i) {
    ShardedParam& param = params_[i];
    if (param.whole.version() == param.gathered_whole) continue;
    const Tensor part = own_part(i);
    const Tensor shard = raw::alias(param.shard);
    if (part.data() != shard.data()) copy_(shard, part);
    param.shard.bump_version();
    // The wholes of all ranks were written alike.
    param.gathered_shard = param.shard.version();
    param.gathered_whole = param.whole.version();
  }
}

// ---- Gradients ---------------------------------------------------------------------------------

void ParamGroup::begin_backward() {
  pending_ = trained_.size();
  reducing_ = false;
}

void ParamGroup::abandon() noexcept {
  for (Work* work : {&reduce_, &replica_sum_}) {
    try {
      std::exchange(*work, {}).wait();
    } catch (...) {  // its results are nobody's
    }
  }
  wait_quietly();
  for (const size_t i : trained_) params_[i].whole.set_grad(Tensor());
  reducing_ = false;
  input_ = sums_ = received_ = host_sums_ = host_received_ = Tensor();
}

void ParamGroup::let_go() noexcept {
  for (Work* work : {&gather_, &reduce_, &replica_sum_}) work->forget();
  if (state_ == State::kGathering) state_ = State::kWhole;  // whose bytes release() takes
  for (const size_t i : trained_) params_[i].whole.set_grad(Tensor());
  reducing_ = false;
  input_ = sums_ = received_ = Tensor();
  release();
}

// Of the transfers of a reduction that counts for nothing.
void ParamGroup::wait_quietly() noexcept {
  if (!transfers_) return;
  reduced_ = downloaded_ = nullptr;
  try {
    transfers_->wait_all();
  } catch (...) {  // whoever waits next is told
  }
}

Tensor ParamGroup::new_sums() {
  const MemoryCategoryGuard category(MemoryCategory::kGradient);
  return raw::empty({gradient_numel_}, gradient_dtype_, device_);
}

// As `.grad` of the shards lies.
Tensor ParamGroup::new_held_sums() {
  if (!is_offloaded()) return ParamGroup::new_sums();
  return HostTransfers::empty({gradient_numel_}, gradient_dtype_, MemoryCategory::kGradient);
}

Tensor ParamGroup::held_sums() {
  const StoragePtr own = handed_out_.lock();
  Tensor sums;
  bool any = false;
  std::vector<size_t> missing, foreign;
  for (size_t i = 0; i < trained_.size(); ++i) {
    const Tensor grad = trained(i).shard.grad();
    if (!grad.defined()) {
      missing.push_back(i);
      continue;
    }
    any = true;
    if (own == nullptr || grad.storage() != own) {
      foreign.push_back(i);
    } else if (!sums.defined()) {
      sums = raw::as_strided(grad, {gradient_numel_}, {1}, 0);
    }
  }
  if (!any) return {};
  if (!sums.defined()) {
    zero_(sums = new_held_sums());  // between the gradients, too
  } else {
    for (const size_t i : missing) zero_(sum_of(sums, i));
  }
  for (const size_t i : foreign) copy_(sum_of(sums, i), raw::alias(trained(i).shard.grad()));
  return sums;
}

// see [Note: sums that go on]
void ParamGroup::start_reduce(bool zeros, bool all_reduce) {
  if (trained_.empty()) return;
  const NoGradGuard no_grad;
  if (alone_) return start_sum_of_copies(zeros);
  input_ = reduce_input(zeros);
  for (const size_t i : trained_) params_[i].whole.set_grad(Tensor());
  sums_ = held_sums();
  if (sums_.defined()) {
    // The other replicas' contributions are in the sum already.
    if (sums_of_replicas_ && ranks_.replicas->rank() != 0) zero_(sums_);
  }
  sums_of_replicas_ = false;
  if (is_offloaded()) return reduce_to_host(std::exchange(sums_, Tensor()), all_reduce);
  if (reduce_dtype_ != gradient_dtype_) {
    adds_received_ = sums_.defined();
    if (!adds_received_) sums_ = new_sums();
    const MemoryCategoryGuard category(MemoryCategory::kCommunication);
    received_ = raw::empty({gradient_numel_}, reduce_dtype_, device_);
    reduce_ = shards().reduce_scatter(received_, input_, ReduceOp::kSum, on(Channel::kGradient));
  } else if (sums_.defined() && !TS_MUTANT(kForgetSums)) {
    reduce_ = shards().reduce_scatter_onto(sums_, input_, on(Channel::kGradient));
  } else {
    if (!sums_.defined()) sums_ = new_sums();
    reduce_ = shards().reduce_scatter(sums_, input_, ReduceOp::kSum, on(Channel::kGradient));
  }
}

Work ParamGroup::start_agreement() {
  return shards().all_reduce(raw::empty({0}, kF32), ReduceOp::kSum, on(Channel::kGradient));
}

// see [Note: parts on the host]. `held`: the host's sums that this goes on with, or undefined.
void ParamGroup::reduce_to_host(const Tensor& held, bool all_reduce) {
  HostTransfers& copies = transfers();
  copies.let_go(true);
  const CollectiveOptions options = on(Channel::kGradient);
  const bool converts = reduce_dtype_ != gradient_dtype_;
  adds_received_ = held.defined();
  host_sums_ = held.defined() ? held : new_held_sums();
  if (converts) {
    const MemoryCategoryGuard category(MemoryCategory::kCommunication);
    received_ = raw::empty({gradient_numel_}, reduce_dtype_, device_);
  }
  if (ranks_.replicas != nullptr && all_reduce) {
    // What the replicas add up is the whole sum of each.
    sums_ = ParamGroup::new_sums();
    downloaded_ = copies.on_download_stream(copies.record_here(), [&] {
      if (held.defined()) copies.upload(sums_, held);
      if (converts) {
        shards().reduce_scatter(received_, input_, ReduceOp::kSum, options).wait();
        held.defined() ? add_(sums_, received_) : copy_(sums_, received_);
      } else if (held.defined()) {
        shards().reduce_scatter_onto(sums_, input_, options).wait();
      } else {
        shards().reduce_scatter(sums_, input_, ReduceOp::kSum, options).wait();
      }
      ranks_.replicas->all_reduce(sums_, ReduceOp::kSum, options).wait();
      reduced_ = copies.record_here();
      copies.download(host_sums_, sums_);
    });
    sums_of_replicas_ = true;
    return;
  }
  if (!converts) sums_ = new_sums();
  const Tensor& reduced = converts ? received_ : sums_;
  if (converts || held.defined()) {
    host_received_ =
        HostTransfers::empty({gradient_numel_}, reduce_dtype_, MemoryCategory::kGradient);
  }
  reduce_ = shards().reduce_scatter(reduced, input_, ReduceOp::kSum, options);
  downloaded_ = copies.on_download_stream(copies.record_here(), [&] {
    std::exchange(reduce_, {}).wait();
    reduced_ = copies.record_here();
    copies.download(host_received_.defined() ? host_received_ : host_sums_, reduced);
  });
}

// When they have come.
void ParamGroup::take_sums_on_host() {
  HostTransfers::wait(std::exchange(downloaded_, nullptr));
  if (!host_received_.defined()) return;
  adds_received_ ? add_(host_sums_, host_received_) : copy_(host_sums_, host_received_);
  host_received_ = Tensor();
}

void ParamGroup::wait_reduce(bool all_reduce) {
  if (!input_.defined()) return;
  if (is_offloaded()) {  // its device memory may go when the stream that calculates comes by
    if (reduced_) transfers().wait_here(std::exchange(reduced_, nullptr));
    input_ = received_ = sums_ = Tensor();
    return;
  }
  if (!TS_MUTANT(kSkipReduceWait)) std::exchange(reduce_, {}).wait();
  input_ = Tensor();
  const NoGradGuard no_grad;
  if (received_.defined()) {
    adds_received_ ? add_(sums_, received_) : copy_(sums_, received_);
    received_ = Tensor();
  }
  if (ranks_.replicas == nullptr || !all_reduce) return;
  replica_sum_ = ranks_.replicas->all_reduce(sums_, ReduceOp::kSum, on(Channel::kGradient));
  sums_of_replicas_ = true;
}

void ParamGroup::finish_sum(double divisor) {
  if (trained_.empty()) return;
  const NoGradGuard no_grad;
  std::exchange(replica_sum_, {}).wait();
  TensorList divided;
  if (alone_) {
    add_own_gradients();
    for (const size_t i : trained_) {
      if (const Tensor sum = params_[i].shard.grad(); sum.defined()) divided.push_back(sum);
    }
  } else if (is_offloaded()) {
    take_sums_on_host();
    divided.push_back(host_sums_);
  } else {
    divided.push_back(sums_);
  }
  const double factor = 1 / divisor;
  if (factor != 1) kernels::multi_tensor_scale(divided, &factor);
}

// Of one rank: nothing travels, and nothing is copied where it need not be.
void ParamGroup::add_own_gradients() {
  for (const size_t i : trained_) {
    ShardedParam& param = params_[i];
    const Tensor gradient = param.whole.grad();
    if (!gradient.defined()) continue;
    const Tensor own = raw::view(raw::alias(kernels::contiguous(gradient)), param.shard.shape());
    if (const Tensor held = param.shard.grad(); held.defined()) {
      add_(raw::alias(held), own);
    } else {
      const Tensor sum = own.dtype() == gradient_dtype_ ? own : own.to(gradient_dtype_);
      copy_guard(param.shard, sum);
      param.shard.set_grad(sum);
    }
    param.whole.set_grad(Tensor());
  }
}

void ParamGroup::hand_out(size_t param) {
  if (alone_) return;
  const auto at = static_cast<size_t>(std::ranges::find(trained_, param) - trained_.begin());
  const Tensor& shard = params_[param].shard;
  const Tensor part = sum_of(is_offloaded() ? host_sums_ : sums_, at);
  if (shard.grad().defined() && shard.grad().storage() == part.storage() &&
      shard.grad().offset() == part.offset()) {
    shard.grad().bump_version();
    return;
  }
  copy_guard(shard, part);
  shard.set_grad(part);
}

void ParamGroup::end_backward() {
  if (const Tensor& sums = is_offloaded() ? host_sums_ : sums_; sums.defined()) {
    note_handed_out(sums);
  }
  sums_ = host_sums_ = Tensor();
  if (transfers_) transfers_->let_go(false);
  // What waits to be reduced adds up in the dtype that it will travel in.
  if (reduce_dtype_ == whole_dtype_) return;
  const NoGradGuard no_grad;
  const MemoryCategoryGuard category(MemoryCategory::kGradient);
  for (const size_t i : trained_) {
    const Tensor gradient = params_[i].whole.grad();
    if (!gradient.defined() || size_of(gradient.dtype()) >= size_of(reduce_dtype_)) continue;
    params_[i].whole.set_grad(raw::alias(gradient).to(reduce_dtype_));
  }
}

}  // namespace tessera::distributed
