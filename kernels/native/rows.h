// Inputs, accumulators and tolerances of a comparison; shared by the three block implementations.
#pragma once

#include "common.h"

namespace ts {

struct Row {  // the fields of FLOATS and INTEGERS in measure.py
    double max_abs = -1, sum_abs = 0, sum_sq_diff = 0, sum_sq_baseline = 0, sum_sq_target = 0, dot = 0;
    int64_t argmax = -1, equal = 0, over = 0, finite = 0, nonfinite_baseline = 0, nonfinite_target = 0, mismatch = 0;
};

// Tolerance of the count `over`: distance > atol + rtol * |baseline|. The float32 path counts twice, with both bounds
// slightly lower and slightly higher; equal counts mean that no value was close enough to the limit for rounding to
// matter.
struct Tolerance {
    double atol, rtol;
    float atol_low, rtol_low, atol_high, rtol_high;
    bool any, fits_float;

    Tolerance(double absolute, double relative) : atol(absolute), rtol(relative) {
        constexpr double kMargin = 0x1p-20;
        atol_low = static_cast<float>(atol * (1 - kMargin)), atol_high = static_cast<float>(atol * (1 + kMargin));
        rtol_low = static_cast<float>(rtol * (1 - kMargin)), rtol_high = static_cast<float>(rtol * (1 + kMargin));
        any = atol > 0 || rtol > 0;
        fits_float = fits(atol) && fits(rtol);
    }

    static bool fits(double bound) { return bound == 0 || (bound >= 1e-30 && bound <= 1e30); }
};

constexpr int64_t kPiece = 4 * kBlock;  // elements of a row that are compared, and if necessary redone, together

struct Sides {  // one block: the bytes of both sides, its length and its first column
    const uint8_t *baseline, *target;
    int64_t count, column;
};

// Prefetches bytes some distance ahead. When each byte takes much computation, the hardware prefetcher stops at every
// page boundary and does not catch up.
TS_INLINE void fetch_ahead(const Sides& s, int64_t start, int64_t end) {
    constexpr int64_t kAhead = 2048;
    for (int64_t i = start; i < end; i += 64) {
        __builtin_prefetch(s.baseline + i + kAhead), __builtin_prefetch(s.target + i + kAhead);
    }
}

// Returns the first index for which same(i) holds, or n. There is no branch inside a chunk, so that the compiler can
// vectorize the loop.
template <class Same>
TS_INLINE int64_t find_first(int64_t n, Same same) {
    constexpr int64_t kLook = 256;
    for (int64_t start = 0; start < n; start += kLook) {
        const uint32_t count = static_cast<uint32_t>(n - start < kLook ? n - start : kLook);
        uint32_t first = count;
        for (uint32_t i = 0; i < count; ++i) {
            const uint32_t place = same(start + i) ? i : kLook;
            first = place < first ? place : first;
        }
        if (first < count) return start + first;
    }
    return n;
}

}  // namespace ts

#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define TS_SHUFFLE
#endif
#endif
