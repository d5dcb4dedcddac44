// Propagation of absl::Status. Abseil of Debian 12 and Ubuntu 24.04 ships none, and a function
// cannot return from its caller: the one place where this project uses macros.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define GM_RETURN_IF_ERROR(expr)                                            \
  do {                                                                      \
    if (absl::Status gm_status = (expr); !gm_status.ok()) return gm_status; \
  } while (false)

#define GM_CONCAT_INNER(a, b) a##b
#define GM_CONCAT(a, b) GM_CONCAT_INNER(a, b)

// GM_ASSIGN_OR_RETURN(auto x, MakeX());
#define GM_ASSIGN_OR_RETURN(lhs, expr) \
  GM_ASSIGN_OR_RETURN_IMPL(GM_CONCAT(gm_statusor_, __LINE__), lhs, expr)
#define GM_ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr) \
  auto tmp = (expr);                             \
  if (!tmp.ok()) return std::move(tmp).status(); \
  lhs = *std::move(tmp)
