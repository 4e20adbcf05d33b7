// Stores: one contract for all kinds, then what each kind adds.
// ctest labels: threads
#include <gtest/gtest.h>

#include <atomic>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <thread>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <tessera/distributed/rendezvous/socket.h>
#include <tessera/distributed/rendezvous/store.h>
#include <tessera/distributed/rendezvous/store_wire.h>
#include <tessera/distributed/transport/watchdog.h>

namespace tessera::distributed::test_store {
namespace {

using namespace std::chrono_literals;
namespace fs = std::filesystem;

const Milliseconds kLong = 20s;  // never reached by a test that passes

class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string pattern = (fs::temp_directory_path() / "tessera-store-XXXXXX").string();
    path_ = ::mkdtemp(pattern.data());
  }
  ~TemporaryFolder() { fs::remove_all(path_); }
  std::string file(const std::string& name) const { return (path_ / name).string(); }

 private:
  fs::path path_;
};

// A job of one kind: clients of the same store.
struct Kind {
  const char* name;
  std::function<std::function<std::shared_ptr<Store>()>()> open;
};

std::ostream& operator<<(std::ostream& out, const Kind& kind) { return out << kind.name; }

std::vector<Kind> kinds() {
  return {
      {"Memory",
       [] {
         auto store = std::make_shared<MemoryStore>();
         return [store]() -> std::shared_ptr<Store> { return store; };
       }},
      {"File",
       [] {
         auto folder = std::make_shared<TemporaryFolder>();
         return [folder]() -> std::shared_ptr<Store> {
           return std::make_shared<FileStore>(folder->file("store"));
         };
       }},
      {"Tcp",
       [] {
         auto server = std::make_shared<TcpStoreServer>(StoreAddress{"127.0.0.1", 0, "secret"});
         return [server]() -> std::shared_ptr<Store> {
           return TcpStore::connect({"127.0.0.1", server->port(), "secret"}, kLong);
         };
       }},
      {"TcpHost",  // the hosting process's own view
       [] {
         auto server = std::make_shared<TcpStoreServer>(StoreAddress{"127.0.0.1", 0, ""});
         return [server]() -> std::shared_ptr<Store> { return server->store(); };
       }},
      {"PrefixOfTcp",
       [] {
         auto server = std::make_shared<TcpStoreServer>(StoreAddress{"localhost", 0, ""});
         server->store()->set("a", "outside the prefix");
         return [server]() -> std::shared_ptr<Store> {
           return std::make_shared<PrefixStore>(
               "group/7/", TcpStore::connect({"localhost", server->port(), ""}, kLong));
         };
       }},
  };
}

class StoreContract : public ::testing::TestWithParam<Kind> {
 protected:
  void SetUp() override { client_ = GetParam().open(); }
  std::shared_ptr<Store> client() { return client_(); }

 private:
  std::function<std::shared_ptr<Store>()> client_;
};

TEST_P(StoreContract, AnotherClientReadsTheBytesThatOneWrote) {
  const auto writer = client();
  const auto reader = client();
  std::string every_byte;
  for (int byte = 0; byte < 256; ++byte) every_byte.push_back(static_cast<char>(byte));
  writer->set("bytes", every_byte);
  writer->set("empty", "");
  writer->set("", "a key without letters");
  EXPECT_EQ(reader->get("bytes"), every_byte);
  EXPECT_EQ(reader->get("empty"), "");
  EXPECT_EQ(reader->get(""), "a key without letters");
  EXPECT_EQ(reader->get("absent"), std::nullopt);
  EXPECT_EQ(reader->get("a"), std::nullopt);
}

TEST_P(StoreContract, MegabytesPassInBothDirections) {
  std::string large(5u << 20, 'x');
  for (size_t i = 0; i < large.size(); i += 97) large[i] = static_cast<char>(i);
  client()->set("large", large);
  EXPECT_EQ(client()->get("large"), large);
}

