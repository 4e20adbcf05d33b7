// IDX files, the format of MNIST, plain or compressed with gzip (in one or several members).
//
// Layout: two zero bytes, one byte element type, one byte number of dimensions, the sizes as
// big-endian u32, then the elements in row-major order, big-endian (Y. LeCun, "The MNIST
// database").
#pragma once

#include <span>
#include <string>
#include <string_view>

#include <tessera/core/tensor/tensor.h>

namespace tessera::data {

// A new tensor on the CPU. Element types 0x08 u8, 0x0C i32, 0x0D f32, 0x0E f64 keep their dtype;
// 0x09 i8 and 0x0B i16 become i32.
//
// IoError; FormatError naming file, byte offset and remedy: unknown magic or element type, more
// than 16 dimensions, a product of sizes that the file cannot hold, truncation, trailing bytes, a
// broken gzip stream. Nothing is allocated before the sizes were compared with the length of the
// file.
Tensor read_idx(const std::string& path);

// The same from memory; `file` names the bytes in errors.
Tensor parse_idx(std::span<const std::byte> bytes, std::string_view file);

}  // namespace tessera::data
