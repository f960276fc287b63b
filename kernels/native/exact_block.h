// Slow comparison of a block, reliable for any values: in double, and with exact integers.
#pragma once

#include "rows.h"

namespace ts {
namespace {

__extension__ typedef __int128 Wide;

struct Item {     // one pair of float64 values, classified by bits
    double a, b;  // 0 unless both are finite
    uint64_t distance;
    bool finite_a, finite_b, same_class;

    TS_INLINE Item(const Sides& s, int64_t i) {
        constexpr uint64_t kInfinity = Float64::kNonfinite;
        const uint64_t bits_a = load<uint64_t>(s.baseline, i), bits_b = load<uint64_t>(s.target, i);
        const uint64_t size_a = bits_a & kMagnitude<Float64>, size_b = bits_b & kMagnitude<Float64>;
        finite_a = size_a < kInfinity, finite_b = size_b < kInfinity;
        // Used only if neither side is finite.
        same_class = (bits_a == bits_b) | ((size_a > kInfinity) & (size_b > kInfinity));
        const uint64_t keep = finite_a & finite_b ? ~uint64_t(0) : 0;
        a = bit_cast<double>(bits_a & keep), b = bit_cast<double>(bits_b & keep);
        distance = bit_cast<uint64_t>(a - b) & kMagnitude<Float64>;
    }
};

TS_CLONES void careful_block(const Sides& sides, const Tolerance& tolerance, Row* row) {
    const Sides s = sides;
    const double atol = tolerance.atol, rtol = tolerance.rtol;
    double sum_abs = 0, diff = 0, base = 0, target = 0, dot = 0;
    int64_t most = 0, finite = 0, finite_a = 0, finite_b = 0, equal = 0, over = 0, agree = 0;
    for (int64_t i = 0; i < s.count; ++i) {
        const Item item(s, i);
        const bool both = item.finite_a & item.finite_b, neither = !item.finite_a & !item.finite_b;
        const double distance = bit_cast<double>(item.distance);
        const int64_t bits = static_cast<int64_t>(item.distance);
        most = bits > most ? bits : most;
        finite += both;
        finite_a += item.finite_a;
        finite_b += item.finite_b;
        equal += both & (item.a == item.b);
        agree += neither & item.same_class;
        over += distance > atol + rtol * __builtin_fabs(item.a);
        sum_abs += distance;
        diff += distance * distance;
        base += item.a * item.a;
        target += item.b * item.b;
        dot += item.a * item.b;
    }
    const int64_t mismatch = s.count - finite - agree;
    row->sum_abs += sum_abs;
    row->sum_sq_diff += diff;
    row->sum_sq_baseline += base;
    row->sum_sq_target += target;
    row->dot += dot;
    row->finite += finite;
    row->nonfinite_baseline += s.count - finite_a;
    row->nonfinite_target += s.count - finite_b;
    row->mismatch += mismatch;
    row->equal += equal + agree;
    row->over += over + mismatch;
    const double largest = bit_cast<double>(most);
    if (finite && largest > row->max_abs) {
        row->max_abs = largest;
        row->argmax = s.column + find_first(s.count, [&](int64_t i) {
            const Item item(s, i);
            return item.finite_a & item.finite_b & (static_cast<int64_t>(item.distance) == most);
        });
    }
}

// Compares integers exactly: float64 does not represent all integers above 2^53.
template <class A, class B>
void exact_block(const Sides& s, const Tolerance& t, Row* row) {
    for (int64_t i = 0; i < s.count; ++i) {
        const A left = load<A>(s.baseline, i);
        const B right = load<B>(s.target, i);
        const Wide difference = static_cast<Wide>(left) - static_cast<Wide>(right);
        const double distance = static_cast<double>(difference < 0 ? -difference : difference);
        const double a = static_cast<double>(left), b = static_cast<double>(right);
        if (distance > row->max_abs) row->max_abs = distance, row->argmax = s.column + i;
        row->equal += difference == 0;
        row->over += distance > t.atol + t.rtol * __builtin_fabs(a);
        row->sum_abs += distance;
        row->sum_sq_diff += distance * distance;
        row->sum_sq_baseline += a * a;
        row->sum_sq_target += b * b;
        row->dot += a * b;
    }
    row->finite += s.count;
}

}  // namespace
}  // namespace ts
