#include <tessera/distributed/transport/backend_one_device.h>

#include <tessera/core/cuda/graph.h>
#include <tessera/core/error.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::distributed {
namespace {

Tensor tensor_at(const void* data, int64_t count, DType dtype, const Device& device) {
  auto storage =
      std::make_shared<Storage>(const_cast<void*>(data), count * size_of(dtype), device, [] {});
  return Tensor(new TensorImpl(std::move(storage), {count}, {1}, 0, dtype));
}

// From left to right; 16-bit floating types are added in f32 and rounded once.
void reduce(std::span<const void* const> inputs, void* out, int64_t count, DType dtype, ReduceOp op,
            const Device& device) {
  const DType common = is_floating(dtype) && size_of(dtype) == 2 ? kF32 : dtype;
  const auto input = [&](size_t r) { return tensor_at(inputs[r], count, dtype, device); };
  const Tensor result =  // not input 0 itself: `out` may be any of them
      common == dtype ? kernels::copy(input(0)) : kernels::convert(input(0), common);
  for (size_t r = 1; r < inputs.size(); ++r) {
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kMean:
        kernels::binary_into<fn::Add>(result, result, input(r), {}, common);
        break;
      case ReduceOp::kMax:
        kernels::binary_into<fn::Maximum>(result, result, input(r), {}, common);
        break;
      case ReduceOp::kMin:
        kernels::binary_into<fn::Minimum>(result, result, input(r), {}, common);
        break;
      case ReduceOp::kProduct:
        kernels::binary_into<fn::Mul>(result, result, input(r), {}, common);
        break;
    }
  }
  if (op == ReduceOp::kMean) {
    kernels::binary_into<fn::Mul>(result, result, 1.0 / static_cast<double>(inputs.size()), {},
                                  common);
  }
  kernels::copy_into(tensor_at(out, count, dtype, device), result);
}

}  // namespace

void note_queued(Call& call) {
  TS_CHECK_AS(UnsupportedError, gpu::Capture::current() == nullptr, "graph capture",
              "ranks that share a GPU cannot capture their collectives, as a graph is of one "
              "rank's streams; leave graphs off (cuda_graphs = false)");
  const gpu::CurrentDevice scope(call.device.index);
  auto caller = gpu::current_stream_handle(call.device.index);
  auto begin = gpu::record_event(*caller);
  call.queued = std::make_shared<QueuedCall>(
      QueuedCall{call.device, std::move(caller), std::move(begin), nullptr});
}

void wait_for(const QueuedCall& call) {
  gpu::wait_event(*gpu::current_stream_handle(call.device.index), *call.end);
}

bool has_ended(const QueuedCall& call) { return gpu::event_done(*call.end); }

void let_go(const QueuedCall& call) noexcept {
  try {
    if (call.end) gpu::wait_event(*call.caller, *call.end);
  } catch (...) {  // the device is lost, and with it what could be overwritten
  }
}

void queue_transfer(std::span<const CallPtr> calls, const std::shared_ptr<gpu::StreamHandle>& side,
                    const std::function<void(const CopyParts&, const ReduceParts&)>& carry_out) {
  const Device device = calls[0]->device;
  const gpu::CurrentDevice scope(device.index);
  const gpu::CurrentStream on_side(side);
  for (const CallPtr& call : calls) gpu::wait_event(*side, *call->queued->begin);
  carry_out(
      [&](const Part& to, const Part& from) {
        gpu::copy_bytes(to.data, device, from.data, device, static_cast<size_t>(from.bytes),
                        /*non_blocking=*/true);
      },
      [&](std::span<const void* const> inputs, void* out, int64_t count, DType dtype, ReduceOp op) {
        reduce(inputs, out, count, dtype, op, device);
      });
  const std::shared_ptr<gpu::EventHandle> end = gpu::record_event(*side);
  for (const CallPtr& call : calls) call->queued->end = end;
}

}  // namespace tessera::distributed
