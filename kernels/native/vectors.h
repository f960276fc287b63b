// The vectors of a processor, TS_VECTOR bytes long, and what its instructions do with them that operators do not say.
//
// Included once for each length, in the namespace TS_VECTORS; whatever uses an instruction is compiled for TS_TARGET.

namespace ts {
namespace TS_VECTORS {

typedef float Floats __attribute__((vector_size(TS_VECTOR)));
typedef float Half __attribute__((vector_size(TS_VECTOR / 2)));
typedef double Doubles __attribute__((vector_size(TS_VECTOR)));
typedef int32_t Ints __attribute__((vector_size(TS_VECTOR)));
typedef uint32_t Words __attribute__((vector_size(TS_VECTOR)));

constexpr int64_t kLanes = TS_VECTOR / 4;

// a * b + sum: written with operators, associative math makes a product and a sum of every other one.
TS_TARGET TS_INLINE Floats fused(Floats a, Floats b, Floats sum) {
#if TS_VECTOR == 64
    return _mm512_fmadd_ps(a, b, sum);
#elif TS_VECTOR == 32
    return _mm256_fmadd_ps(a, b, sum);
#else
    return a * b + sum;
#endif
}

#if TS_VECTOR == 32
// Which lanes of a comparison are true, one bit each.
TS_TARGET TS_INLINE unsigned bits_of(Ints truth) {
    return static_cast<unsigned>(_mm256_movemask_ps(reinterpret_cast<__m256>(truth)));
}
#endif

// Which lanes are `value`, one bit each.
TS_TARGET TS_INLINE unsigned lanes_equal(Ints lanes, int32_t value) {
#if TS_VECTOR == 64
    return _mm512_cmpeq_epi32_mask(reinterpret_cast<__m512i>(lanes), _mm512_set1_epi32(value));
#elif TS_VECTOR == 32
    return bits_of(lanes == value);
#else
    const Ints truth = lanes == value;
    return (truth[0] & 1u) | (truth[1] & 2u) | (truth[2] & 4u) | (truth[3] & 8u);
#endif
}

// Counts lanes.
class Counter {
  public:
    // What is not zero, where nothing is negative.
    TS_TARGET TS_INLINE void add(Ints lanes) {
#if TS_VECTOR == 64
        const __m512i x = reinterpret_cast<__m512i>(lanes);
        count_ += __builtin_popcount(_mm512_test_epi32_mask(x, x));
#elif TS_VECTOR == 32
        count_ += __builtin_popcount(bits_of(lanes > 0));
#else
        count_ += lanes < 1 ? lanes : 1;
#endif
    }

    TS_TARGET TS_INLINE void add_larger(Floats a, Floats b) {
#if TS_VECTOR == 64
        count_ += __builtin_popcount(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ));
#elif TS_VECTOR == 32
        count_ += __builtin_popcount(bits_of(a > b));
#else
        count_ -= a > b;
#endif
    }

    TS_TARGET TS_INLINE int64_t total() const {
#if TS_VECTOR == 16
        return static_cast<int64_t>(count_[0]) + count_[1] + count_[2] + count_[3];
#else
        return count_;
#endif
    }

  private:
#if TS_VECTOR == 16
    Ints count_ = Ints{};
#else
    int64_t count_ = 0;
#endif
};

// Values of a format of sixteen bits.
template <class F>
TS_TARGET TS_INLINE Floats from_halves(const uint8_t* bytes) {
    typedef int16_t Halves __attribute__((vector_size(TS_VECTOR / 2)));
    const Halves halves = load<Halves>(bytes, 0);
#if TS_VECTOR == 64
    const __m256i x = reinterpret_cast<__m256i>(halves);
    if constexpr (std::is_same_v<F, Float16>) return _mm512_cvtph_ps(x);
    return reinterpret_cast<Floats>(reinterpret_cast<Words>(_mm512_cvtepu16_epi32(x)) << 16);
#elif TS_VECTOR == 32
    const __m128i x = reinterpret_cast<__m128i>(halves);
    if constexpr (std::is_same_v<F, Float16>) return _mm256_cvtph_ps(x);
    return reinterpret_cast<Floats>(reinterpret_cast<Words>(_mm256_cvtepu16_epi32(x)) << 16);
#else
    const Ints bits = __builtin_convertvector(halves, Ints);
    if constexpr (std::is_same_v<F, Float16>) {
        return reinterpret_cast<Floats>(bits << 13 & static_cast<int32_t>(0x8FFFE000)) * 0x1p112f;
    }
    return reinterpret_cast<Floats>(bits << 16);
#endif
}

// A format's values as float32, one a lane. Where no instruction widens it, a float16 that is not finite comes out as 2^16
// or more, which no finite one reaches.
template <class F>
TS_TARGET TS_INLINE Floats widened(const uint8_t* bytes, int64_t index) {
    if constexpr (sizeof(typename F::Bits) == 4) {
        return load<Floats>(bytes + index * 4, 0);
    } else {
        return from_halves<F>(bytes + index * 2);
    }
}

// Half of the lanes; the builtin leaves them in registers.
template <class Part, class V>
TS_INLINE Part half_of(V all, bool upper) {
#ifdef TS_SHUFFLE
    constexpr int kCount = sizeof(Part) / sizeof(all[0]);
    if constexpr (kCount == 8) {
        const Part low = __builtin_shufflevector(all, all, 0, 1, 2, 3, 4, 5, 6, 7);
        const Part high = __builtin_shufflevector(all, all, 8, 9, 10, 11, 12, 13, 14, 15);
        return upper ? high : low;
    } else if constexpr (kCount == 4) {
        const Part low = __builtin_shufflevector(all, all, 0, 1, 2, 3);
        const Part high = __builtin_shufflevector(all, all, 4, 5, 6, 7);
        return upper ? high : low;
    } else {
        const Part low = __builtin_shufflevector(all, all, 0, 1), high = __builtin_shufflevector(all, all, 2, 3);
        return upper ? high : low;
    }
#else
    Part half;
    std::memcpy(&half, reinterpret_cast<const char*>(&all) + (upper ? sizeof(Part) : 0), sizeof(Part));
    return half;
#endif
}

// All lanes as one, by halves.
template <class T, class V, class Both>
TS_INLINE T folded(V lanes, Both both) {
    constexpr int kCount = sizeof(V) / sizeof(T);
    if constexpr (kCount == 2) {
        return both(lanes[0], lanes[1]);
    } else {
        typedef T Part __attribute__((vector_size(sizeof(V) / 2)));
        return folded<T>(both(half_of<Part>(lanes, false), half_of<Part>(lanes, true)), both);
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

TS_TARGET TS_INLINE Doubles in_double(Half floats) {
#if TS_VECTOR == 64
    return _mm512_cvtps_pd(reinterpret_cast<__m256>(floats));
#elif TS_VECTOR == 32
    return _mm256_cvtps_pd(reinterpret_cast<__m128>(floats));
#else
    return __builtin_convertvector(floats, Doubles);
#endif
}

// Lanes that are half a vector apart as one, in double.
TS_TARGET TS_INLINE Doubles doubled(Floats lanes) {
    return in_double(half_of<Half>(lanes, false)) + in_double(half_of<Half>(lanes, true));
}

}  // namespace TS_VECTORS
}  // namespace ts
