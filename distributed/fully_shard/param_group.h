// Parameters of one dtype and device that are sharded over the ranks of a group, and gathered and
// reduced as one flat buffer.
//
// Each parameter has two tensors:
//
//     shard   this rank's part, a DTensor: the object that the module was made with, which
//             parameters(), optimizers and checkpoints see. It has its bytes at all times.
//     whole   what ops read, all that the ranks hold between them: a leaf of its own, made once. It
//             stands in the modules' places while
//             their calls run, and has bytes from a gather to release().
//
// A gradient is added to the whole, reduced, and ends as the shard's `.grad`. Dtypes may differ: an
// all-gather sends the wholes' dtype, so a cast comes before it; reductions have their own dtype.
//
// [Note: sums that go on] The owner of a shard makes the sum over the ranks: it adds their
// contributions in rank order to its sum of earlier backwards. So N ranks with M micro-batches each
// add in the order of one process with N * M micro-batches: g0 + g1 + g2 + ...
//
// [Note: casts] Under autocast most weights are read as 16-bit copies only. Once all ranks agree on
// these weights, their shards are cast before the all-gather and arrive as autocast's copies
// (autograd/weight_cache.h), with the bits that a cast of the whole has; the whole then has no
// memory. Any other read gathers the unit in its stored dtype, on all ranks alike, and so from then
// on.
//
// [Note: versions] An all-gather does not count as a write: while nobody has written the shards, a
// whole that was resharded and gathered again has its old version, and graphs that saved it stay
// valid. After a write they refuse, as for any tensor.
//
// [Note: parts on the host] On a GPU the shards and their gradients may be in page-locked host
// memory (offload_policy.h); wholes are on the device. An all-gather begins with the upload of this
// rank's shard, cast if parameters are gathered cast. The host keeps casts until a shard is
// written. A reduction ends with the download of its results in the dtype of the reduction. They
// are added there to continued sums, element by element, as a GPU's stream does after a reduction,
// and are divided. Only sums over replicas, in the last micro-batch of a step, are completed on the
// device, to which the host's sums are uploaded before.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/core/tensor/tensor.h>
#include <tessera/distributed/backward/buffer.h>
#include <tessera/distributed/fully_shard/fp8_part.h>
#include <tessera/distributed/fully_shard/host_transfers.h>
#include <tessera/distributed/fully_shard/offload_policy.h>
#include <tessera/distributed/mesh/mesh.h>
#include <tessera/distributed/mesh/placement.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

struct ShardedParam {
  std::string name;             // dotted, in the model
  Tensor shard, whole;          // see above
  std::vector<Tensor*> places;  // of modules, more than one where it is tied
  int shard_dim = 0;            // the sharded one; evenly if it is not the first
  Shape shape = {};             // of the whole
  // The placements of a parameter that was a part before, along axes that stay as they are (tensor
  // parallelism). Then the whole is that part, and the shard a DTensor over these axes, too.
  std::optional<DTensorSpec> across = {};
  // The mesh along whose last axis it is sharded, if not along the unit's: its gradient is a
  // summand on more ranks than the unit's, which add it up and hold its parts.
  Mesh* mesh = nullptr;
  std::optional<DType> cast = {};     // see [Note: casts]: only its copies in this dtype are read
  std::shared_ptr<Fp8Part> fp8 = {};  // or its bytes
  uint32_t gathered_shard = 0;        // versions at the last gather, of the shard as it was read
  uint32_t gathered_whole = 0;
  uint32_t issued_shard = 0;  // of the shard in the gather under way
  bool trains() const { return whole.requires_grad(); }
};

// The ranks over which the parameters are sharded.
struct ShardRanks {
  Mesh* mesh = nullptr;       // of one axis, or of two, the first of which replicates
  Group* shards = nullptr;    // along the axis that cuts
  Group* replicas = nullptr;  // along the other, or none
  Group* batches = nullptr;   // those with batches of their own, if not all of the mesh
  int first = 0;  // the place of the first of them on the axis that cuts, see FlatShards
  Group& batch_ranks() const { return batches != nullptr ? *batches : mesh->group(); }
};

