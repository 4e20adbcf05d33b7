#include <tessera/data/collate.h>

#include <cstring>

#include <tessera/core/error.h>

namespace tessera::data {
namespace {

// Copies the elements of a strided tensor to row-major memory, the innermost dimension in a loop.
void copy_strided(const char* source, const Shape& shape, const Shape& strides, int dim,
                  int64_t width, char*& out) {
  if (dim == shape.size()) {
    std::memcpy(out, source, static_cast<size_t>(width));
    out += width;
    return;
  }
  for (int64_t i = 0; i < shape[dim]; ++i) {
    copy_strided(source + i * strides[dim] * width, shape, strides, dim + 1, width, out);
  }
}

}  // namespace

Tensor stack_examples(std::span<const Tensor> tensors) {
  constexpr std::string_view kWhere = "stack_examples";
  TS_CHECK(!tensors.empty(), kWhere, "needs at least one tensor; got none.");
  const Tensor& first = tensors.front();
  TS_CHECK_DEVICE(first.device().is_cpu(), kWhere, "examples lie on the CPU; the first is ", first,
                  "; move the batch, not its examples.");
  Shape shape = first.shape();
  shape.insert(0, static_cast<int64_t>(tensors.size()));
  for (size_t i = 0; i < tensors.size(); ++i) {
    const Tensor& tensor = tensors[i];
    TS_CHECK_SHAPE(tensor.shape() == first.shape(), kWhere,
                   "examples of a batch have one shape; the first is ", first, " and number ", i,
                   " is ", tensor, "; pad them or give a Collate of your own.");
    TS_CHECK_DTYPE(tensor.dtype() == first.dtype(), kWhere,
                   "examples of a batch have one dtype; the first is ", first, " and number ", i,
                   " is ", tensor, "; convert them with to(dtype).");
    TS_CHECK_DEVICE(tensor.device().is_cpu(), kWhere, "examples lie on the CPU; number ", i, " is ",
                    tensor, "; move the batch, not its examples.");
  }
  Tensor out = raw::empty(shape, first.dtype());
  char* next = static_cast<char*>(out.data());
  if (first.numel() == 0) return out;
  for (const Tensor& tensor : tensors) {
    if (tensor.is_contiguous()) {
      std::memcpy(next, tensor.data(), static_cast<size_t>(tensor.nbytes()));
      next += tensor.nbytes();
    } else {
      copy_strided(static_cast<const char*>(tensor.data()), tensor.shape(), tensor.strides(), 0,
                   size_of(tensor.dtype()), next);
    }
  }
  return out;
}

}  // namespace tessera::data
