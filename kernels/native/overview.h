// The rows of a comparison as one, see overview.py.
#pragma once

#include "common.h"

namespace ts {

constexpr int64_t kOverviewBytes = 25 * 8;

}  // namespace ts

// At least one row. `errors` has room for one a row, `result` for kOverviewBytes.
TS_EXPORT void ts_overview(const double* floats, const int64_t* integers, const double* at_worst, int64_t rows,
                           double* errors, void* result);