TEST_P(StoreContract, ALaterWriteWins) {
  const auto store = client();
  store->set("key", "first");
  store->set("key", "second");
  EXPECT_EQ(client()->get("key"), "second");
}

TEST_P(StoreContract, AWaitEndsWhenAnotherClientSetsTheKey) {
  const auto store = client();
  std::thread writer([this] {
    std::this_thread::sleep_for(30ms);
    client()->set("late", "here");
  });
  EXPECT_EQ(store->wait("late", kLong), "here");
  writer.join();
}

TEST_P(StoreContract, AWaitThatRunsOutNamesTheKey) {
  try {
    client()->wait("never", 20ms);
    FAIL() << "the key was never set";
  } catch (const StoreTimeout& error) {
    EXPECT_NE(std::string(error.what()).find("never"), std::string::npos) << error.what();
  }
}

TEST_P(StoreContract, AWaitDoesNotHoldUpOtherCallsOfTheSameClient) {
  const auto store = client();
  std::thread waiter([&] { EXPECT_EQ(store->wait("answer", kLong), "42"); });
  std::this_thread::sleep_for(20ms);
  store->set("answer", "42");
  waiter.join();
}

TEST_P(StoreContract, AddIsOneStepForAllClients) {
  constexpr int kClients = 4;
  constexpr int kAdds = 50;
  std::vector<std::thread> threads;
  std::atomic<int64_t> largest{0};
  for (int i = 0; i < kClients; ++i) {
    threads.emplace_back([&] {
      const auto store = client();
      for (int j = 0; j < kAdds; ++j) {
        const int64_t sum = store->add("count", 1);
        int64_t seen = largest;
        while (seen < sum && !largest.compare_exchange_weak(seen, sum)) {
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(largest, kClients * kAdds);
  EXPECT_EQ(client()->add("count", -200), 0);
  EXPECT_EQ(client()->get("count"), "0");
}

TEST_P(StoreContract, AddRefusesTextAndOverflow) {
  const auto store = client();
  store->set("text", "12 monkeys");
  EXPECT_THROW(store->add("text", 1), DistributedError);
  EXPECT_EQ(store->get("text"), "12 monkeys");
  store->set("large", "9223372036854775807");
  EXPECT_THROW(store->add("large", 1), DistributedError);
  EXPECT_EQ(store->add("large", -1), 9223372036854775806);
}

TEST_P(StoreContract, OneOfManyWinsACompareSet) {
  std::atomic<int> winners{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      if (client()->compare_set("leader", std::nullopt, std::to_string(i))) ++winners;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(winners, 1);
  const std::string leader = client()->get("leader").value();
  EXPECT_FALSE(client()->compare_set("leader", "nobody", "x"));
  EXPECT_FALSE(client()->compare_set("leader", std::nullopt, "x"));
  EXPECT_FALSE(client()->compare_set("absent", "", "x"));
  EXPECT_TRUE(client()->compare_set("leader", leader, "x"));
  EXPECT_EQ(client()->get("leader"), "x");
}

TEST_P(StoreContract, CheckRemoveAndListSeeTheKeysThatAreThere) {
  const auto store = client();
  for (const char* key : {"rank/2", "rank/0", "rank/1", "other", "rank"}) store->set(key, key);
  EXPECT_EQ(store->list("rank/"), (std::vector<std::string>{"rank/0", "rank/1", "rank/2"}));
  EXPECT_EQ(store->list("nothing"), std::vector<std::string>{});
  const std::vector<std::string> all = {"rank/0", "other"};
  EXPECT_TRUE(store->check(all));
  EXPECT_TRUE(client()->remove("rank/0"));
  EXPECT_FALSE(client()->remove("rank/0"));
  EXPECT_FALSE(store->check(all));
  EXPECT_TRUE(store->check({}));
  EXPECT_EQ(store->list("rank/"), (std::vector<std::string>{"rank/1", "rank/2"}));
}

TEST_P(StoreContract, AWatchReportsWritesInTheirOrderAndOnce) {
  const auto store = client();
  store->set("failure/3", "killed");
  store->set("noise", "x");
  store->set("failure/1", "exited");
  StoreChanges changes = store->watch("failure/", 0, kLong);
  EXPECT_EQ(changes.entries,
            (std::vector<StoreEntry>{{"failure/3", "killed"}, {"failure/1", "exited"}}));
  EXPECT_TRUE(store->watch("failure/", changes.revision, 10ms).entries.empty());
  std::thread writer([this] {
    std::this_thread::sleep_for(30ms);
    client()->set("failure/3", "again");
  });
  changes = store->watch("failure/", changes.revision, kLong);
  EXPECT_EQ(changes.entries, (std::vector<StoreEntry>{{"failure/3", "again"}}));
  writer.join();
}

INSTANTIATE_TEST_SUITE_P(Kinds, StoreContract, ::testing::ValuesIn(kinds()),
                         [](const auto& info) { return info.param.name; });

TEST(PrefixStore, NestsAndKeepsKeysApart) {
  const auto whole = std::make_shared<MemoryStore>();
  const auto outer = std::make_shared<PrefixStore>("job/", whole);
  PrefixStore first("a/", outer);
  PrefixStore second("b/", outer);
  first.set("id", "1");
  second.set("id", "2");
  EXPECT_EQ(whole->list(""), (std::vector<std::string>{"job/a/id", "job/b/id"}));
  EXPECT_EQ(first.get("id"), "1");
  EXPECT_EQ(second.watch("", 0, 0ms).entries, (std::vector<StoreEntry>{{"id", "2"}}));
  EXPECT_THROW(PrefixStore("x/", nullptr), ValueError);
}

TEST(FileStore, ARecordCutShortByADeadWriterIsDropped) {
  const TemporaryFolder folder;
  const std::string path = folder.file("store");
  FileStore(path).set("kept", "value");
  const auto whole = fs::file_size(path);
  FileStore(path).set("lost", "a value of which the end is missing");
  for (auto size = fs::file_size(path) - 1; size > whole; --size) {
    fs::resize_file(path, size);
    FileStore store(path);
    EXPECT_EQ(store.get("lost"), std::nullopt) << size;
    EXPECT_EQ(store.get("kept"), "value");
    store.set("lost", "a value of which the end is missing");
  }
}

// Another process writes: its lock is the file's, not the threads'.
TEST(FileStore, AWriteWaitsForTheProcessThatHoldsTheFile) {
  const TemporaryFolder folder;
  const std::string path = folder.file("store");
  FileStore store(path);
  store.set("count", "1");
  int ready[2], release[2];
  ASSERT_EQ(::pipe(ready) | ::pipe(release), 0);
  const pid_t holder = ::fork();
  if (holder == 0) {
    const int file = ::open(path.c_str(), O_RDWR);
    char byte = ::flock(file, LOCK_EX) == 0 ? 'y' : 'n';
    if (::write(ready[1], &byte, 1) == 1 && ::read(release[0], &byte, 1) == 1) ::_exit(0);
    ::_exit(1);
  }
  char held = 'n';
  ASSERT_EQ(::read(ready[0], &held, 1), 1);
  ASSERT_EQ(held, 'y');
  auto adding = std::async(std::launch::async, [&] { return store.add("count", 1); });
  EXPECT_EQ(adding.wait_for(200ms), std::future_status::timeout);
  ASSERT_EQ(::write(release[1], "x", 1), 1);
  EXPECT_EQ(adding.get(), 2);
  int status = 0;
  ::waitpid(holder, &status, 0);
  EXPECT_EQ(status, 0);
  for (const int end : {ready[0], ready[1], release[0], release[1]}) ::close(end);
}

TEST(FileStore, AFlippedByteIsNotTakenForAValue) {
  const TemporaryFolder folder;
  const std::string path = folder.file("store");
  FileStore(path).set("key", "value");
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-1, std::ios::end);
  file.put('X');
  file.close();
  EXPECT_EQ(FileStore(path).get("key"), std::nullopt);
}

TEST(FileStore, AFolderThatIsNotThereIsNamed) {
  try {
    FileStore store("/nowhere/at/all/store");
    FAIL();
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("/nowhere/at/all/store"), std::string::npos);
  }
}

StoreAddress address_of(const TcpStoreServer& server, const std::string& token = "secret") {
  return {"127.0.0.1", server.port(), token};
}

TEST(TcpStore, AClientThatComesBeforeItsHostWaitsForIt) {
  int port = 0;
  { port = TcpStoreServer({"127.0.0.1", 0, ""}).port(); }
  std::shared_ptr<TcpStore> client;
  std::thread early([&] { client = TcpStore::connect({"127.0.0.1", port, "secret"}, kLong); });
  std::this_thread::sleep_for(30ms);
  TcpStoreServer server({"127.0.0.1", port, "secret"});
  early.join();
  client->set("key", "value");
  EXPECT_EQ(server.store()->get("key"), "value");
}

TEST(TcpStore, NobodyListeningIsATimeoutThatNamesTheAddress) {
  int port = 0;
  { port = TcpStoreServer({"127.0.0.1", 0, ""}).port(); }
  try {
    TcpStore::connect({"127.0.0.1", port, ""}, 50ms);
    FAIL();
  } catch (const StoreTimeout& error) {
    EXPECT_NE(std::string(error.what()).find("127.0.0.1:" + std::to_string(port)),
              std::string::npos)
        << error.what();
  }
}

TEST(TcpStore, AddressesThatCannotBeAreRefused) {
  EXPECT_THROW(TcpStore::connect({"127.0.0.1", 0, ""}, 50ms), DistributedError);
  EXPECT_THROW(TcpStore::connect({"127.0.0.1", 65536, ""}, 50ms), DistributedError);
  EXPECT_THROW(TcpStore::connect({"no-such-host.invalid", 80, ""}, 50ms), DistributedError);
  EXPECT_THROW(TcpStoreServer({"127.0.0.1", 70000, ""}), DistributedError);
  const TcpStoreServer server({"127.0.0.1", 0, ""});
  EXPECT_THROW(TcpStoreServer({"127.0.0.1", server.port(), ""}), DistributedError);
}

TEST(TcpStore, AStrangerWithoutTheTokenIsRefusedAndTheJobGoesOn) {
  TcpStoreServer server({"127.0.0.1", 0, "secret"});
  const auto client = TcpStore::connect(address_of(server), kLong);
  try {
    TcpStore::connect(address_of(server, "guess"), kLong);
    FAIL();
  } catch (const DistributedError& error) {
    EXPECT_NE(std::string(error.what()).find("token"), std::string::npos) << error.what();
  }
  // Bytes of other protocols, and sizes that would exhaust the memory.
  for (const std::string& bytes : {std::string("GET / HTTP/1.1\r\n\r\n"), std::string(64, '\xff'),
                                   std::string(64, '\0'), std::string("\x01\0\0\0\x01", 5)}) {
    FileDescriptor socket = try_connect("127.0.0.1", server.port(), Clock::now() + kLong);
    ASSERT_TRUE(socket);
    ASSERT_EQ(send_all(socket.get(), bytes, Clock::now() + kLong), Transfer::kDone);
    char answer;
    EXPECT_EQ(receive_exact(socket.get(), &answer, 1, Clock::now() + kLong), Transfer::kClosed);
  }
  client->set("key", "value");
  EXPECT_EQ(client->get("key"), "value");
}

// Who has not shown the token yet may not make the server hold much for it.
TEST(TcpStore, AGreetingLongerThanAnyOfOursEndsTheConnectionBeforeItIsRead) {
  TcpStoreServer server({"127.0.0.1", 0, "secret"});
  FileDescriptor socket = try_connect("127.0.0.1", server.port(), Clock::now() + kLong);
  ASSERT_TRUE(socket);
  std::string size;
  wire::put_number(size, uint32_t{5 << 10});
  ASSERT_EQ(send_all(socket.get(), size, Clock::now() + kLong), Transfer::kDone);
  char answer;
  EXPECT_EQ(receive_exact(socket.get(), &answer, 1, Clock::now() + kLong), Transfer::kClosed);
}

// Of processor time, which nobody else takes: 0.2 s here if it asked without end.
TEST(TcpStore, AnIdleServerSleeps) {
  TcpStoreServer server({"127.0.0.1", 0, "secret"});
  const auto store = TcpStore::connect(address_of(server), kLong);
  const std::clock_t before = std::clock();
  std::this_thread::sleep_for(200ms);
  EXPECT_LT(std::clock() - before, CLOCKS_PER_SEC / 20);
}

// Nor may many of them keep others out.
TEST(TcpStore, ClientsThatNeverGreetMakeRoomForThoseThatDo) {
  TcpStoreServer server({"127.0.0.1", 0, "secret"});
  const auto before = TcpStore::connect(address_of(server), kLong);
  std::vector<FileDescriptor> silent;
  for (size_t i = 0; i < 2 * wire::kMostStrangers; ++i) {
    silent.push_back(try_connect("127.0.0.1", server.port(), Clock::now() + kLong));
    ASSERT_TRUE(silent.back());
  }
  before->set("key", "value");
  const auto after = TcpStore::connect(address_of(server), kLong);
  EXPECT_EQ(after->get("key"), "value");
  // All of them go, without a word of theirs.
  for (const FileDescriptor& socket : silent) {
    char answer;
    EXPECT_EQ(receive_exact(socket.get(), &answer, 1, Clock::now() + kLong), Transfer::kClosed);
  }
}

// The time that is asked for is that of all ranks together.
TEST(Watchdogs, SeveralSilentRanksCostOneTimeout) {
  struct Recorder : MemoryStore {
    std::string wait(std::string_view key, Milliseconds timeout) override {
      asked += timeout;
      return MemoryStore::wait(key, timeout);
    }
    Milliseconds asked{0};
  };
  const auto store = std::make_shared<Recorder>();
  Watchdog watchdog(store, 0, std::make_shared<CommTrace>(), {});
  const std::vector<int> silent = {1, 2, 3, 4};
  const auto positions = watchdog.ask("world", Channel::kUser, silent, 100ms);
  for (const auto& position : positions) EXPECT_FALSE(position.has_value());
  EXPECT_LE(store->asked, 100ms + 4ms);  // at least a millisecond each
}

// Messages go at once, and a machine that lost power, which closes nothing, is found by probes:
// from either end.
TEST(TcpStore, BothEndsOfAConnectionSendAtOnceAndProbe) {
  TcpStoreServer server({"127.0.0.1", 0, ""});
  const auto client = TcpStore::connect({"127.0.0.1", server.port(), ""}, kLong);
  client->set("key", "value");
  const auto option = [](int socket, int level, int name) {
    int value = -1;
    socklen_t size = sizeof value;
    EXPECT_EQ(::getsockopt(socket, level, name, &value, &size), 0);
    return value;
  };
  int ends = 0;
  for (int socket = 3; socket < 1024; ++socket) {
    sockaddr_in own = {}, peer = {};
    socklen_t own_size = sizeof own, peer_size = sizeof peer;
    if (::getsockname(socket, reinterpret_cast<sockaddr*>(&own), &own_size) != 0 ||
        ::getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &peer_size) != 0 ||
        own.sin_family != AF_INET) {
      continue;
    }
    if (ntohs(own.sin_port) != server.port() && ntohs(peer.sin_port) != server.port()) continue;
    ++ends;
    EXPECT_NE(option(socket, IPPROTO_TCP, TCP_NODELAY), 0);
    EXPECT_NE(option(socket, SOL_SOCKET, SO_KEEPALIVE), 0);
    EXPECT_EQ(option(socket, IPPROTO_TCP, TCP_KEEPIDLE), 10);
    EXPECT_EQ(option(socket, IPPROTO_TCP, TCP_KEEPINTVL), 5);
    EXPECT_EQ(option(socket, IPPROTO_TCP, TCP_KEEPCNT), 3);
  }
  EXPECT_EQ(ends, 2);
}

TEST(TcpStore, TheLossOfTheHostEndsEveryWait) {
  auto server = std::make_unique<TcpStoreServer>(StoreAddress{"127.0.0.1", 0, "secret"});
  const auto client = TcpStore::connect(address_of(*server), kLong);
  std::thread waiter([&] { EXPECT_THROW(client->wait("key", kLong), DistributedError); });
  std::thread watcher([&] { EXPECT_THROW(client->watch("", 0, kLong), DistributedError); });
  std::this_thread::sleep_for(30ms);
  server.reset();
  waiter.join();
  watcher.join();
  EXPECT_THROW(client->set("key", "value"), DistributedError);
}

TEST(TcpStore, InterruptEndsEveryWaitOfItsClientAlone) {
  TcpStoreServer server({"127.0.0.1", 0, "secret"});
  const auto client = TcpStore::connect(address_of(server), kLong);
  const auto other = TcpStore::connect(address_of(server), kLong);
  std::thread waiter([&] { EXPECT_THROW(client->wait("key", kLong), DistributedError); });
  std::this_thread::sleep_for(30ms);
  client->interrupt();
  waiter.join();
  EXPECT_THROW(client->get("key"), DistributedError);
  other->set("key", "value");
  EXPECT_EQ(other->get("key"), "value");
}

TEST(TcpStore, AWillIsWrittenWhenItsClientGoesWithoutWithdrawingIt) {
  TcpStoreServer server({"127.0.0.1", 0, "secret"});
  auto gone = TcpStore::connect(address_of(server), kLong);
  auto finished = TcpStore::connect(address_of(server), kLong);
  gone->leave_will("failure/0", "first");
  gone->leave_will("failure/0", "second");
  finished->leave_will("failure/1", "never written");
  finished->withdraw_will();
  finished.reset();
  gone.reset();
  EXPECT_EQ(server.store()->wait("failure/0", kLong), "second");
  EXPECT_EQ(server.store()->list("failure/"), std::vector<std::string>{"failure/0"});
}

TEST(TcpStore, ManyClientsAtOnceAreServed) {
  TcpStoreServer server({"127.0.0.1", 0, "secret"});
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 16; ++rank) {
    threads.emplace_back([&, rank] {
      const auto store = TcpStore::connect(address_of(server), kLong);
      store->set("rank/" + std::to_string(rank), std::to_string(rank));
      for (int other = 0; other < 16; ++other) {
        EXPECT_EQ(store->wait("rank/" + std::to_string(other), kLong), std::to_string(other));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

#if !defined(__SANITIZE_THREAD__)  // which does not follow a fork of a program with threads
TEST(TcpStore, TheWillOfAKilledProcessIsWritten) {
  TcpStoreServer server({"127.0.0.1", 0, "secret"});
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto store = TcpStore::connect(address_of(server), kLong);
    store->leave_will("failure/0", "killed");
    store->set("ready", "yes");
    ::pause();
    ::_exit(0);
  }
  server.store()->wait("ready", kLong);
  ::kill(child, SIGKILL);
  EXPECT_EQ(server.store()->wait("failure/0", kLong), "killed");
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
}
#endif

}  // namespace
}  // namespace tessera::distributed::test_store
