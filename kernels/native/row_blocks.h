// Arguments of the comparison kernels: pairs of matrices whose rows are compared, see row_blocks.py.
#pragma once

#include <vector>

#include "common.h"

namespace ts {

struct Rows {  // rows of one side
    const uint8_t* data;
    int64_t stride;        // in bytes
    const int64_t* index;  // row indices; null for all rows in order
    int dtype;

    const uint8_t* at(int64_t i) const { return data + (index ? index[i] : i) * stride; }
};

struct Matrices {
    Rows baseline, target;
    int64_t rows = 0, width = 0;
};

struct Strip {  // a block of rows and columns of a comparison
    Matrices sides;
    int64_t row, column;  // index of the first row and first column among all that are compared
    // The summands of each side after the first, which is in `sides`, and the dtype in which they are added; -1 for a
    // side that is not a sum.
    std::vector<Rows> more[2];
    int sum_dtype[2] = {-1, -1};
};

struct RowResults {  // for all rows: [6][rows], [8][rows], [rows], [rows], see measure.py
    double* floats;
    int64_t* integers;
    double* at_worst;  // baseline value at the row's largest distance; 0 if there is none
    int64_t* strip;    // index of the strip with the largest distance
    int64_t rows;
};

// Compares the strip with index `number`. If `is_first`, initializes the results of its rows; otherwise merges more
// columns into them.
void compare_strip(const Strip& strip, int64_t number, bool is_first, double atol, double rtol, const RowResults& out);

// Adds the strip's channel sums to `sums`, [half][kind][total]. Rows with an even index among all compared rows go into
// the first half, the others into the second.
void add_channel_sums(const Strip& strip, double* sums, int64_t total);

struct ChannelFound {  // Channel in channels.py
    int64_t index;
    double gain, noise;
};

// Finds the channel with the largest gain relative to its noise, among at least two channels. The noise is infinite if
// too few rows contribute to the channel. Returns false and leaves `out` unspecified if the sums are not all finite.
bool find_channel(const double* sums, int64_t width, ChannelFound* out);

}  // namespace ts
