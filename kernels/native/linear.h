// y = x w' + b for few rows of x: see linear.cpp.
#pragma once

#include <cstdint>

namespace ts {

struct Linear {
    const void* x;     // [rows, ins], with a row stride of `stride` elements
    const void* w;     // [outs, ins]
    const void* bias;  // [outs], or null
    void* y;           // [rows, outs]
    int64_t rows, stride, outs, ins;
};

// Computes y. Returns false and writes nothing if this CPU or this build has no kernel for the dtype.
bool ts_linear(const Linear& call, int dtype, int64_t threads);

// Multiplies rows [ends[g - 1], ends[g]) of x by the g-th of `groups` matrices w, without a bias. Also returns false
// and writes nothing if `ends` is not ascending or a group has more than `most` rows.
bool ts_grouped_linear(const Linear& call, const int32_t* ends, int64_t groups, int64_t most, int dtype,
                       int64_t threads);

}  // namespace ts
