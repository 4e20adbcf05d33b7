// Keys and values of earlier tokens, so that generation computes each token once.
//
//     nn::models::Llama llama({.layers = 2});
//     nn::models::llama::KvCache cache(llama.config, 4, 512, kBF16);  // 4 texts of up to 512 tokens
//     Tensor logits = llama(zeros({4, 16}, {.dtype = kI64}), Tensor(), true, &cache).logits;
//     logits = llama(argmax(logits, -1), Tensor(), true, &cache).logits;
//
// It holds them as f32, bf16 or f16, or with kU8 in 8 bits: each vector of a head and token by its
// smallest value and a 255th of its range, so that no element is off by more than a 510th of the
// range, beside rounding of f32. 8 bits take (E + 8) / 4 E of the bytes of f32.
//
// With keys off by at most d each, a score scale * (q . k) is off by at most scale * d * sum|q|; with
// all scores off by at most e, each probability is off by a factor between exp(-2 e) and exp(2 e), and an
// output by at most (exp(2 e) - 1) * max|v| beside what values are off by.
//
// What attention reads is converted to the dtype of the keys that are appended, one layer at a time: each
// call reads what is held and writes it once in that dtype. f32 beside f32 saves this, and so do few
// queries beside 8 bits on a CPU, which read these as they lie (attention_bytes.h).
#pragma once

#include <cstdint>
#include <vector>

#include <tessera/autograd/ops.h>

namespace tessera::nn::models {

struct KvCacheShape {
  int64_t layers = 0, batch = 0, heads = 0, capacity = 0, width = 0;  // width: of a head
};

class KvCache {
 public:
  // Allocates for `batch` sequences of `capacity` tokens. DTypeError: another dtype than those above.
  KvCache(const KvCacheShape& shape, DType dtype, const Device& device);

  int64_t length() const { return length_; }  // tokens held
  int64_t capacity() const { return shape_.capacity; }
  int64_t bytes() const;
  void clear() { length_ = 0; }

  struct Held {
    Tensor keys, values;  // [B, H, length + T, E], in the dtype of those appended
  };
  // Appends the keys and values [B, H, T, E] of one layer and returns all of them. ShapeError: more
  // than the capacity.
  Held append(size_t layer, const Tensor& keys, const Tensor& values);
  // Appends likewise, and gives scaled_dot_product_attention of the queries [B, H, T, E] to all.
  Tensor attend(size_t layer, const Tensor& query, const Tensor& keys, const Tensor& values,
                const AttentionOptions& options);
  void advance(int64_t tokens) { length_ += tokens; }  // after the last layer
  // Sequence i is what sequence rows[i] was; the number of sequences may change. rows: [n] i64.
  void select(const Tensor& rows);

 private:
  struct Part {          // the keys or the values of a layer
    Tensor held;         // [B, H, capacity, E]
    Tensor least, step;  // [B, H, capacity, 1] f32, of 8 bits
  };
  Part make_part() const;
  void check_room(int64_t added) const;
  // Writes the vectors [B, H, T, E] behind those that are held.
  void write(Part& part, const Tensor& added) const;
  Tensor read(const Part& part, int64_t total, DType dtype) const;

  KvCacheShape shape_;
  DType dtype_;
  Device device_;
  std::vector<Part> keys_, values_;
  int64_t length_ = 0;
};

}  // namespace tessera::nn::models
