#include <tessera/data/fine_tuning.h>

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>

#include <tessera/core/error.h>
#include <tessera/core/io/bounded_json.h>
#include <tessera/core/io/mapped_file.h>
#include <tessera/core/parallel.h>
#include <tessera/data/text/text.h>

namespace tessera::data {
namespace {

constexpr std::string_view kFineTuning = "FineTuningDataset";

using OrderedJson = nlohmann::ordered_json;  // templates show objects in their order

// The text of an example, and where its answers are.
struct MarkedText {
  std::string text;
  std::vector<CharacterSpan> answers;
  bool special_tokens = false;  // whether the tokenizer adds them
};

int64_t characters(std::string_view text) {
  return std::count_if(text.begin(), text.end(), [](char byte) { return (byte & 0xC0) != 0x80; });
}

class Line {
 public:
  Line(std::string_view text, std::string place, const PretrainedTokenizer& tokenizer,
       const FineTuningOptions& options)
      : place_(std::move(place)), tokenizer_(tokenizer), options_(options), chat_(options.chat) {
    std::string why;
    json_ = parse_bounded_json<OrderedJson>(text, place_, &why);
    require(!json_.is_discarded(), "must be a JSON object: ", replace_invalid_utf8(why));
    require(json_.is_object(), "must be a JSON object; it is a ", json_.type_name());
    for (auto [name, option] :
         {std::pair("tools", &chat_.tools), std::pair("documents", &chat_.documents)}) {
      const OrderedJson* const value = field(name);
      if (value == nullptr) continue;
      require(value->is_array(), "has '", name, "', which must be an array");
      *option = value->dump();
    }
  }

  MarkedText marked() const {
    if (const OrderedJson* const messages = field("messages")) return of_messages(*messages, 0);
    const OrderedJson *const prompt = field("prompt"), *const completion = field("completion");
    require(prompt != nullptr && completion != nullptr,
            "must have 'messages', or 'prompt' and 'completion'; it has neither");
    if (prompt->is_string() && completion->is_string()) {
      return of_texts(prompt->get<std::string>(), completion->get<std::string>());
    }
    require(prompt->is_array() && completion->is_array(),
            "must have two texts or two lists of messages in 'prompt' and 'completion'");
    OrderedJson all = *prompt;
    for (const OrderedJson& message : *completion) all.push_back(message);
    return of_messages(all, prompt->size());
  }

 private:
  template <class... Parts>
  void require(bool holds, const Parts&... parts) const {
    TS_CHECK_AS(FormatError, holds, kFineTuning, place_, " ", parts..., "; correct the line.");
  }
  const OrderedJson* field(const char* name) const {
    const auto found = json_.find(name);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }

  MarkedText of_texts(const std::string& prompt, const std::string& completion) const {
    MarkedText result{prompt + completion, {}, true};
    if (options_.append_eos) {
      const auto& eos = tokenizer_.config().eos_token;
      TS_CHECK_AS(ConfigError, eos.has_value(), kFineTuning,
                  "the tokenizer names no eos_token to end completions with; name it in "
                  "tokenizer_config.json, or give append_eos = false.");
      result.text += *eos;
    }
    result.answers.push_back({characters(prompt), characters(result.text)});
    return result;
  }

  std::string rendered(const OrderedJson& messages, bool prompts) const {
    ChatOptions chat = chat_;
    chat.add_generation_prompt = prompts;
    return tokenizer_.render_chat(messages.dump(), chat).text;
  }

  // `first`: messages before it are no answers.
  MarkedText of_messages(const OrderedJson& messages, size_t first) const {
    require(messages.is_array() && !messages.empty(), "must have messages in a list, at least one");
    ChatOptions chat = chat_;
    chat.add_generation_prompt = false;
    RenderedChat whole = tokenizer_.render_chat(messages.dump(), chat);
    MarkedText result{std::move(whole.text), std::move(whole.generated), false};
    if (tokenizer_.marks_generation(chat) || !options_.answers_only) return result;
    OrderedJson so_far = OrderedJson::array();
    for (size_t i = 0; i < messages.size(); ++i) {
      const bool answers = i >= first && messages[i].is_object() &&
                           messages[i].value("role", OrderedJson()) == OrderedJson("assistant");
      if (answers && i > 0) result.answers.push_back(answer(result.text, so_far, messages[i]));
      so_far.push_back(messages[i]);
    }
    require(!result.answers.empty(),
            "has no message of the role 'assistant' that answers another one");
    return result;
  }

