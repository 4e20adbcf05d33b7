#include <tessera/core/kernels/fp8/scale_history.h>

#include <cmath>

#include <tessera/core/cuda/launch.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/fp8/rules.h>

namespace tessera::kernels {
namespace {

constexpr int kThreads = 128;

struct Roll {
  float* rows;              // (steps, operands)
  const int64_t* position;  // rows there are, the newest one
  const float* maxima;      // (operands)
  float* scales;            // (operands)
  int64_t steps, operands;
  double largest, grad_largest;  // of the formats, divided by 2^margin
  bool of_newest, power_of_two;
};

struct LargerNumber {
  TS_DEVICE float operator()(float a, float b) const { return a > b ? a : b; }
};

// Whether anything was noted: the same in all threads. `slot`: shared memory for 32 values.
TS_DEVICE bool any_noted(const float* maxima, int64_t operands, uint32_t* slot) {
  uint32_t noted = 0;
  for (int64_t i = threadIdx.x; i < operands; i += kThreads) noted |= maxima[i] != 0 ? 1u : 0u;
  return gpu::block_reduce(
             noted, [](uint32_t a, uint32_t b) { return a | b; }, 0u, slot) != 0;
}

// A block for each operand.
__global__ void __launch_bounds__(kThreads) roll_scales_kernel(Roll roll) {
  TS_SHARED(uint32_t, slot, gpu::kWarp);
  TS_SHARED(float, largest_slot, gpu::kWarp);
  if (!any_noted(roll.maxima, roll.operands, slot)) return;
  const int64_t i = blockIdx.x, before = roll.position[0];
  const int64_t count = before + 1 < roll.steps ? before + 1 : roll.steps;
  const int64_t newest = before == 0 ? 0 : (roll.position[1] + 1) % roll.steps;
  const float maximum = roll.maxima[i];
  const bool finite = rules::magnitude_bits(maximum) < rules::kInfinityBits;
  float amax = finite ? maximum : 0;
  if (!roll.of_newest) {
    for (int64_t row = threadIdx.x; row < count; row += kThreads) {
      if (row != newest) amax = LargerNumber{}(amax, roll.rows[row * roll.operands + i]);
    }
    amax = gpu::block_reduce(amax, LargerNumber{}, 0.0f, largest_slot);
  }
  if (threadIdx.x != 0) return;
  roll.rows[newest * roll.operands + i] = finite ? maximum : 0;
  if (amax > 0) {
    roll.scales[i] =
        rules::scale_of(amax, i % 3 == 2 ? roll.grad_largest : roll.largest, roll.power_of_two);
  }
}

// When all operands have read the maxima.
__global__ void __launch_bounds__(kThreads)
    end_roll_kernel(float* maxima, int64_t* position, int64_t steps, int64_t operands) {
  TS_SHARED(uint32_t, slot, gpu::kWarp);
  if (!any_noted(maxima, operands, slot)) return;
  if (threadIdx.x == 0) {
    position[1] = position[0] == 0 ? 0 : (position[1] + 1) % steps;
    position[0] = position[0] + 1 < steps ? position[0] + 1 : steps;
  }
  for (int64_t i = threadIdx.x; i < operands; i += kThreads) maxima[i] = 0;
}

double largest_of(DType format, int margin) {
  return std::ldexp(format == kF8E4M3 ? rules::kLargestOf<f8e4m3> : rules::kLargestOf<f8e5m2>,
                    -margin);
}

void roll_scales_cuda(const ScaleHistory& history, const ScaleRules& rules) {
  const int64_t steps = history.rows.size(0), operands = history.rows.size(1);
  if (operands == 0) return;
  const Roll roll{.rows = history.rows.data_as<float>(),
                  .position = history.position.data_as<int64_t>(),
                  .maxima = history.maxima.data_as<float>(),
                  .scales = history.scales.data_as<float>(),
                  .steps = steps,
                  .operands = operands,
                  .largest = largest_of(rules.format, rules.margin),
                  .grad_largest = largest_of(rules.grad_format, rules.margin),
                  .of_newest = rules.of_newest,
                  .power_of_two = rules.power_of_two};
  gpu::launch({.name = "roll_scales",
               .grid = static_cast<unsigned>(operands),
               .block = kThreads,
               .traffic = {.reads = history.rows.nbytes() + 4 * operands + 16,
                           .writes = 8 * operands,
                           .at_most = true}},
              roll_scales_kernel, roll);
  gpu::launch(
      {.name = "roll_scales",
       .block = kThreads,
       .traffic = {.reads = 4 * operands + 16, .writes = 4 * operands + 16, .at_most = true}},
      end_roll_kernel, history.maxima.data_as<float>(), history.position.data_as<int64_t>(), steps,
      operands);
}

}  // namespace

void register_scale_history() { cuda_kernel<roll_scales> = roll_scales_cuda; }

}  // namespace tessera::kernels
