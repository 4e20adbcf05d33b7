#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/fp8/part_labels.h>

namespace tessera::kernels {

void write_part_label(const Tensor& label, const Tensor& scale, const Tensor& largest,
                      const Tensor& counts) {
  on_cuda<kernels::write_part_label>("part_label", label.device(), label, scale, largest, counts);
}

WholeOfParts read_part_labels(const Tensor& labels, int64_t first) {
  return on_cuda<kernels::read_part_labels>("part_label", labels.device(), labels, first);
}

}  // namespace tessera::kernels
