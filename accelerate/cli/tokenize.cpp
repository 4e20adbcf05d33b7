// tessera tokenize: texts and conversations to ids and back, by a pretrained model's tokenizer.json;
// documents to token files.
#include <algorithm>
#include <exception>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <tessera/accelerate/cli/commands.h>
#include <tessera/core/error.h>
#include <tessera/core/io/bounded_json.h>
#include <tessera/core/parallel.h>
#include <tessera/data/text/token_file.h>
#include <tessera/data/tokenizer_json/pretrained_tokenizer.h>

namespace tessera::cli {
namespace {

using data::PretrainedTokenizer;

constexpr std::string_view kTokenize = "tessera tokenize";

// Of lines that are encoded at once for a token file: what bounds the memory.
constexpr size_t kBytesAtOnce = size_t{8} << 20;

struct TokenizeRequest {
  std::string tokenizer, output;
  bool chat = false, generation_prompt = false, end_of_text = false;
  bool json = false, decode = false, offsets = false;
  bool no_special_tokens = false, skip_special_tokens = false;
};

using OrderedJson = nlohmann::ordered_json;  // templates show objects in their order

template <class Json = nlohmann::json>
Json json_of(const std::string& line, size_t number) {
  const std::string place = "line " + std::to_string(number) + " of the standard input";
  std::string why;
  auto value = parse_bounded_json<Json>(line, place, &why);
  TS_CHECK_AS(FormatError, !value.is_discarded(), kTokenize, place, " is no JSON: ", why);
  return value;
}

// A list of messages, or an object that has it beside tools and documents.
data::Chat chat_of(const PretrainedTokenizer& tokenizer, const std::string& line, size_t number,
                   const TokenizeRequest& request) {
  const auto value = json_of<OrderedJson>(line, number);
  data::ChatOptions options{.add_generation_prompt = request.generation_prompt};
  const OrderedJson* messages = &value;
  if (value.is_object()) {
    TS_CHECK_AS(FormatError, value.contains("messages"), kTokenize, "line ", number,
                " has no messages; give a list of them, or an object that has 'messages'");
    messages = &value["messages"];
    if (value.contains("tools")) options.tools = value["tools"].dump();
    if (value.contains("documents")) options.documents = value["documents"].dump();
  }
  return tokenizer.apply_chat_template_json(messages->dump(), options);
}

std::string ids_line(const std::vector<data::TokenId>& ids) {
  std::string line;
  for (const data::TokenId id : ids) {
    if (!line.empty()) line += ' ';
    line += std::to_string(id);
  }
  return line;
}

std::string encoded(const PretrainedTokenizer& tokenizer, const std::string& text,
                    const TokenizeRequest& request) {
  const auto encoding =
      tokenizer.encode_text(text, {.add_special_tokens = !request.no_special_tokens});
  if (!request.json) return ids_line(encoding.ids);
  nlohmann::json line = {{"ids", encoding.ids}};
  if (request.offsets) {
    line["offsets"] = nlohmann::json::array();
    for (const data::TokenOffset& offset : encoding.offsets) {
      line["offsets"].push_back({offset.begin, offset.end});
    }
  }
  return line.dump();
}

std::vector<data::TokenId> ids_of(const std::string& line, size_t number, bool json) {
  std::string list = line;
  if (!json) {
    std::replace(list.begin(), list.end(), ' ', ',');
    list = "[" + list + "]";
  }
  nlohmann::json ids = json_of(list, number);
  if (ids.is_object() && ids.contains("ids")) ids = nlohmann::json(ids["ids"]);
  TS_CHECK_AS(FormatError, ids.is_array(), kTokenize, "line ", number,
              " has no ids; give {\"ids\": [15496, 995]}");
  for (const auto& id : ids) {
    TS_CHECK_AS(FormatError, id.is_number_unsigned() && id.get<uint64_t>() < (1u << 31), kTokenize,
                "line ", number, " has '", id.dump(), "' for an id; ids are whole numbers");
  }
  return ids.get<std::vector<data::TokenId>>();
}

std::string text_of(const std::string& line, size_t number, bool json) {
  if (!json) return line;
  const nlohmann::json value = json_of(line, number);
  TS_CHECK_AS(FormatError, value.is_string(), kTokenize, "line ", number,
              " must be a JSON string; it is a ", value.type_name());
  return value.get<std::string>();
}

std::vector<data::TokenId> document_ids(const PretrainedTokenizer& tokenizer,
                                        const std::string& line, size_t number,
                                        const TokenizeRequest& request) {
  std::vector<data::TokenId> ids;
  if (request.chat) {
    ids = chat_of(tokenizer, line, number, request).ids;
  } else if (request.no_special_tokens) {
    ids = tokenizer.encode(text_of(line, number, request.json));
  } else {
    ids = tokenizer
              .encode_text(text_of(line, number, request.json),
                           data::PretrainedEncodeOptions::whole(true))
              .ids;
  }
  if (request.end_of_text) ids.push_back(*tokenizer.end_of_text());
  return ids;
}

// Each line is a document. Lines are read some megabytes at a time and encoded on all cores; the
// file has their ids in order.
int write_tokens(const PretrainedTokenizer& tokenizer, const TokenizeRequest& request) {
  TS_CHECK_AS(ConfigError, !request.end_of_text || tokenizer.end_of_text(), kTokenize,
              "the tokenizer names no eos_token for --end-of-text");
  data::TokenFileWriter writer(request.output, tokenizer.vocab_size());
  size_t documents = 0;
  for (bool more = true; more;) {
    std::vector<std::string> lines;
    size_t bytes = 0;
    for (std::string line; bytes < kBytesAtOnce && (more = !std::getline(std::cin, line).fail());) {
      bytes += line.size() + 1;
      lines.push_back(std::move(line));
    }
    std::vector<std::vector<data::TokenId>> ids(lines.size());
    std::vector<std::exception_ptr> errors(lines.size());
    parallel_for(static_cast<int64_t>(lines.size()), 16, [&](int64_t begin, int64_t end) {
      for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); ++i) {
        try {
          ids[i] = document_ids(tokenizer, lines[i], documents + i + 1, request);
        } catch (...) {
          errors[i] = std::current_exception();
        }
      }
    });
    for (const std::exception_ptr& error : errors) {
      if (error != nullptr) std::rethrow_exception(error);
    }
    for (const auto& document : ids) writer.append(document);
    documents += lines.size();
  }
  const int64_t count = writer.size();
  writer.commit();
  std::cout << documents << " documents, " << count << " ids in " << request.output << '\n';
  return 0;
}

