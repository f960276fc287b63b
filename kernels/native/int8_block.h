// Exact comparison of 8-bit integers, whose distances fit 8 unsigned bits and products 16 bits, and of bools.
//
// Included once per vector length, after lanes.h.

namespace ts {
namespace TS_VECTORS {

typedef uint8_t Bytes __attribute__((vector_size(TS_VECTOR)));
typedef int8_t Chars __attribute__((vector_size(TS_VECTOR)));
typedef int16_t Shorts __attribute__((vector_size(TS_VECTOR)));
typedef uint16_t Ushorts __attribute__((vector_size(TS_VECTOR)));

// Returns a bit mask of the equal bytes.
TS_TARGET TS_INLINE uint64_t same_bytes(Bytes a, Bytes b) {
#if TS_VECTOR == 64
    return _mm512_cmpeq_epi8_mask(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b));
#elif TS_VECTOR == 32
    return static_cast<uint32_t>(_mm256_movemask_epi8(reinterpret_cast<__m256i>(a == b)));
#elif defined(TS_WIDE)
    return static_cast<uint32_t>(_mm_movemask_epi8(reinterpret_cast<__m128i>(a == b)));
#else
    uint64_t bits = 0;
    for (int i = 0; i < TS_VECTOR; ++i) bits |= uint64_t(a[i] == b[i]) << i;
    return bits;
#endif
}

constexpr uint64_t kAllBytes = ~uint64_t(0) >> (64 - TS_VECTOR);

// Sums bytes in groups of eight.
TS_TARGET TS_INLINE Longs sums_of(Bytes bytes) {
#if TS_VECTOR == 64
    return reinterpret_cast<Longs>(_mm512_sad_epu8(reinterpret_cast<__m512i>(bytes), _mm512_setzero_si512()));
#elif TS_VECTOR == 32
    return reinterpret_cast<Longs>(_mm256_sad_epu8(reinterpret_cast<__m256i>(bytes), _mm256_setzero_si256()));
#elif defined(TS_WIDE)
    return reinterpret_cast<Longs>(_mm_sad_epu8(reinterpret_cast<__m128i>(bytes), _mm_setzero_si128()));
#else
    const Ushorts x = reinterpret_cast<Ushorts>(bytes), two = (x & 0xFF) + (x >> 8);
    const Words four = (reinterpret_cast<Words>(two) & 0xFFFF) + (reinterpret_cast<Words>(two) >> 16);
    const Longs eight = reinterpret_cast<Longs>(four);
    return (eight & 0xFFFFFFFF) + (eight >> 32);
#endif
}

// Sums squares of adjacent elements in pairs.
TS_TARGET TS_INLINE Ints squares_of(Shorts x) {
#if TS_VECTOR == 64
    return reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(x)));
#elif TS_VECTOR == 32
    return reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(x)));
#elif defined(TS_WIDE)
    return reinterpret_cast<Ints>(_mm_madd_epi16(reinterpret_cast<__m128i>(x), reinterpret_cast<__m128i>(x)));
#else
    const Ints both = reinterpret_cast<Ints>(x), high = both >> 16, low = both << 16 >> 16;
    return low * low + high * high;
#endif
}

// Widens every other byte to a 16-bit integer.
template <class T>
TS_TARGET TS_INLINE Shorts widened_bytes(Bytes bytes, int odd) {
    if constexpr (std::is_signed_v<T>) {
        const Shorts x = reinterpret_cast<Shorts>(bytes);
        return odd ? x >> 8 : x << 8 >> 8;
    } else {
        const Ushorts x = reinterpret_cast<Ushorts>(bytes);
        return reinterpret_cast<Shorts>(odd ? x >> 8 : x & 0xFF);
    }
}

template <class T>
TS_TARGET TS_INLINE Bytes distance_of(Bytes a, Bytes b) {
    if constexpr (std::is_signed_v<T>) {
        const Chars x = reinterpret_cast<Chars>(a), y = reinterpret_cast<Chars>(b);
        return reinterpret_cast<Bytes>(x > y ? x : y) - reinterpret_cast<Bytes>(x > y ? y : x);
    } else {
        return (a > b ? a : b) - (a > b ? b : a);
    }
}

struct ByteLanes {
    Ints base = Ints{}, target = Ints{}, diff = Ints{};  // sums of squares; those of one piece fit 31 bits
    Longs sum_abs = Longs{};
    Bytes recent = Bytes{};  // largest distances of the current stretch
    int64_t equal = 0;

    template <class T>
    TS_TARGET TS_INLINE void add(Bytes a, Bytes b) {
        const Bytes distance = distance_of<T>(a, b);
        recent = recent > distance ? recent : distance;
        equal += __builtin_popcountll(same_bytes(a, b));
        sum_abs += sums_of(distance);
        for (int odd = 0; odd < 2; ++odd) {
            const Shorts x = widened_bytes<T>(a, odd), y = widened_bytes<T>(b, odd);
            base += squares_of(x), target += squares_of(y), diff += squares_of(x - y);
        }
    }

    TS_TARGET TS_INLINE uint8_t largest() const {
        uint8_t all[TS_VECTOR], most = 0;
        std::memcpy(all, &recent, TS_VECTOR);
        for (const uint8_t one : all) most = one > most ? one : most;
        return most;
    }
};

