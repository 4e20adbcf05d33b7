#include <tessera/nn/models/evaluation.h>

#include <algorithm>
#include <cmath>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>

namespace tessera::nn::models {
namespace {

constexpr std::string_view kEvaluate = "evaluate";

// Tokens that go through a model, of which those from `first` on count.
struct Row {
  std::vector<int64_t> tokens;
  size_t first = 1;
};

// Of each row the likelihood of its tokens that count. Shorter rows are filled up at the right, which
// no token before it sees.
std::vector<Likelihood> likelihoods(const LanguageModel& model, std::span<const Row> rows) {
  const NoGradGuard no_grad;
  size_t longest = 0;
  for (const Row& row : rows) longest = std::max(longest, row.tokens.size());
  const size_t length = longest - 1;  // nothing follows the last
  std::vector<int64_t> input, target;
  for (const Row& row : rows) {
    for (size_t i = 0; i < length; ++i) {
      input.push_back(i < row.tokens.size() ? row.tokens[i] : 0);
      target.push_back(i + 1 < row.tokens.size() ? row.tokens[i + 1] : 0);
    }
  }
  const auto B = static_cast<int64_t>(rows.size()), T = static_cast<int64_t>(length);
  const auto on_device = [&](const std::vector<int64_t>& ids) {
    return tensor(std::span<const int64_t>(ids), {B, T}).to(model.device());
  };
  const Tensor logits = model.logits(on_device(input), false, nullptr, Tensor()).to(kF32);
  const Tensor wanted = on_device(target).unsqueeze(2);
  const Tensor chosen = gather(logits, 2, wanted).squeeze(2);
  const auto log_likelihood = (chosen - logsumexp(logits, {-1})).to_vector<float>();
  const auto largest = eq(argmax(logits, -1), wanted.squeeze(2)).to_vector<bool>();
  std::vector<Likelihood> result;
  for (size_t b = 0; b < rows.size(); ++b) {
    Likelihood one{.is_greedy = true};
    for (size_t i = rows[b].first; i < rows[b].tokens.size(); ++i) {
      one.log_likelihood += log_likelihood[b * length + i - 1];
      one.is_greedy = one.is_greedy && largest[b * length + i - 1];
    }
    result.push_back(one);
  }
  return result;
}

// In batches; `take` gets the likelihood of row i.
void for_each_row(const LanguageModel& model, const std::vector<Row>& rows, int64_t batch_size,
                  const std::function<void(size_t i, const Likelihood& one)>& take) {
  TS_CHECK(batch_size > 0, kEvaluate, "needs a batch_size above 0; got ", batch_size);
  const EvaluationMode evaluation(*model.module);
  const auto step = static_cast<size_t>(batch_size);
  for (size_t begin = 0; begin < rows.size(); begin += step) {
    const auto part = std::span(rows).subspan(begin, std::min(step, rows.size() - begin));
    const std::vector<Likelihood> ones = likelihoods(model, part);
    for (size_t i = 0; i < ones.size(); ++i) take(begin + i, ones[i]);
  }
}

}  // namespace

double Perplexity::perplexity() const {
  return std::exp(negative_log_likelihood / static_cast<double>(tokens));
}

Perplexity perplexity(const LanguageModel& model, std::span<const int64_t> ids,
                      const PerplexityOptions& options) {
  const int64_t window = options.window > 0 ? options.window : model.context;
  const int64_t stride = options.stride > 0 ? options.stride : std::max<int64_t>(window / 2, 1);
  const auto count = static_cast<int64_t>(ids.size());
  TS_CHECK(count >= 2, kEvaluate, "a text of ", count, " tokens has none that others precede");
  TS_CHECK(window >= 2 && options.stride >= 0 && stride < window, kEvaluate,
           "needs a window of at least 2 and a stride from 1 to window - 1; got ", window, " and ",
           stride);
  TS_CHECK(!model.is_limited || window <= model.context, kEvaluate, "the model reads ",
           model.context, " tokens; got a window of ", window);
  std::vector<Row> rows;
  for (int64_t begin = 0, counted = 1; counted < count; begin += stride) {
    const int64_t end = std::min(begin + window, count);
    rows.push_back({std::vector<int64_t>(ids.begin() + begin, ids.begin() + end),
                    static_cast<size_t>(counted - begin)});
    counted = end;
  }
  Perplexity result{.tokens = count - 1};
  for_each_row(model, rows, options.batch_size, [&](size_t, const Likelihood& one) {
    result.negative_log_likelihood -= one.log_likelihood;
  });
  return result;
}

std::vector<Likelihood> continuation_likelihoods(const LanguageModel& model,
                                                 const std::vector<Continuation>& continuations,
                                                 int64_t batch_size) {
  std::vector<Row> rows;
  for (const Continuation& each : continuations) {
    TS_CHECK(!each.context.empty() && !each.tokens.empty(), kEvaluate,
             "a continuation and what precedes it have at least one token each; got ",
             each.tokens.size(), " behind ", each.context.size());
    Row row{each.context, each.context.size()};
    row.tokens.insert(row.tokens.end(), each.tokens.begin(), each.tokens.end());
    const auto length = static_cast<int64_t>(row.tokens.size());
    TS_CHECK(!model.is_limited || length <= model.context + 1, kEvaluate, "the model reads ",
             model.context, " tokens; a context with its continuation has ", length);
    rows.push_back(std::move(row));
  }
  std::vector<Likelihood> result(rows.size());
  for_each_row(model, rows, batch_size, [&](size_t i, const Likelihood& one) { result[i] = one; });
  return result;
}

}  // namespace tessera::nn::models
