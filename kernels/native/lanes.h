// The fast way of comparing a block: sums in float32, checked afterwards, so that whoever calls can redo the block in
// double where float32 cannot be trusted.
//
// Included once for each length of the processor's vectors, after vectors.h.

namespace ts {
namespace TS_VECTORS {

constexpr int64_t kPair = 2 * kLanes;  // elements that are read together
constexpr int64_t kStretch = 128;      // elements after which the place of the largest distance is noted

// A sum lane by lane, in float32 until it is carried over.
struct Sum {
    Floats recent = Floats{};
    Doubles before = Doubles{};

    TS_TARGET TS_INLINE void add(Floats a, Floats b) { recent = fused(a, b, recent); }

    TS_TARGET TS_INLINE void carry() { before += doubled(recent), recent = Floats{}; }

    TS_TARGET TS_INLINE double total() const { return folded<double>(before + doubled(recent), Plus{}); }
};

// What one loop adds up, lane by lane.
struct Lanes {
    Sum sum_abs, diff, base, target, dot;
    // Bits of the largest distance, which sort as it does; of this stretch; where the stretch of the largest starts.
    Ints most = Ints{}, recent = Ints{}, where = Ints{};
    Counter unequal, low, high;

    template <bool kTolerance>
    TS_TARGET TS_INLINE void add(Floats a, Floats b, const Tolerance& t) {
        const Ints bits = reinterpret_cast<Ints>(a - b) & 0x7FFFFFFF;
        const Floats distance = reinterpret_cast<Floats>(bits);
        recent = bits > recent ? bits : recent;
        unequal.add(bits);  // without flush-to-zero only equal numbers have no distance
        if constexpr (kTolerance) {
            const Floats size = reinterpret_cast<Floats>(reinterpret_cast<Ints>(a) & 0x7FFFFFFF);
            low.add_larger(distance, t.atol_low + t.rtol_low * size);
            high.add_larger(distance, t.atol_high + t.rtol_high * size);
        }
        sum_abs.recent += distance;
        diff.add(distance, distance);
        base.add(a, a);
        target.add(b, b);
        dot.add(a, b);
    }

    TS_TARGET TS_INLINE void end_stretch(int64_t start) {
        const Ints better = recent > most;
        where = better ? Ints{} + static_cast<int32_t>(start) : where;
        most = better ? recent : most;
        recent = Ints{};
    }

