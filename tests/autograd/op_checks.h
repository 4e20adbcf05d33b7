// What test_ops asks of each row of the table. A check returns its complaints, none where the row
// is right, so that the tests of these tests can look at them too.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include <tessera/core/state/safetensors.h>

#include "autograd/op_samples.h"

namespace tessera::tests {

using Complaints = std::vector<std::string>;

// The error bound of a result: k * eps * sqrt(terms) * scale, eps = 2^-p of the dtype.
double error_bound(DType dtype, double k, double terms, double scale);

// Largest finite magnitude.
double largest(const std::vector<double>& values);

// Empty where every |got - reference| is within the bound, NaN meets NaN and infinities are equal;
// otherwise says where it differs most. References of integers and booleans are met exactly.
std::string difference(const Tensor& got, const std::vector<double>& reference, double bound);

// The same elements as another dtype.
Tensor converted(const Tensor& x, DType dtype);

// Values and gradients in f32, bf16 and f16 against f64 from the same rounded inputs; the dtype of
// the results; inputs stay as they were. Of linear algebra: f32, and the errors for others.
Complaints check_forward(const OpRow& row, const Sample& sample);
// The op runs on `device`, the reference on the CPU.
Complaints check_forward_on(const OpRow& row, const Sample& sample, const Device& device);
// The Jacobian against central differences in f64; second derivatives, or the error that names the
// op.
Complaints check_grad(const OpRow& row, const Sample& sample);
// Whichever inputs require a gradient, they get the one that they have where all do, and the second
// derivatives.
Complaints check_grad_of_some(const OpRow& row, const Sample& sample);
// Inputs and incoming gradients that are transposed, strided or expanded give what contiguous ones
// do.
Complaints check_layout(const OpRow& row, const Sample& sample);
// The meta device gives the shapes and dtypes of the CPU, or an error where values decide.
Complaints check_meta(const OpRow& row, const Sample& sample);
// Operands of two devices, the CPU and `other`, are an error that names both; but zero-dimensional
// ones of the CPU may stand beside others, where the op takes them as numbers.
Complaints check_devices(const OpRow& row, const Sample& sample, const Device& other);
// Dtypes of results and gradients under autocast are those of the record's policy.
Complaints check_autocast(const OpRow& row);

// Runs one case of ops_GROUP.json on ops_GROUP.safetensors: values, dtypes and gradients of torch.
Complaints replay_op_case(const nlohmann::json& golden, const SafeTensorsFile& file);

}  // namespace tessera::tests
