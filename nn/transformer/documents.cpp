#include <tessera/nn/transformer/documents.h>

#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>

namespace tessera::nn {
namespace {

constexpr std::string_view kWhere = "document_bounds";

Tensor positions_of_lengths(const Tensor& cu_seqlens) {
  const std::vector<int64_t> ends = cu_seqlens.to_vector<int64_t>();
  TS_CHECK(!ends.empty() && ends[0] == 0, kWhere, "cu_seqlens begin with 0; got ", cu_seqlens,
           "; position ids are [B, T]");
  std::vector<int64_t> places;
  for (size_t i = 1; i < ends.size(); ++i) {
    TS_CHECK(ends[i] > ends[i - 1], kWhere, "cu_seqlens must ascend; number ", i, " is ", ends[i],
             " after ", ends[i - 1], "; position ids are [B, T]");
    for (int64_t t = 0; t < ends[i] - ends[i - 1]; ++t) places.push_back(t);
  }
  const auto T = static_cast<int64_t>(places.size());
  const Tensor row = empty({1, T}, {.dtype = kI64});
  std::copy(places.begin(), places.end(), row.data_as<int64_t>());
  return row.to(cu_seqlens.device());
}

void check_positions(const Tensor& position_ids) {
  const std::vector<int64_t> places = position_ids.to_vector<int64_t>();
  const int64_t T = position_ids.size(1);
  for (size_t i = 0; i < places.size(); ++i) {
    const bool is_first = static_cast<int64_t>(i) % T == 0;
    TS_CHECK(places[i] == 0 || (!is_first && places[i] == places[i - 1] + 1), kWhere,
             "position ids begin at 0 in each document and rise by one; row ",
             static_cast<int64_t>(i) / T, " has ", places[i], " at token ",
             static_cast<int64_t>(i) % T);
  }
}

}  // namespace

Documents document_bounds(const Tensor& given) {
  TS_CHECK(given.defined(), kWhere, "the position ids are undefined; give it a value first");
  TS_CHECK_DTYPE(given.dtype() == kI64 || given.dtype() == kI32, kWhere,
                 "expects position ids or cu_seqlens of i64 or i32; got ", given);
  TS_CHECK_SHAPE(given.dim() == 1 || given.dim() == 2, kWhere,
                 "expects position ids [B, T] or cu_seqlens [N + 1]; got ", given);
  const NoGradGuard no_grad;
  const Tensor places = given.dim() == 1 ? positions_of_lengths(given) : given.to(kI64);
  if (given.dim() == 2 && places.device().is_cpu()) check_positions(places);
  const int64_t T = places.size(1);
  const Tensor index = arange(0, T, 1, kI64, places.device());
  // The end of a token's document is the first place behind it that begins another.
  const Tensor first = where(eq(places, 0), index, T);
  const Tensor behind =
      T == 0 ? first
             : cat(TensorList{first.narrow(1, 1, T - 1), full_like(first.narrow(1, 0, 1), T)}, 1);
  const Tensor ends = T == 0 ? behind : flip(cummin(flip(behind, {1}), 1).values, {1});
  return {.position_ids = places, .starts = (index - places).to(kI32), .ends = ends.to(kI32)};
}

void check_rows(const char* where, const TokenRows& rows) {
  TS_CHECK_SHAPE(rows.ids.dim() == 2, where, "tokens must be [batch, length]; got ", rows.ids);
  TS_CHECK_SHAPE(
      !rows.documents.defined() || rows.documents.position_ids.shape() == rows.ids.shape(), where,
      "tokens and their documents differ in shape: ", rows.ids, " and ",
      rows.documents.position_ids);
}

}  // namespace tessera::nn
