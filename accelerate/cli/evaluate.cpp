// tessera evaluate: the perplexity of a text, or which of some answers a language model finds the
// most likely.
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <tessera/accelerate/cli/commands.h>
#include <tessera/core/error.h>
#include <tessera/core/io/bounded_json.h>
#include <tessera/core/parallel.h>
#include <tessera/data/tokenizer_json/pretrained_tokenizer.h>
#include <tessera/nn/models/evaluation.h>

namespace tessera::cli {
namespace {

using Json = nlohmann::json;
using namespace nn::models;
namespace fs = std::filesystem;

constexpr std::string_view kEvaluate = "tessera evaluate";

struct EvaluateRequest {
  std::string model, text, choices, dtype;
  PerplexityOptions perplexity = {};
  int threads = 0;
  bool json = false;
};

// A text as the model's tokens: by tokenizer.json, or the bytes of a model of 256 tokens.
class Words {
 public:
  Words(const std::string& folder, int64_t vocab_size) {
    if (fs::exists(fs::path(folder) / "tokenizer.json")) {
      tokenizer_.emplace(data::PretrainedTokenizer::from_pretrained(folder));
      return;
    }
    TS_CHECK_AS(ConfigError, vocab_size == 256, kEvaluate, folder,
                " has no tokenizer.json, and bytes are tokens of models with 256 of them; this one "
                "has ",
                vocab_size);
  }
  std::vector<int64_t> operator()(const std::string& text) const {
    std::vector<int64_t> ids;
    if (!tokenizer_) {
      for (const char byte : text) ids.push_back(static_cast<unsigned char>(byte));
      return ids;
    }
    const auto encoding = tokenizer_->encode_text(text);
    ids.assign(encoding.ids.begin(), encoding.ids.end());
    return ids;
  }

