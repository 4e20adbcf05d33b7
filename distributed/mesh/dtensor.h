// DTensor: a tensor of which each rank of a mesh holds a shard. It stores parameters, gradients and
// states; computations take the shard or the whole out first.
//
//     Mesh mesh(world(), {{"dp", 4}});
//     const Tensor weight = distribute_tensor(randn({12, 4}), mesh, {Shard(0)});  // of rank 0
//     weight.set_requires_grad();
//     Tensor y = matmul(x, full_tensor(weight));  // all_gather; the gradient is a shard again
//
// A DTensor is a Tensor with a TensorPlacement (placement.h). Its own geometry, and so shape(),
// numel(), data() and what kernels see, is that of the local shard; global_shape() is that of the
// whole.
//
// [Note: what works on a DTensor]
// - The functions below; requires_grad, grad(), zero_grad(), detach(), version(); inputs of grad().
//   The `.grad` of a leaf is a DTensor of its placements (replicated where the leaf is partial),
//   but for a main_grad, which is as its owner made it. Hooks get plain parts.
// - Printing and error messages, which show its placements.
// - StateDict with clone(), and load_state_dict of a module or an optimizer, from DTensors of the
//   same placements or from whole tensors, of which each rank takes its part.
// - Checkpoints (save_state, load_state), from any placements into any; save_model, load_model and
//   full_state_dict(), but not for a Partial.
// - Optimizers. States become DTensors of the same placements, and the update is element by
//   element; Muon brings each matrix together on one rank. A Partial is no parameter
//   (UnsupportedError).
// - clip_grad_value, and clip_grad_norm, which takes the norm of the whole gradients on all ranks.
// - A GradScaler on the host that agrees among the ranks (set_agreement).
// - EMA, whose averages have the placements of the parameters (not for a Partial).
// Everything else that would take a part for the whole throws UnsupportedError: every op, item(),
// to_vector(), backward() from a DTensor, retain_grad(), collectives, replicate(),
// save_safetensors, save_weights, to_dlpack and set_data() of a whole tensor. data() and storage()
// give the part without a check, and so do kernels and raw::.
//
// A DTensor refers to its mesh, which must outlive it. All ranks of the mesh must call a collective
// function alike.
#pragma once

#include <optional>
#include <vector>

#include <tessera/core/tensor/tensor.h>
#include <tessera/distributed/mesh/placement.h>

namespace tessera::distributed {

// Distributes the values of rank 0 of the mesh (the other ranks pass a tensor of the same shape and
// dtype): scattered along axes that shard, broadcast along those that replicate. The result has its
// own memory and is a leaf that requires grad if the tensor did; AutogradError for a tensor with a
// gradient history. Collective: shapes and dtypes are compared (ShapeError, DTypeError on every
// rank), then one call for each axis; for meta tensors nothing is sent and the shard is meta.
// ConfigError for placements as DTensorSpec::checked says, and for a Partial.
Tensor distribute_tensor(const Tensor& tensor, Mesh& mesh, const Placements& placements);

struct FromLocalOptions {
  // Compares shapes, dtypes and the copies of replicated axes among the ranks: collective, with as
  // much traffic as a broadcast. ShapeError, DTypeError or ValueError on every rank.
  bool run_check = false;
  // The shape of the whole; required for uneven shards and for a FlatShard (else ConfigError).
  std::optional<Shape> shape = {};
};
// The DTensor whose shard on this rank is `local`, with which it shares memory. Without run_check
// nothing is communicated. Without a shape all shards are assumed to be as large as this one.
// ShapeError if `local` is not the shard of `shape` that this rank holds. Its gradient is the local
// shard of the DTensor's.
Tensor from_local(const Tensor& local, Mesh& mesh, const Placements& placements,
                  const FromLocalOptions& options = {});

struct ToLocalOptions {
  // The placements of the result's gradient. Absent: the DTensor's (replicated where it is
  // partial). If ranks use a replicated tensor in different ways, each has a summand of its
  // gradient: pass Partial() for that axis, or Replicate() if all use it alike. to_local() of one
  // that requires grad must set it (AutogradError); full_tensor() assumes that all use it alike.
  std::optional<Placements> grad_placements = {};
};
// This rank's shard as a plain tensor that shares memory. ConfigError for gradient placements under
// which the shard would have another shape. Backward: nothing, or an all_reduce along axes whose
// gradient is declared Partial.
Tensor to_local(const Tensor& dtensor, const ToLocalOptions& options = {});

// Declares once the placements of the gradient of what is taken out of a DTensor, for to_local()
// without grad_placements and for fully_shard(), which adds up what is Partial() along with the
// gradients of its own ranks. ConfigError for placements that to_local() does not take. Holds for
// this tensor, not for tensors made of it.
void set_grad_placements(const Tensor& dtensor, const Placements& placements);
// nullptr if nothing is declared, and for a plain tensor.
const Placements* grad_placements_of(const Tensor& dtensor);

// The whole tensor on every rank, plain; differentiable. With a gradient declared Partial a sharded
// tensor's gradient comes by reduce_scatter. Collective, and so is its backward if the table of
// redistribute.h says so.
Tensor full_tensor(const Tensor& dtensor, const ToLocalOptions& options = {});

// The same tensor with other placements on the same mesh; differentiable. Collectives: see the
// table in redistribute.h. Collective, its backward too.
Tensor redistribute(const Tensor& dtensor, const Placements& placements);

bool is_dtensor(const Tensor& tensor);
// These take a DTensor; ValueError for another tensor.
const DTensorSpec& spec_of(const Tensor& dtensor);
const Placements& placements_of(const Tensor& dtensor);
Mesh& mesh_of(const Tensor& dtensor);
const Shape& global_shape(const Tensor& dtensor);
Box local_box(
    const Tensor& dtensor);  // this rank's part of the whole; not for a FlatShard or several blocks
std::vector<Box> local_boxes(const Tensor& dtensor);  // for any placements, see DTensorSpec
// "DTensor f32[12, 4] on mesh(dp=4): [Shard(0)], local [3, 4]"; describe() of another tensor.
std::string describe(const Tensor& tensor);

}  // namespace tessera::distributed
