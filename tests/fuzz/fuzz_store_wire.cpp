#include <tessera/distributed/rendezvous/socket.h>
#include <tessera/distributed/rendezvous/store.h>
#include <tessera/distributed/rendezvous/store_wire.h>

#include <sys/socket.h>

#include "driver.h"

using namespace tessera;
using namespace tessera::distributed;

namespace {
constexpr Milliseconds kTime{5000};
constexpr Milliseconds kShort{20};  // a wait of the input's own may last for ever

// The server of all inputs.
TcpStoreServer& server() {
  static TcpStoreServer one({"127.0.0.1", 0, "token"});
  return one;
}
}  // namespace

// The first byte says whether the client shows the token before the rest of the input is sent. The
// server goes on to serve others, whatever came.
FUZZ(text) {
  if (text.empty()) return;
  FileDescriptor client = try_connect("127.0.0.1", server().port(), Clock::now() + kTime);
  fuzz::require(static_cast<bool>(client), "the server accepts");
  std::string bytes;
  if ((text[0] & 1) != 0) {
    std::string hello(1, static_cast<char>(wire::Command::kHello));
    wire::put_string(hello, wire::kMagic);
    wire::put_string(hello, "token");
    bytes = wire::framed(hello);
  }
  bytes += text.substr(1);
  send_all(client.get(), bytes, Clock::now() + kTime);
  ::shutdown(client.get(), SHUT_WR);
  char answer;
  while (receive_exact(client.get(), &answer, 1, Clock::now() + kShort) == Transfer::kDone) {
  }
  client.reset();
  server().store()->set("alive", "yes");
  fuzz::require(server().store()->get("alive") == "yes", "the server serves");
  for (const std::string& key : server().store()->list("")) server().store()->remove(key);
}