template <class T>
TS_TARGET TS_INLINE void add_bytes(const Sides& s, int64_t start, int64_t end, ByteLanes* lanes) {
    int64_t i = start;
    for (; i + TS_VECTOR <= end; i += TS_VECTOR) {
        lanes->add<T>(load<Bytes>(s.baseline + i, 0), load<Bytes>(s.target + i, 0));
    }
    if (i == end) return;
    const size_t rest = static_cast<size_t>(end - i);
    const Padded<TS_VECTOR> a(s.baseline + i, rest), b(s.target + i, rest);
    lanes->add<T>(load<Bytes>(a.bytes, 0), load<Bytes>(b.bytes, 0));
    lanes->equal -= TS_VECTOR - static_cast<int64_t>(rest);
}

// Returns the first element from `start` on with the given distance, which must occur there.
template <class T>
TS_TARGET TS_INLINE int64_t place_of_byte(const Sides& s, int64_t start, uint8_t distance) {
    int64_t i = start;
    for (; i + TS_VECTOR <= s.count; i += TS_VECTOR) {
        const Bytes here = distance_of<T>(load<Bytes>(s.baseline + i, 0), load<Bytes>(s.target + i, 0));
        if (const uint64_t found = same_bytes(here, Bytes{} + distance)) return i + __builtin_ctzll(found);
    }
    for (; i < s.count; ++i) {
        const int a = static_cast<T>(s.baseline[i]), b = static_cast<T>(s.target[i]);
        if ((a < b ? b - a : a - b) == distance) break;
    }
    return i;
}

template <class F>
constexpr bool is_byte_integer = false;
template <class T>
constexpr bool is_byte_integer<Byte<T>> = true;

template <class T>
TS_TARGET TS_INLINE bool byte_block_of(Byte<T>, const Sides& sides, Row* row) {
    constexpr int64_t kByteStretch = 512;  // elements between checks for a larger distance
    const Sides s = sides;
    ByteLanes lanes;
    int64_t where = 0;
    uint8_t most = 0;
    for (int64_t start = 0; start < s.count; start += kByteStretch) {
        const int64_t end = start + kByteStretch < s.count ? start + kByteStretch : s.count;
        add_bytes<T>(s, start, end, &lanes);
        const Bytes before = Bytes{} + most;
        if (same_bytes(lanes.recent > before ? lanes.recent : before, before) != kAllBytes) {
            most = lanes.largest(), where = start;
        }
    }
    const double base = folded<int32_t>(lanes.base, Plus{}), target = folded<int32_t>(lanes.target, Plus{});
    const double diff = folded<int32_t>(lanes.diff, Plus{});
    row->sum_abs += static_cast<double>(folded<int64_t>(lanes.sum_abs, Plus{}));
    row->sum_sq_diff += diff;
    row->sum_sq_baseline += base;
    row->sum_sq_target += target;
    row->dot += (base + target - diff) / 2;  // all terms are integers
    row->finite += s.count;
    row->equal += lanes.equal;
    row->over += s.count - lanes.equal;
    if (most > row->max_abs) {
        row->max_abs = most;
        row->argmax = s.column + place_of_byte<T>(s, where, most);
    }
    return true;
}

// Counts of bools: any nonzero byte is true.
struct BitCounts {
    int64_t base = 0, target = 0, both = 0, first = -1;  // first: first unequal element, or -1

    TS_TARGET TS_INLINE void add(int64_t start, Bytes a, Bytes b) {
        const uint64_t x = kAllBytes ^ same_bytes(a, Bytes{}), y = kAllBytes ^ same_bytes(b, Bytes{});
        base += __builtin_popcountll(x), target += __builtin_popcountll(y), both += __builtin_popcountll(x & y);
        if (x != y && first < 0) first = start + __builtin_ctzll(x ^ y);
    }
};

TS_TARGET TS_INLINE bool byte_block_of(Byte<bool>, const Sides& sides, Row* row) {
    const Sides s = sides;
    BitCounts counts;
    int64_t i = 0;
    for (; i + TS_VECTOR <= s.count; i += TS_VECTOR) {
        counts.add(i, load<Bytes>(s.baseline + i, 0), load<Bytes>(s.target + i, 0));
    }
    if (i < s.count) {
        const size_t rest = static_cast<size_t>(s.count - i);
        const Padded<TS_VECTOR> a(s.baseline + i, rest), b(s.target + i, rest);
        counts.add(i, load<Bytes>(a.bytes, 0), load<Bytes>(b.bytes, 0));
    }
    const int64_t unequal = counts.base + counts.target - 2 * counts.both;
    const double differ = static_cast<double>(unequal), most = unequal > 0;
    row->sum_abs += differ;
    row->sum_sq_diff += differ;
    row->sum_sq_baseline += static_cast<double>(counts.base);
    row->sum_sq_target += static_cast<double>(counts.target);
    row->dot += static_cast<double>(counts.both);
    row->finite += s.count;
    row->equal += s.count - unequal;
    row->over += unequal;
    if (most > row->max_abs) row->max_abs = most, row->argmax = s.column + (unequal > 0 ? counts.first : 0);
    return true;
}

}  // namespace TS_VECTORS
}  // namespace ts
