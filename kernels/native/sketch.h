// A tensor whose sketch is taken; see sketch.py.
#pragma once

#include <cstdint>

namespace ts {

struct Sketch {
    const uint8_t* data;
    int dtype;
    int64_t width;  // columns of a row
    const int64_t* rows;
    const uint32_t* keys;
    int64_t num_rows;
    const int64_t* runs;  // (first local column, its column in the whole tensor, number of columns)
    int64_t num_runs;
};

// Adds to 256 counters.
void ts_sketch(const Sketch& call, double* out);

}  // namespace ts
