// What tensor parallelism knows of a parameter that it has divided, for who stands between: outside
// of calls the parameter is a DTensor, and the tensor that ops read in its place, which fully_shard
// makes, has these marks. Internal.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <tessera/core/tensor/tensor.h>

namespace tessera::distributed {

struct DividedParameter {
  std::weak_ptr<const VersionCounter> parameter;  // expires with it
  std::string name;                               // dotted, for messages
  uint64_t marks = 0;                             // tensor_parallel/mark.h
};

// In the current context, for tensors that share the parameter's version counter.
void note_divided(const Tensor& parameter, std::string name, uint64_t marks);
const DividedParameter* divided_parameter(const Tensor& parameter);  // nullptr for all others

}  // namespace tessera::distributed
