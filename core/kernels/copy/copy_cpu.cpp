#include <algorithm>
#include <cmath>
#include <cstring>

#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/common/overlap.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/copy/copy_loops.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels {
namespace {

constexpr int64_t kCopyGrain = 32768;
constexpr int64_t kCopyTile = 1024;

// The innermost dimension of the target runs along a row of it, and another one is where the source
// lies in order: moved in tiles, as each side alone would touch a cache line an element.
bool is_transpose(const Walk& walk, int& source_inner) {
  const int inner = walk.dims - 1;
  if (walk.dims < 2 || walk.strides[0][inner] != 1 || walk.strides[1][inner] <= 1 ||
      walk.sizes[inner] < 4) {
    return false;
  }
  for (source_inner = inner - 1; source_inner >= 0; --source_inner) {
    if (walk.strides[1][source_inner] == 1) return walk.sizes[source_inner] >= 4;
  }
  return false;
}

void transpose_all(const Walk& walk, int source_inner, const MoveFunctions& move, int64_t size,
                   const char* source, char* target) {
  const int inner = walk.dims - 1;
  const int64_t rows = walk.sizes[source_inner], columns = walk.sizes[inner];
  const int64_t batches = walk.numel / (rows * columns);
  const int64_t bands = (rows + 31) / 32;  // of 32 rows: units of work
  const int64_t grain = std::max<int64_t>(1, kCopyGrain / (32 * columns));
  parallel_for(batches * bands, grain, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      int64_t rest = unit / bands;
      int64_t source_offset = 0, target_offset = 0;
      for (int d = inner - 1; d >= 0; --d) {
        if (d == source_inner) continue;
        const int64_t index = rest % walk.sizes[d];
        rest /= walk.sizes[d];
        target_offset += index * walk.strides[0][d];
        source_offset += index * walk.strides[1][d];
      }
      const int64_t row = unit % bands * 32;
      target_offset += row * walk.strides[0][source_inner];
      source_offset += row;
      move.transpose(source + source_offset * size, walk.strides[1][inner],
                     target + target_offset * size, walk.strides[0][source_inner],
                     std::min<int64_t>(32, rows - row), columns);
    }
  });
}

void move_same_dtype(const Walk& walk, int64_t size, const char* source, char* target) {
  if (walk.is_linear(0) && walk.is_linear(1)) {
    parallel_for(walk.numel, kCopyGrain, [&](int64_t begin, int64_t end) {
      std::memcpy(target + begin * size, source + begin * size,
                  static_cast<size_t>((end - begin) * size));
    });
    return;
  }
  const MoveFunctions move = TS_SIMD_CALL(move_functions, size);
  int source_inner = 0;
  if (is_transpose(walk, source_inner)) {
    transpose_all(walk, source_inner, move, size, source, target);
    return;
  }
  const int inner = walk.dims - 1;
  const int64_t target_stride = walk.strides[0][inner], source_stride = walk.strides[1][inner];
  const bool rows = target_stride == 1 && source_stride == 1;
  parallel_for(walk.numel, kCopyGrain, [&](int64_t begin, int64_t end) {
    for (int64_t position = begin; position < end;) {
      const int64_t in_row = position % walk.sizes[inner];
      const int64_t length = std::min(walk.sizes[inner] - in_row, end - position);
      int64_t rest = position;
      int64_t source_offset = 0, target_offset = 0;
      for (int d = inner; d >= 0; --d) {
        const int64_t index = rest % walk.sizes[d];
        rest /= walk.sizes[d];
        target_offset += index * walk.strides[0][d];
        source_offset += index * walk.strides[1][d];
      }
      if (rows && length * size >= 64) {
        std::memcpy(target + target_offset * size, source + source_offset * size,
                    static_cast<size_t>(length * size));
      } else {
        move.run(source + source_offset * size, source_stride, target + target_offset * size,
                 target_stride, length);
      }
      position += length;
    }
  });
}

void move_converting(const Walk& walk, const Tensor& target, const Tensor& source) {
  const int64_t source_size = size_of(source.dtype()), target_size = size_of(target.dtype());
  const Lane lane = source.dtype() == kBool ? Lane::kBool : lane_of(source.dtype());
  const LoadFunction load = load_function(source.dtype(), lane);
  const StoreFunction store = store_function(lane, target.dtype());
  const bool source_linear = walk.is_linear(1), target_linear = walk.is_linear(0);
  const bool source_direct = source_linear && is_stored_as(lane, source.dtype());
  const bool target_direct = target_linear && is_stored_as(lane, target.dtype());
  const char* from = static_cast<const char*>(source.data());
  char* to = static_cast<char*>(target.data());
  const int inner = walk.dims - 1;
  parallel_for(walk.numel, kCopyGrain, [&](int64_t begin, int64_t end) {
    alignas(64) char buffer[kCopyTile * 8];
    const int64_t step = source_direct || target_direct ? end - begin : kCopyTile;
    const int64_t lane_size = size_of(lane);
    for (int64_t position = begin; position < end; position += step) {
      const int64_t count = std::min(step, end - position);
      char* values = target_direct ? to + position * target_size : buffer;
      if (source_direct) {
        values = const_cast<char*>(from) + position * source_size;  // only read
      } else if (source_linear) {
        load(from + position * source_size, 1, values, count);
      } else {
        for_each_run(walk, 1, position, count, [&](int64_t offset, int64_t at, int64_t length) {
          load(from + offset * source_size, walk.strides[1][inner], values + at * lane_size,
               length);
        });
      }
      if (target_direct) continue;
      if (target_linear) {
        store(values, to + position * target_size, 1, count);
      } else {
        for_each_run(walk, 0, position, count, [&](int64_t offset, int64_t at, int64_t length) {
          store(values + at * lane_size, to + offset * target_size, walk.strides[0][inner], length);
        });
      }
    }
  });
}

}  // namespace

