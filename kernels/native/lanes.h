// The fast way of comparing a block: sums in float32, checked afterwards, so that whoever calls can redo the block in
// double where float32 cannot be trusted.
//
// Included once for each length of the processor's vectors: TS_VECTOR bytes, in the namespace TS_VECTORS.

namespace ts {
namespace TS_VECTORS {

typedef float Floats __attribute__((vector_size(TS_VECTOR)));
typedef int32_t Ints __attribute__((vector_size(TS_VECTOR)));
typedef uint32_t Words __attribute__((vector_size(TS_VECTOR)));
typedef uint16_t Halves __attribute__((vector_size(TS_VECTOR / 2)));

constexpr int64_t kLanes = TS_VECTOR / 4;
constexpr int64_t kStretch = 128;  // elements after which the place of the largest distance is noted

// A format's values, one a lane, as the bits of float32. A float16 that is not finite comes out as 2^16 or more,
// which no finite one reaches.
template <class F>
TS_INLINE Words widened(const uint8_t* bytes, int64_t index) {
    if constexpr (sizeof(typename F::Bits) == 4) {
        return load<Words>(bytes + index * 4, 0);
    } else if constexpr (std::is_same_v<F, Float16>) {
        typedef int16_t Signed __attribute__((vector_size(TS_VECTOR / 2)));
        Signed halves;
        std::memcpy(&halves, bytes + index * 2, sizeof(halves));
        const Ints bits = __builtin_convertvector(halves, Ints) << 13 & static_cast<int32_t>(0x8FFFE000);
        return reinterpret_cast<Words>(reinterpret_cast<Floats>(bits) * 0x1p112f);
    } else {
        Halves halves;
        std::memcpy(&halves, bytes + index * 2, sizeof(halves));
        return __builtin_convertvector(halves, Words) << 16;
    }
}

// Half of the lanes; the builtin leaves them in registers.
template <class Half, class V>
TS_INLINE Half half_of(V all, bool upper) {
#ifdef TS_SHUFFLE
    if constexpr (sizeof(V) == 64) {
        const Half low = __builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7);
        const Half high = __builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15);
        return upper ? high : low;
    } else {
        const Half low = __builtin_shufflevector(all, all, 0, 1, 2, 3);
        const Half high = __builtin_shufflevector(all, all, 4, 5, 6, 7);
        return upper ? high : low;
    }
#else
    Half half;
    std::memcpy(&half, reinterpret_cast<const char*>(&all) + (upper ? sizeof(Half) : 0), sizeof(Half));
    return half;
#endif
}

// All lanes as one, by halves.
template <class T, class V, class Both>
TS_INLINE T folded(V lanes, Both both) {
    typedef T Eight __attribute__((vector_size(32)));
    typedef T Four __attribute__((vector_size(16)));
    if constexpr (sizeof(V) == 64) {
        return folded<T>(both(half_of<Eight>(lanes, false), half_of<Eight>(lanes, true)), both);
    } else if constexpr (sizeof(V) == 32) {
        return folded<T>(both(half_of<Four>(lanes, false), half_of<Four>(lanes, true)), both);
    } else {
        const T one = both(lanes[0], lanes[1]), other = both(lanes[2], lanes[3]);
        return both(one, other);
    }
}

struct Plus {
    template <class V>
    TS_INLINE V operator()(V a, V b) const { return a + b; }
};

struct Larger {
    template <class V>
    TS_INLINE V operator()(V a, V b) const { return a > b ? a : b; }
};

struct Smaller {
    template <class V>
    TS_INLINE V operator()(V a, V b) const { return a < b ? a : b; }
};

TS_INLINE float total(Floats lanes) { return folded<float>(lanes, Plus{}); }
TS_INLINE int32_t total(Ints lanes) { return folded<int32_t>(lanes, Plus{}); }

// What one loop adds up, lane by lane.
struct Lanes {
    Floats sum_abs = Floats{}, diff = Floats{}, base = Floats{}, target = Floats{}, dot = Floats{};
    // Bits of the largest distance, which sort as it does; of this stretch; where the stretch of the largest starts.
    Ints most = Ints{}, recent = Ints{}, where = Ints{};
    Ints unequal = Ints{}, low = Ints{}, high = Ints{};

    template <bool kTolerance>
    TS_INLINE void add(Words bits_a, Words bits_b, const Tolerance& t) {
        const Floats a = reinterpret_cast<Floats>(bits_a), b = reinterpret_cast<Floats>(bits_b);
        const Ints bits = reinterpret_cast<Ints>(a - b) & 0x7FFFFFFF;
        const Floats distance = reinterpret_cast<Floats>(bits);
        recent = bits > recent ? bits : recent;
        unequal += bits < 1 ? bits : 1;  // without flush-to-zero only equal numbers have no distance
        if (kTolerance) {
            const Floats size = reinterpret_cast<Floats>(bits_a & 0x7FFFFFFFu);
            low -= distance > t.atol_low + t.rtol_low * size;
            high -= distance > t.atol_high + t.rtol_high * size;
        }
        sum_abs += distance;
        diff += distance * distance;
        base += a * a;
        target += b * b;
        dot += a * b;
    }

    TS_INLINE void end_stretch(int32_t start) {
        const Ints better = recent > most;
        where = better ? Ints{} + start : where;
        most = better ? recent : most;
        recent = Ints{};
    }
};

