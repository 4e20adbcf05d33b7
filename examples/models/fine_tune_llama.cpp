// Fine-tunes adapters of a folder of transformers on answers, saves them as PEFT does, and asks the result.
//
//     fine_tune_llama Llama-3.2-1B-Instruct train.jsonl out/adapter "Where is the key?"
//     tessera launch --mixed-precision bf16 fine_tune_llama Llama-3.2-1B-Instruct train.jsonl out/adapter "Hello"
#include <cstdio>
#include <string>
#include <vector>

#include <tessera.h>

using namespace tessera;

void fine_tune(const std::string& folder, const std::string& file, const std::string& output,
               const std::string& question) {
  Accelerator accelerator({.seed = 1});
  const auto tokenizer = data::PretrainedTokenizer::from_pretrained(folder);
  const auto model = nn::models::Llama::from_pretrained(folder);
  nn::add_lora(*model, {.names = {"all-linear"}, .rank = 8, .alpha = 16});
  const auto examples = std::make_shared<data::FineTuningDataset>(file, tokenizer);
  data::DataLoader<data::FineTuningExample> loader(examples, {.batch_size = 2, .shuffle = true});
  optim::AdamW optimizer(nn::trainable_parameters(*model), {.lr = 5e-3});
  accelerator.prepare(*model, optimizer, loader);
  double first = 0, mean = 0;
  for (int epoch = 0; epoch < 5; ++epoch) {
    mean = 0;
    for (const data::TokenExample& batch : loader) {
      const Tensor loss = (*model)(batch.inputs, batch.targets).loss;
      accelerator.backward(loss);
      accelerator.clip_grad_norm(model->parameters(), 1.0);
      optimizer.step(), optimizer.zero_grad();
      mean += loss.item() / static_cast<double>(loader.size());
    }
    if (epoch == 0) first = mean;
    accelerator.print("epoch ", epoch, ": loss ", mean);
  }
  accelerator.save_lora(*model, output);
  const auto chat =
      tokenizer.apply_chat_template({{"user", question}}, {.add_generation_prompt = true});
  const std::vector<int64_t> prompt(chat.ids.begin(), chat.ids.end());
  const auto answer = nn::models::generate(*model, prompt, {.max_tokens = 20, .temperature = 0});
  accelerator.print(tokenizer.decode(std::vector<data::TokenId>(answer.begin(), answer.end())));
  TS_CHECK(mean < 0.9 * first, "fine_tune_llama", "learned nothing: ", first, " became ", mean);
}

int main(int argc, char** argv) {
  return run(argc, argv, [](std::span<const std::string> arguments) {
    TS_CHECK(arguments.size() == 4, "fine_tune_llama",
             "give it a model, data, a folder for the adapter and a question");
    fine_tune(arguments[0], arguments[1], arguments[2], arguments[3]);
  });
}
