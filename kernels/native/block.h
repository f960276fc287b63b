// Fast comparison of one block of a row, in vectors of the formats' common type. The result is checked afterwards: the
// caller redoes the block in double where float32, or a fast sum, cannot be trusted.
//
// Included once per vector length, after int8_block.h.

namespace ts {
namespace TS_VECTORS {

constexpr int64_t kStretch = 128;  // elements after which the position of the largest distance is updated

// The lane type in which formats A and B are compared.
template <class A, class B>
using CommonReal = std::conditional_t<sizeof(typename A::Value) == 8 || sizeof(typename B::Value) == 8, double, float>;

template <class A, class B>
constexpr int64_t kPair = 2 * kLanes<CommonReal<A, B>>;  // elements read per iteration

template <class A, class B, class L>
TS_TARGET TS_INLINE void add_pair(const uint8_t* a, const uint8_t* b, const Tolerance& t, L* lanes) {
    if constexpr (std::is_same_v<A, BFloat16> && std::is_same_v<B, BFloat16>) {
        const Two<A> x = read_words(a), y = read_words(b);
        lanes->add(x.first, y.first, t), lanes->add(x.second, y.second, t);
    } else {
        const Two<A> x = read_two<A>(a);
        const Two<B> y = read_two<B>(b);
        lanes->add(x.first, y.first, t), lanes->add(x.second, y.second, t);
    }
}

template <class A, class B, class L>
TS_TARGET TS_INLINE void add_pairs(const Sides& s, int64_t start, int64_t end, const Tolerance& t, L* lanes) {
    constexpr int64_t kA = sizeof(typename A::Bits), kB = sizeof(typename B::Bits);
    if constexpr (kA == 1 && kB == 1) fetch_ahead(s, start, end);
    for (int64_t i = start; i < end; i += kPair<A, B>) add_pair<A, B>(s.baseline + i * kA, s.target + i * kB, t, lanes);
}

// Adds the remaining elements, which fill less than a pair of vectors; zero padding adds nothing.
template <class A, class B, class L>
TS_TARGET TS_INLINE void add_rest(const Sides& s, int64_t start, const Tolerance& t, L* lanes) {
    constexpr size_t kA = sizeof(typename A::Bits), kB = sizeof(typename B::Bits), kRoom = kPair<A, B>;
    const size_t count = static_cast<size_t>(s.count - start), first = static_cast<size_t>(start);
    const Padded<kRoom * kA> a(s.baseline + first * kA, count * kA);
    const Padded<kRoom * kB> b(s.target + first * kB, count * kB);
    add_pair<A, B>(a.bytes, b.bytes, t, lanes);
}

template <class A, class B, class L>
TS_TARGET TS_INLINE void add_up(const Sides& s, const Tolerance& t, L* lanes) {
    int64_t start = 0;
    for (; start + kStretch <= s.count; start += kStretch) {
        add_pairs<A, B>(s, start, start + kStretch, t, lanes);
        lanes->distances.end_stretch(start);
        if ((start + kStretch) % kBlock == 0) lanes->carry();
    }
    if (start < s.count) {
        const int64_t end = s.count / kPair<A, B> * kPair<A, B>;
        add_pairs<A, B>(s, start, end, t, lanes);
        if (end < s.count) add_rest<A, B>(s, end, t, lanes);
        lanes->distances.end_stretch(start);
    }
}

template <class F>
TS_TARGET TS_INLINE bool are_finite(const uint8_t* bytes, int64_t n) {
    if constexpr (sizeof(typename F::Bits) == 1) {
        uint8_t most = 0;
        for (int64_t i = 0; i < n; ++i) most = F::rank(bytes[i]) > most ? F::rank(bytes[i]) : most;
        return F::is_finite(most);
    } else {
        bool finite = true;
        for (int64_t i = 0; i < n; ++i) finite &= (load<typename F::Bits>(bytes, i) & kMagnitude<F>) < F::kNonfinite;
        return finite;
    }
}

// Returns whether a sum of squares proves that no term overflowed or underflowed; non-finite values make the sum
// non-finite.
template <class F>
TS_TARGET TS_INLINE bool is_safe(double squares, const uint8_t* bytes, int64_t n) {
    using Bits = typename F::Bits;
    if constexpr (std::is_signed_v<Bits>) {  // integers
        return true;
    } else if constexpr (sizeof(Bits) == 1) {  // a range of few powers of two
        return are_finite<F>(bytes, n);
    } else if constexpr (sizeof(Bits) == 8) {  // underflow in double is the same on the slow path
        return (bit_cast<uint64_t>(squares) & kMagnitude<Float64>) < Float64::kNonfinite;
    } else {
        const bool is_large = TS_VECTOR == 16 && std::is_same_v<F, Float16> && squares >= 0x1p32;  // see widened
        if (is_large) return are_finite<F>(bytes, n);
        if (squares >= kSafeLow * kSafeLow && squares <= kSafeHigh * kSafeHigh) return true;
        Bits any = 0;
        for (int64_t i = 0; i < n; ++i) any = static_cast<Bits>(any | (load<Bits>(bytes, i) & kMagnitude<F>));
        return any == 0;
    }
}

// Recounts elements over the tolerance in double, for a block with values too close to it: 0.01 * 100 is common with
// 8-bit mantissas.
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

template <class A, class B, class Real>
TS_TARGET TS_INLINE uint64_t lanes_at(const uint8_t* a, const uint8_t* b, Real distance) {
    return lanes_equal(magnitude(widened<A>(a) - widened<B>(b)), distance);
}

// Returns the first element of a stretch with the given distance, which must occur there. No branch depends on the
// data: a misprediction would keep the CPU from loading the next stretch.
template <class A, class B, class Real>
TS_TARGET TS_INLINE int64_t place_of(const Sides& s, int64_t start, Real distance) {
    constexpr int64_t kEach = kLanes<Real>, kA = sizeof(typename A::Bits), kB = sizeof(typename B::Bits);
    const uint8_t *a = s.baseline + start * kA, *b = s.target + start * kB;
    const int64_t count = s.count - start;
    uint64_t found[2] = {};
    if (count >= kStretch) {
        for (int64_t i = 0; i < 64; i += kEach) {
            found[0] |= lanes_at<A, B>(a + i * kA, b + i * kB, distance) << i;
            found[1] |= lanes_at<A, B>(a + (64 + i) * kA, b + (64 + i) * kB, distance) << i;
        }
    } else {
        int64_t i = 0;
        for (; i + kEach <= count; i += kEach) {
            found[i / 64] |= lanes_at<A, B>(a + i * kA, b + i * kB, distance) << (i % 64);
        }
        if (i < count) {
            const size_t rest = static_cast<size_t>(count - i);
            const Padded<kEach * kA> x(a + i * kA, rest * kA);
            const Padded<kEach * kB> y(b + i * kB, rest * kB);
            const uint64_t within = (uint64_t(1) << rest) - 1;
            found[i / 64] |= (lanes_at<A, B>(x.bytes, y.bytes, distance) & within) << (i % 64);
        }
    }
    return start + (found[0] ? 0 : 64) + __builtin_ctzll(found[0] ? found[0] : found[1]);
}

// Returns false and leaves `row` unchanged if the block must be compared in double.
template <class A, class B, bool kTolerance>
TS_TARGET TS_INLINE bool real_block(const Sides& sides, const Tolerance& tolerance, Row* row) {
    using Real = CommonReal<A, B>;
    const Sides s = sides;
    const Tolerance t = tolerance;
    Lanes<Real, kTolerance> lanes;
    add_up<A, B>(s, t, &lanes);
    const Real most = lanes.distances.largest();
    const double base = lanes.products.base.total(), target = lanes.products.target.total();
    if (!is_safe<A>(base, s.baseline, s.count) || !is_safe<B>(target, s.target, s.count)) return false;
    if (sizeof(Real) == 4 && most != 0 && !(most >= kSafeLow && most <= kSafeHigh)) return false;
    const int64_t unequal = lanes.unequal.total();
    row->sum_abs += lanes.distances.sum_abs.total();
    row->sum_sq_diff += lanes.distances.diff.total();
    row->sum_sq_baseline += base;
    row->sum_sq_target += target;
    row->dot += lanes.products.dot.total();
    row->finite += s.count;
    row->equal += s.count - unequal;
    if constexpr (kTolerance) {
        const int64_t low = lanes.low.total(), high = sizeof(Real) == 4 ? lanes.high.total() : low;
        row->over += low == high ? low : count_over<A, B>(s, t);
    } else {
        row->over += unequal;
    }
    if (most > row->max_abs) {
        row->max_abs = most;
        row->argmax = s.column + place_of<A, B>(s, lanes.distances.first_at(most, s.count), most);
    }
    return true;
}

template <class A, class B, bool kTolerance>
TS_TARGET TS_INLINE bool fast_block(const Sides& sides, const Tolerance& tolerance, Row* row) {
    if constexpr (is_byte_integer<A>) {
        return byte_block_of(A{}, sides, row);
    } else {
        return real_block<A, B, kTolerance>(sides, tolerance, row);
    }
}

}  // namespace TS_VECTORS
}  // namespace ts