// The options of one group, as in MixedPrecisionPolicy. Absent: the parameters' own dtype.
struct GroupDTypes {
  std::optional<DType> param_dtype = {};   // of what ops read
  std::optional<DType> reduce_dtype = {};  // of gradients as they travel; absent: as they are kept
  std::optional<DType> gradient_dtype =
      {};  // of the shards' gradients, where it is wider than theirs
};

// The shard's object gets the bytes of `part` and its placement along the last axis of the mesh,
// beside those that it has along other axes.
void become_part(ShardedParam& param, const Tensor& part, Mesh& mesh, const Placement& placement);

class ParamGroup {
 public:
  virtual ~ParamGroup();
  ParamGroup(const ParamGroup&) = delete;
  ParamGroup& operator=(const ParamGroup&) = delete;

  const std::string& tag() const { return tag_; }  // "unit h.0": in the trace and in errors
  const ShardRanks& ranks() const { return ranks_; }
  // What the ranks have to agree on, for the tags of calls: requires_grad_changes.h.
  void set_changes(const std::string& changes) { call_tag_ = tag_ + changes; }
  std::vector<ShardedParam>& params() { return params_; }
  const std::vector<ShardedParam>& params() const { return params_; }
  bool trains() const { return !trained_.empty(); }
  bool keeps_wholes() const { return keeps_wholes_; }  // they are never resharded
  // Bytes of an all-gather's result, padding included, and of a rank's shard of the parameters.
  virtual int64_t whole_bytes() const {
    return ranks_.shards->size() * part_numel_ * size_of(whole_dtype_);
  }
  int64_t part_bytes() const { return part_numel_ * size_of(dtype_); }
  int64_t gradient_bytes() const;  // of a rank's part
  int64_t reduced_bytes() const {
    return ranks_.shards->size() * gradient_numel_ * size_of(reduce_dtype_);
  }
  // ---- see [Note: parts on the host]; 0 if they are on the device
  bool is_offloaded() const { return offload_ != OffloadPolicy::kNone; }
  OffloadPolicy offload() const { return offload_; }
  // Bytes that an all-gather uploads, that a reduction downloads (in a step's last micro-batch, in
  // an earlier one), and that the last one of a step uploads if there were others.
  virtual int64_t uploaded_bytes() const { return 0; }
  // Whether the all-gather of a backward begins on the host, too, because no earlier one has left a
  // part.
  virtual bool gathers_from_host_again() const { return false; }
  int64_t downloaded_bytes(bool is_last) const;
  int64_t continued_bytes() const;
  // The host waits until no transfer reads the shards any more: they may be written.
  void settle();
  DType dtype() const { return dtype_; }
  DType whole_dtype() const { return whole_dtype_; }
  // Follows changes of the shards' requires_grad, for the wholes and the reductions. Between
  // backwards. Returns whether anything has changed.
  bool follow_requires_grad();

  // Moves shards that got other memory (by a load, or an allocation after construction) into the
  // unit's own memory again.
  virtual void bring_home() = 0;

  // ---- Parameters. All ranks call these alike.
  // Issues the all-gather unless the wholes exist with the shards' values. `cast`: the dtype in
  // which autocast reads weights, if it is on; weights with other reads are gathered as well.
  void start_gather(std::optional<DType> cast = {});
  // Waits until the wholes can be read. No effect without an all-gather.
  void finish_gather();
  // Frees the wholes unless they are kept (ZeRO-1 and 2 keep them). `keep_part`: this rank's part
  // among fewer ranks stays, if there are such (RowShards), and the next all-gather is among these.
  void release(bool keep_part = false) noexcept;
  bool is_whole() const { return state_ == State::kWhole; }
  bool is_gathering() const { return state_ == State::kGathering; }
  bool is_current(std::optional<DType> cast = {}) const {
    return state_ == State::kWhole && is_as_gathered() && serves(cast);
  }
  bool is_as_gathered() const;  // the shards hold what they did at the last gather
  // For a read that no cast serves: the wholes get their memory, and this one keeps it always.
  virtual void gather_whole(size_t param);
  // Whether parameters may be gathered cast, and which reads autocast has.
  virtual bool may_cast() const { return false; }
  virtual bool may_travel_in_fp8() const { return false; }
  void set_cast(size_t param, std::optional<DType> cast) { params_[param].cast = cast; }
  // Gathers the fp8 bytes of `key`; none: does not.
  void set_fp8(size_t param, std::optional<WeightKey> key,
               const std::shared_ptr<Fp8Maxima>& maxima);
  // What stands in the modules' places.
  void show_wholes();
  void show_shards();
  // Whether wholes that are parts across other ranks say so, to readers outside of calls.
  void mark_parts(bool marked);
  // Throws AutogradError if a whole was written since it was gathered: the write would be lost.
  void check_unwritten() const;
  // Copies the wholes' own parts into the shards, to keep writes to unsharded parameters.
  void keep_written();

