// Statistics and digests of a tensor, computed in one pass.
#pragma once

#include <limits>

#include "hash.h"

namespace ts {

struct Summary {  // layout: _LAYOUT in summary.py
    int64_t count = 0, nan = 0, posinf = 0, neginf = 0, zeros = 0, subnormals = 0, finite = 0;
    double min = std::numeric_limits<double>::infinity(), max = -min, absmax = 0, sum = 0, sumsq = 0;
    Hash hash;
    uint64_t bag = 0;

    void extend(double low, double high) {
        if (low < min) min = low;
        if (high > max) max = high;
    }

    void finish(uint64_t nbytes) {
        min = unsigned_zero(min), max = unsigned_zero(max), sum = unsigned_zero(sum);
        if (finite) absmax = unsigned_zero(max > -min ? max : -min);
        hash.finish(nbytes);
    }

  private:
    static double unsigned_zero(double number) {  // tests bits, because the compiler may ignore signed zeros here
        return bit_cast<uint64_t>(number) << 1 ? number : bit_cast<double>(uint64_t(0));
    }
};

constexpr int64_t kTextRoom = 448;  // the longest text has 16 + 32 + 16 digits, 6 counts, 5 numbers and the field names

}  // namespace ts
