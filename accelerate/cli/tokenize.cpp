// tessera tokenize: texts to ids and back, by a pretrained model's tokenizer.json.
#include <algorithm>
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
#include <tessera/data/tokenizer_json/pretrained_tokenizer.h>

namespace tessera::cli {
namespace {

using data::PretrainedTokenizer;

constexpr std::string_view kTokenize = "tessera tokenize";

struct TokenizeRequest {
  std::string tokenizer;
  bool json = false, decode = false, offsets = false;
  bool no_special_tokens = false, skip_special_tokens = false;
};

nlohmann::json json_of(const std::string& line, size_t number) {
  const std::string place = "line " + std::to_string(number) + " of the standard input";
  std::string why;
  auto value = parse_bounded_json(line, place, &why);
  TS_CHECK_AS(FormatError, !value.is_discarded(), kTokenize, place, " is no JSON: ", why);
  return value;
}

std::string encoded(const PretrainedTokenizer& tokenizer, const std::string& text,
                    const TokenizeRequest& request) {
  const auto encoding =
      tokenizer.encode_text(text, {.add_special_tokens = !request.no_special_tokens});
  if (!request.json) {
    std::string line;
    for (const data::TokenId id : encoding.ids) {
      if (!line.empty()) line += ' ';
      line += std::to_string(id);
    }
    return line;
  }
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

int tokenize(const TokenizeRequest& request) {
  const PretrainedTokenizer tokenizer =
      std::filesystem::is_directory(request.tokenizer)
          ? PretrainedTokenizer::from_pretrained(request.tokenizer)
          : PretrainedTokenizer::from_file(request.tokenizer);
  std::string line;
  for (size_t number = 1; std::getline(std::cin, line); ++number) {
    if (request.decode) {
      const std::string text =
          tokenizer.decode(ids_of(line, number, request.json), request.skip_special_tokens);
      std::cout << (request.json ? nlohmann::json(text).dump() : text) << '\n';
      continue;
    }
    std::string text = line;
    if (request.json) {
      const nlohmann::json value = json_of(line, number);
      TS_CHECK_AS(FormatError, value.is_string(), kTokenize, "line ", number,
                  " must be a JSON string; it is a ", value.type_name());
      text = value.get<std::string>();
    }
    std::cout << encoded(tokenizer, text, request) << '\n';
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
  command->callback([request, &exit_code] {
    TS_CHECK_AS(UsageError, !request->offsets || (request->json && !request->decode), kTokenize,
                "--offsets goes with --json, and not with --decode");
    exit_code = tokenize(*request);
  });
}

}  // namespace tessera::cli
