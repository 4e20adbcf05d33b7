#include <tessera/core/kernels/fp8/part_labels.h>

#include <tessera/core/cuda/launch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/fp8/rules.h>

namespace tessera::kernels {
namespace {

constexpr const char* kLabel = "part_label";

struct PartLabel {
  float scale, largest;
  long long saturated, underflown;
};
static_assert(sizeof(PartLabel) == kPartLabelBytes);

// One thread: a few numbers.
__global__ void write_label_kernel(PartLabel* label, const float* scale, const float* largest,
                                   const long long* counts) {
  label->scale = *scale;
  label->largest = *largest;
  label->saturated = counts[0];
  label->underflown = counts[1];
}

__global__ void read_labels_kernel(const unsigned char* labels, int64_t stride, int64_t parts,
                                   float* scale, float* inverse, float* largest,
                                   long long* counts) {
  float all = 0, most = 0;
  bool same = true;
  long long saturated = 0, underflown = 0;
  for (int64_t part = 0; part < parts; ++part) {
    const PartLabel& label = *reinterpret_cast<const PartLabel*>(labels + part * stride);
    const float own = label.scale;
    if (own == 0) continue;
    if (all == 0) all = own;
    same = same && own == all;
    const float magnitude = label.largest;
    most = magnitude > most ? magnitude : most;
    saturated += label.saturated;
    underflown += label.underflown;
  }
  if (!same) all = tessera::detail::float_of(0x7fc00000u);
  *scale = all;
  *inverse = 1 / all;
  *largest = most;
  counts[0] = saturated;
  counts[1] = underflown;
}

void write_part_label_cuda(const Tensor& label, const Tensor& scale, const Tensor& largest,
                           const Tensor& counts) {
  gpu::launch({.name = kLabel, .traffic = {.reads = kPartLabelBytes, .writes = kPartLabelBytes}},
              write_label_kernel, static_cast<PartLabel*>(label.data()), scale.data_as<float>(),
              largest.data_as<float>(), static_cast<const long long*>(counts.data()));
}

WholeOfParts read_part_labels_cuda(const Tensor& labels, int64_t first) {
  const Device device = labels.device();
  const int64_t parts = labels.size(0), stride = labels.size(1);
  const WholeOfParts whole{.scale = raw::empty({1, 1}, kF32, device),
                           .inverse = raw::empty({1, 1}, kF32, device),
                           .largest = raw::empty({1}, kF32, device),
                           .counts = raw::empty({2}, kI64, device)};
  gpu::launch({.name = kLabel, .traffic = {.reads = kPartLabelBytes * parts, .writes = 28}},
              read_labels_kernel, static_cast<const unsigned char*>(labels.data()) + first, stride,
              parts, whole.scale.data_as<float>(), whole.inverse.data_as<float>(),
              whole.largest.data_as<float>(), static_cast<long long*>(whole.counts.data()));
  return whole;
}

}  // namespace

void register_part_labels() {
  cuda_kernel<write_part_label> = write_part_label_cuda;
  cuda_kernel<read_part_labels> = read_part_labels_cuda;
}

}  // namespace tessera::kernels
