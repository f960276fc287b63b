// Sums of every channel over some rows of two matrices, in double; the plain reference is in channels.py.

#include "decode.h"

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
}  // namespace ts

// Row indices may be null: every row in turn. Strides are in bytes; `first` is the place of the first row among all that
// are added up, whose even ones go into one half of `sums` and whose odd ones into the other: [half][kind][width].
TS_EXPORT void ts_channel_sums(const void* baseline, const void* target, int baseline_dtype, int target_dtype,
                               int64_t baseline_stride, int64_t target_stride, const int64_t* baseline_rows,
                               const int64_t* target_rows, int64_t rows, int64_t width, int64_t first, double* sums) {
    using namespace ts;
    alignas(64) double room[2][kColumns];
    for (int64_t column = 0; column < width; column += kColumns) {
        const int64_t count = width - column < kColumns ? width - column : kColumns;
        for (int64_t i = 0; i < rows; ++i) {
            const int64_t a = baseline_rows ? baseline_rows[i] : i, b = target_rows ? target_rows[i] : i;
            const uint8_t* left = static_cast<const uint8_t*>(baseline) + a * baseline_stride;
            const uint8_t* right = static_cast<const uint8_t*>(target) + b * target_stride;
            widen(baseline_dtype, left + column * kItemSize[baseline_dtype], count, room[0]);
            widen(target_dtype, right + column * kItemSize[target_dtype], count, room[1]);
            add_row(room[0], room[1], count, sums + (first + i) % 2 * kKinds * width + column, width);
        }
    }
}
