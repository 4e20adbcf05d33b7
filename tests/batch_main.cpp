// The program that holds many test files at once: `tests --file=test_norm ...` runs one of them, as
// the program of that file alone would. Without --file it runs all.
#include <gtest/gtest.h>

#include <cstdio>
#include <set>
#include <string>
#include <string_view>

namespace {

// GoogleTest's filter for the tests of FILE; empty where it has none. A name that another file has
// too would run both: it ends the program.
std::string tests_of(std::string_view file) {
  std::string filter;
  std::set<std::string> own, others;
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  for (int s = 0; s < all.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *all.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      std::string_view source = test.file();
      source.remove_prefix(source.rfind('/') + 1);
      const std::string name = std::string(suite.name()) + "." + test.name();
      (source == std::string(file) + ".cpp" ? own : others).insert(name);
    }
  }
  for (const std::string& name : own) {
    if (others.contains(name)) {
      std::fprintf(stderr, "%s stands in another file than %s.cpp, too: rename it\n", name.c_str(),
                   std::string(file).c_str());
      return "";
    }
    filter += (filter.empty() ? "" : ":") + name;
  }
  return filter;
}

}  // namespace

int main(int count, char** arguments) {
  testing::InitGoogleTest(&count, arguments);
  constexpr std::string_view kFile = "--file=";
  if (count > 1 && std::string_view(arguments[1]).starts_with(kFile)) {
    const std::string filter = tests_of(std::string_view(arguments[1]).substr(kFile.size()));
    if (filter.empty()) {
      std::fprintf(stderr, "%s: no tests\n", arguments[1]);
      return 1;
    }
    // A filter of the caller's own, or of a death test's child, is narrower.
    if (GTEST_FLAG_GET(filter) == "*") GTEST_FLAG_SET(filter, filter);
  }
  return RUN_ALL_TESTS();
}
