// Sketch counters of a tensor; see sketch.py.
#pragma once

#include <cstdint>

namespace ts {

struct Sketch {
    const uint8_t* data;
    int dtype;
    int64_t width;  // columns per row
    const int64_t* rows;
    const uint32_t* keys;
    int64_t num_rows;
    const int64_t* runs;  // (first local column, its column in the full tensor, number of columns)
    int64_t num_runs;
};

// Adds the tensor's contributions to the 256 counters in `out`.
void ts_sketch(const Sketch& call, double* out);

}  // namespace ts
