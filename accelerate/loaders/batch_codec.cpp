#include <tessera/accelerate/loaders/batch_codec.h>

#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>

namespace tessera::accelerate {

void ByteWriter::tensor(const Tensor& tensor) {
  number(tensor.defined());
  if (!tensor.defined()) return;
  TS_CHECK_AS(UnsupportedError, tensor.device().is_cpu(), "BatchCodec",
              "batches travel from the CPU; given ", tensor, "; move them after the loader.");
  number(tensor.dtype());
  number(tensor.dim());
  for (int d = 0; d < tensor.dim(); ++d) number(tensor.size(d));
  const Tensor dense = tensor.detach().contiguous();
  raw(dense.data(), static_cast<size_t>(dense.nbytes()));
}

void ByteWriter::text(const std::string& text) {
  number(text.size());
  raw(text.data(), text.size());
}

void ByteReader::raw(void* data, size_t size) {
  TS_CHECK_AS(FormatError, size <= bytes_.size(), "BatchCodec", "needs ", size, " more bytes, has ",
              bytes_.size(), "; the ranks' batches are of different types.");
  if (size > 0) std::memcpy(data, bytes_.data(), size);
  bytes_ = bytes_.subspan(size);
}

Tensor ByteReader::tensor() {
  if (!number<bool>()) return {};
  const auto dtype = number<DType>();
  const auto dims = number<int>();
  Shape shape;
  for (int d = 0; d < dims; ++d) shape.push_back(number<int64_t>());
  const Tensor result = tessera::raw::empty(shape, dtype);
  raw(result.data(), static_cast<size_t>(result.nbytes()));
  return result;
}

std::string ByteReader::text() {
  std::string text(number<size_t>(), '\0');
  raw(text.data(), text.size());
  return text;
}

void detail::cannot_travel(const std::type_info& type) {
  TS_THROW(UnsupportedError, "BatchCodec", "a batch holds a ", type.name(),
           ", which cannot be sent to another rank; give it visit_tensors or set dispatch_batches "
           "= false.");
}

}  // namespace tessera::accelerate
