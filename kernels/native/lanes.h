// The fast way of comparing a block: sums in float32, checked afterwards, so that whoever calls can redo the block in
// double where float32 cannot be trusted.
#pragma once

#include "rows.h"

namespace ts {

// What one loop adds up.
struct Lane {
    float sum_abs = 0, diff = 0, base = 0, target = 0, dot = 0;
    uint32_t most = 0, equal = 0, low = 0, high = 0;  // most: bits of the largest distance, which sort as it does

    template <bool kTolerance>
    TS_INLINE void add(float a, float b, const Tolerance& t) {
        const uint32_t bits = bit_cast<uint32_t>(a - b) & kMagnitude<Float32>;
        const float distance = bit_cast<float>(bits);
        most = bits > most ? bits : most;
        equal += a == b;
        if (kTolerance) {
            low += distance > t.atol_low + t.rtol_low * __builtin_fabsf(a);
            high += distance > t.atol_high + t.rtol_high * __builtin_fabsf(a);
        }
        sum_abs += distance;
        diff += distance * distance;
        base += a * a;
        target += b * b;
        dot += a * b;
    }

    TS_INLINE void merge(const Lane& other) {
        most = other.most > most ? other.most : most;
        equal += other.equal, low += other.low, high += other.high;
        sum_abs += other.sum_abs, diff += other.diff, base += other.base, target += other.target, dot += other.dot;
    }
};

template <class A, class B, bool kTolerance>
TS_INLINE Lane add_up(const Sides& s, const Tolerance& t) {
    Lane lane;
    for (int64_t i = 0; i < s.count; ++i) {
        const auto a = load<typename A::Bits>(s.baseline, i);
        const auto b = load<typename B::Bits>(s.target, i);
        lane.add<kTolerance>(A::value(a), B::value(b), t);
    }
    return lane;
}

// Two neighbours of a 16-bit format in one 32-bit word: cheaper than widening each.
template <class F, bool kTolerance>
TS_INLINE Lane add_up_pairs(const Sides& s, const Tolerance& t) {
    Lane even, odd;
    for (int64_t i = 0; i < s.count / 2; ++i) {
        const uint32_t a = load<uint32_t>(s.baseline, i), b = load<uint32_t>(s.target, i);
        even.add<kTolerance>(F::low_half(a), F::low_half(b), t);
        odd.add<kTolerance>(F::high_half(a), F::high_half(b), t);
    }
    if (s.count % 2) {
        const auto a = load<typename F::Bits>(s.baseline, s.count - 1), b = load<typename F::Bits>(s.target, s.count - 1);
        even.add<kTolerance>(F::value(a), F::value(b), t);
    }
    even.merge(odd);
    return even;
}

// Whether a sum of squares tells that its terms neither overflowed nor vanished; non-finite values spoil the sum.
template <class F>
TS_INLINE bool is_safe(float squares, const uint8_t* bytes, int64_t n) {
    if (squares >= kSafeLow * kSafeLow && squares <= kSafeHigh * kSafeHigh) return true;
    typename F::Bits any = 0;
    for (int64_t i = 0; i < n; ++i) any = static_cast<typename F::Bits>(any | (load<typename F::Bits>(bytes, i) & kMagnitude<F>));
    return any == 0;
}

template <class A, class B>
TS_INLINE uint32_t distance_bits(const Sides& s, int64_t i) {
    const float a = A::value(load<typename A::Bits>(s.baseline, i)), b = B::value(load<typename B::Bits>(s.target, i));
    return bit_cast<uint32_t>(a - b) & kMagnitude<Float32>;
}

// For a block with values too near their tolerance: 0.01 * 100 is common in 8-bit mantissas.
template <class A, class B>
TS_INLINE int64_t count_over(const Sides& s, const Tolerance& t) {
    const double atol = t.atol, rtol = t.rtol;
    int64_t over = 0;
    for (int64_t i = 0; i < s.count; ++i) {
        const double a = A::value(load<typename A::Bits>(s.baseline, i));
        const double b = B::value(load<typename B::Bits>(s.target, i));
        over += __builtin_fabs(a - b) > atol + rtol * __builtin_fabs(a);
    }
    return over;
}

// Returns false, with the row untouched, where the block must be done in double.
template <class A, class B, bool kTolerance>
TS_INLINE bool float_block(const Sides& sides, const Tolerance& tolerance, Row* row) {
    const Sides s = sides;
    const Tolerance t = tolerance;
    Lane lane;
    if constexpr (std::is_same_v<A, B> && sizeof(typename A::Bits) == 2) {
        lane = add_up_pairs<A, kTolerance>(s, t);
    } else {
        lane = add_up<A, B, kTolerance>(s, t);
    }
    const float most = bit_cast<float>(lane.most);
    if (!is_safe<A>(lane.base, s.baseline, s.count) || !is_safe<B>(lane.target, s.target, s.count)) return false;
    if (lane.most && !(most >= kSafeLow && most <= kSafeHigh)) return false;
    row->sum_abs += lane.sum_abs;
    row->sum_sq_diff += lane.diff;
    row->sum_sq_baseline += lane.base;
    row->sum_sq_target += lane.target;
    row->dot += lane.dot;
    row->finite += s.count;
    row->equal += lane.equal;
    row->over += !kTolerance ? s.count - lane.equal : lane.low == lane.high ? lane.low : count_over<A, B>(s, t);
    if (most > row->max_abs) {
        row->max_abs = most;
        row->argmax = s.column + find_first(s.count, [&](int64_t i) { return distance_bits<A, B>(s, i) == lane.most; });
    }
    return true;
}

}  // namespace ts
