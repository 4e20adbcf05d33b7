// Which queries of attention on a CPU are a problem of their own. Internal.
//
// A piece is a stretch of queries and the stretch of keys that they, and no other queries, see: a
// sample, or each document of a packed row. Pieces share nothing, so that a document's bits are
// those of the document alone, whatever stands beside it. Where the queries of a piece see all of
// its keys, or those up to their own place, it is an ordinary problem; else each query's range goes
// along (windows, prefixes, gaps).
#pragma once

#include <cstdint>
#include <vector>

#include <tessera/core/kernels/attention/attention_head.h>

namespace tessera::kernels {

struct AttentionSpec;

struct AttentionPiece {
  int64_t sample;
  int64_t query, queries;  // the first query, and their number
  int64_t key, keys;
  int64_t padding;  // keys behind these that nobody sees
  bool causal;      // a query sees keys 0 .. its own place, both counted from the piece's first
  bool ranged;      // AttentionPieces::ranges hold
};

struct AttentionPieces {
  std::vector<AttentionPiece> pieces;  // together they have all queries and keys
  std::vector<KeyRange> ranges;        // [B, T], counted from the piece's first key
};

// IndexError for bounds that do not fit.
AttentionPieces attention_pieces(const AttentionSpec& spec, int64_t B, int64_t T, int64_t S);

// Pairs of a query and a key that it sees, of all samples; the bounds of `spec` are on the CPU and
// are not checked.
double ranged_pairs(const AttentionSpec& spec, int64_t T, int64_t S);

}  // namespace tessera::kernels
