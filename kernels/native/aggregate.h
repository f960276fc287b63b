// The rows of a pair as one, see overview.py.
#pragma once

#include "common.h"

namespace ts {

constexpr int64_t kOverviewBytes = 25 * 8;

}  // namespace ts

// Of several sections of rows, each from one bound to the next: of an empty one all is 0. `errors` has room for one a
// row, `results` for kOverviewBytes a section.
TS_EXPORT void ts_overviews(const double* floats, const int64_t* integers, const double* at_worst, int64_t rows,
                            const int64_t* bounds, int64_t sections, double* errors, void* results);
