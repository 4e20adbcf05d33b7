// Atomic and mapped files.
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include <tessera/core/error.h>
#include <tessera/core/io/atomic_file.h>
#include <tessera/core/io/mapped_file.h>

#include "message_of.h"

namespace tessera::test_files {
namespace {

namespace fs = std::filesystem;

class Files : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "tessera-files-XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override {
    fs::permissions(folder_, fs::perms::owner_all);
    fs::remove_all(folder_);
  }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  static std::string read(const std::string& file) {
    std::ifstream in(file, std::ios::binary);
    std::ostringstream text;
    text << in.rdbuf();
    return text.str();
  }
  int count_entries() const {
    return static_cast<int>(std::distance(fs::directory_iterator(folder_), {}));
  }

  fs::path folder_;
};

TEST_F(Files, CommitMakesTheWholeFileVisibleAndNothingElse) {
  const std::string big(200'000, 'x');
  {
    AtomicFile file(path("a.bin"));
    file.write("HEAD");
    file.write(big);
    file.write("tail");
    EXPECT_EQ(file.size(), big.size() + 8);
    EXPECT_FALSE(fs::exists(path("a.bin")));
    file.overwrite(0, "DONE", 4);
    file.commit();
  }
  EXPECT_EQ(read(path("a.bin")), "DONE" + big + "tail");
  EXPECT_EQ(count_entries(), 1);
}

TEST_F(Files, WithoutCommitTheOldFileStaysAndTheTemporaryIsRemoved) {
  write_file_atomically(path("a.txt"), "old");
  {
    AtomicFile file(path("a.txt"));
    file.write(std::string(100'000, 'n'));
  }
  EXPECT_EQ(read(path("a.txt")), "old");
  EXPECT_EQ(count_entries(), 1);
}

TEST_F(Files, AReplacedFileKeepsItsPermissions) {
  write_file_atomically(path("a.txt"), "old");
  ::chmod(path("a.txt").c_str(), 0640);
  write_file_atomically(path("a.txt"), "new");
  struct stat status = {};
  ASSERT_EQ(::stat(path("a.txt").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0640u);
  EXPECT_EQ(read(path("a.txt")), "new");
}

TEST_F(Files, ASymbolicLinkStaysAndItsTargetIsReplaced) {
  write_file_atomically(path("target"), "old");
  fs::create_symlink("target", path("link"));
  write_file_atomically(path("link"), "new");
  EXPECT_TRUE(fs::is_symlink(path("link")));
  EXPECT_EQ(read(path("target")), "new");
}

TEST_F(Files, ADeviceOrFolderIsNeverReplaced) {
  EXPECT_THROW(AtomicFile("/dev/full"), IoError);
  EXPECT_THROW(AtomicFile{folder_.string()}, IoError);
  EXPECT_THROW(AtomicFile(""), IoError);
}

TEST_F(Files, AMissingFolderIsAnErrorWithPathReasonAndRemedy) {
  const std::string message = message_of<IoError>([&] { AtomicFile file(path("none/a.txt")); });
  EXPECT_NE(message.find("none/a.txt"), std::string::npos) << message;
  EXPECT_NE(message.find("No such file or directory"), std::string::npos) << message;
  EXPECT_NE(message.find("create the folder"), std::string::npos) << message;
}

TEST_F(Files, AnUnwritableFolderIsAnIoError) {
  fs::permissions(folder_, fs::perms(0555));
  const uid_t user = ::geteuid();
  if (user == 0) {
    ASSERT_EQ(::seteuid(65534), 0);
  }  // root may write everywhere: be nobody
  const std::string message = message_of<IoError>([&] { AtomicFile file(path("a.txt")); });
  ASSERT_EQ(::seteuid(user), 0);
  EXPECT_NE(message.find("may write"), std::string::npos) << message;
}

// The file size limit makes the write itself fail, as a full disk does, without special rights.
TEST_F(Files, AWriteThatFailsLeavesTheOldFileAndNoTemporary) {
  write_file_atomically(path("a.txt"), "old");
  rlimit before = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  auto* handler = ::signal(SIGXFSZ, SIG_IGN);
  rlimit small = before;
  small.rlim_cur = 100'000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const std::string message =
      message_of<IoError>([&] { write_file_atomically(path("a.txt"), std::string(300'000, 'n')); });
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, handler);
  EXPECT_NE(message.find("File too large"), std::string::npos) << message;
  EXPECT_EQ(read(path("a.txt")), "old");
  EXPECT_EQ(count_entries(), 1);
}

TEST_F(Files, AFullDiskLeavesTheOldFileAndNoTemporary) {
  const fs::path small = folder_ / "small";
  fs::create_directory(small);
  if (::mount("tmpfs", small.c_str(), "tmpfs", 0, "size=64k") != 0) {
    GTEST_SKIP() << "this user may not mount a small tmpfs";
  }
  const std::string file = (small / "a.txt").string();
  write_file_atomically(file, "old");
  const std::string message =
      message_of<IoError>([&] { write_file_atomically(file, std::string(1 << 20, 'n')); });
  const std::string content = read(file);
  const auto entries = std::distance(fs::directory_iterator(small), {});
  ASSERT_EQ(::umount(small.c_str()), 0);
  EXPECT_NE(message.find("No space left on device"), std::string::npos) << message;
  EXPECT_NE(message.find("free some space"), std::string::npos) << message;
  EXPECT_EQ(content, "old");
  EXPECT_EQ(entries, 1);
}

TEST_F(Files, OverwritePastTheEndIsRefused) {
  AtomicFile file(path("a.txt"));
  file.write("12345678");
  EXPECT_THROW(file.overwrite(5, "1234", 4), ValueError);
  EXPECT_THROW(file.overwrite(UINT64_MAX, "1234", 4), ValueError);
  file.commit();
  EXPECT_THROW(file.commit(), IoError);
  EXPECT_THROW(file.write("x"), IoError);
}

TEST_F(Files, AMappedFileHasTheBytesOfTheFile) {
  write_file_atomically(path("a.txt"), "some bytes");
  MappedFile file(path("a.txt"), FileAccess::kSequential);
  EXPECT_EQ(file.text(), "some bytes");
  MappedFile moved = std::move(file);
  EXPECT_EQ(moved.text(), "some bytes");
  EXPECT_EQ(file.size(), 0u);  // NOLINT: a moved-from file is empty
  write_file_atomically(path("a.txt"), "other");
  EXPECT_EQ(moved.text(), "some bytes") << "a mapping survives an atomic replacement";
}

TEST_F(Files, AnEmptyFileMapsToNoBytes) {
  write_file_atomically(path("empty"), "");
  EXPECT_EQ(MappedFile(path("empty")).size(), 0u);
}

TEST_F(Files, MappingWhatIsNotARegularFileIsAnIoError) {
  EXPECT_THROW(MappedFile(path("none")), IoError);
  EXPECT_THROW(MappedFile{folder_.string()}, IoError);
  EXPECT_THROW(MappedFile("/dev/zero"), IoError);
  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  EXPECT_THROW(MappedFile(path("pipe")), IoError);
}

}  // namespace
}  // namespace tessera::test_files