  // Up to which byte of a text its tokens are those of another one. A character alone may be the
  // same in the tokens that follow: < in <|user|> and </s>.
  size_t common_end(const std::string& text, const std::string& other) const {
    const PretrainedEncodeOptions whole = PretrainedEncodeOptions::whole(false);
    const PretrainedEncoding a = tokenizer_.encode_text(text, whole);
    const PretrainedEncoding b = tokenizer_.encode_text(other, whole);
    const auto same = std::mismatch(a.ids.begin(), a.ids.end(), b.ids.begin(), b.ids.end()).first;
    const auto count = static_cast<size_t>(same - a.ids.begin());
    int64_t left = count == 0 ? 0 : a.offsets[count - 1].end;
    size_t end = 0;
    for (; end < text.size(); ++end) {
      if ((text[end] & 0xC0) != 0x80 && left-- == 0) break;
    }
    return end;
  }

  CharacterSpan answer(const std::string& whole, const OrderedJson& before,
                       const OrderedJson& message) const {
    const std::string prompt = rendered(before, true);
    OrderedJson with = before;
    with.push_back(message);
    const std::string until = rendered(with, false);
    const size_t end = common_end(whole, until);
    std::string said;
    if (message.contains("content") && message["content"].is_string()) {
      said = message["content"].get<std::string>();
    }
    const auto trimmed = [](std::string_view text) {
      const size_t begin = text.find_first_not_of(" \n\t\r");
      if (begin == text.npos) return std::string_view();
      return text.substr(begin, text.find_last_not_of(" \n\t\r") + 1 - begin);
    };
    const bool found =
        whole.starts_with(prompt) && end >= prompt.size() &&
        std::string_view(whole).substr(prompt.size(), end - prompt.size()).find(trimmed(said)) !=
            std::string_view::npos;
    require(found,
            "has an answer that the chat template changes when messages follow it, or that "
            "does not begin as add_generation_prompt does; give a template that marks "
            "answers by {% generation %}");
    return {characters(std::string_view(whole).substr(0, prompt.size())),
            characters(std::string_view(whole).substr(0, end))};
  }