  // ---- Gradients, of one backward
  virtual void begin_backward();
  // Completes and discards what a backward that threw has left.
  void abandon() noexcept;
  // The same without waiting for running calls, which the others may never make.
  void let_go() noexcept;
  // The gradient of params()[i] of this rank has come, or zeros stand for it.
  void arrive() { --pending_; }
  bool is_complete() const { return pending_ == 0; }
  bool is_reducing() const { return reducing_; }
  void set_reducing() { reducing_ = true; }
  // Issues the reduction of the wholes' gradients, zeros if there are none, onto the sums of
  // earlier backwards. `zeros`: this rank contributes nothing. `all_reduce`: as wait_reduce().
  void start_reduce(bool zeros, bool all_reduce);
  // A call without data instead of a reduction, when no parameter here trains on this rank and the
  // others still have to agree on that.
  Work start_agreement();
  // Waits and frees what was sent. Issues the sum along the replicated axis with `all_reduce`: the
  // sums are then those of all ranks.
  void wait_reduce(bool all_reduce);
  // Waits for that. The mean of the sum.
  void finish_sum(double divisor);
  // The shard's `.grad` is its part of the sums.
  void hand_out(size_t param);
  void end_backward();

 protected:
  struct Options {
    std::string tag;
    ShardRanks ranks;
    GroupDTypes dtypes = {};
    bool keeps_wholes = false;
    OffloadPolicy offload = OffloadPolicy::kNone;
  };
  ParamGroup(Options options, std::vector<ShardedParam> params);

  enum class State : uint8_t { kSharded, kGathering, kWhole };

  Group& shards() const { return *ranks_.shards; }
  int shard_index() const { return ranks_.shards->rank(); }
  size_t num_trained() const { return trained_.size(); }
  ShardedParam& trained(size_t i) { return params_[trained_[i]]; }
  const ShardedParam& trained(size_t i) const { return params_[trained_[i]]; }
  virtual void issue_gather(std::optional<DType> cast) = 0;
  virtual void take_gathered() {}  // what has come lies where it is read
  // Whether what was gathered last is all that a reader in a scope of autocast needs.
  virtual bool serves(std::optional<DType>) const { return true; }
  virtual void free_wholes(bool keep_part) = 0;
  // Elements of a parameter that a rank sends.
  virtual int64_t room_of(size_t param) const { return numel_of(params_[param].shape); }
  // This rank's part of a whole, as the shard lies.
  virtual Tensor own_part(size_t param) const = 0;
  // [ranks x part] of the reduce dtype, in which this rank's gradients lie.
  virtual Tensor reduce_input(bool zeros) = 0;
  virtual void follow_trained() {}  // the list of trained parameters has changed
  // Memory for the sums, [part], without values.
  virtual Tensor new_sums();
  // Where the part of a trained parameter lies in the sums.
  virtual Tensor sum_of(const Tensor& sums, size_t trained) const = 0;
  // Memory for the shards, zeros: the device's or the host's.
  Tensor new_part() const;
  HostTransfers& transfers();
  // For a unit that was made on the meta device: where its parameters are now.
  void take_device(const Device& device);
  std::vector<uint32_t> shard_versions() const;
  // As whole and shard are made.
  void become_shard(ShardedParam& param, const Tensor& part, const Placement& placement) {
    become_part(param, part, *ranks_.mesh, placement);
  }
  // A shard that lies elsewhere lies in `home` from now on, a view of the unit's own memory.
  void move_home(ShardedParam& param, const Tensor& home);
  // A whole over these elements. What tensor parallelism has divided keeps name and marks.
  static Tensor leaf_over(const Tensor& elements, const ShardedParam& param);
  // Of a group of one rank, whose gradients do not travel: adds up those of copies (LocalParts).
  virtual void start_sum_of_copies(bool /*zeros*/) {}
  void note_handed_out(const Tensor& sums) { handed_out_ = sums.storage(); }
  CollectiveOptions on(Channel channel) const { return {.channel = channel, .tag = call_tag_}; }

