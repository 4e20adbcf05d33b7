// A weight's shard for all-gathers if only fp8 products read it: a byte an element.
//
// [Note: fp8 gathers] If one scale serves the whole weight (autograd/fp8/weight.h), bytes of a
// shard that were made with that scale are those of the whole. So a rank quantizes its own shard,
// once for new values or a new scale, and keeps the bytes; an all-gather sends them unchanged, and
// what arrives is the copy that the products read, in the weight cache (autograd/weight_cache.h).
// The whole then has no values, as with casts ([Note: casts] in param_group.h), and any other read
// gathers the unit in its stored dtype. That lasts until the weight is written next, so that a step
// in which some call could not run in fp8 has what its backward reads, and one such call, or an
// evaluation in another precision, does not end the gathering of bytes for good.
//
// The scale of a recipe with delayed scales is known before. Another one needs the largest
// magnitude of the whole: at the first all-gather after a step the ranks exchange those of all such
// weights of the model, in one reduction of four bytes a weight.
//
// The bytes of each shard are followed by a label: the scale that they were made with, and the
// counts of quantizing the shard. So all ranks know the counts of the whole, and a rank whose scale
// differs is a DistributedError on all of them instead of a wrong product.
//
// On a GPU maxima, scales and labels stay on the device, as no step waits for them: a weight whose
// shards have different scales gets the scale NaN there. The copy by columns, which products read
// as well, is made from the gathered bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/autograd/fp8/weight.h>
#include <tessera/autograd/weight_cache.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/distributed/transport/group.h>
#include <tessera/nn/module.h>

namespace tessera::distributed {

// What runs in fp8 among the Linears of these modules and below.
Fp8Places fp8_places_in(const std::vector<nn::ModuleBase*>& modules);

// The largest magnitudes of sharded weights.
class Fp8Maxima {
 public:
  explicit Fp8Maxima(Group& ranks) : ranks_(&ranks) {}
  // `part`: this rank's shard. Returns the weight's number.
  size_t add(const Tensor& part);
  // The maximum of the whole; infinite if it has a NaN. Collective if the shard was written since:
  // then those of all weights are updated, in one reduction.
  float of(size_t weight);
  // The same on a GPU, where it stays: f32 [1].
  Tensor on_gpu(size_t weight);

 private:
  struct Weight {
    Tensor part;
    uint32_t version = 0;  // of which the maximum is
    bool is_known = false;
    float own = 0, all = 0;
    bool is_current() const { return is_known && version == part.version(); }
  };
  Group* ranks_;
  std::vector<Weight> weights_;
  Tensor own_, all_;  // of a GPU: f32 [weights]
};

// The label that follows the bytes of a shard.
struct Fp8Label {
  float scale = 1;
  uint32_t largest = 0;  // the bits of the largest magnitude, which order as magnitudes
  int64_t saturated = 0, underflown = 0;
};

class Fp8Part {
 public:
  // `room`: elements of a shard that are sent, the same on all ranks. `maxima`: for a key without a
  // scale.
  Fp8Part(const Tensor& part, int64_t room, WeightKey key, std::shared_ptr<Fp8Maxima> maxima);

  const WeightKey& key() const { return key_; }
  // This rank's bytes, u8[room], quantized now if the shard or the scale is new. Collective as
  // Fp8Maxima::of().
  const Tensor& bytes();
  // The label of the last bytes(): on the host; on a GPU u8 [sizeof(Fp8Label)].
  const Fp8Label& label() const { return label_; }
  const Tensor& label_on_gpu() const { return label_on_gpu_; }
  // The version of a given scale; 0 for others.
  uint32_t scale_version() const { return key_.scale.defined() ? key_.scale.version() : 0; }

  // Whether it is gathered in its stored dtype, see [Note: fp8 gathers].
  bool rests() const { return rests_ && resting_version_ == part_.version(); }
  void rest();

 private:
  void make();
  void make_on_gpu();
  Tensor part_;
  int64_t room_;
  WeightKey key_;
  std::shared_ptr<Fp8Maxima> maxima_;
  size_t number_ = 0;  // in them
  Tensor bytes_;
  Fp8Label label_;
  Tensor label_on_gpu_;
  uint32_t version_ = 0, made_with_ = 0;  // of the part and the scale, of which the bytes are
  bool rests_ = false;
  uint32_t resting_version_ = 0;
};

// The counts of quantizing the whole, on `device`, without its values. DistributedError if ranks
// have made their bytes with different scales; `where` and `name` are for that.
kernels::Quantized fp8_whole(std::span<const Fp8Label> labels, const WeightKey& key,
                             const Device& device, std::string_view where, const std::string& name);
// The same on a GPU. labels: u8 [ranks, bytes], each rank's at `first`.
kernels::Quantized fp8_whole(const Tensor& labels, int64_t first, const WeightKey& key);

}  // namespace tessera::distributed