  std::string place_;
  const PretrainedTokenizer& tokenizer_;
  const FineTuningOptions& options_;
  ChatOptions chat_;
  OrderedJson json_;
};

TokenId padding_id(const PretrainedTokenizer& tokenizer) {
  for (const auto& name : {tokenizer.config().pad_token, tokenizer.config().eos_token}) {
    if (!name) continue;
    if (const auto id = tokenizer.token_to_id(*name)) return *id;
  }
  return 0;
}

// False: the example is left out.
bool shorten(FineTuningExample& example, const std::string& place,
             const FineTuningOptions& options) {
  const auto most = static_cast<size_t>(options.max_length);
  const size_t size = example.ids.size();
  if (size <= most) return true;
  switch (options.too_long) {
    case TooLong::kTruncateRight:
      example.ids.resize(most);
      example.learned.resize(most);
      break;
    case TooLong::kTruncateLeft: {
      const auto more = static_cast<std::ptrdiff_t>(size - most);
      example.ids.erase(example.ids.begin(), example.ids.begin() + more);
      example.learned.erase(example.learned.begin(), example.learned.begin() + more);
      break;
    }
    case TooLong::kSkip:
      return false;
    case TooLong::kRefuse:
      TS_THROW(ValueError, kFineTuning, place, " has ", size, " tokens, and at most ", most,
               " are allowed; shorten it, raise max_length, or choose another TooLong.");
  }
  return true;
}

}  // namespace

std::optional<FineTuningExample> fine_tuning_example(std::string_view line,
                                                     const std::string& place,
                                                     const PretrainedTokenizer& tokenizer,
                                                     const FineTuningOptions& options) {
  TS_CHECK(options.max_length >= 2, kFineTuning, "max_length must be at least 2; got ",
           options.max_length, ".");
  const MarkedText marked = Line(line, place, tokenizer, options).marked();
  PretrainedEncoding encoding =
      tokenizer.encode_text(marked.text, PretrainedEncodeOptions::whole(marked.special_tokens));
  FineTuningExample example;
  example.padding = padding_id(tokenizer);
  example.learned.resize(encoding.ids.size());
  const std::vector<TokenId> mask = token_mask(encoding.offsets, marked.answers);
  for (size_t i = 0; i < example.learned.size(); ++i) {
    example.learned[i] = !options.answers_only || mask[i] != 0;
  }
  example.ids = std::move(encoding.ids);
  if (!shorten(example, place, options)) return std::nullopt;
  // The first token is nobody's target.
  const bool learns =
      example.learned.size() > 1 &&
      std::find(example.learned.begin() + 1, example.learned.end(), true) != example.learned.end();
  if (!learns) return std::nullopt;
  return example;
}

FineTuningDataset::FineTuningDataset(const std::string& path, const PretrainedTokenizer& tokenizer,
                                     const FineTuningOptions& options) {
  const MappedFile file(path, FileAccess::kSequential);
  struct Numbered {
    std::string_view text;
    size_t number;
  };
  std::vector<Numbered> lines;
  size_t number = 0;
  for (const std::string_view line : split_lines(strip_byte_order_mark(file.text()))) {
    ++number;
    if (line.find_first_not_of(" \t\r") != line.npos) lines.push_back({line, number});
  }
  std::vector<std::optional<FineTuningExample>> made(lines.size());
  std::vector<std::exception_ptr> errors(lines.size());
  parallel_for(static_cast<int64_t>(lines.size()), 8, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto at = static_cast<size_t>(i);
      try {
        const std::string place = "'" + path + "' line " + std::to_string(lines[at].number);
        try {
          made[at] = fine_tuning_example(lines[at].text, place, tokenizer, options);
        } catch (Error& error) {
          if (std::string_view(error.what()).find(place) == std::string_view::npos)
            error.add_context(place);
          throw;
        }
      } catch (...) {
        errors[at] = std::current_exception();
      }
    }
  });
  for (const std::exception_ptr& error : errors) {
    if (error != nullptr) std::rethrow_exception(error);
  }
  for (std::optional<FineTuningExample>& example : made) {
    if (!example) {
      ++skipped_;
      continue;
    }
    num_targets_ += std::count(example->learned.begin() + 1, example->learned.end(), true);
    longest_ = std::max(longest_, static_cast<int64_t>(example->ids.size()));
    examples_.push_back(*std::move(example));
  }
  TS_CHECK(!examples_.empty(), kFineTuning, "'", path, "' has ", lines.size(),
           " lines, and none is left with a target of max_length ", options.max_length,
           "; give longer examples, or raise max_length.");
}

FineTuningExample FineTuningDataset::get(int64_t index) const {
  detail::check_index(index, size(), kFineTuning);
  return examples_[static_cast<size_t>(index)];
}

TokenExample Collate<FineTuningExample>::batch(std::span<FineTuningExample> examples) {
  TS_CHECK(!examples.empty(), "collate", "a batch has at least one example; got none.");
  size_t longest = 2;
  for (const FineTuningExample& example : examples) longest = std::max(longest, example.ids.size());
  const auto rows = static_cast<int64_t>(examples.size()),
             width = static_cast<int64_t>(longest) - 1;
  TokenExample batch{raw::empty({rows, width}, kI64), raw::empty({rows, width}, kI64)};
  auto* inputs = batch.inputs.data_as<int64_t>();
  auto* targets = batch.targets.data_as<int64_t>();
  for (const FineTuningExample& example : examples) {
    for (size_t i = 0; i + 1 < longest; ++i) {
      const bool has = i < example.ids.size(), predicts = i + 1 < example.ids.size();
      *inputs++ = has ? example.ids[i] : example.padding;
      *targets++ = predicts && example.learned[i + 1] ? example.ids[i + 1] : kIgnoreTarget;
    }
  }
  return batch;
}

}  // namespace tessera::data
