#include <tessera/distributed/shard/param_shards.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/weight_cache.h>
#include <tessera/core/error.h>
#include <tessera/core/factory.h>
#include <tessera/core/initial_values.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/copy/multi_tensor_copy.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/meta_memory.h>
#include <tessera/core/placement_slot.h>
#include <tessera/core/raw_views.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/shard/mutant.h>

namespace tessera::distributed {
namespace {

// Up to a multiple of 16: of elements a cache line, of bytes what a GPU moves at once.
int64_t aligned(int64_t count) { return (count + 15) / 16 * 16; }

// In the placement slot of a whole without bytes, so that whatever would read it says why not.
struct ReleasedSlot : PlacementSlot {
  ReleasedSlot(std::string name_in, std::string tag_in)
      : name(std::move(name_in)), tag(std::move(tag_in)) {}
  std::string describe(const Tensor& whole) const override {
    return "the released parameter '" + name + "' of " + tag + ", " + describe_whole(whole);
  }
  std::string describe_whole(const Tensor& whole) const override {
    return tessera::detail::concatenate(whole.dtype(), whole.shape());
  }
  std::string_view remedy() const override {
    return "gathered parameters are whole while the calls of their unit run and in its backward; "
           "read it there, or in a scope of full_parameters()";
  }
  std::unique_ptr<PlacementSlot> clone() const override {
    return std::make_unique<ReleasedSlot>(name, tag);
  }
  std::unique_ptr<PlacementSlot> of_gradient() const override { return nullptr; }
  bool equals(const PlacementSlot& other) const override { return &other == this; }
  const std::string name, tag;
};

// Of a whole without bytes whose casts are there, see [Note: casts].
struct CastSlot final : ReleasedSlot {
  CastSlot(std::string name_in, std::string tag_in, ParamShards& shards_in, size_t param_in)
      : ReleasedSlot(std::move(name_in), std::move(tag_in)), shards(&shards_in), param(param_in) {}
  bool has_casts() const override { return true; }
  void bring() const override { shards->gather_whole(param); }  // which takes this slot away
  ParamShards* const shards;
  const size_t param;
};

// A view as an object of its own, with a version of its own.
Tensor part_view(const Tensor& flat, const Shape& shape, int64_t offset) {
  return raw::as_parameter(
      raw::as_strided(flat, shape, contiguous_strides(shape), flat.offset() + offset));
}

// For FlatLayout, which cuts the first dimension: the one that is cut in front.
Shape cut_shape(const Shape& shape, int dim) {
  Shape cut{shape[dim]};
  for (int i = 0; i < shape.size(); ++i) {
    if (i != dim) cut.push_back(shape[i]);
  }
  return cut;
}
std::vector<Shape> cut_shapes(const std::vector<ShardedParam>& params, bool trained_only) {
  std::vector<Shape> shapes;
  for (const ShardedParam& param : params) {
    if (!trained_only || param.shard.requires_grad()) {
      shapes.push_back(cut_shape(param.shape, param.shard_dim));
    }
  }
  return shapes;
}

DType wider(DType own, std::optional<DType> wanted) {
  return wanted && size_of(*wanted) > size_of(own) ? *wanted : own;
}

}  // namespace

// ---- What all layouts share --------------------------------------------------------------------

ParamShards::ParamShards(Options options, std::vector<ShardedParam> params)
    : tag_(std::move(options.tag)),
      ranks_(options.ranks),
      dtype_(params.front().shard.dtype()),
      whole_dtype_(options.dtypes.whole.value_or(dtype_)),
      reduce_dtype_(dtype_),
      gradient_dtype_(wider(dtype_, options.dtypes.gradient)),
      device_(params.front().shard.device()),
      keeps_wholes_(options.keeps_wholes),
      offload_(options.offload),
      params_(std::move(params)) {
  reduce_dtype_ = options.dtypes.reduce.value_or(gradient_dtype_);
  for (size_t i = 0; i < params_.size(); ++i) {
    params_[i].shape = params_[i].shard.shape();
    if (params_[i].shard.requires_grad()) trained_.push_back(i);
  }
}

ParamShards::~ParamShards() = default;

bool ParamShards::follow_requires_grad() {
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

int64_t ParamShards::gradient_bytes() const { return gradient_numel_ * size_of(gradient_dtype_); }

// ---- see [Note: parts on the host]

int64_t ParamShards::downloaded_bytes(bool is_last) const {
  if (!is_offloaded() || trained_.empty()) return 0;
  const bool sums = is_last && ranks_.replicas != nullptr;
  return gradient_numel_ * size_of(sums ? gradient_dtype_ : reduce_dtype_);
}

int64_t ParamShards::continued_bytes() const {
  if (!is_offloaded() || trained_.empty() || ranks_.replicas == nullptr) return 0;
  return gradient_bytes();
}

HostTransfers& ParamShards::transfers() {
  if (!transfers_) transfers_ = HostTransfers::of(device_);
  return *transfers_;
}

void ParamShards::take_device(const Device& device) {
  TS_CHECK_AS(UnsupportedError, !is_offloaded() || device.is_cuda(), tag_,
              "parts lie in memory of the host for a GPU that calculates, and the parameters were "
              "given memory on ",
              device, "; give it to them on the GPU, from where they move");
  device_ = device;
}

void ParamShards::settle() {
  if (transfers_) transfers_->wait_uploads();
}

Tensor ParamShards::new_part() const {
  if (!is_offloaded() || device_.is_meta()) {
    const MemoryCategoryGuard category(MemoryCategory::kParameter);
    return raw::zeros({part_numel_}, dtype_, device_);
  }
  const Tensor part = HostTransfers::empty({part_numel_}, dtype_, MemoryCategory::kParameter);
  zero_(part);
  return part;
}

std::vector<uint32_t> ParamShards::shard_versions() const {
  std::vector<uint32_t> versions;
  for (const ShardedParam& param : params_) versions.push_back(param.shard.version());
  return versions;
}

Tensor ParamShards::leaf_over(const Tensor& elements, bool requires_grad) {
  Tensor leaf = raw::as_parameter(elements);
  if (requires_grad) leaf.set_requires_grad();
  return leaf;
}

void ParamShards::become_shard(ShardedParam& param, const Tensor& part,
                               const Placement& placement) {
  Placements placements(ranks_.mesh->axes().size(), Replicate());
  placements.back() = placement;
  const Tensor model = from_local(part, *ranks_.mesh, placements, {.shape = param.shape});
  pass_initial_values(param.shard, model);
  param.shard.set_data(part);
  param.shard.bump_version("a cut into shards");
  copy_placement(model, param.shard);
}

void ParamShards::show_wholes() {
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

void ParamShards::show_shards() {
  for (ShardedParam& param : params_) {
    for (Tensor* place : param.places) *place = param.shard;
  }
}

void ParamShards::move_home(ShardedParam& param, const Tensor& home) {
  TS_CHECK_SHAPE(param.shard.shape() == home.shape(), tag_, "'", param.name, "' was given data of ",
                 param.shard.shape(), ", and this rank's part has ", home.shape(),
                 "; copy_() whole values within a scope that gathers them");
  copy_(home, raw::alias(param.shard));
  param.shard.set_data(home);
}

bool ParamShards::is_as_gathered() const {
  return std::ranges::all_of(params_, [](const ShardedParam& param) {
    return param.shard.version() == param.gathered_shard;
  });
}

void ParamShards::start_gather(std::optional<DType> cast) {
  if (state_ == State::kGathering || is_current(cast)) return;
  for (const ShardedParam& param : params_) {
    TS_CHECK_DEVICE(!param.shard.is_meta() || MetaMemoryGuard::holds(), tag_, "'", param.name,
                    "' is ", param.shard,
                    "; give the model memory and values before its first call");
  }
  const NoGradGuard no_grad;
  issue_gather(cast);
  state_ = State::kGathering;
}

void ParamShards::gather_whole(size_t) {}

// see [Note: versions]
void ParamShards::finish_gather() {
  if (state_ != State::kGathering) return;
  const NoGradGuard no_grad;
  if (!TS_MUTANT(kSkipWait)) gather_.wait();
  gather_ = {};
  if (uploaded_) transfers().wait_here(std::exchange(uploaded_, nullptr));  // a group of one rank
  state_ = State::kWhole;
  for (ShardedParam& param : params_) {
    VersionCounter& version = *param.whole.impl()->version;
    if (param.shard.version() == param.gathered_shard || TS_MUTANT(kStaleGather)) {
      version.value = param.gathered_whole;
    } else {
      param.whole.bump_version("a gather of other values");
    }
    param.gathered_shard = param.shard.version();
    param.gathered_whole = param.whole.version();
    param.whole.impl()->placement = nullptr;
  }
  take_gathered();
}

void ParamShards::release(bool keep_part) noexcept {
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
    param.whole.impl()->placement = std::make_unique<ReleasedSlot>(param.name, tag_);
  }
  free_wholes(keep_part);
  state_ = State::kSharded;
}

void ParamShards::check_unwritten() const {
  if (state_ != State::kWhole) return;
  for (const ShardedParam& param : params_) {
    TS_CHECK_AS(AutogradError, param.whole.version() == param.gathered_whole, tag_, "'", param.name,
                "' was written while it was gathered, and the write would be lost; write in a "
                "scope of full_parameters(), or write the shard");
  }
}

void ParamShards::keep_written() {
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

void ParamShards::begin_backward() {
  pending_ = trained_.size();
  reducing_ = false;
}

void ParamShards::abandon() noexcept {
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

// Of the transfers of a reduction that counts for nothing.
void ParamShards::wait_quietly() noexcept {
  if (!transfers_) return;
  reduced_ = downloaded_ = nullptr;
  try {
    transfers_->wait_all();
  } catch (...) {  // whoever waits next is told
  }
}

Tensor ParamShards::new_sums() {
  const MemoryCategoryGuard category(MemoryCategory::kGradient);
  return raw::empty({gradient_numel_}, gradient_dtype_, device_);
}

// As `.grad` of the shards lies.
Tensor ParamShards::new_held_sums() {
  if (!is_offloaded()) return ParamShards::new_sums();
  return HostTransfers::empty({gradient_numel_}, gradient_dtype_, MemoryCategory::kGradient);
}

Tensor ParamShards::held_sums() {
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
  if (!sums.defined()) sums = new_held_sums();
  for (const size_t i : missing) zero_(sum_of(sums, i));
  for (const size_t i : foreign) copy_(sum_of(sums, i), raw::alias(trained(i).shard.grad()));
  return sums;
}

// see [Note: sums that go on]
void ParamShards::start_reduce(bool zeros, bool all_reduce) {
  if (trained_.empty()) return;
  const NoGradGuard no_grad;
  if (alone_) return;
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

// see [Note: parts on the host]. `held`: the host's sums that this goes on with, or undefined.
void ParamShards::reduce_to_host(const Tensor& held, bool all_reduce) {
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
    sums_ = ParamShards::new_sums();
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
void ParamShards::take_sums_on_host() {
  HostTransfers::wait(std::exchange(downloaded_, nullptr));
  if (!host_received_.defined()) return;
  adds_received_ ? add_(host_sums_, host_received_) : copy_(host_sums_, host_received_);
  host_received_ = Tensor();
}

void ParamShards::wait_reduce(bool all_reduce) {
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

void ParamShards::finish_sum(double divisor) {
  if (trained_.empty()) return;
  const NoGradGuard no_grad;
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
  std::exchange(replica_sum_, {}).wait();
  const double factor = 1 / divisor;
  if (factor != 1) kernels::multi_tensor_scale(divided, &factor);
}

// Of one rank: nothing travels, and nothing is copied where it need not be.
void ParamShards::add_own_gradients() {
  for (const size_t i : trained_) {
    ShardedParam& param = params_[i];
    const Tensor gradient = param.whole.grad();
    if (!gradient.defined()) continue;
    const Tensor own = raw::view(raw::alias(kernels::contiguous(gradient)), param.shard.shape());
    if (const Tensor held = param.shard.grad(); held.defined()) {
      add_(raw::alias(held), own);
    } else {
      const Tensor sum = own.dtype() == gradient_dtype_ ? own : own.to(gradient_dtype_);
      copy_placement(param.shard, sum);
      param.shard.set_grad(sum);
    }
    param.whole.set_grad(Tensor());
  }
}

void ParamShards::hand_out(size_t param) {
  if (alone_) return;
  const auto at = static_cast<size_t>(std::ranges::find(trained_, param) - trained_.begin());
  const Tensor& shard = params_[param].shard;
  const Tensor part = sum_of(is_offloaded() ? host_sums_ : sums_, at);
  if (shard.grad().defined() && shard.grad().storage() == part.storage() &&
      shard.grad().offset() == part.offset()) {
    shard.grad().bump_version();
    return;
  }
  copy_placement(shard, part);
  shard.set_grad(part);
}

void ParamShards::end_backward() {
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

// ---- RowShards ---------------------------------------------------------------------------------

RowShards::RowShards(std::string tag, const ShardRanks& ranks, std::vector<ShardedParam> params,
                     const ShardDTypes& dtypes, std::shared_ptr<Group> near, OffloadPolicy offload)
    : ParamShards({.tag = std::move(tag), .ranks = ranks, .dtypes = dtypes, .offload = offload},
                  std::move(params)),
      layout_(FlatLayout::even_chunk(cut_shapes(params_, false), shards().size())),
      near_(std::move(near)) {
  const NoGradGuard no_grad;
  part_numel_ = layout_.shard_numel();
  RowShards::follow_trained();
  part_ = new_part();
  const MemoryCategoryGuard category(MemoryCategory::kUnsharded);
  auto& lent = Context::current().slot<LentTensors>().names;
  for (size_t i = 0; i < params_.size(); ++i) {
    ShardedParam& param = params_[i];
    param.whole = leaf_over(released(param.shape), param.shard.requires_grad());
    param.whole.impl()->placement = std::make_unique<ReleasedSlot>(param.name, tag_);
    lent[param.whole.impl()->version.get()] = "'" + param.name + "' of " + tag_;
    Tensor part = part_of(part_, layout_, i, i);
    if (param.shard.is_meta() && !MetaMemoryGuard::holds()) {
      // By itself: a storage remembers the fills of one tensor. It comes home when it has memory.
      part = raw::empty(part.shape(), dtype_, device_);
    } else if (part.numel() > 0) {
      copy_(part, rows_of(raw::alias(param.shard), i));
    }
    become_shard(param, part, Shard(param.shard_dim));
  }
}

RowShards::~RowShards() {
  auto& lent = Context::current().slot<LentTensors>().names;
  for (const ShardedParam& param : params_) {
    lent.erase(param.whole.impl()->version.get());
    std::unique_ptr<TensorSlot>& slot = param.whole.impl()->placement;
    if (slot != nullptr) slot = std::make_unique<ReleasedSlot>(param.name, tag_);
  }
}

// A whole before its first gather.
Tensor RowShards::released(const Shape& shape) const {
  const Tensor whole = raw::empty(shape, whole_dtype_, device_);
  whole.storage()->resize(0);
  return whole;
}

void RowShards::follow_trained() {
  gradient_layout_ = FlatLayout::even_chunk(cut_shapes(params_, true), shards().size());
  gradient_numel_ = gradient_layout_.shard_numel();
}

// This rank's rows of a whole.
Tensor RowShards::rows_of(const Tensor& whole, size_t param) const {
  const FlatLayout::Rows rows = layout_.rows(param, shard_index());
  return raw::narrow(whole, params_[param].shard_dim, rows.begin, rows.size());
}

// This rank's part of a parameter in a piece of memory that holds those of all.
Tensor RowShards::part_of(const Tensor& flat, const FlatLayout& layout, size_t at,
                          size_t param) const {
  Shape shape = params_[param].shape;
  shape[params_[param].shard_dim] = layout.rows(at, shard_index()).size();
  return part_view(flat, shape, layout.local_slice(at, shard_index()).offset);
}

template <class Piece>
void RowShards::for_pieces(const FlatLayout& layout, size_t at, size_t param, int r,
                           const Piece& piece) const {
  const Shape& shape = params_[param].shape;
  const int dim = params_[param].shard_dim;
  int64_t outer = 1, inner = 1;
  for (int i = 0; i < dim; ++i) outer *= shape[i];
  for (int i = dim + 1; i < shape.size(); ++i) inner *= shape[i];
  const FlatLayout::Rows rows = layout.rows(at, r);
  const int64_t offset = layout.local_slice(at, r).offset, run = rows.size() * inner;
  for (int64_t o = 0; run > 0 && o < outer; ++o) {
    int64_t begin = rows.begin;
    if (TS_MUTANT(kPaddingCounted))
      begin = std::max<int64_t>(0, r * (shape[dim] / shards().size()));
    piece(offset + o * run, (o * shape[dim] + begin) * inner, run);
  }
}

Tensor RowShards::own_part(size_t param) const {
  return rows_of(raw::alias(params_[param].whole), param);
}

// A shard that got other memory (it was loaded, or given memory after a construction without) lies
// in the flat part again.
void RowShards::bring_home() {
  for (size_t i = 0; i < params_.size(); ++i) {
    const Tensor& shard = params_[i].shard;
    const int64_t offset = layout_.local_slice(i, shard_index()).offset;
    if (shard.is_meta() || (shard.storage() == part_.storage() && shard.offset() == offset)) {
      continue;
    }
    if (part_.is_meta()) take_memory(shard.device());
    const Tensor home = part_of(part_, layout_, i, i);
    move_home(params_[i], home);
  }
}

// For a unit that was made without.
void RowShards::take_memory(const Device& device) {
  take_device(device);
  part_ = new_part();
  const MemoryCategoryGuard category(MemoryCategory::kUnsharded);
  for (ShardedParam& param : params_) param.whole.set_data(released(param.shape));
}

RowShards::Travel RowShards::travel(std::optional<DType> cast) const {
  Travel travel{.dtype = whole_dtype_};
  size_t casts = 0;
  for (const ShardedParam& param : params_) {
    travel.is_cast.push_back(cast && param.cast == cast);
    casts += travel.is_cast.back();
  }
  if (casts > 0) {
    travel.cast = cast;
    travel.dtype = casts == params_.size() ? *cast : kU8;
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    const FlatLayout::Slice room = layout_.local_slice(i, 0);  // of each rank
    if (casts == 0) {
      travel.offsets.push_back(room.offset * size_of(whole_dtype_));
      continue;
    }
    travel.offsets.push_back(travel.bytes);
    travel.bytes += aligned(room.numel * size_of(travel.is_cast[i] ? *cast : whole_dtype_));
  }
  if (casts == 0) travel.bytes = part_numel_ * size_of(whole_dtype_);
  return travel;
}

bool RowShards::serves(std::optional<DType> cast) const { return !way_.cast || way_.cast == cast; }

int64_t RowShards::whole_bytes() const {
  return way_.bytes > 0 ? shards().size() * way_.bytes : ParamShards::whole_bytes();
}

// see [Note: casts]
void RowShards::gather_whole(size_t param) {
  params_[param].cast.reset();
  near_part_ = Tensor();
  start_gather();
  finish_gather();
}

void RowShards::issue_gather(std::optional<DType> cast) {
  bring_home();
  const Travel before = std::exchange(way_, travel(cast));
  const bool near = near_part_.defined() && way_ == before && is_as_gathered();
  const int64_t numel = way_.bytes / size_of(way_.dtype);
  const MemoryCategoryGuard category(MemoryCategory::kUnsharded);
  gathered_ = raw::empty({numel * shards().size()}, way_.dtype, device_);
  if (near) {
    gather_ = near_->all_gather(gathered_, near_part_, on(Channel::kParameter));
    return;
  }
  near_part_ = Tensor();
  if (!is_offloaded()) return gather_from(part_, numel);
  // see [Note: parts on the host]
  HostTransfers& copies = transfers();
  if (offload_ == OffloadPolicy::kParameters) {
    const Tensor& part = part_to_upload(numel);
    const Tensor own = raw::narrow(gathered_, 0, numel * shard_index(), numel);
    uploaded_ = copies.on_upload_stream([&] {
      copies.upload(own, part);
      gather_ = shards().all_gather(gathered_, own, on(Channel::kParameter));
    });
    if (part.is(packed_)) packed_upload_ = uploaded_;
    return;
  }
  const std::vector<uint32_t> versions = shard_versions();
  if (device_part_versions_ == versions) return gather_from(device_part_, numel);
  if (!device_part_.defined()) {
    const MemoryCategoryGuard of_parameters(MemoryCategory::kParameter);
    device_part_ = raw::empty({part_numel_}, dtype_, device_);
  }
  uploaded_ = copies.on_upload_stream([&] {
    copies.upload(device_part_, part_);
    gather_from(device_part_, numel);
  });
  device_part_versions_ = versions;
}

// From this rank's part, which lies with the wholes.
void RowShards::gather_from(const Tensor& part, int64_t numel) {
  Tensor own = part;
  if (way_.cast || whole_dtype_ != dtype_) {
    own = raw::narrow(gathered_, 0, numel * shard_index(), numel);
    pack(part, own, device_);
  }
  gather_ = shards().all_gather(gathered_, own, on(Channel::kParameter));
}

// This rank's part as it travels.
void RowShards::pack(const Tensor& part, const Tensor& target, const Device& device) const {
  if (!way_.cast) {
    copy_(target, part);
    return;
  }
  if (device.is_meta()) return;
  std::vector<kernels::CopySegment> casts, others;
  for (size_t i = 0; i < params_.size(); ++i) {
    const FlatLayout::Slice slice = layout_.local_slice(i, shard_index());
    (way_.is_cast[i] != 0 ? casts : others)
        .push_back({part.data_as<char>() + slice.offset * size_of(dtype_),
                    target.data_as<char>() + way_.offsets[i], slice.numel});
  }
  kernels::copy_segments(casts, dtype_, *way_.cast, device);
  kernels::copy_segments(others, dtype_, whole_dtype_, device);
}

// The same in memory of the host, where it stays until a shard is written.
const Tensor& RowShards::part_to_upload(int64_t numel) {
  if (!way_.cast && whole_dtype_ == dtype_) return part_;
  std::vector<uint32_t> versions = shard_versions();
  if (packed_.defined() && packed_way_ == way_ && packed_versions_ == versions) return packed_;
  HostTransfers::wait(std::exchange(packed_upload_, nullptr));  // it reads what is written now
  if (!packed_.defined() || packed_.numel() != numel || packed_.dtype() != way_.dtype) {
    packed_ = HostTransfers::empty({numel}, way_.dtype, MemoryCategory::kStaging);
  }
  pack(part_, packed_, kCpu);
  packed_way_ = way_;
  packed_versions_ = std::move(versions);
  return packed_;
}

int64_t RowShards::uploaded_bytes() const {
  if (offload_ == OffloadPolicy::kParameters) return whole_bytes() / shards().size();
  return is_offloaded() ? part_bytes() : 0;
}

void RowShards::take_gathered() {
  const MemoryCategoryGuard category(MemoryCategory::kUnsharded);
  std::vector<kernels::CopySegment> casts, others;
  TensorList keep;
  for (size_t i = 0; i < params_.size(); ++i) {
    const Tensor& whole = params_[i].whole;
    const bool cast = way_.is_cast[i] != 0;
    if (cast) {
      whole.storage()->resize(0);
      whole.impl()->placement = std::make_unique<CastSlot>(params_[i].name, tag_, *this, i);
      keep.push_back(weight_cache::provide(whole, {.dtype = *way_.cast}));
    } else {
      whole.storage()->resize(whole.numel() * size_of(whole_dtype_));
      keep.push_back(whole);
    }
    if (device_.is_meta()) continue;
    const int64_t element = size_of(cast ? *way_.cast : whole_dtype_);
    char* const to = keep.back().data_as<char>();
    for (int r = 0; r < shards().size(); ++r) {
      const char* const from = gathered_.data_as<char>() + r * way_.bytes + way_.offsets[i];
      const int64_t begin = layout_.local_slice(i, r).offset;
      for_pieces(layout_, i, i, r, [&](int64_t part, int64_t at, int64_t numel) {
        (cast ? casts : others)
            .push_back({from + (part - begin) * element, to + at * element, numel});
      });
    }
  }
  if (!casts.empty()) kernels::copy_segments(casts, *way_.cast, *way_.cast, device_);
  kernels::copy_segments(others, whole_dtype_, whole_dtype_, device_);
  for (size_t i = 0; i < params_.size(); ++i) {
    if (way_.is_cast[i] == 0) weight_cache::restore(params_[i].whole);
  }
  if (near_ != nullptr && !near_part_.defined()) {
    const int64_t numel = gathered_.numel() / near_->size();
    near_part_ = raw::narrow(gathered_, 0, near_->rank() * numel, numel).clone();
  }
  gathered_ = Tensor();
}

void RowShards::free_wholes(bool keep_part) {
  if (!keep_part) near_part_ = Tensor();
  gathered_ = Tensor();
  for (const ShardedParam& param : params_) param.whole.storage()->resize(0);
}

Tensor RowShards::reduce_input(bool zeros) {
  const int ranks = shards().size();
  const MemoryCategoryGuard category(MemoryCategory::kCommunication);
  if (zeros) return raw::zeros({gradient_numel_ * ranks}, reduce_dtype_, device_);
  const Tensor input = raw::empty({gradient_numel_ * ranks}, reduce_dtype_, device_);
  char* const to = input.data_as<char>();
  const int64_t element = size_of(reduce_dtype_);
  // In the dtype that backward gives, in the one in which several backwards add up, and zeros.
  std::vector<kernels::CopySegment> segments, added_up;
  TensorList keep;
  for (size_t i = 0; i < num_trained(); ++i) {
    Tensor gradient = trained(i).whole.grad();
    if (gradient.defined()) keep.push_back(gradient = kernels::contiguous(raw::alias(gradient)));
    if (device_.is_meta()) continue;
    const bool own_dtype = !gradient.defined() || gradient.dtype() == whole_dtype_;
    for (int r = 0; r < ranks; ++r) {
      const int64_t target = r * gradient_numel_;
      int64_t packed = 0;
      for_pieces(
          gradient_layout_, i, trained_[i], r, [&](int64_t part, int64_t whole, int64_t numel) {
            const char* const from =
                gradient.defined() ? gradient.data_as<char>() + whole * size_of(gradient.dtype())
                                   : nullptr;
            (own_dtype ? segments : added_up)
                .push_back({from, to + (target + part) * element, numel});
            packed += numel;
          });
      // The room of the first rank's rows is everybody's.
      const int64_t room = gradient_layout_.local_slice(i, 0).numel;
      const int64_t end = target + gradient_layout_.local_slice(i, 0).offset + packed;
      if (packed < room) segments.push_back({nullptr, to + end * element, room - packed});
    }
  }
  kernels::copy_segments(segments, whole_dtype_, reduce_dtype_, device_);
  if (!added_up.empty()) {
    kernels::copy_segments(added_up, wider(whole_dtype_, reduce_dtype_), reduce_dtype_, device_);
  }
  return input;
}

Tensor RowShards::sum_of(const Tensor& sums, size_t trained) const {
  return part_of(sums, gradient_layout_, trained, trained_[trained]);
}

// ---- FlatShards --------------------------------------------------------------------------------

FlatShards::FlatShards(std::string tag, const ShardRanks& ranks, std::vector<ShardedParam> params,
                       const ShardDTypes& dtypes, bool rows, bool local_sums, OffloadPolicy offload)
    : ParamShards({.tag = std::move(tag),
                   .ranks = ranks,
                   .dtypes = dtypes,
                   .keeps_wholes = true,
                   .offload = offload},
                  std::move(params)),
      rows_(rows) {
  const NoGradGuard no_grad;
  const int count = shards().size();
  alone_ = count == 1 && !is_offloaded();
  int64_t numel = 0;
  for (const ShardedParam& param : params_) {
    offsets_.push_back(numel);
    numel += param.shard.numel();
  }
  // Parts begin at cache lines.
  part_numel_ = gradient_numel_ = aligned((numel + count - 1) / count);
  {
    const MemoryCategoryGuard category(MemoryCategory::kParameter);
    run_ = raw::zeros({part_numel_ * count}, dtype_, device_);
  }
  if (is_offloaded()) part_ = new_part();
  for (size_t i = 0; i < params_.size(); ++i) {
    ShardedParam& param = params_[i];
    param.whole = leaf_over(part_view(run_, param.shape, offsets_[i]), param.shard.requires_grad());
    Tensor part = home_of(i);
    if (param.shard.is_meta() && !MetaMemoryGuard::holds()) {
      part = raw::empty(part.shape(), dtype_, device_);  // by itself, as in RowShards
    } else {
      copy_(raw::alias(param.whole), raw::alias(param.shard));
      if (is_offloaded()) copy_(part, own_part(i));
    }
    become_shard(param, part,
                 rows_ ? Placement(Shard(param.shard_dim)) : FlatShard{offsets_[i], part_numel_});
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
  if (!is_offloaded()) return own_part(param);
  const auto [begin, end] = run_of(param);
  return part_view(part_, {end - begin}, place_in_part(param));
}

void FlatShards::issue_gather(std::optional<DType>) {
  bring_home();
  if (alone_) return;
  const Tensor own = raw::narrow(run_, 0, part_numel_ * shard_index(), part_numel_);
  const auto gather = [&] { gather_ = shards().all_gather(run_, own, on(Channel::kParameter)); };
  if (!is_offloaded()) return gather();
  // see [Note: parts on the host]
  uploaded_ = transfers().on_upload_stream([&] {
    transfers().upload(own, part_);
    gather();
  });
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
  ParamShards::begin_backward();
  if (homes_.empty()) return;
  const NoGradGuard no_grad;
  bool any = false;
  for (size_t i = 0; i < num_trained(); ++i) {
    const Tensor grad = trained(i).shard.grad();
    any = any || (grad.defined() && grad.storage() == gradients_.storage());
  }
  if (!any) return;
  const Tensor aside = ParamShards::new_sums();
  for (size_t i = 0; i < num_trained(); ++i) {
    const Tensor& shard = trained(i).shard;
    const Tensor grad = shard.grad();
    if (!grad.defined()) continue;
    const Tensor place = sum_of(aside, i);
    copy_(place, raw::alias(grad));
    // It lies elsewhere and is still what it was.
    place.impl()->version->value = grad.version();
    copy_placement(shard, place);
    shard.set_grad(place);
  }
  note_handed_out(aside);
}

Tensor FlatShards::new_sums() {
  if (homes_.empty()) return ParamShards::new_sums();
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
  int64_t end = 0;
  for (size_t i = 0; i < params_.size(); ++i) {
    const int64_t size = numel_of(params_[i].shape);
    end = offsets_[i] + size;
    Tensor gradient = params_[i].trains() ? params_[i].whole.grad() : Tensor();
    if (local && gradient.defined() && gradient.is(homes_[i])) continue;
    if (gradient.defined()) keep.push_back(gradient = kernels::contiguous(raw::alias(gradient)));
    if (device_.is_meta()) continue;
    const void* const from = gradient.defined() ? gradient.data() : nullptr;
    const bool own_dtype = from == nullptr || gradient.dtype() == whole_dtype_;
    (own_dtype ? segments : added_up).push_back({from, to + offsets_[i] * element, size});
  }
  if (device_.is_meta()) return input;
  if (!local && end < numel) segments.push_back({nullptr, to + end * element, numel - end});
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