  std::string tag_, call_tag_;
  ShardRanks ranks_;
  DType dtype_, whole_dtype_, reduce_dtype_, gradient_dtype_;
  Device device_;
  bool keeps_wholes_;
  OffloadPolicy offload_;
  bool alone_ = false;  // of one rank, whose shards are the wholes' elements
  std::vector<ShardedParam> params_;
  std::vector<size_t> trained_;  // positions of those that require grad
  Work gather_, replica_sum_;
  HostTransfers::EventPtr uploaded_;             // what the gather under way begins with
  int64_t part_numel_ = 0, gradient_numel_ = 0;  // of a rank's part

 private:
  // What the shards' `.grad` hold as one piece, where any has one.
  Tensor held_sums();
  Tensor new_held_sums();
  void add_own_gradients();
  void reduce_to_host(const Tensor& held, bool all_reduce);
  void take_sums_on_host();
  void wait_quietly() noexcept;

  State state_ = State::kSharded;
  size_t pending_ = 0;
  bool reducing_ = false;
  Work reduce_;
  Tensor input_, sums_;
  Tensor received_;  // [part], where sums travel in another dtype than they are kept in
  bool adds_received_ = false;
  // see [Note: parts on the host]: the sums, or what came in the dtype that it was reduced in.
  Tensor host_sums_, host_received_;
  HostTransfers::EventPtr reduced_, downloaded_;
  std::shared_ptr<HostTransfers> transfers_;
  std::weak_ptr<Storage> handed_out_;
  bool sums_of_replicas_ = false;  // what was handed out is the sum along the replicated axis, too
};

// Rows: every parameter is cut along dimension 0 into chunks of ceil(rows / ranks), as Shard(0)
// says, or along another one evenly, and a gather is unpacked into the wholes. The contract of
// fully_shard().
class RowShards final : public ParamGroup {
 public:
  // The parameters' elements are cut here: `params` have places and names, and the whole tensors as
  // `shard`. `near`: fewer ranks, among which the wholes are kept in parts between forward and
  // backward; null: they are not.
  RowShards(std::string tag, const ShardRanks& ranks, std::vector<ShardedParam> params,
            const GroupDTypes& dtypes, std::shared_ptr<Group> near = nullptr,
            OffloadPolicy offload = OffloadPolicy::kNone);
  ~RowShards() override;

  void bring_home() override;
  int64_t whole_bytes() const override;
  int64_t uploaded_bytes() const override;
  bool gathers_from_host_again() const override {
    return offload_ == OffloadPolicy::kParameters && near_ == nullptr;
  }
  void gather_whole(size_t param) override;
  bool may_cast() const override { return whole_dtype_ == dtype_ && dtype_ == kF32; }
  bool may_travel_in_fp8() const override { return may_cast() && !is_offloaded(); }

 private:
  // How a rank's part travels.
  enum class Form : uint8_t { kStored, kCast, kFp8 };
  struct Travel {
    std::optional<DType> cast = {};     // of autocast, where a parameter has a form for that
    std::vector<Form> forms = {};       // of each parameter
    std::vector<int64_t> offsets = {};  // of the parameters, in bytes
    std::vector<uint32_t> scales = {};  // versions, of the parameters in fp8
    int64_t labels = 0;                 // offset of theirs, one behind the other
    int64_t bytes = 0;
    DType dtype = kF32;  // bytes, where there are several
    bool operator==(const Travel&) const = default;
  };
  int64_t room_of(size_t param) const override { return layout_.local_slice(param, 0).numel; }
  DType dtype_in(const Travel& travel, size_t param) const;
  void pack_fp8(const Tensor& target);
  kernels::Quantized arrived_fp8(size_t param, int64_t label) const;
  void issue_gather(std::optional<DType> cast) override;
  void take_gathered() override;
  bool serves(std::optional<DType> cast) const override;
  void free_wholes(bool keep_part) override;
  Travel travel(std::optional<DType> cast) const;
  void gather_from(const Tensor& part, int64_t numel);
  void pack(const Tensor& part, const Tensor& target, const Device& device);
  const Tensor& part_to_upload(int64_t numel);
  Tensor released(const Shape& shape) const;
  Tensor own_part(size_t param) const override;
  Tensor reduce_input(bool zeros) override;
  Tensor sum_of(const Tensor& sums, size_t trained) const override;
  void follow_trained() override;
  Tensor rows_of(const Tensor& whole, size_t param) const;
  Tensor part_of(const Tensor& flat, const FlatLayout& layout, size_t at, size_t param) const;
  // Calls piece(offset in a rank's part, offset in the whole, elements) for what rank r holds.
  template <class Piece>
  void for_pieces(const FlatLayout& layout, size_t at, size_t param, int r,
                  const Piece& piece) const;
  void take_memory(const Device& device);

