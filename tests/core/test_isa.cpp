// How TESSERA_ISA chooses kernels. The variable is read once, so that each value is tried in a
// process of its own: this program again.
#include <cstdlib>
#include <iostream>

#include <gtest/gtest.h>

#include <tessera/core/error.h>
#include <tessera/core/isa.h>

#include "finished_process.h"

namespace tessera::kernels::test_isa {
namespace {

constexpr Isa kSets[] = {Isa::kGeneric, Isa::kNeon, Isa::kV3, Isa::kV4, Isa::kBf16, Isa::kAmx};

// What that process says of itself: the set, or the error's class and text.
std::string chosen_with(const std::string& value) {
  const FinishedProcess process =
      run_process({std::filesystem::read_symlink("/proc/self/exe").string(), "--gtest_brief=1",
                   "--gtest_also_run_disabled_tests", "--gtest_filter=Isa.DISABLED_IsPrinted"},
                  {{"TESSERA_ISA", value}});
  EXPECT_EQ(process.code(), 0) << process;
  const size_t begin = process.output.find('<'), end = process.output.rfind('>');
  EXPECT_TRUE(begin != std::string::npos && end != std::string::npos) << process;
  return process.output.substr(begin + 1, end - begin - 1);
}

TEST(Isa, DISABLED_IsPrinted) {
  try {
    const std::string name = name_of(cpu_isa());
    std::cout << '<' << name << (isa_is_asked_for() ? ", asked for>\n" : ">\n");
  } catch (const ConfigError& error) {
    std::cout << "<ConfigError " << error.what() << ">\n";
  } catch (const UnsupportedError& error) {
    std::cout << "<UnsupportedError " << error.what() << ">\n";
  }
}

TEST(Isa, EverySetOfTheProcessorCanBeAskedForAndNoOther) {
  for (const Isa isa : kSets) {
    const std::string name = name_of(isa), chosen = chosen_with(name);
    if (has_isa(isa)) {
      EXPECT_EQ(chosen, name + ", asked for");
    } else {
      EXPECT_TRUE(
          chosen.starts_with("UnsupportedError kernels: TESSERA_ISA asks for " + name + ", "))
          << chosen;
    }
  }
}

TEST(Isa, IsTheBestOfTheProcessorUnlessAskedFor) {
  Isa best = Isa::kGeneric;
  for (const Isa isa : kSets) best = has_isa(isa) ? isa : best;
  EXPECT_EQ(chosen_with(""), name_of(best));
}

TEST(Isa, SetsOfAnotherKindOfMachineAreNotThisOnes) {
#if defined(__x86_64__)
  EXPECT_FALSE(has_isa(Isa::kNeon) || has_isa(Isa::kGeneric));
#elif defined(__aarch64__)
  EXPECT_TRUE(has_isa(Isa::kNeon));
  for (const Isa isa : kSets) EXPECT_EQ(has_isa(isa), isa == Isa::kNeon) << name_of(isa);
#else
  for (const Isa isa : kSets) EXPECT_EQ(has_isa(isa), isa == Isa::kGeneric) << name_of(isa);
#endif
}

TEST(Isa, ANameThatIsNoneIsAnErrorThatListsThem) {
  for (const std::string name : {"avx2", "V4", "v4 ", "1"}) {
    EXPECT_EQ(chosen_with(name), "ConfigError kernels: TESSERA_ISA is '" + name +
                                     "'; it must be v3, v4, bf16 or amx, of another " +
                                     "machine neon or generic");
  }
}

}  // namespace
}  // namespace tessera::kernels::test_isa
