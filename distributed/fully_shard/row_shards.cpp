#include <tessera/distributed/fully_shard/param_group.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/fp8/weight.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/weight_cache.h>
#include <tessera/core/error.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/optim/multi_tensor_copy.h>
#include <tessera/core/memory/meta_memory.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/backward/mutant.h>
#include <tessera/distributed/fully_shard/part_memory.h>
#include <tessera/distributed/fully_shard/released_storage.h>
#include <tessera/distributed/mesh/dtensor.h>

namespace tessera::distributed {
namespace {

// Of a whole without bytes whose casts are there, see [Note: casts].
struct CastStorage final : ReleasedStorage {
  CastStorage(std::string name_in, std::string tag_in, ParamGroup& shards_in, size_t param_in)
      : ReleasedStorage(std::move(name_in), std::move(tag_in)),
        shards(&shards_in),
        param(param_in) {}
  bool can_bring() const override { return true; }
  void bring() const override { shards->gather_whole(param); }  // which takes this guard away
  ParamGroup* const shards;
  const size_t param;
};

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

}  // namespace

RowShards::RowShards(std::string tag, const ShardRanks& ranks, std::vector<ShardedParam> params,
                     const GroupDTypes& dtypes, std::shared_ptr<Group> near, OffloadPolicy offload)
    : ParamGroup({.tag = std::move(tag), .ranks = ranks, .dtypes = dtypes, .offload = offload},
                 std::move(params)),
      layout_(FlatLayout::even_chunk(cut_shapes(params_, false), shards().size(),
                                     alignment_of({dtype_, whole_dtype_}))),
      near_(std::move(near)) {
  const NoGradGuard no_grad;
  part_numel_ = layout_.shard_numel();
  RowShards::follow_trained();
  part_ = new_part();
  const MemoryCategoryGuard category(MemoryCategory::kUnsharded);
  auto& lent = Context::current().slot<LentTensors>().names;
  for (size_t i = 0; i < params_.size(); ++i) {
    ShardedParam& param = params_[i];
    param.whole = leaf_over(released(param.shape), param);
    param.whole.impl()->guard = std::make_unique<ReleasedStorage>(param.name, tag_);
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
    std::unique_ptr<TensorSlot>& guard = param.whole.impl()->guard;
    if (guard != nullptr) guard = std::make_unique<ReleasedStorage>(param.name, tag_);
  }
}

// A whole before its first gather.
Tensor RowShards::released(const Shape& shape) const {
  const Tensor whole = raw::empty(shape, whole_dtype_, device_);
  whole.storage()->resize(0);
  return whole;
}

void RowShards::follow_trained() {
  gradient_layout_ = FlatLayout::even_chunk(cut_shapes(params_, true), shards().size(),
                                            alignment_of({gradient_dtype_, reduce_dtype_}));
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

DType RowShards::dtype_in(const Travel& travel, size_t param) const {
  switch (travel.forms[param]) {
    case Form::kCast:
      return *travel.cast;
    case Form::kFp8:
      return params_[param].fp8->key().dtype;
    case Form::kStored:
      break;
  }
  return whole_dtype_;
}

RowShards::Travel RowShards::travel(std::optional<DType> cast) const {
  Travel travel{.dtype = whole_dtype_};
  size_t casts = 0;
  for (const ShardedParam& param : params_) {
    Form form = Form::kStored;
    if (cast && param.cast == cast) form = Form::kCast;
    if (cast && param.fp8 != nullptr && !param.fp8->rests()) {
      form = Form::kFp8;
      travel.scales.push_back(param.fp8->scale_version());
    }
    travel.forms.push_back(form);
    casts += form == Form::kCast;
  }
  const size_t fp8_count = travel.scales.size();
  if (casts + fp8_count > 0) {
    travel.cast = cast;
    travel.dtype = casts == params_.size() ? *cast : kU8;
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    const FlatLayout::Slice room = layout_.local_slice(i, 0);  // of each rank
    if (!travel.cast) {
      travel.offsets.push_back(room.offset * size_of(whole_dtype_));
      continue;
    }
    travel.offsets.push_back(travel.bytes);
    travel.bytes += aligned(room.numel * size_of(dtype_in(travel, i)));
  }
  if (!travel.cast) travel.bytes = part_numel_ * size_of(whole_dtype_);
  travel.labels = travel.bytes;
  travel.bytes += aligned(static_cast<int64_t>(fp8_count * sizeof(Fp8Label)));
  return travel;
}

bool RowShards::serves(std::optional<DType> cast) const {
  if (!way_.cast) return true;
  if (way_.cast != cast) return false;
  // A delayed scale may be another one since.
  return way_.scales.empty() || way_ == travel(cast);
}

int64_t RowShards::whole_bytes() const {
  return way_.bytes > 0 ? shards().size() * way_.bytes : ParamGroup::whole_bytes();
}

// see [Note: casts] and [Note: fp8 gathers]
void RowShards::gather_whole(size_t param) {
  params_[param].cast.reset();
  for (ShardedParam& each : params_) {
    if (each.fp8 != nullptr) each.fp8->rest();
  }
  near_part_ = Tensor();
  const bool had_bytes = !way_.scales.empty() && way_.forms[param] == Form::kFp8;
  try {
    start_gather();
    finish_gather();
  } catch (const DistributedError& error) {
    if (!had_bytes) throw;
    TS_THROW(DistributedError, tag_, "'", params_[param].name,
             "' came in fp8, and a call that does not run in fp8 reads it on this rank and "
             "not on all: give all ranks batches whose products run alike (rows that are multiples "
             "of 16); ",
             error.what());
  }
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
void RowShards::pack(const Tensor& part, const Tensor& target, const Device& device) {
  if (!way_.cast) {
    copy_(target, part);
    return;
  }
  if (!way_.scales.empty()) pack_fp8(target);
  if (device.is_meta()) return;
  std::vector<kernels::CopySegment> casts, others;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (way_.forms[i] == Form::kFp8) continue;
    const FlatLayout::Slice slice = layout_.local_slice(i, shard_index());
    (way_.forms[i] == Form::kCast ? casts : others)
        .push_back({part.data_as<char>() + slice.offset * size_of(dtype_),
                    target.data_as<char>() + way_.offsets[i], slice.numel});
  }
  kernels::copy_segments(casts, dtype_, *way_.cast, device);
  kernels::copy_segments(others, dtype_, whole_dtype_, device);
}

void RowShards::pack_fp8(const Tensor& target) {
  std::vector<kernels::CopySegment> segments;
  std::vector<Fp8Label> labels;
  for (size_t i = 0; i < params_.size(); ++i) {
    if (way_.forms[i] != Form::kFp8) continue;
    Fp8Part& own = *params_[i].fp8;
    const Tensor& bytes = own.bytes();
    const auto label = static_cast<int64_t>(labels.size() * sizeof(Fp8Label));
    labels.push_back(own.label());
    if (target.is_meta()) continue;
    segments.push_back({bytes.data(), target.data_as<char>() + way_.offsets[i], bytes.numel()});
    if (device_.is_cuda()) {
      const Tensor& said = own.label_on_gpu();
      segments.push_back({said.data(), target.data_as<char>() + way_.labels + label, said.numel()});
    }
  }
  if (target.is_meta()) return;
  kernels::copy_segments(segments, kU8, kU8, device_);
  if (device_.is_cuda()) return;
  std::memcpy(target.data_as<char>() + way_.labels, labels.data(),
              labels.size() * sizeof(Fp8Label));
}

// What has come beside the bytes of a parameter. `label`: which of the labels is its own.
kernels::Quantized RowShards::arrived_fp8(size_t param, int64_t label) const {
  if (device_.is_cuda()) {
    return fp8_whole(raw::view(gathered_, {shards().size(), way_.bytes}),
                     way_.labels + label * static_cast<int64_t>(sizeof(Fp8Label)),
                     params_[param].fp8->key());
  }
  std::vector<Fp8Label> labels(static_cast<size_t>(shards().size()));
  for (size_t r = 0; !device_.is_meta() && r < labels.size(); ++r) {
    const int64_t at = static_cast<int64_t>(r) * way_.bytes + way_.labels;
    std::memcpy(&labels[r],
                gathered_.data_as<char>() + at + label * static_cast<int64_t>(sizeof(Fp8Label)),
                sizeof(Fp8Label));
  }
  return fp8_whole(labels, params_[param].fp8->key(), device_, tag_, params_[param].name);
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
  std::vector<kernels::CopySegment> casts, bytes, others;
  TensorList keep;
  int64_t label = 0;
  for (size_t i = 0; i < params_.size(); ++i) {
    const Tensor& whole = params_[i].whole;
    const Form form = way_.forms[i];
    if (form == Form::kStored) {
      whole.storage()->resize(whole.numel() * size_of(whole_dtype_));
      keep.push_back(whole);
    } else {
      whole.storage()->resize(0);
      whole.impl()->guard = std::make_unique<CastStorage>(params_[i].name, tag_, *this, i);
      keep.push_back(form == Form::kCast ? weight_cache::provide(whole, {.dtype = *way_.cast})
                                         : weight_cache::provide(whole, params_[i].fp8->key(),
                                                                 arrived_fp8(i, label++)));
    }
    if (device_.is_meta()) continue;
    std::vector<kernels::CopySegment>& segments = form == Form::kStored ? others
                                                  : form == Form::kCast ? casts
                                                                        : bytes;
    const int64_t element = size_of(dtype_in(way_, i));
    char* const to = keep.back().data_as<char>();
    for (int r = 0; r < shards().size(); ++r) {
      const char* const from = gathered_.data_as<char>() + r * way_.bytes + way_.offsets[i];
      const int64_t begin = layout_.local_slice(i, r).offset;
      for_pieces(layout_, i, i, r, [&](int64_t part, int64_t at, int64_t numel) {
        segments.push_back({from + (part - begin) * element, to + at * element, numel});
      });
    }
  }
  if (!casts.empty()) kernels::copy_segments(casts, *way_.cast, *way_.cast, device_);
  kernels::copy_segments(bytes, kU8, kU8, device_);
  kernels::copy_segments(others, whole_dtype_, whole_dtype_, device_);
  for (size_t i = 0; i < params_.size(); ++i) {
    if (way_.forms[i] == Form::kStored) weight_cache::restore(params_[i].whole);
    if (way_.forms[i] == Form::kFp8) {
      weight_cache::turn(params_[i].whole, params_[i].fp8->key());
    }
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
      const int64_t room = gradient_layout_.room(i);
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

}  // namespace tessera::distributed