  FlatLayout layout_, gradient_layout_;
  Travel way_;  // of the last gather
  std::shared_ptr<Group> near_;
  Tensor near_part_;  // [ranks x part / near ranks]: of the last gather, for the next one
  Tensor part_;       // [part]: the shards one behind the other
  // For parts on the host: the device's copy (OffloadPolicy::kOptimizer), and the parts in the form
  // in which they are sent, if that differs; each is of the versions in its vector.
  Tensor device_part_, packed_;
  std::vector<uint32_t> device_part_versions_, packed_versions_;
  Travel packed_way_;
  HostTransfers::EventPtr packed_upload_;
  Tensor gathered_;  // [ranks x part], while a gather is under way
};

// How parameters lie one behind the other in a run that so many ranks divide.
struct FlatRun {
  std::vector<int64_t> offsets;
  int64_t part_numel = 0;
  FlatRun(const std::vector<ShardedParam>& params, int ranks, int64_t alignment);
};

// One run of memory: the parameters lie one behind the other and the run is cut into equal parts,
// wherever the cuts fall (FlatShard). The wholes are views of it and a gather is in place, so that
// nothing is packed or unpacked. For ZeRO-1 and 2, which keep the wholes, for a group of one rank,
// where wholes and shards are the same elements, and for stages of a pipeline: their ranks are a
// stretch of an axis (ShardRanks::first), on which every other rank has nothing of the parameters.
class FlatShards final : public ParamGroup {
 public:
  // `rows`: of one rank, whose parts are whole: placed Shard(0) as RowShards are.
  // `local_sums`: gradients add up in this rank's own whole gradients until they are reduced
  // (ZeRO-1).
  // `offload`: kNone or kOptimizer; not with `rows`.
  // `keeps_wholes`: false: release() frees them; with `local_sums` and `rows` false, not offloaded.
  FlatShards(std::string tag, const ShardRanks& ranks, std::vector<ShardedParam> params,
             const GroupDTypes& dtypes, bool rows, bool local_sums,
             OffloadPolicy offload = OffloadPolicy::kNone, bool keeps_wholes = true);
  ~FlatShards() override;

  void bring_home() override;
  int64_t uploaded_bytes() const override { return is_offloaded() ? part_bytes() : 0; }

  void begin_backward() override;

 private:
  void issue_gather(std::optional<DType> cast) override;
  void free_wholes(bool keep_part) override;
  Tensor own_part(size_t param) const override;
  Tensor reduce_input(bool zeros) override;
  Tensor new_sums() override;
  Tensor sum_of(const Tensor& sums, size_t trained) const override;
  void follow_trained() override;
  std::pair<int64_t, int64_t> run_of(size_t param) const;
  int64_t place_in_part(size_t param) const;
  Tensor home_of(size_t param) const;
  void take_memory(const Device& device);

  bool rows_;
  std::vector<int64_t> offsets_;  // of the parameters in the run
  Tensor run_;                    // [ranks x part]
  Tensor part_;       // [part], of the shards, where they lie on the host or the run is freed
  Tensor gradients_;  // the same of the gradients, where they add up locally
  std::vector<Tensor> homes_;  // of the wholes' gradients in it, one for each parameter
};

}  // namespace tessera::distributed
