// base: options, the table behind them, and the log.
#include <cstdlib>
#include <string>
#include <vector>

#include "base/log.h"
#include "base/options.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace geomesh {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class Environment : public ::testing::Test {
 protected:
  void TearDown() override {
    for (const OptionInfo& info : OptionTable()) unsetenv(info.variable.data());
  }
};

TEST_F(Environment, DefaultsEqualTheTablesText) {
  absl::StatusOr<Options> defaults = Options::FromEnvironment();
  ASSERT_TRUE(defaults.ok()) << defaults.status();
  Options set;
  for (const OptionInfo& info : OptionTable()) {
    if (info.name.empty() || info.default_value.empty()) continue;
    EXPECT_TRUE(set.Set(info.name, info.default_value).ok()) << info.name;
  }
  EXPECT_EQ(set.lanes, defaults->lanes);
  EXPECT_EQ(set.unexpected_bytes, defaults->unexpected_bytes);
  EXPECT_EQ(set.suspect_after, defaults->suspect_after);
  EXPECT_EQ(set.dead_after, defaults->dead_after);
  EXPECT_EQ(set.linger, defaults->linger);
}

TEST_F(Environment, ReadsVariables) {
  setenv("GEOMESH_REGION", "eastus", 1);
  setenv("GEOMESH_PORTS", "23000-23100", 1);
  setenv("GEOMESH_UNEXPECTED_BYTES", "3M", 1);
  setenv("GEOMESH_DEAD_AFTER", "1500ms", 1);
  absl::StatusOr<Options> options = Options::FromEnvironment();
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->region, "eastus");
  EXPECT_EQ(options->ports.first, 23000);
  EXPECT_EQ(options->ports.last, 23100);
  EXPECT_EQ(options->unexpected_bytes, 3 << 20);
  EXPECT_EQ(options->dead_after, absl::Milliseconds(1500));
}

TEST_F(Environment, BadValuesNameVariableValueAndForm) {
  const std::vector<std::pair<std::string, std::string>> bad = {
      {"GEOMESH_PORTS", "23100-23000"},  {"GEOMESH_PORTS", "0"},
      {"GEOMESH_PORTS", "1-70000"},      {"GEOMESH_PORTS", "a-b"},
      {"GEOMESH_LANES", "-1"},           {"GEOMESH_LANES", "65"},
      {"GEOMESH_LANES", "two"},          {"GEOMESH_UNEXPECTED_BYTES", ""},
      {"GEOMESH_UNEXPECTED_BYTES", "5"}, {"GEOMESH_UNEXPECTED_BYTES", "99999999999G"},
      {"GEOMESH_DEAD_AFTER", "20"},      {"GEOMESH_DEAD_AFTER", "-1s"}};
  for (const auto& [variable, value] : bad) {
    setenv(variable.c_str(), value.c_str(), 1);
    absl::StatusOr<Options> options = Options::FromEnvironment();
    ASSERT_FALSE(options.ok()) << variable << "=" << value;
    EXPECT_EQ(options.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(options.status().message()),
                HasSubstr(variable + "='" + value + "': takes "));
    unsetenv(variable.c_str());
  }
}

TEST(Options, PortRanges) {
  Options options;
  EXPECT_TRUE(options.ports.any());
  EXPECT_EQ(options.ports.ToString(), "any port");
  ASSERT_TRUE(options.Set("ports", "23100-23199").ok());
  EXPECT_EQ(options.ports.first, 23100);
  EXPECT_EQ(options.ports.last, 23199);
  EXPECT_EQ(options.ports.ToString(), "23100-23199");
  ASSERT_TRUE(options.Set("ports", "5000").ok());
  EXPECT_EQ(options.ports.ToString(), "5000");
  for (const char* text : {"0", "0-10", "10-5", "1-65536", "a-b", "5-", "-5", "1-2-3", " "}) {
    const absl::Status status = options.Set("ports", text);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string("'") + text + "'"));
  }
  EXPECT_EQ(options.ports.ToString(), "5000");  // as before the wrong ones
}

TEST(Options, EveryOptionIsGivenBackAsItWasSet) {
  for (const OptionInfo& info : OptionTable()) {
    if (info.name.empty()) continue;
    const std::string text = info.type == "duration"    ? "7s"
                             : info.type == "ports"     ? "7000-7001"
                             : info.type == "bytes"     ? "7340032"
                             : info.name == "wire"      ? "tls"
                             : info.name == "scheduler" ? "fair"
                             : info.name == "balancer"  ? "backlog"
                             : info.name == "dscp"      ? "7,9"
                                                        : "7";
    Options options;
    EXPECT_NE(options.Get(info.name), text);
    ASSERT_TRUE(options.Set(info.name, text).ok()) << info.name;
    EXPECT_EQ(options.Get(info.name), text);
  }
  EXPECT_EQ(Options().Get("lane"), "");
}

TEST(Options, UnknownNameListsTheKnown) {
  Options options;
  absl::Status status = options.Set("lane", "2");
  EXPECT_THAT(std::string(status.message()), HasSubstr("no option is named 'lane'"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("dead_after"));
}

TEST(Options, UnknownVariableSuggestsTheNearest) {
  const std::vector<std::string> names = {"PATH", "GEOMESH_LANES", "GEOMESH_LANE",
                                          "GEOMESH_DEADAFTER"};
  EXPECT_THAT(UnknownVariables(names),
              ElementsAre(AllOf(HasSubstr("GEOMESH_LANE "), HasSubstr("mean GEOMESH_LANES?")),
                          HasSubstr("mean GEOMESH_DEAD_AFTER?")));
}

TEST(Log, OneLineWithIdentityAndLevels) {
  std::vector<std::string> lines;
  SetLogSink([&](LogLevel, absl::string_view line) { lines.emplace_back(line); });
  SetLogLevel(LogLevel::kWarning);
  SetLogIdentity("rank 2 (eastasia)");
  Log(LogLevel::kWarning, "transport", "a peer is silent");
  Log(LogLevel::kInfo, "transport", "not shown");
  SetLogSink(nullptr);
  SetLogIdentity("");
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_THAT(lines[0], HasSubstr("geomesh W "));
  EXPECT_THAT(lines[0], HasSubstr("[rank 2 (eastasia)] transport: a peer is silent"));
}

}  // namespace
}  // namespace geomesh
