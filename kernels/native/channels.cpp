// Sums of every channel over some rows of two matrices, in double; the plain reference is in channels.py.

#include "decode.h"
#include "strips.h"

namespace ts {
namespace {

constexpr int64_t kKinds = 5;      // of sums, in the order of KINDS in channels.py
constexpr int64_t kColumns = 256;  // at a time, so that all sums of both halves stay in the first cache

TS_CLONES void widen(int dtype, const uint8_t* bytes, int64_t n, double* out) { decode_number(dtype, bytes, n, out); }

// Adds one row to the sums, which lie `stride` apart.
TS_CLONES void add_row(const double* baseline, const double* target, int64_t n, double* sums, int64_t stride) {
    double *__restrict energy = sums, *__restrict fourth = sums + stride, *__restrict product = sums + 2 * stride;
    double *__restrict squared = sums + 3 * stride, *__restrict cubic = sums + 4 * stride;
    for (int64_t i = 0; i < n; ++i) {
        const double square = baseline[i] * baseline[i], change = baseline[i] * (target[i] - baseline[i]);
        energy[i] += square;
        fourth[i] += square * square;
        product[i] += change;
        squared[i] += change * change;
        cubic[i] += square * change;
    }
}

}  // namespace

void channel_sums(const Matrices& sides, int64_t first, double* sums) {
    alignas(64) double room[2][kColumns];
    const Rows &left = sides.baseline, &right = sides.target;
    for (int64_t column = 0; column < sides.width; column += kColumns) {
        const int64_t count = sides.width - column < kColumns ? sides.width - column : kColumns;
        for (int64_t i = 0; i < sides.rows; ++i) {
            widen(left.dtype, left.at(i) + column * kItemSize[left.dtype], count, room[0]);
            widen(right.dtype, right.at(i) + column * kItemSize[right.dtype], count, room[1]);
            double* half = sums + (first + i) % 2 * kKinds * sides.width;
            add_row(room[0], room[1], count, half + column, sides.width);
        }
    }
}

}  // namespace ts
