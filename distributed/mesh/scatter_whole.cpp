#include <tessera/distributed/mesh/scatter_whole.h>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/error.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/mesh/dtensor_inputs.h>
#include <tessera/distributed/transport/collectives.h>

namespace tessera::distributed {

Tensor scatter_whole(const Tensor& whole, const Tensor& target, Group& group) {
  constexpr const char* kScatterWhole = "scatter_whole";
  const NoGradGuard no_grad;
  const bool parts = is_dtensor(target);
  const Shape& shape = parts ? global_shape(target) : target.shape();
  TS_CHECK_SHAPE(whole.shape() == shape, kScatterWhole, "the whole is ", whole,
                 ", and what it goes into ", target, "; give one of its shape");
  const Device device = target.is_meta() ? kCpu : target.device();
  const Tensor given = raw::alias(whole);
  if (!parts) {
    const Tensor all = group.rank() == 0 ? contiguous(given.to(device))
                                         : raw::empty(whole.shape(), whole.dtype(), device);
    group.broadcast(all, 0, {.channel = Channel::kParameter, .waits = true}).wait();
    return all;
  }
  const DTensorSpec& spec = spec_of(target);
  TS_CHECK_AS(ConfigError,
              spec.mesh->size() == group.size() && spec.mesh->coordinate() == group.rank(),
              kScatterWhole, "the target is ", target, ", whose ranks are not the ", group.size(),
              " of the group in their order; place it on the mesh of them all");
  // Of who does not give, the shape counts: one element stands for all.
  const Tensor source =
      group.rank() == 0
          ? given.to(device)
          : raw::as_strided(raw::empty({1}, whole.dtype(), device), whole.shape(),
                            Shape::filled(static_cast<int>(whole.shape().size()), 0), 0);
  return from_local(scatter_from_first(source, spec), *spec.mesh, spec.placements,
                    {.shape = spec.shape});
}

}  // namespace tessera::distributed
