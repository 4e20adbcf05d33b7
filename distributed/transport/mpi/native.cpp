#include <tessera/distributed/transport/mpi/native.h>

#include <algorithm>

#include <tessera/core/half.h>
#include <tessera/distributed/transport/deterministic.h>

namespace tessera::distributed::mpi {
namespace {

struct Sum {
  static float apply(float a, float b) { return a + b; }
};
struct Product {
  static float apply(float a, float b) { return a * b; }
};
struct Max {  // NaN wins, as in the deterministic mode
  static float apply(float a, float b) { return a > b || a != a ? a : b; }
};
struct Min {
  static float apply(float a, float b) { return a < b || a != a ? a : b; }
};

template <class T, class Op>
void combine(void* in, void* in_out, int* length, MPI_Datatype*) {
  const T* a = static_cast<const T*>(in);
  T* b = static_cast<T*>(in_out);
#pragma omp simd
  for (int i = 0; i < *length; ++i) {
    b[i] = from_float<T>(Op::apply(to_float(a[i]), to_float(b[i])));
  }
}

// Made at the first use, on the progress thread; they belong to MPI and go with it.
struct HalfTypes {
  MPI_Datatype type = MPI_DATATYPE_NULL;
  MPI_Op sum, max, min, product;
};

template <class T>
const HalfTypes& half_types() {
  static const HalfTypes types = [] {
    HalfTypes made;
    check(MPI_Type_contiguous(static_cast<int>(sizeof(T)), MPI_BYTE, &made.type),
          "MPI_Type_contiguous");
    check(MPI_Type_commit(&made.type), "MPI_Type_commit");
    check(MPI_Op_create(combine<T, Sum>, 1, &made.sum), "MPI_Op_create");
    check(MPI_Op_create(combine<T, Max>, 1, &made.max), "MPI_Op_create");
    check(MPI_Op_create(combine<T, Min>, 1, &made.min), "MPI_Op_create");
    check(MPI_Op_create(combine<T, Product>, 1, &made.product), "MPI_Op_create");
    return made;
  }();
  return types;
}

MPI_Datatype type_of(DType dtype) {
  switch (dtype) {
    case kF64:
      return MPI_DOUBLE;
    case kF32:
      return MPI_FLOAT;
    case kF16:
      return half_types<f16>().type;
    case kBF16:
      return half_types<bf16>().type;
    case kI64:
      return MPI_INT64_T;
    case kI32:
      return MPI_INT32_T;
    case kU8:
      return MPI_UINT8_T;
    default:
      break;
  }
  TS_THROW(DTypeError, "mpi", "reductions take f64, f32, f16, bf16, i64, i32 and u8; ", dtype,
           " was given; convert it first");
}

MPI_Op operation_of(ReduceOp op, DType dtype) {
  const HalfTypes* half = dtype == kF16    ? &half_types<f16>()
                          : dtype == kBF16 ? &half_types<bf16>()
                                           : nullptr;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMean:
      return half ? half->sum : MPI_SUM;
    case ReduceOp::kMax:
      return half ? half->max : MPI_MAX;
    case ReduceOp::kMin:
      return half ? half->min : MPI_MIN;
    case ReduceOp::kProduct:
      return half ? half->product : MPI_PROD;
  }
  TS_THROW(ValueError, "mpi", "unknown reduction ", static_cast<int>(op));
}

}  // namespace

bool reduces_well(const Ranks& ranks, const Reduction& reduction) {
  const std::vector<Part>& pieces = reduction.pieces;
  for (size_t r = 1; r < pieces.size(); ++r) {
    if (pieces[r].data != pieces[r - 1].data + pieces[r - 1].bytes) return false;
    if (reduction.delivery == Delivery::kOwner && pieces[r].bytes != pieces[0].bytes) return false;
  }
  return reduction.delivery == Delivery::kOwner ? pieces[0].bytes <= ranks.message_limit
                                                : ranks.size > ranks.exchange_ranks;
}

Task reduce_natively(std::shared_ptr<Ranks> ranks, Reduction reduction) {
  const MPI_Datatype type = type_of(reduction.dtype);
  const MPI_Op operation = operation_of(reduction.op, reduction.dtype);
  const int64_t element_size = size_of(reduction.dtype);
  char* const data = reduction.pieces[0].data;
  int64_t bytes = 0;
  for (const Part& piece : reduction.pieces) bytes += piece.bytes;
  const bool has_result = reduction.delivery != Delivery::kRoot || ranks->rank == reduction.root;
  const auto finish = [&](char* values, int64_t count) {
    if (reduction.op == ReduceOp::kMean && has_result) {
      scale_contribution(values, count, reduction.dtype, 1.0 / ranks->size);
    }
  };

  Requests requests;
  if (reduction.delivery == Delivery::kOwner) {
    const int64_t size = reduction.pieces[0].bytes, count = size / element_size;
    // MPI writes to no memory that it reads; its own form in place leaves the sum at the beginning.
    const bool is_input = reduction.output >= data && reduction.output < data + bytes;
    const bool staged = reduction.onto || is_input;
    std::vector<char>& scratch = ranks->scratch[0];
    if (staged && std::ssize(scratch) < size) scratch.resize(static_cast<size_t>(size));
    char* const sum = staged ? scratch.data() : reduction.output;
    check(MPI_Ireduce_scatter_block(data, sum, static_cast<int>(count), type, operation,
                                    ranks->communicator, requests.add()),
          "MPI_Ireduce_scatter_block");
    co_await requests;
    finish(sum, count);
    if (reduction.onto) {
      const void* const summands[] = {reduction.output, sum};
      reduce_contributions(summands, reduction.output, count, reduction.dtype, reduction.op);
    } else if (staged) {
      std::copy_n(sum, size, reduction.output);
    }
    co_return;
  }
  const int64_t limit = std::max<int64_t>(1, ranks->message_limit / element_size) * element_size;
  for (int64_t begin = 0; begin < bytes; begin += limit) {
    char* const part = data + begin;
    const int64_t count = std::min(limit, bytes - begin) / element_size;
    const int length = static_cast<int>(count);
    if (reduction.delivery == Delivery::kAll) {
      check(MPI_Iallreduce(MPI_IN_PLACE, part, length, type, operation, ranks->communicator,
                           requests.add()),
            "MPI_Iallreduce");
    } else {
      check(MPI_Ireduce(has_result ? MPI_IN_PLACE : part, has_result ? part : nullptr, length, type,
                        operation, reduction.root, ranks->communicator, requests.add()),
            "MPI_Ireduce");
    }
    co_await requests;
    finish(part, count);
  }
}

}  // namespace tessera::distributed::mpi
