// Serves a classifier of a folder of transformers over TCP: a line of text in, its label and how
// sure the model is out.
//
//     serve out/classifier 8080
//     echo "where is my card" | nc localhost 8080
//
// A thread a connection; all share the model, which nobody writes.
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <thread>

#include <tessera.h>

using namespace tessera;

struct Classifier {
  explicit Classifier(const std::string& folder)
      : tokenizer(data::WordPieceTokenizer::from_pretrained(folder)),
        model(nn::models::Bert::from_pretrained(folder)) {
    model->eval();
  }
  std::string answer(const std::string& text) {
    const NoGradGuard no_grad;
    const auto encoding = tokenizer.encode_text(text, {.max_length = model->config.context});
    const std::vector<int64_t> ids(encoding.ids.begin(), encoding.ids.end());
    const Tensor logits = (*model)(tensor(ids, {1, static_cast<int64_t>(ids.size())})).logits;
    const auto best = static_cast<int64_t>(logits.argmax(-1).item());
    const double sure = softmax(logits, -1).select(1, best).item();
    const auto& names = model->config.label_names;
    const std::string name =
        names.empty() ? std::to_string(best) : names[static_cast<size_t>(best)];
    return name + "\t" + std::to_string(sure);
  }
  data::WordPieceTokenizer tokenizer;
  std::unique_ptr<nn::models::Bert> model;
};

void talk(int connection, Classifier& classifier) {
  set_num_threads(1);  // several connections share the cores
  std::FILE* in = ::fdopen(connection, "r");
  char* line = nullptr;
  size_t room = 0;
  for (ssize_t length; (length = ::getline(&line, &room, in)) > 0;) {
    std::string answer;
    try {
      answer = classifier.answer(std::string(line, static_cast<size_t>(length)));
    } catch (const std::exception& error) {
      answer = std::string("error\t") + error.what();
    }
    answer += "\n";
    if (::send(connection, answer.data(), answer.size(), MSG_NOSIGNAL) < 0) break;
  }
  std::free(line);
  std::fclose(in);
}

int main(int argc, char** argv) {
  return run(argc, argv, [](std::span<const std::string> arguments) {
    TS_CHECK(arguments.size() == 2, "serve", "give it FOLDER PORT");
    // run() lets a training save before it ends by this; here there is nothing to save.
    std::signal(SIGTERM, SIG_DFL);
    Classifier classifier(arguments[0]);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(std::stoi(arguments[1])));
    socklen_t size = sizeof address;
    auto* const name = reinterpret_cast<sockaddr*>(&address);
    const int server = ::socket(AF_INET, SOCK_STREAM, 0);
    TS_CHECK_AS(IoError, ::bind(server, name, size) == 0 && ::listen(server, 16) == 0, "serve",
                "port ", arguments[1], " is taken; give another, or 0 for any");
    ::getsockname(server, name, &size);
    std::printf("listening on port %d\n", ntohs(address.sin_port));
    std::fflush(stdout);
    for (int connection; (connection = ::accept(server, nullptr, nullptr)) >= 0;) {
      std::thread(talk, connection, std::ref(classifier)).detach();
    }
  });
}
