#include <algorithm>
#include <cstring>

#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/common/overlap.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/elementwise/elementwise.h>
#include <tessera/core/kernels/elementwise/elementwise_loops.h>
#include <tessera/core/parallel.h>

namespace tessera::kernels {
namespace {

using detail::Loop;
using detail::Loops;

constexpr const char* kElementwise = "elementwise";
constexpr int64_t kElementGrain = 32768;  // elements that are worth a thread
constexpr int64_t kElementTile = 1024;    // elements a buffer: five of 8 KiB at most stay in L1

constexpr int kMaxInputs = kMaxOperands - 1;

// How a loop meets an operand.
struct Port {
  char* data = nullptr;
  Lane lane = Lane::kFloat;
  int64_t element_size = 0;
  bool direct = false;    // read or written where it is
  bool linear = false;    // in order, but of another type than the lane
  bool constant = false;  // one element, whose lane is filled once
  LoadFunction load = nullptr;
  StoreFunction store = nullptr;
};

struct Call {
  Loop loop = nullptr;
  const void* functor = nullptr;
  int inputs = 0;
  Port input[kMaxInputs];
  double numbers[kMaxInputs];  // storage of operands that are numbers
  Port output;
};

void run_range(const Call& call, const Walk& walk, int64_t begin, int64_t end) {
  alignas(64) char buffers[kMaxOperands][kElementTile * 8];
  const void* lanes[kMaxInputs];
  bool direct = call.output.direct;
  for (int i = 0; i < call.inputs; ++i) {
    const Port& port = call.input[i];
    direct = direct && port.direct;
    lanes[i] = buffers[i];
    if (port.constant) port.load(port.data, 0, buffers[i], std::min(kElementTile, end - begin));
  }
  const int64_t step = direct ? end - begin : kElementTile;
  for (int64_t position = begin; position < end; position += step) {
    const int64_t count = std::min(step, end - position);
    for (int i = 0; i < call.inputs; ++i) {
      const Port& port = call.input[i];
      if (port.direct) {
        lanes[i] = port.data + position * port.element_size;
      } else if (port.linear) {
        port.load(port.data + position * port.element_size, 1, buffers[i], count);
      } else if (!port.constant) {
        const int64_t stride = walk.strides[i + 1][walk.dims - 1];
        const int64_t lane_size = size_of(port.lane);
        for_each_run(walk, i + 1, position, count, [&](int64_t offset, int64_t at, int64_t length) {
          port.load(port.data + offset * port.element_size, stride, buffers[i] + at * lane_size,
                    length);
        });
      }
    }
    const Port& output = call.output;
    if (output.direct) {
      call.loop(call.functor, lanes, output.data + position * output.element_size, count);
      continue;
    }
    char* result = buffers[kMaxInputs];
    call.loop(call.functor, lanes, result, count);
    if (output.linear) {
      output.store(result, output.data + position * output.element_size, 1, count);
    } else {
      const int64_t stride = walk.strides[0][walk.dims - 1];
      const int64_t lane_size = size_of(output.lane);
      for_each_run(walk, 0, position, count, [&](int64_t offset, int64_t at, int64_t length) {
        output.store(result + at * lane_size, output.data + offset * output.element_size, stride,
                     length);
      });
    }
  }
}

Shape shape_of(const Operand& operand) {
  return operand.is_tensor() ? operand.tensor().shape() : Shape();
}

Shape broadcast_of(std::span<const Operand> operands) {
  Shape shape = shape_of(operands[0]);
  for (const Operand& operand : operands.subspan(1)) {
    if (operand.is_tensor() && !(operand.tensor().shape() == shape)) {
      shape = broadcast_shapes(shape, operand.tensor().shape(), kElementwise);
    }
  }
  return shape;
}

// The device on which the operation runs: that of the tensors with dimensions; CPU tensors of one
// element go along with any.
const Device& device_of(std::span<const Operand> operands) {
  const Tensor* chosen = nullptr;
  for (const Operand& operand : operands) {
    if (!operand.is_tensor()) continue;
    const Tensor& tensor = operand.tensor();
    if (chosen == nullptr || (chosen->device().is_cpu() && chosen->dim() == 0)) {
      chosen = &tensor;
    } else {
      TS_CHECK_DEVICE(
          tensor.device() == chosen->device() || (tensor.device().is_cpu() && tensor.dim() == 0),
          kElementwise, "operands are on different devices: ", *chosen, " and ", tensor,
          "; move one with to(device)");
    }
  }
  TS_CHECK(chosen != nullptr, kElementwise, "expects at least one tensor among the operands");
  return chosen->device();
}

Loop loop_for(const Loops& loops, DType common) {
  TS_CHECK_DTYPE(!is_fp8(common) || loops.condition, kElementwise, common,
                 " is storage only; convert to another floating dtype first");
  const Lane lane = lane_of(common);
  const Loop loop = lane == Lane::kFloat    ? loops.of_float
                    : lane == Lane::kDouble ? loops.of_double
                                            : loops.of_int64;
  TS_CHECK_DTYPE(loop != nullptr, kElementwise, "the formula is not defined for ", common,
                 "; convert to a floating dtype first");
  return loop;
}

// A GPU reads operands of the lane's own dtypes; others are converted before, and the result after.
// A CPU tensor of one element goes along as a number.
void run_on_device(const Loops& loops, const void* functor, const Tensor& out,
                   std::span<const Operand> operands, DType common) {
  const Lane lane = lane_of(common);
  const Lane result_lane = loops.predicate ? Lane::kBool : lane;
  if (!detail::is_direct(result_lane, out.dtype())) {
    const Tensor result = raw::empty(out.shape(), loops.predicate ? kBool : common, out.device());
    run_on_device(loops, functor, result, operands, common);
    copy_into(out, result);
    return;
  }
  if (*loops.cuda == nullptr) fail_without_kernel(kElementwise, out.device());
  Tensor converted[kMaxInputs];
  Shape strides[kMaxOperands];
  strides[0] = out.strides();
  detail::DeviceInput inputs[kMaxInputs];
  for (size_t i = 0; i < operands.size(); ++i) {
    const Lane wanted = i == 0 && loops.condition ? Lane::kBool : lane;
    detail::DeviceInput& input = inputs[i];
    strides[i + 1] = Shape::filled(out.dim(), 0);
    if (!operands[i].is_tensor()) {
      input.number = operands[i].scalar().to_double();
      input.integer = operands[i].scalar().to_int();
      continue;
    }
    Tensor x = operands[i].tensor();
    if (x.device().is_cpu()) {
      if (lane == Lane::kInt64) {
        input.integer = x.item<int64_t>();
      } else {
        input.number = x.item<double>();
      }
      if (wanted == Lane::kBool) input.integer = x.item<bool>();
      continue;
    }
    if (!detail::is_direct(wanted, x.dtype())) {
      x = converted[i] = convert(x, wanted == Lane::kBool ? kBool : common);
    }
    strides[i + 1] = x.shape() == out.shape()
                         ? x.strides()
                         : broadcast_strides(x.shape(), x.strides(), out.shape());
    input.data = x.data();
    input.dtype = x.dtype();
  }
  const Walk walk(out.shape(), {strides, operands.size() + 1});
  detail::DeviceCall call{walk, functor, lane, out.data(), out.dtype(), {}};
  std::copy(inputs, inputs + operands.size(), call.inputs);
  const gpu::CurrentDevice scope(out.device().index);
  (*loops.cuda)(call);
}

void run(const Loops& loops, const void* functor, const Tensor& out,
         std::span<const Operand> operands, DType common) {
  Call call;
  call.loop = loop_for(loops, common);
  if (out.numel() == 0) return;
  if (out.device().is_cuda()) return run_on_device(loops, functor, out, operands, common);
  call.functor = functor;
  call.inputs = static_cast<int>(operands.size());
  Shape strides[kMaxOperands];
  strides[0] = out.strides();
  for (size_t i = 0; i < operands.size(); ++i) {
    if (operands[i].is_tensor()) {
      const Tensor& x = operands[i].tensor();
      strides[i + 1] = x.shape() == out.shape()
                           ? x.strides()
                           : broadcast_strides(x.shape(), x.strides(), out.shape());
    } else {
      strides[i + 1] = Shape::filled(out.dim(), 0);
    }
  }
  const Walk walk(out.shape(), {strides, operands.size() + 1});

  const Lane lane = lane_of(common);
  for (int i = 0; i < call.inputs; ++i) {
    Port& port = call.input[i];
    const Operand& operand = operands[static_cast<size_t>(i)];
    port.lane = i == 0 && loops.condition ? Lane::kBool : lane;
    if (!operand.is_tensor()) {
      // A number is stored in a type that keeps it exactly: integers as they are.
      const bool integer = lane == Lane::kInt64;
      if (integer) {
        const int64_t value = operand.scalar().to_int();
        std::memcpy(&call.numbers[i], &value, sizeof value);
      } else {
        call.numbers[i] = operand.scalar().to_double();
      }
      port.data = reinterpret_cast<char*>(&call.numbers[i]);
      port.load = load_function(integer ? kI64 : kF64, port.lane);
      port.constant = true;
      continue;
    }
    const Tensor& x = operand.tensor();
    port.data = static_cast<char*>(x.data());
    port.element_size = size_of(x.dtype());
    port.load = load_function(x.dtype(), port.lane);
    port.linear = walk.is_linear(i + 1);
    port.direct = port.linear && is_stored_as(port.lane, x.dtype());
    port.constant = !port.linear && walk.is_constant(i + 1);
  }
  Port& output = call.output;
  output.data = static_cast<char*>(out.data());
  output.element_size = size_of(out.dtype());
  output.lane = loops.predicate ? Lane::kBool : lane;
  output.store = store_function(output.lane, out.dtype());
  output.linear = walk.is_linear(0);
  output.direct = output.linear && is_stored_as(output.lane, out.dtype());

  parallel_for(walk.numel, kElementGrain,
               [&](int64_t begin, int64_t end) { run_range(call, walk, begin, end); });
}

// True where walking x in the order of `out` would touch a cache line, and for many rows a page,
// for each element: then a transposing copy first is three times as fast (2048 x 1536, f32).
bool is_transposed(const Tensor& x, const Tensor& out) {
  if (x.numel() < kElementGrain || !(x.shape() == out.shape()) ||
      !is_dense(out.shape(), out.strides())) {
    return false;
  }
  const Shape strides[2] = {out.strides(), x.strides()};
  const Walk walk(out.shape(), strides);
  const int inner = walk.dims - 1;
  const int64_t* of_x = walk.strides[1];
  return of_x[inner] >= 64 && walk.sizes[inner] >= 64 &&
         std::find(of_x, of_x + inner, 1) != of_x + inner;
}

int64_t wrapped(int64_t value, DType dtype) {
  return dtype == kU8 ? static_cast<uint8_t>(value) : static_cast<int32_t>(value);
}

// The operands, with a copy in the order of `out` in the place of those that must not be read where
// they are. Integers wrap to the dtype of the result first, as torch's do: loops count in 64 bits,
// where -4 beside u8 is no 252. `copies` holds what was made.
void prepare(const Tensor& out, std::span<const Operand> operands, DType common, bool compares,
             Operand* prepared, Tensor* copies) {
  const bool narrow = !compares && (common == kU8 || common == kI32);
  for (size_t i = 0; i < operands.size(); ++i) {
    prepared[i] = operands[i];
    if (!operands[i].is_tensor()) {
      if (narrow) prepared[i] = Operand(wrapped(operands[i].scalar().to_int(), common));
      continue;
    }
    const Tensor& x = operands[i].tensor();
    if (narrow && is_integral(x.dtype()) && size_of(x.dtype()) > size_of(common)) {
      copies[i] = convert(x, common);
      prepared[i] = Operand(copies[i]);
      continue;
    }
    if (is_transposed(x, out)) {
      copies[i] = raw::empty_strided(out.shape(), out.strides(), x.dtype(), x.device());
      copy_into(copies[i], x);
    } else if (overlaps_shifted(out, x)) {
      copies[i] = copy(x);
    } else {
      continue;
    }
    prepared[i] = Operand(copies[i]);
  }
}

void run_prepared(const Loops& loops, const void* functor, const Tensor& out,
                  std::span<const Operand> operands, DType common) {
  Tensor copies[kMaxInputs];
  Operand prepared[kMaxInputs] = {0, 0, 0, 0};
  prepare(out, operands, common, loops.predicate, prepared, copies);
  run(loops, functor, out, {prepared, operands.size()}, common);
}

std::span<const Operand> promoting(const Loops& loops, std::span<const Operand> operands) {
  return loops.condition ? operands.subspan(1) : operands;
}

}  // namespace

DType promote(std::span<const Operand> operands) {
  // The highest of each rank: tensors with dimensions, zero-dim tensors, numbers. A lower rank
  // matters only where its category (bool < integer < floating) is higher.
  std::optional<DType> of_rank[3];
  for (const Operand& operand : operands) {
    const int rank = !operand.is_tensor() ? 2 : operand.tensor().dim() == 0 ? 1 : 0;
    const DType dtype = operand.is_tensor()                              ? operand.tensor().dtype()
                        : operand.scalar().is_floating()                 ? kF32
                        : operand.scalar().kind() == Scalar::Kind::kBool ? kBool
                                                                         : kI64;
    of_rank[rank] = of_rank[rank] ? promote_types(*of_rank[rank], dtype) : dtype;
  }
  const auto category = [](DType dtype) {
    return is_floating(dtype) ? 2 : is_integral(dtype) ? 1 : 0;
  };
  std::optional<DType> result;
  for (const std::optional<DType>& dtype : of_rank) {
    if (dtype && (!result || category(*dtype) > category(*result))) result = dtype;
  }
  return *result;
}

DType promote(std::initializer_list<Operand> operands) {
  return promote(std::span<const Operand>(operands.begin(), operands.size()));
}

namespace detail {

Tensor elementwise(const Loops& loops, const void* functor, std::initializer_list<Operand> list,
                   std::optional<DType> common) {
  const std::span<const Operand> operands(list.begin(), list.size());
  const Device& device = device_of(operands);
  const DType calculated = common ? *common : promote(promoting(loops, operands));
  const DType result_dtype = loops.predicate ? kBool : calculated;
  const Shape shape = broadcast_of(operands);
  // Checked also where nothing runs: a meta call fails as the real one does.
  loop_for(loops, calculated);

  const Tensor* model = nullptr;
  for (const Operand& operand : operands) {
    if (operand.is_tensor() && operand.tensor().shape() == shape &&
        is_dense(shape, operand.tensor().strides())) {
      model = &operand.tensor();
      break;
    }
  }
  Tensor out = model == nullptr || model->is_contiguous()
                   ? raw::empty(shape, result_dtype, device)
                   : raw::empty_strided(shape, model->strides(), result_dtype, device);
  if (device.is_meta()) return out;
  run_prepared(loops, functor, out, operands, calculated);
  return out;
}

void elementwise_into(const Loops& loops, const void* functor, const Tensor& out,
                      std::initializer_list<Operand> list, std::optional<DType> common) {
  const std::span<const Operand> operands(list.begin(), list.size());
  const DType calculated = common ? *common : promote(promoting(loops, operands));
  const Shape shape = broadcast_of(operands);
  TS_CHECK_SHAPE(shape == out.shape() || broadcastable_to(shape, out.shape()), kElementwise,
                 "the result has shape ", shape, ", which does not fit the output ", out);
  loop_for(loops, calculated);
  const Device& device = out.device();
  for (const Operand& operand : operands) {
    TS_CHECK_DEVICE(!operand.is_tensor() || operand.tensor().device() == device ||
                        (operand.tensor().device().is_cpu() && operand.tensor().dim() == 0),
                    kElementwise, "the output is on ", device, " and an operand is ",
                    operand.tensor(), "; move one with to(device)");
  }
  if (device.is_meta()) return;
  TS_CHECK(!repeats_elements(out), kElementwise, "writes to ", out, " with strides ", out.strides(),
           ", in which elements lie on one another; make it contiguous() first");

  run_prepared(loops, functor, out, operands, calculated);
}

#define TS_LOOPS_OF(F)                                     \
  template <>                                              \
  const Loops& loops_of<fn::F>() {                         \
    static const Loops loops = [] {                        \
      Loops made = TS_SIMD_CALL(elementwise_loops<fn::F>); \
      made.cuda = &cuda_loop<fn::F>;                       \
      return made;                                         \
    }();                                                   \
    return loops;                                          \
  }
TS_UNARY_FUNCTORS(TS_LOOPS_OF)
TS_BINARY_FUNCTORS(TS_LOOPS_OF)
TS_UNARY_GRADIENT_FUNCTORS(TS_LOOPS_OF)
TS_TERNARY_FUNCTORS(TS_LOOPS_OF)
#undef TS_LOOPS_OF

}  // namespace detail
}  // namespace tessera::kernels
