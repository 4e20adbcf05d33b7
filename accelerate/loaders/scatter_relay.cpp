#include <tessera/accelerate/loaders/scatter_relay.h>

#include <cstring>

#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>

namespace tessera::accelerate {
namespace {

enum class Kind : int64_t { kBatch, kEnd, kError };

// What comes before each rank's batch.
struct Header {
  Kind kind = Kind::kEnd;
  int64_t bytes = 0, rows = 0, samples = 0, last = 0, end_position = 0;
  int64_t final = 0;  // no turn follows
};
constexpr int64_t kHeaderSize = sizeof(Header) / sizeof(int64_t);

const distributed::CollectiveOptions kHeaders{.tag = "loader: headers"};
const distributed::CollectiveOptions kBatches{.tag = "loader: batches"};

// Shares the memory of `bytes`.
Tensor tensor_over(const std::string& bytes) {
  return raw::from_blob(const_cast<char*>(bytes.data()), {static_cast<int64_t>(bytes.size())}, kU8);
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    return exception.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

}  // namespace

data::MadeBatch ScatterRelay::exchange(data::MadeBatch made, std::exception_ptr error) {
  if (finished_) return {};
  return makes_batches() ? send(std::move(made), error) : receive();
}

data::MadeBatch ScatterRelay::send(data::MadeBatch made, std::exception_ptr error) {
  std::vector<Header> headers(static_cast<size_t>(ranks_.size()));
  std::vector<std::string> payloads(headers.size());
  try {
    for (size_t rank = 1; !error && made.batch && rank < headers.size(); ++rank) {
      const data::BatchShare& share = made.others[rank - 1];
      if (!share.batch) continue;
      ByteWriter out;
      codec_.encode(share.batch.get(), out);
      payloads[rank] = out.take();
      headers[rank] = {.kind = Kind::kBatch,
                       .rows = share.rows,
                       .samples = share.samples,
                       .last = share.last,
                       .end_position = made.end_position};
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (error) {
    for (size_t rank = 1; rank < headers.size(); ++rank) {
      headers[rank] = {.kind = Kind::kError};
      payloads[rank] = text_of(error);
    }
  }
  for (size_t rank = 1; rank < headers.size(); ++rank) {
    headers[rank].bytes = static_cast<int64_t>(payloads[rank].size());
    finished_ |= headers[rank].kind != Kind::kBatch;
  }
  std::vector<Tensor> header_tensors, payload_tensors;
  for (size_t rank = 0; rank < headers.size(); ++rank) {
    headers[rank].final = finished_;
    header_tensors.push_back(raw::from_blob(&headers[rank], {kHeaderSize}, kI64));
    payload_tensors.push_back(tensor_over(payloads[rank]));
  }
  ranks_.scatter(raw::empty({kHeaderSize}, kI64), header_tensors, 0, kHeaders).wait();
  ranks_.scatter(raw::empty({0}, kU8), payload_tensors, 0, kBatches).wait();
  if (error) std::rethrow_exception(error);
  made.others.clear();
  return made;
}

data::MadeBatch ScatterRelay::receive() {
  Header header;
  const Tensor numbers = raw::empty({kHeaderSize}, kI64);
  ranks_.scatter(numbers, {}, 0, kHeaders).wait();
  std::memcpy(&header, numbers.data(), sizeof header);
  const Tensor payload = raw::empty({header.bytes}, kU8);
  ranks_.scatter(payload, {}, 0, kBatches).wait();
  finished_ = header.final != 0;
  const std::span bytes(payload.data_as<const char>(), static_cast<size_t>(header.bytes));
  TS_CHECK_AS(DistributedError, header.kind != Kind::kError, "loader",
              "rank 0, which makes the batches, could not make this one: ",
              std::string(bytes.begin(), bytes.end()));
  data::MadeBatch made;
  if (header.kind == Kind::kEnd) return made;
  ByteReader in(bytes);
  made.batch = codec_.decode(in, header.samples);
  made.rows = header.rows;
  made.samples = header.samples;
  made.last = header.last != 0;
  made.end_position = header.end_position;
  return made;
}

}  // namespace tessera::accelerate
