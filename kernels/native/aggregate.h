// Aggregation of row measures, see aggregate.py and deviation.py.
#pragma once

#include <cstdint>
#include <vector>

#include "common.h"

namespace ts {

constexpr int64_t kOverviewBytes = 25 * 8;

struct Strip;

struct Deviation {  // Deviation in deviation.py
    double typical = 0, worst = 0, power = 0, dot = 0;
    int64_t elements = 0, width = 0, unequal = 0, mismatched = 0;
};

// Compares all rows of the strips as compare_strip does and aggregates them. For `share` see deviation.py; negative
// means that it is not given.
Deviation deviation_of(const std::vector<Strip>& strips, int64_t rows, double share);

}  // namespace ts

// Computes one Overview per section; section i covers rows bounds[i] to bounds[i + 1], and all fields of an empty
// section are 0. `errors` holds one double per row, `results` kOverviewBytes bytes per section.
TS_EXPORT void ts_overviews(const double* floats, const int64_t* integers, const double* at_worst, int64_t rows,
                            const int64_t* bounds, int64_t sections, double* errors, void* results);