 private:
  std::optional<data::PretrainedTokenizer> tokenizer_;
};

std::string contents_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  TS_CHECK_AS(IoError, file.is_open(), kEvaluate, "cannot read ", path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void evaluate_text(const EvaluateRequest& request, const LanguageModel& model, const Words& words) {
  const std::vector<int64_t> ids = words(contents_of(request.text));
  const Perplexity result = perplexity(model, ids, request.perplexity);
  const double each = result.negative_log_likelihood / static_cast<double>(result.tokens);
  if (request.json) {
    std::printf("%s\n", Json({{"perplexity", result.perplexity()},
                              {"negative_log_likelihood", each},
                              {"tokens", result.tokens}})
                            .dump()
                            .c_str());
    return;
  }
  std::printf("perplexity %.6g, which is exp(%.6f), the mean over %lld tokens\n",
              result.perplexity(), each, static_cast<long long>(result.tokens));
}

struct Question {
  std::vector<std::string> choices;
  size_t answer = 0;
  std::vector<Continuation> continuations = {};
};

Question question_of(const std::string& line, const std::string& place, const Words& words) {
  std::string why;
  const auto json = parse_bounded_json(line, place, &why);
  TS_CHECK_AS(FormatError, json.is_object(), kEvaluate, place, " is no JSON object",
              why.empty() ? "" : ": " + why);
  const Json choices = json.value("choices", Json());
  bool fits = json.value("context", Json()).is_string() && choices.is_array() &&
              choices.size() >= 2 && json.value("answer", Json()).is_number_unsigned() &&
              json.at("answer").get<size_t>() < choices.size();
  for (const Json& choice : choices.is_array() ? choices : Json::array()) {
    fits = fits && choice.is_string();
  }
  TS_CHECK_AS(FormatError, fits, kEvaluate, place,
              " needs \"context\", a text, \"choices\", at least two texts, and \"answer\", the "
              "index of one");
  Question question{choices.get<std::vector<std::string>>(), json.at("answer").get<size_t>()};
  const auto context = json.at("context").get<std::string>();
  const std::vector<int64_t> before = words(context);
  for (const std::string& choice : question.choices) {
    // Where both meet tokens are those of the whole text.
    const std::vector<int64_t> whole = words(context + choice);
    TS_CHECK_AS(FormatError, !before.empty() && whole.size() > before.size(), kEvaluate, place,
                ": the choice \"", choice, "\" adds no token to its context");
    const auto end = whole.begin() + static_cast<std::ptrdiff_t>(before.size());
    question.continuations.push_back({{whole.begin(), end}, {end, whole.end()}});
  }
  return question;
}

void evaluate_choices(const EvaluateRequest& request, const LanguageModel& model,
                      const Words& words) {
  std::ifstream file(request.choices);
  TS_CHECK_AS(IoError, file.is_open(), kEvaluate, "cannot read ", request.choices);
  size_t count = 0, right = 0, right_by_bytes = 0, number = 0;
  for (std::string line; std::getline(file, line);) {
    const std::string place = request.choices + ", line " + std::to_string(++number);
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const Question question = question_of(line, place, words);
    const auto found =
        continuation_likelihoods(model, question.continuations, request.perplexity.batch_size);
    const auto best = [&](auto&& score) {
      size_t first = 0;
      for (size_t i = 1; i < found.size(); ++i) first = score(i) > score(first) ? i : first;
      return first;
    };
    ++count;
    right += best([&](size_t i) { return found[i].log_likelihood; }) == question.answer;
    right_by_bytes +=
        best([&](size_t i) {
          return found[i].log_likelihood / static_cast<double>(question.choices[i].size());
        }) == question.answer;
  }
  TS_CHECK_AS(FormatError, count > 0, kEvaluate, request.choices, " has no questions");
  const auto part = [&](size_t of) { return static_cast<double>(of) / static_cast<double>(count); };
  if (request.json) {
    std::printf("%s\n", Json({{"accuracy", part(right)},
                              {"accuracy_by_bytes", part(right_by_bytes)},
                              {"questions", count}})
                            .dump()
                            .c_str());
    return;
  }
  std::printf("accuracy %.4f, by likelihood per byte %.4f, of %zu questions\n", part(right),
              part(right_by_bytes), count);
}

int evaluate(const EvaluateRequest& request) {
  if (request.threads > 0) set_num_threads(request.threads);
  const LanguageModel model = LanguageModel::from_pretrained(request.model);
  if (!request.dtype.empty()) model.module->to(*parse_dtype(request.dtype));
  const Words words(request.model, model.vocab_size);
  if (!request.text.empty()) evaluate_text(request, model, words);
  if (!request.choices.empty()) evaluate_choices(request, model, words);
  return 0;
}

}  // namespace

void add_evaluate(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand(
      "evaluate", "the perplexity of a text, or accuracy of multiple choice, by a language model");
  const auto request = std::make_shared<EvaluateRequest>();
  command->add_option("model", request->model, "a folder of transformers: GPT-2 or Llama-like")
      ->required();
  command->add_option("--text", request->text, "a file whose perplexity is wanted");
  command->add_option("--choices", request->choices,
                      "a file of lines {\"context\": ..., \"choices\": [...], \"answer\": 0}: how "
                      "often the answer is the most likely choice");
  command->add_option("--window", request->perplexity.window,
                      "with --text: tokens that are read together; default: the model's context");
  command->add_option("--stride", request->perplexity.stride,
                      "with --text: how far apart windows begin; default: half a window");
  command->add_option("--batch-size", request->perplexity.batch_size,
                      "windows or choices that are read together");
  command->add_option("--dtype", request->dtype, "default: as saved")
      ->check(CLI::IsMember({"f32", "bf16"}));
  command->add_option("--threads", request->threads, "0: one a core")
      ->check(CLI::NonNegativeNumber);
  command->add_flag("--json", request->json, "prints an object");
  command->callback([request, &exit_code] {
    TS_CHECK_AS(UsageError, !request->text.empty() || !request->choices.empty(), kEvaluate,
                "give --text or --choices, or both");
    TS_CHECK_AS(UsageError,
                request->perplexity.window >= 0 && request->perplexity.stride >= 0 &&
                    request->perplexity.batch_size > 0,
                kEvaluate, "--window, --stride and --batch-size are numbers above 0");
    exit_code = evaluate(*request);
  });
}

}  // namespace tessera::cli