    TS_TARGET TS_INLINE void carry() { sum_abs.carry(), diff.carry(), base.carry(), target.carry(), dot.carry(); }
};

// Two neighbours of bfloat16 lie in one 32-bit word, which is cheaper than widening each, and the order of elements within
// a stretch does not matter here.
template <class A, class B, bool kTolerance>
TS_TARGET TS_INLINE void add_pair(const uint8_t* a, const uint8_t* b, const Tolerance& t, Lanes* lanes) {
    if constexpr (std::is_same_v<A, BFloat16> && std::is_same_v<B, BFloat16>) {
        const Words x = load<Words>(a, 0), y = load<Words>(b, 0);
        lanes->add<kTolerance>(reinterpret_cast<Floats>(x << 16), reinterpret_cast<Floats>(y << 16), t);
        lanes->add<kTolerance>(reinterpret_cast<Floats>(x & 0xFFFF0000u), reinterpret_cast<Floats>(y & 0xFFFF0000u), t);
    } else {
        lanes->add<kTolerance>(widened<A>(a, 0), widened<B>(b, 0), t);
        lanes->add<kTolerance>(widened<A>(a, kLanes), widened<B>(b, kLanes), t);
    }
}

template <class A, class B, bool kTolerance>
TS_TARGET TS_INLINE void add_pairs(const Sides& s, int64_t start, int64_t end, const Tolerance& t, Lanes* lanes) {
    constexpr int64_t kA = sizeof(typename A::Bits), kB = sizeof(typename B::Bits);
    for (int64_t i = start; i < end; i += kPair) {
        const uint8_t *a = s.baseline + i * kA, *b = s.target + i * kB;
        add_pair<A, B, kTolerance>(a, b, t, lanes);
    }
}

// Elements that fill no pair of vectors, filled up with zeros, which add nothing.
template <class A, class B, bool kTolerance>
TS_TARGET TS_INLINE void add_rest(const Sides& s, int64_t start, const Tolerance& t, Lanes* lanes) {
    constexpr size_t kA = sizeof(typename A::Bits), kB = sizeof(typename B::Bits);
    alignas(64) uint8_t a[kPair * kA] = {}, b[kPair * kB] = {};
    const size_t count = static_cast<size_t>(s.count - start), first = static_cast<size_t>(start);
    std::memcpy(a, s.baseline + first * kA, count * kA);
    std::memcpy(b, s.target + first * kB, count * kB);
    add_pair<A, B, kTolerance>(a, b, t, lanes);
}

template <class A, class B, bool kTolerance>
TS_TARGET TS_INLINE void add_up(const Sides& s, const Tolerance& t, Lanes* out) {
    Lanes& lanes = *out;
    int64_t start = 0;
    for (; start + kStretch <= s.count; start += kStretch) {
        add_pairs<A, B, kTolerance>(s, start, start + kStretch, t, &lanes);
        lanes.end_stretch(start);
        if ((start + kStretch) % kBlock == 0) lanes.carry();
    }
    if (start < s.count) {
        const int64_t end = s.count / kPair * kPair;
        add_pairs<A, B, kTolerance>(s, start, end, t, &lanes);
        if (end < s.count) add_rest<A, B, kTolerance>(s, end, t, &lanes);
        lanes.end_stretch(start);
    }
}

// Whether a sum of squares tells that its terms neither overflowed nor vanished; non-finite values spoil the sum.
template <class F>
TS_INLINE bool is_safe(double squares, const uint8_t* bytes, int64_t n) {
    const bool has_large = TS_VECTOR == 16 && std::is_same_v<F, Float16> && squares >= 0x1p32;  // see widened
    if (squares >= kSafeLow * kSafeLow && squares <= kSafeHigh * kSafeHigh && !has_large) return true;
    if (has_large) {
        bool finite = true;
        for (int64_t i = 0; i < n; ++i) finite &= (load<typename F::Bits>(bytes, i) & kMagnitude<F>) < F::kNonfinite;
        return finite;
    }
    typename F::Bits any = 0;
    for (int64_t i = 0; i < n; ++i) any = static_cast<typename F::Bits>(any | (load<typename F::Bits>(bytes, i) & kMagnitude<F>));
    return any == 0;
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

template <class A, class B>
TS_TARGET TS_INLINE uint64_t lanes_at(const Sides& s, int64_t i, int32_t distance) {
    constexpr int64_t kA = sizeof(typename A::Bits), kB = sizeof(typename B::Bits);
    const Floats difference = widened<A>(s.baseline + i * kA, 0) - widened<B>(s.target + i * kB, 0);
    return lanes_equal(reinterpret_cast<Ints>(difference) & 0x7FFFFFFF, distance);
}

// The first element of a stretch at the given distance, where some element there has it. No branch depends on where: a
// wrong guess would keep the processor from loading what comes next.
template <class A, class B>
TS_TARGET TS_INLINE int64_t place_of(const Sides& s, int64_t start, int32_t distance) {
    uint64_t found[2] = {};
    if (start + kStretch <= s.count) {
#pragma GCC unroll 32
        for (int64_t i = 0; i < kStretch; i += kLanes) found[i / 64] |= lanes_at<A, B>(s, start + i, distance) << (i % 64);
    } else {
        int64_t i = 0;
        for (; start + i + kLanes <= s.count; i += kLanes) found[i / 64] |= lanes_at<A, B>(s, start + i, distance) << (i % 64);
        for (; start + i < s.count; ++i) {
            const float a = A::value(load<typename A::Bits>(s.baseline, start + i));
            const float b = B::value(load<typename B::Bits>(s.target, start + i));
            const uint64_t here = (bit_cast<int32_t>(a - b) & 0x7FFFFFFF) == distance;
            found[i / 64] |= here << (i % 64);
        }
    }
    return start + (found[0] ? 0 : 64) + __builtin_ctzll(found[0] ? found[0] : found[1]);
}

// Returns false, with the row untouched, where the block must be done in double.
template <class A, class B, bool kTolerance>
TS_TARGET TS_INLINE bool float_block(const Sides& sides, const Tolerance& tolerance, Row* row) {
    const Sides s = sides;
    const Tolerance t = tolerance;
    Lanes lanes;
    add_up<A, B, kTolerance>(s, t, &lanes);
    const int32_t bits = folded<int32_t>(lanes.most, Larger{});
    const float most = bit_cast<float>(bits);
    const double base = lanes.base.total(), target = lanes.target.total();
    if (!is_safe<A>(base, s.baseline, s.count) || !is_safe<B>(target, s.target, s.count)) return false;
    if (bits && !(most >= kSafeLow && most <= kSafeHigh)) return false;
    const int64_t unequal = lanes.unequal.total();
    row->sum_abs += lanes.sum_abs.total();
    row->sum_sq_diff += lanes.diff.total();
    row->sum_sq_baseline += base;
    row->sum_sq_target += target;
    row->dot += lanes.dot.total();
    row->finite += s.count;
    row->equal += s.count - unequal;
    if constexpr (kTolerance) {
        const int64_t low = lanes.low.total(), high = lanes.high.total();
        row->over += low == high ? low : count_over<A, B>(s, t);
    } else {
        row->over += unequal;
    }
    if (most > row->max_abs) {
        row->max_abs = most;
        const Ints starts = lanes.most == bits ? lanes.where : Ints{} + static_cast<int32_t>(s.count);
        row->argmax = s.column + place_of<A, B>(s, folded<int32_t>(starts, Smaller{}), bits);
    }
    return true;
}

}  // namespace TS_VECTORS
}  // namespace ts