// A multiple of 2 * kLanes elements. Two neighbours of bfloat16 lie in one 32-bit word, which is cheaper than widening
// each, and the order of elements within a stretch does not matter here.
template <class A, class B, bool kTolerance>
TS_INLINE void add_stretch(const uint8_t* a, const uint8_t* b, int64_t start, int64_t end, const Tolerance& t, Lanes* lanes) {
    if constexpr (std::is_same_v<A, BFloat16> && std::is_same_v<B, BFloat16>) {
        for (int64_t i = start; i < end; i += 2 * kLanes) {
            const Words x = load<Words>(a + i * 2, 0), y = load<Words>(b + i * 2, 0);
            lanes->add<kTolerance>(x << 16, y << 16, t);
            lanes->add<kTolerance>(x & 0xFFFF0000u, y & 0xFFFF0000u, t);
        }
    } else {
        for (int64_t i = start; i < end; i += kLanes) {
            lanes->add<kTolerance>(widened<A>(a, i), widened<B>(b, i), t);
        }
    }
    lanes->end_stretch(static_cast<int32_t>(start));
}

// The end of a block that fills no stretch, filled up with zeros, which add nothing.
template <class F>
TS_INLINE void fill_up(uint8_t* room, const uint8_t* bytes, int64_t start, int64_t count) {
    constexpr int64_t kSize = sizeof(typename F::Bits);
    std::memset(room, 0, static_cast<size_t>(kStretch * kSize));
    std::memcpy(room, bytes + start * kSize, static_cast<size_t>((count - start) * kSize));
}

template <class A, class B, bool kTolerance>
TS_INLINE void add_up(const Sides& s, const Tolerance& t, Lanes* out) {
    Lanes& lanes = *out;
    int64_t start = 0;
    for (; start + kStretch <= s.count; start += kStretch) {
        add_stretch<A, B, kTolerance>(s.baseline, s.target, start, start + kStretch, t, &lanes);
    }
    if (start < s.count) {
        alignas(64) uint8_t room[2][kStretch * 4];
        fill_up<A>(room[0], s.baseline, start, s.count);
        fill_up<B>(room[1], s.target, start, s.count);
        const Ints before = lanes.where, most = lanes.most;
        const int64_t rest = (s.count - start + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
        add_stretch<A, B, kTolerance>(room[0], room[1], 0, rest, t, &lanes);
        lanes.where = lanes.most > most ? Ints{} + static_cast<int32_t>(start) : before;
    }
}

// Whether a sum of squares tells that its terms neither overflowed nor vanished; non-finite values spoil the sum.
template <class F>
TS_INLINE bool is_safe(float squares, const uint8_t* bytes, int64_t n) {
    const bool has_large = std::is_same_v<F, Float16> && squares >= 0x1p32f;
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

template <class A, class B>
TS_INLINE int32_t distance_bits(const Sides& s, int64_t i) {
    const float a = A::value(load<typename A::Bits>(s.baseline, i)), b = B::value(load<typename B::Bits>(s.target, i));
    return bit_cast<int32_t>(a - b) & 0x7FFFFFFF;
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

// The first element of a stretch at the given distance, which some element there has.
template <class A, class B>
TS_INLINE int64_t place_of(const Sides& s, int64_t start, int32_t distance) {
    const Ints kNowhere = Ints{} + static_cast<int32_t>(kBlock);
    Ints order = Ints{};
    for (int32_t lane = 0; lane < kLanes; ++lane) order[lane] = lane;
    const int64_t end = start + kStretch < s.count ? start + kStretch : s.count;
    Ints first = kNowhere;
    int64_t i = start;
    for (; i + kLanes <= end; i += kLanes) {
        const Words a = widened<A>(s.baseline, i), b = widened<B>(s.target, i);
        const Ints bits = reinterpret_cast<Ints>(reinterpret_cast<Floats>(a) - reinterpret_cast<Floats>(b)) & 0x7FFFFFFF;
        const Ints place = bits == distance ? order + static_cast<int32_t>(i) : kNowhere;
        first = place < first ? place : first;
    }
    const int32_t found = folded<int32_t>(first, Smaller{});
    if (found < kBlock) return found;
    while (i + 1 < end && distance_bits<A, B>(s, i) != distance) ++i;
    return i;
}

// Returns false, with the row untouched, where the block must be done in double.
template <class A, class B, bool kTolerance>
TS_INLINE bool float_block(const Sides& sides, const Tolerance& tolerance, Row* row) {
    const Sides s = sides;
    const Tolerance t = tolerance;
    Lanes lanes;
    add_up<A, B, kTolerance>(s, t, &lanes);
    const int32_t bits = folded<int32_t>(lanes.most, Larger{});
    const float most = bit_cast<float>(bits);
    if (!is_safe<A>(total(lanes.base), s.baseline, s.count) || !is_safe<B>(total(lanes.target), s.target, s.count)) return false;
    if (bits && !(most >= kSafeLow && most <= kSafeHigh)) return false;
    const int64_t unequal = total(lanes.unequal);
    row->sum_abs += total(lanes.sum_abs);
    row->sum_sq_diff += total(lanes.diff);
    row->sum_sq_baseline += total(lanes.base);
    row->sum_sq_target += total(lanes.target);
    row->dot += total(lanes.dot);
    row->finite += s.count;
    row->equal += s.count - unequal;
    if constexpr (kTolerance) {
        const int32_t low = total(lanes.low), high = total(lanes.high);
        row->over += low == high ? low : count_over<A, B>(s, t);
    } else {
        row->over += unequal;
    }
    if (most > row->max_abs) {
        row->max_abs = most;
        const Ints starts = lanes.most == bits ? lanes.where : Ints{} + static_cast<int32_t>(kBlock);
        row->argmax = s.column + place_of<A, B>(s, folded<int32_t>(starts, Smaller{}), bits);
    }
    return true;
}

}  // namespace TS_VECTORS
}  // namespace ts