uint64_t element_bits(const Scalar& value, DType dtype) {
  uint64_t bits = 0;
  dispatch_all(dtype, "fill_", [&]<class T>() {
    using C = Compute<T>;
    C number;
    if constexpr (std::is_floating_point_v<C>) {
      number = static_cast<C>(value.to_double());
    } else if constexpr (std::is_same_v<C, bool>) {
      number = value.to_bool();
    } else {
      number = value.to_int();
    }
    const T stored = store<T>(number);
    std::memcpy(&bits, &stored, sizeof stored);
  });
  return bits;
}

void move_elements(const Walk& walk, const Tensor& target, const Tensor& source) {
  const Device& device = target.device();
  if (device.is_cuda()) return on_cuda<move_elements>("copy_", device, walk, target, source);
  if (target.dtype() == source.dtype()) {
    move_same_dtype(walk, size_of(target.dtype()), static_cast<const char*>(source.data()),
                    static_cast<char*>(target.data()));
  } else {
    move_converting(walk, target, source);
  }
}

void fill_elements(const Walk& walk, const Tensor& x, uint64_t bits) {
  if (x.device().is_cuda()) return on_cuda<fill_elements>("fill_", x.device(), walk, x, bits);
  move_same_dtype(walk, size_of(x.dtype()), reinterpret_cast<const char*>(&bits),
                  static_cast<char*>(x.data()));
}

namespace {

// Bytes travel in row-major order; layouts and dtypes change on the side they arrive at.
void copy_between_devices(const Tensor& target, const Tensor& source) {
  const Tensor dense = contiguous(source);
  const bool direct = target.is_contiguous() && target.dtype() == source.dtype() &&
                      target.shape() == source.shape();
  const Tensor arrived =
      direct ? target : raw::empty(source.shape(), source.dtype(), target.device());
  gpu::copy_bytes(arrived.data(), target.device(), dense.data(), source.device(),
                  static_cast<size_t>(dense.nbytes()));
  if (!direct) copy_into(target, arrived);
}

}  // namespace

void copy_into(const Tensor& target, const Tensor& source) {
  TS_CHECK_SHAPE(
      source.shape() == target.shape() || broadcastable_to(source.shape(), target.shape()), "copy_",
      "the source ", source, " does not broadcast to the target ", target);
  if (target.is_meta() || source.is_meta()) {
    TS_CHECK_DEVICE(target.is_meta(), "copy_", "the source is on meta and has no elements; the ",
                    "target is ", target);
    return;
  }
  if (target.numel() == 0) return;
  TS_CHECK(!repeats_elements(target), "copy_", "writes to ", target, " with strides ",
           target.strides(), ", in which elements lie on one another; make it contiguous() first");
  if (target.device() != source.device()) {
    copy_between_devices(target, source);
    return;
  }
  if (overlaps_shifted(target, source)) {
    copy_into(target, copy(source));
    return;
  }
  const Shape strides[2] = {
      target.strides(), source.shape() == target.shape()
                            ? source.strides()
                            : broadcast_strides(source.shape(), source.strides(), target.shape())};
  const Walk walk(target.shape(), strides);
  if (target.dtype() == source.dtype() && target.data() == source.data()) return;  // the same
  move_elements(walk, target, source);
}

Tensor convert(const Tensor& x, DType dtype) {
  Tensor result = raw::empty_like(x, dtype);
  copy_into(result, x);
  return result;
}

Tensor copy(const Tensor& x) { return convert(x, x.dtype()); }

Tensor contiguous(const Tensor& x) {
  if (x.is_contiguous()) return x;
  Tensor result = raw::empty(x.shape(), x.dtype(), x.device());
  copy_into(result, x);
  return result;
}

bool can_hold(DType dtype, const Scalar& value) {
  if (is_floating(dtype) || dtype == kBool) return true;
  // The bounds are exact in double; a fraction is cut, so that 255.5 is 255.
  const double bound = dtype == kU8 ? 0x1p8 : dtype == kI32 ? 0x1p31 : 0x1p63;
  const auto inside = [&](auto number, auto limit) {
    return number < limit && (dtype == kU8 ? number > -limit : number >= -limit);
  };
  if (value.is_floating()) return inside(std::trunc(value.to_double()), bound);
  return dtype == kI64 || inside(value.to_int(), static_cast<int64_t>(bound));
}

void fill(const Tensor& x, const Scalar& value) {
  TS_CHECK(can_hold(x.dtype(), value), "fill_", "no element of ", x.dtype(), " can be ", value,
           "; convert the tensor with to(dtype) first");
  if (x.is_meta() || x.numel() == 0) return;
  // Elements that lie on one another are one, which no two threads write.
  Shape shape = x.shape();
  for (int d = 0; d < x.dim(); ++d) {
    if (x.stride(d) == 0) shape[d] = 1;
  }
  const Shape strides[2] = {x.strides(), Shape::filled(x.dim(), 0)};
  const Walk walk(shape, strides);
  fill_elements(walk, x, element_bits(value, x.dtype()));
}

}  // namespace tessera::kernels
