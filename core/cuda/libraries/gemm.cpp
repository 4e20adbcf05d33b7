#include <tessera/core/cuda/libraries/gemm.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <sstream>

#include <tessera/core/error.h>
#include <tessera/core/plain_text.h>

namespace tessera::gpu {
namespace {

constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();  // size of a matrix

bool is_16_bit(DType dtype) { return dtype == kF16 || dtype == kBF16; }
bool has_gelu(GemmEpilogue e) {
  return e == GemmEpilogue::kGelu || e == GemmEpilogue::kGeluBias || e == GemmEpilogue::kGeluGrad ||
         e == GemmEpilogue::kGeluGradBiasGrad;
}
bool needs_aux(GemmEpilogue e) {
  return e == GemmEpilogue::kGeluGrad || e == GemmEpilogue::kGeluGradBiasGrad;
}
bool needs_bias(GemmEpilogue e) {
  return e != GemmEpilogue::kNone && e != GemmEpilogue::kGelu && e != GemmEpilogue::kGeluGrad;
}
bool is_fp8_problem(const GemmProblem& p) { return is_fp8(p.a.dtype); }

using tessera::detail::concatenate;

bool is_aligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

// A matrix of `rows` x `columns`: strides that hold it, and an address that fits its elements.
std::string check_matrix(const char* name, const GemmMatrix& x, int64_t rows, int64_t columns,
                         int64_t batch, bool written) {
  const int64_t inner = x.transposed ? rows : columns, outer = x.transposed ? columns : rows;
  if (x.leading < inner) {
    return concatenate(name, " has rows of ", inner, " elements ", x.leading, " apart");
  }
  if (x.batch_stride < 0)
    return concatenate(name, " has a negative batch stride, ", x.batch_stride);
  if (written && batch > 1 && x.batch_stride < (outer - 1) * x.leading + inner) {
    return concatenate("the matrices of ", name, " overlap: their batch stride is ",
                       x.batch_stride);
  }
  if (x.data == nullptr) return concatenate(name, " is missing");
  if (!is_aligned(x.data, size_of(x.dtype))) {
    return concatenate(name, " lies at an address that is no multiple of its elements' ",
                       size_of(x.dtype), " bytes");
  }
  return {};
}

// The dtypes that go together, and that of the bias.
std::string check_dtypes(const GemmProblem& p) {
  const DType a = p.a.dtype, b = p.b.dtype, d = p.d.dtype;
  DType bias = d;
  if (is_fp8(a) || is_fp8(b)) {
    if (!is_fp8(a) || !is_fp8(b)) return concatenate("fp8 meets ", is_fp8(a) ? b : a);
    if (a == kF8E5M2 && b == kF8E5M2) return "there is no product of f8e5m2 with f8e5m2";
    const bool narrow = d == kF8E4M3 || (d == kF8E5M2 && (a == kF8E5M2 || b == kF8E5M2));
    if (d != kF32 && !is_16_bit(d) && !narrow)
      return concatenate(a, " and ", b, " do not give ", d);
    // There is no f32 bias beside fp8 operands.
    bias = d == kF16 ? kF16 : kBF16;
  } else {
    if (a != kF64 && a != kF32 && !is_16_bit(a)) return concatenate("there is no product of ", a);
    if (a != b) return concatenate("a is ", a, " and b is ", b);
    if (d != a && !(is_16_bit(a) && d == kF32)) return concatenate(a, " operands do not give ", d);
  }
  if (needs_bias(p.epilogue) && p.bias_dtype != bias) {
    return concatenate("the bias must be ", bias, ", it is ", p.bias_dtype);
  }
  if (p.tf32 && a != kF32) return concatenate("tf32 is for f32 operands, they are ", a);
  return {};
}

bool changes_along_k(GemmScale scale) {
  return scale == GemmScale::kVectors || scale == GemmScale::kSquares;
}

// Which scales go together, and what they leave out.
std::string check_scales(const GemmProblem& p) {
  using enum GemmScale;
  const GemmScale a = p.a_scaling, b = p.b_scaling;
  if (a == kTensor && b == kTensor) return {};
  const bool outer = a == kOuter && b == kOuter;
  const bool along_k =
      changes_along_k(a) && changes_along_k(b) && !(a == kSquares && b == kSquares);
  if (!outer && !along_k) {
    return concatenate("there is no product of ", name_of(a), " scales with ", name_of(b), " ones");
  }
  if (p.batch > 1) return concatenate(name_of(a), " scales serve one product, not a batch");
  if (is_fp8(p.d.dtype)) return concatenate(name_of(a), " scales do not give ", p.d.dtype);
  for (const void* scale : {p.a_scale, p.b_scale}) {
    if (scale == nullptr) return concatenate(name_of(a), " scales are missing");
    if (!is_aligned(scale, 16)) return "the scales must begin at a multiple of 16 bytes";
  }
  if (p.epilogue != GemmEpilogue::kNone && p.epilogue != GemmEpilogue::kBias) {
    return concatenate(name_of(a), " scales have no epilogue ", name_of(p.epilogue));
  }
  if (along_k && p.fast_accumulation) {
    return "fast accumulation has no scales that change along K";
  }
  return {};
}

std::string check_fp8(const GemmProblem& p) {
  if (!is_fp8_problem(p)) {
    if (p.fast_accumulation) return "fast accumulation is for fp8";
    if (p.a_scaling != GemmScale::kTensor || p.b_scaling != GemmScale::kTensor) {
      return "scales are for fp8";
    }
    if (p.a_scale != nullptr || p.b_scale != nullptr || p.d_scale != nullptr) {
      return "scales are for fp8";
    }
    return {};
  }
  // Hopper multiplies fp8 in one layout: K runs along memory in both operands.
  if (p.a.transposed || !p.b.transposed) {
    return "fp8 needs a by rows and b by columns, so that K lies along memory in both";
  }
  if (p.M % 16 != 0 || p.N % 16 != 0 || p.K % 16 != 0) {
    return concatenate("fp8 needs M, N and K to be multiples of 16; they are ", p.M, ", ", p.N,
                       ", ", p.K);
  }
  for (const GemmMatrix* x : {&p.a, &p.b, &p.d}) {
    const int64_t size = size_of(x->dtype);
    if (x->leading * size % 16 != 0 || x->batch_stride * size % 16 != 0 ||
        !is_aligned(x->data, 16)) {
      return "fp8 needs rows that begin at multiples of 16 bytes";
    }
  }
  if (is_fp8(p.d.dtype) && p.beta != 0) return "a fp8 result cannot be added to";
  if (!is_fp8(p.d.dtype) && p.d_scale != nullptr) {
    return concatenate("a result of ", p.d.dtype, " has no scale");
  }
  return check_scales(p);
}

std::string check_epilogue(const GemmProblem& p) {
  const GemmEpilogue e = p.epilogue;
  if (e == GemmEpilogue::kNone) {
    return p.bias == nullptr && p.aux.data == nullptr ? std::string()
                                                      : "there is a bias or aux without epilogue";
  }
  if (p.a.dtype == kF64) return concatenate("f64 has no epilogue ", name_of(e));
  if (p.batch > 1)
    return concatenate("the epilogue ", name_of(e), " serves one product, not a batch");
  if (needs_bias(e) != (p.bias != nullptr)) {
    return concatenate("the epilogue ", name_of(e),
                       needs_bias(e) ? " needs a bias" : " has no bias");
  }
  if (p.bias != nullptr && !is_aligned(p.bias, size_of(p.bias_dtype))) {
    return "the bias lies at an address that is no multiple of its elements";
  }
  const bool of_operand = e == GemmEpilogue::kBiasGradOfA || e == GemmEpilogue::kBiasGradOfB;
  if (of_operand && is_fp8_problem(p)) return concatenate("fp8 has no epilogue ", name_of(e));
  // cuBLASLt 13.1 on an H200: the operand's rows lie along the sum, as those of a weight's gradient
  // do.
  if (e == GemmEpilogue::kBiasGradOfA && !p.a.transposed) return "bias_grad_a needs a transposed a";
  if (e == GemmEpilogue::kBiasGradOfB && p.b.transposed) return "bias_grad_b needs b as it is";
  if (p.aux.data == nullptr) {
    return needs_aux(e) ? concatenate("the epilogue ", name_of(e), " needs aux") : std::string();
  }
  if (!has_gelu(e)) return concatenate("the epilogue ", name_of(e), " has no aux");
  const bool narrow = p.d.dtype == kF8E4M3 && p.aux.dtype == kF16;
  if (p.aux.dtype != p.d.dtype && !narrow) {
    return concatenate("aux must be ", p.d.dtype, " as the result is, it is ", p.aux.dtype);
  }
  if (p.aux.transposed || p.aux.leading % 8 != 0 || !is_aligned(p.aux.data, 16)) {
    return "aux needs rows a multiple of 8 elements apart that begin at a multiple of 16 bytes";
  }
  return check_matrix("aux", p.aux, p.M, p.N, 1, e != GemmEpilogue::kGeluGrad);
}

}  // namespace

const char* name_of(GemmEpilogue epilogue) {
  constexpr const char* names[] = {"none",      "bias",           "gelu",        "gelu_bias",
                                   "gelu_grad", "gelu_grad_bias", "bias_grad_a", "bias_grad_b"};
  return names[static_cast<int>(epilogue)];
}

const char* name_of(GemmScale scale) {
  constexpr const char* names[] = {"tensor", "outer", "1x128", "128x128"};
  return names[static_cast<int>(scale)];
}

int64_t count_scales(GemmScale scale, int64_t outer, int64_t K) {
  const auto pieces = [](int64_t size) { return (size + kScaledTogether - 1) / kScaledTogether; };
  switch (scale) {
    case GemmScale::kTensor:
      return 1;
    case GemmScale::kOuter:
      return outer;
    case GemmScale::kVectors:
      return pieces(K) * outer;
    case GemmScale::kSquares:
      return pieces(outer) * ((pieces(K) + 3) / 4 * 4);
  }
  return 0;
}

std::string validate(const GemmProblem& p) {
  for (const int64_t size : {p.M, p.N, p.K, p.batch}) {
    if (size < 1 || size > kLargest) {
      return concatenate("sizes must be in [1, 2^31); they are ", p.M, " x ", p.N, " x ", p.K, ", ",
                         p.batch, " of them");
    }
  }
  if (p.d.transposed) return "the result must lie by rows";
  std::string reason = check_dtypes(p);
  if (reason.empty()) reason = check_matrix("a", p.a, p.M, p.K, p.batch, false);
  if (reason.empty()) reason = check_matrix("b", p.b, p.K, p.N, p.batch, false);
  if (reason.empty()) reason = check_matrix("the result", p.d, p.M, p.N, p.batch, true);
  if (reason.empty() && p.c != nullptr && !is_aligned(p.c, size_of(p.d.dtype))) {
    reason = "c lies at an address that is no multiple of its elements";
  }
  if (reason.empty() && p.c != nullptr && p.beta == 0) reason = "there is a c that beta leaves out";
  if (reason.empty()) reason = check_fp8(p);
  if (reason.empty()) reason = check_epilogue(p);
  return reason;
}

int64_t gemm_workspace_bytes(int64_t device_bytes) {
  constexpr int64_t kLeast = int64_t{32} << 20, kMost = int64_t{128} << 20, kShare = 256;
  return std::clamp(device_bytes / kShare, kLeast, kMost);
}

GemmProblem fold_batch(GemmProblem p) {
  const bool rows_follow = !p.a.transposed && !p.d.transposed && p.b.batch_stride == 0 &&
                           p.a.batch_stride == p.M * p.a.leading &&
                           p.d.batch_stride == p.M * p.d.leading;
  if (p.batch <= 1 || !rows_follow) return p;
  p.M *= p.batch;
  p.batch = 1;
  p.a.batch_stride = p.b.batch_stride = p.d.batch_stride = 0;
  return p;
}

GemmProblem without_epilogue(GemmProblem p) {
  p.epilogue = GemmEpilogue::kNone;
  p.bias = nullptr;
  p.aux = {};
  return p;
}

int64_t rounded_length(int64_t length) {
  if (length <= 8) return length;
  const int shift = std::bit_width(static_cast<uint64_t>(length - 1)) - 3;
  const int64_t up = ((length - 1) >> shift << shift) + (int64_t{1} << shift);
  return std::max(length, std::min(up, kLargest));
}

GemmProblem rounded(GemmProblem p) {
  const int64_t M = p.M, K = p.K;
  p.batch = rounded_length(p.batch);
  if (!p.a.transposed) p.M = rounded_length(M);
  if (p.a.transposed && !p.b.transposed) p.K = rounded_length(K);
  if (p.sums_over_rows && !p.a.transposed && p.b.transposed && p.a.leading == K &&
      p.b.leading == K) {
    p.K = p.a.leading = p.b.leading = rounded_length(K);
  }
  // Matrices that follow each other still do.
  const auto follow = [](GemmMatrix& x, int64_t outer, int64_t now) {
    if (x.batch_stride == outer * x.leading) x.batch_stride = now * x.leading;
  };
  if (p.batch > 1) {
    if (!p.a.transposed) {
      follow(p.a, M, p.M);
      follow(p.d, M, p.M);
    } else if (!p.b.transposed) {
      follow(p.a, K, p.K);
      follow(p.b, K, p.K);
    }
  }
  return p;
}

std::string key_of(const GemmProblem& problem) { return describe(rounded(problem)); }

bool makes_gelu(GemmEpilogue epilogue) {
  return epilogue == GemmEpilogue::kGelu || epilogue == GemmEpilogue::kGeluBias;
}

// [Note: fused by rule] Measured on an H200 with cuBLASLt 13.1 (docs/measurements/gpu,
// 2026-11-27-h200/gemm.json), microseconds of 65536 rows: GELU with its bias takes 571 of 768 ->
// 3072, the product with a bias 459 and the pass some 200. Its gradient with the bias's takes 1624,
// apart 763; a weight's gradient of 2304 x 768 with the bias's 470, apart 438, and so at each other
// size of a step. In f32 the library's tanh would be the least exact part of a step.
bool fused_by_rule(const GemmProblem& p) {
  return size_of(p.d.dtype) <= 2 && makes_gelu(p.epilogue);
}

std::optional<bool> fused_without_measuring(GemmFusion fusion, const GemmProblem& problem,
                                            const std::optional<std::string>& known) {
  if (fusion == GemmFusion::kNever) return false;
  if (fusion == GemmFusion::kAlways) return true;
  if (known) return *known == "fused";
  if (fusion == GemmFusion::kByTable) return fused_by_rule(problem);
  return std::nullopt;
}

bool reads_result(const GemmProblem& p) { return p.beta != 0 && p.c == nullptr; }

GemmAddresses addresses_of(const GemmProblem& p, const LibraryCall& call) {
  return {p.bias, call.aux.data, call.a_scale, call.b_scale, call.d_scale};
}

LibraryCall library_call(const GemmProblem& p) {
  LibraryCall call{.m = p.N, .n = p.M, .k = p.K, .batch = p.batch};
  // What is by rows here is the transpose there, and the operands change places.
  const auto matrix = [](const GemmMatrix& x, int64_t rows, int64_t columns) {
    return LibraryMatrix{x.dtype,
                         x.transposed ? rows : columns,
                         x.transposed ? columns : rows,
                         x.leading,
                         x.batch_stride,
                         x.data};
  };
  call.a = matrix(p.b, p.K, p.N);
  call.transpose_a = p.b.transposed;
  call.b = matrix(p.a, p.M, p.K);
  call.transpose_b = p.a.transposed;
  call.d = call.c = matrix(p.d, p.M, p.N);
  if (p.c != nullptr) call.c.data = const_cast<void*>(p.c);
  if (p.aux.data != nullptr) call.aux = matrix(p.aux, p.M, p.N);
  call.a_scale = p.b_scale;
  call.b_scale = p.a_scale;
  call.d_scale = p.d_scale;
  constexpr int32_t kModes[] = {0, 3, 4, 5};  // scalar, outer vector, vectors of 128, 128 x 128
  call.a_scale_mode = kModes[static_cast<int>(p.b_scaling)];
  call.b_scale_mode = kModes[static_cast<int>(p.a_scaling)];
  constexpr uint32_t kDefault = 1, kBias = 4, kBiasGrad = 16, kGelu = 32, kGeluGrad = 64,
                     kAux = 128, kBiasGradOfTheirA = 256, kBiasGradOfTheirB = 512;
  const uint32_t aux = p.aux.data != nullptr ? kAux : 0;
  switch (p.epilogue) {
    case GemmEpilogue::kNone:
      call.epilogue = kDefault;
      break;
    case GemmEpilogue::kBias:
      call.epilogue = kBias;
      break;
    case GemmEpilogue::kGelu:
      call.epilogue = kGelu | aux;
      break;
    case GemmEpilogue::kGeluBias:
      call.epilogue = kGelu | kBias | aux;
      break;
    case GemmEpilogue::kGeluGrad:
      call.epilogue = kGeluGrad | kAux;
      break;
    case GemmEpilogue::kGeluGradBiasGrad:
      call.epilogue = kGeluGrad | kAux | kBiasGrad;
      break;
    case GemmEpilogue::kBiasGradOfA:  // their b
      call.epilogue = kBiasGradOfTheirB;
      break;
    case GemmEpilogue::kBiasGradOfB:
      call.epilogue = kBiasGradOfTheirA;
      break;
  }
  return call;
}

int alignment_of(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  int alignment = 256;
  while (address % static_cast<uintptr_t>(alignment) != 0) alignment /= 2;
  return alignment;
}

std::string describe(const GemmProblem& p) {
  PlainText<std::ostringstream> out;
  const auto matrix = [&](const char* name, const GemmMatrix& x) {
    out << ' ' << name << ':' << x.dtype << (x.transposed ? ",t," : ",n,") << x.leading << ','
        << x.batch_stride << ",@" << alignment_of(x.data);
  };
  out << 'm' << p.M << " n" << p.N << " k" << p.K << " b" << p.batch;
  matrix("a", p.a);
  matrix("b", p.b);
  matrix("d", p.d);
  out << ' ' << name_of(p.epilogue);
  if (p.bias != nullptr) out << " bias:" << p.bias_dtype << ",@" << alignment_of(p.bias);
  if (p.aux.data != nullptr) matrix("aux", p.aux);
  out << (p.beta != 0 ? " beta1" : " beta0");
  if (p.c != nullptr) out << " c:@" << alignment_of(p.c);
  if (p.tf32) out << " tf32";
  if (p.fast_accumulation) out << " fast";
  if (p.a_scaling != GemmScale::kTensor || p.b_scaling != GemmScale::kTensor) {
    out << " scales:" << name_of(p.a_scaling) << ',' << name_of(p.b_scaling);
  }
  return out.str();
}

}  // namespace tessera::gpu
