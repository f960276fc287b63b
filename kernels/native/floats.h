// Statistics of one block of a floating-point format: fast sums and extremes, and the fallback where these cannot be
// trusted.
#pragma once

#include "summary.h"

namespace ts {

// Extremes of a block, computed on the bits as integers without looking at the sign. As unsigned integers, negative
// values come last and the one with the largest magnitude is the maximum; as signed integers, negative values come
// first.
template <class F>
struct Extremes {
    using Bits = typename F::Bits;
    using Signed = std::make_signed_t<Bits>;
    Bits low = std::numeric_limits<Bits>::max(), high = 0;
    Signed signed_low = std::numeric_limits<Signed>::max(), signed_high = std::numeric_limits<Signed>::min();

    TS_INLINE void add(Bits bits) {
        const Signed same = static_cast<Signed>(bits);
        low = bits < low ? bits : low;
        high = bits > high ? bits : high;
        signed_low = same < signed_low ? same : signed_low;
        signed_high = same > signed_high ? same : signed_high;
    }

    static Bits magnitude(Bits bits) { return bits & kMagnitude<F>; }
    bool any_positive() const { return signed_high >= 0; }
    bool any_negative() const { return high > kMagnitude<F>; }
    double least() const { return F::value(any_negative() ? high : low); }
    double most() const { return F::value(any_positive() ? static_cast<Bits>(signed_high) : low); }
    bool any_tiny() const {
        return magnitude(low) < F::kMinNormal || magnitude(static_cast<Bits>(signed_low)) < F::kMinNormal;
    }
    bool any_nonfinite() const {
        return magnitude(high) >= F::kNonfinite || magnitude(static_cast<Bits>(signed_high)) >= F::kNonfinite;
    }
};

// Handles a block with non-finite values or with squares that overflow or underflow float32: masked, in double.
template <class F>
TS_INLINE void careful_block(const uint8_t* bytes, int64_t n, Summary* out) {
    using Bits = typename F::Bits;
    double sum = 0, sumsq = 0, low = out->min, high = out->max;
    int64_t nan = 0, infinite = 0, negative = 0;
    for (int64_t i = 0; i < n; ++i) {
        const Bits bits = load<Bits>(bytes, i), magnitude = bits & kMagnitude<F>;
        const bool finite = magnitude < F::kNonfinite;
        const double value = F::value(finite ? bits : Bits(0));
        nan += magnitude > F::kNonfinite;
        infinite += magnitude == F::kNonfinite;
        negative += bits == static_cast<Bits>(F::kNonfinite | ~kMagnitude<F>);
        sum += value;
        sumsq += value * value;
        low = finite && value < low ? value : low;
        high = finite && value > high ? value : high;
    }
    out->nan += nan;
    out->posinf += infinite - negative;
    out->neginf += negative;
    out->finite -= nan + infinite;
    out->sum += sum;
    out->sumsq += sumsq;
    out->extend(low, high);
}

template <class F>
TS_INLINE void count_tiny(const uint8_t* bytes, int64_t n, Summary* out) {
    using Bits = typename F::Bits;
    Bits tiny = 0, zeros = 0;  // counts of one block fit 16 bits
    for (int64_t i = 0; i < n; ++i) {
        const Bits magnitude = load<Bits>(bytes, i) & kMagnitude<F>;
        tiny = static_cast<Bits>(tiny + (magnitude < F::kMinNormal));
        zeros = static_cast<Bits>(zeros + (magnitude == 0));
    }
    out->zeros += zeros;
    out->subnormals += tiny - zeros;
}

template <class Value>
struct Sums {
    Value sum = 0, squares = 0;

    TS_INLINE void add(Value value) { sum += value, squares += value * value; }
};

// Adds a block of `n` elements to the summary, from its fast sums.
template <class F>
TS_INLINE void conclude(const Extremes<F>& extremes, const Sums<typename F::Value>& sums, const uint8_t* bytes,
                        int64_t n, Summary* out) {
    using Value = typename F::Value;
    out->finite += n;
    if (extremes.any_tiny()) count_tiny<F>(bytes, n, out);
    const double least = extremes.least(), most = extremes.most(), absmax = most > -least ? most : -least;
    const bool safe = sizeof(Value) == 8 || absmax == 0 || (absmax >= kSafeLow && absmax <= kSafeHigh);
    if (extremes.any_nonfinite() || !safe) return careful_block<F>(bytes, n, out);
    out->sum += sums.sum;
    out->sumsq += sums.squares;
    out->extend(least, most);
}

}  // namespace ts