int tokenize(const TokenizeRequest& request) {
  const PretrainedTokenizer tokenizer =
      std::filesystem::is_directory(request.tokenizer)
          ? PretrainedTokenizer::from_pretrained(request.tokenizer)
          : PretrainedTokenizer::from_file(request.tokenizer);
  if (!request.output.empty()) return write_tokens(tokenizer, request);
  std::string line;
  for (size_t number = 1; std::getline(std::cin, line); ++number) {
    if (request.chat) {
      const data::Chat chat = chat_of(tokenizer, line, number, request);
      nlohmann::json out = {{"ids", chat.ids}, {"text", chat.text}};
      if (!chat.assistant_mask.empty()) out["assistant_mask"] = chat.assistant_mask;
      std::cout << (request.json ? out.dump() : ids_line(chat.ids)) << '\n';
      continue;
    }
    if (request.decode) {
      const std::string text =
          tokenizer.decode(ids_of(line, number, request.json), request.skip_special_tokens);
      std::cout << (request.json ? nlohmann::json(text).dump() : text) << '\n';
      continue;
    }
    std::cout << encoded(tokenizer, text_of(line, number, request.json), request) << '\n';
  }
  return 0;
}

}  // namespace

void add_tokenize(CLI::App& app, int& exit_code) {
  CLI::App* command =
      app.add_subcommand("tokenize", "texts to ids and back, by a model's tokenizer.json");
  const auto request = std::make_shared<TokenizeRequest>();
  command
      ->add_option("--tokenizer", request->tokenizer,
                   "a folder that holds tokenizer.json, or such a file")
      ->required();
  command->add_flag("--json", request->json,
                    "a JSON string a line in and {\"ids\": [...]} a line out; without it lines of "
                    "text, and ids with spaces between");
  command->add_flag("--decode", request->decode, "the other way");
  command->add_flag("--offsets", request->offsets,
                    "with --json: the characters of the text that each id stands for, too");
  command->add_flag("--no-special-tokens", request->no_special_tokens,
                    "adds no special tokens to a text");
  command->add_flag("--skip-special-tokens", request->skip_special_tokens,
                    "with --decode: leaves them out");
  command->add_flag("--chat", request->chat,
                    "lines are lists of messages in JSON, or objects with messages, tools and "
                    "documents, for the chat template; with --json text and ids come out");
  command->add_flag("--generation-prompt", request->generation_prompt,
                    "with --chat: the beginning of an answer at the end");
  command->add_option("--output", request->output,
                      "a token file for the ids of all lines, which are encoded on all cores");
  command->add_flag("--end-of-text", request->end_of_text,
                    "with --output: the eos_token behind each line");
  command->callback([request, &exit_code] {
    TS_CHECK_AS(UsageError, !request->chat || !(request->decode || request->offsets), kTokenize,
                "--chat goes neither with --decode nor with --offsets");
    TS_CHECK_AS(UsageError, request->chat || !request->generation_prompt, kTokenize,
                "--generation-prompt goes with --chat");
    TS_CHECK_AS(UsageError, !request->output.empty() || !request->end_of_text, kTokenize,
                "--end-of-text goes with --output");
    TS_CHECK_AS(UsageError, request->output.empty() || !(request->decode || request->offsets),
                kTokenize, "--output goes neither with --decode nor with --offsets");
    TS_CHECK_AS(UsageError, !request->offsets || (request->json && !request->decode), kTokenize,
                "--offsets goes with --json, and not with --decode");
    exit_code = tokenize(*request);
  });
}

}  // namespace tessera::cli
