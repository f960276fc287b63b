// Two matrices whose rows meet: what the kernels of a comparison are called with, see strips.py.
#pragma once

#include <vector>

#include "common.h"

namespace ts {

struct Rows {  // of one side
    const uint8_t* data;
    int64_t stride;        // bytes from row to row
    const int64_t* index;  // which rows; null: every row in turn
    int dtype;

    const uint8_t* at(int64_t i) const { return data + (index ? index[i] : i) * stride; }
};

struct Matrices {
    Rows baseline, target;
    int64_t rows = 0, width = 0;
};

struct Strip {  // some columns of some rows of a comparison
    Matrices sides;
    int64_t row, column;  // the first of each among all rows and columns that are compared
    // The further summands of each side, whose first one is in `sides`, and the dtype in which they are added; -1 for a
    // side that is not a sum.
    std::vector<Rows> more[2];
    int sum_dtype[2] = {-1, -1};
};

struct RowResults {  // of all rows: [6][rows], [8][rows], [rows], [rows], see measure.py
    double* floats;
    int64_t* integers;
    double* at_worst;  // the baseline's value where the row's largest distance is; 0 where there is none
    int64_t* strip;    // the strip that holds it
    int64_t rows;
};

// Compares strip `number`. `is_first`: its rows are new; else it adds columns to those that are there.
void compare_strip(const Strip& strip, int64_t number, bool is_first, double atol, double rtol, const RowResults& out);

// Adds the sums of the strip's channels to `sums`, [half][kind][total]: those of even rows, as they are counted among
// all, go into one half and those of odd ones into the other.
void add_channel_sums(const Strip& strip, double* sums, int64_t total);

struct ChannelFound {  // Channel in channels.py
    int64_t index;
    double gain, noise;
};

// False, and nothing, where the sums of two or more channels are not all finite.
bool find_channel(const double* sums, int64_t width, ChannelFound* out);

}  // namespace ts
