// The rows of a pair as one, see aggregate.py and deviation.py.
#pragma once

#include <cstdint>
#include <vector>

#include "common.h"

namespace ts {

constexpr int64_t kOverviewBytes = 25 * 8;

struct Strip;

struct Deviation {  // in deviation.py
    double typical = 0, worst = 0, power = 0, dot = 0;
    int64_t elements = 0, width = 0, unequal = 0, mismatched = 0;
};

// Of all rows of the strips, which are each compared as compare_strip does; see deviation.py for `share`, which is
// negative where it is not given.
Deviation deviation_of(const std::vector<Strip>& strips, int64_t rows, double share);

}  // namespace ts

// Of several sections of rows, each from one bound to the next: of an empty one all is 0. `errors` has room for one a
// row, `results` for kOverviewBytes a section.
TS_EXPORT void ts_overviews(const double* floats, const int64_t* integers, const double* at_worst, int64_t rows,
                            const int64_t* bounds, int64_t sections, double* errors, void* results);
