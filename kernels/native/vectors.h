// CPU vectors of TS_VECTOR bytes, and operations on them that C++ operators do not express.
//
// Included once per vector length, in the namespace TS_VECTORS; every function that uses an instruction is compiled for
// TS_TARGET.

namespace ts {
namespace TS_VECTORS {

typedef float Floats __attribute__((vector_size(TS_VECTOR)));
typedef float Half __attribute__((vector_size(TS_VECTOR / 2)));
typedef double Doubles __attribute__((vector_size(TS_VECTOR)));
typedef int32_t Ints __attribute__((vector_size(TS_VECTOR)));
typedef uint32_t Words __attribute__((vector_size(TS_VECTOR)));
typedef int64_t Longs __attribute__((vector_size(TS_VECTOR)));

template <class Real>  // float or double
using Reals = std::conditional_t<sizeof(Real) == 4, Floats, Doubles>;
template <class Real>  // integers of the same width, the result type of comparisons: all bits are set in a true lane
using Wholes = std::conditional_t<sizeof(Real) == 4, Ints, Longs>;
template <class Real>
constexpr int64_t kLanes = TS_VECTOR / sizeof(Real);

// Returns a * b + sum. With operators, associative math would turn every other one into a separate product and sum.
TS_TARGET TS_INLINE Floats fused(Floats a, Floats b, Floats sum) {
#if TS_VECTOR == 64
    return _mm512_fmadd_ps(a, b, sum);
#elif TS_VECTOR == 32
    return _mm256_fmadd_ps(a, b, sum);
#else
    return a * b + sum;
#endif
}

TS_TARGET TS_INLINE Doubles fused(Doubles a, Doubles b, Doubles sum) {
#if TS_VECTOR == 64
    return _mm512_fmadd_pd(a, b, sum);
#elif TS_VECTOR == 32
    return _mm256_fmadd_pd(a, b, sum);
#else
    return a * b + sum;
#endif
}

TS_TARGET TS_INLINE Floats larger(Floats a, Floats b) {
#if TS_VECTOR == 64
    return _mm512_max_ps(a, b);
#elif TS_VECTOR == 32
    return _mm256_max_ps(a, b);
#else
    return a > b ? a : b;
#endif
}

TS_TARGET TS_INLINE Doubles larger(Doubles a, Doubles b) {
#if TS_VECTOR == 64
    return _mm512_max_pd(a, b);
#elif TS_VECTOR == 32
    return _mm256_max_pd(a, b);
#else
    return a > b ? a : b;
#endif
}

TS_TARGET TS_INLINE Floats magnitude(Floats x) {
    return reinterpret_cast<Floats>(reinterpret_cast<Ints>(x) & 0x7FFFFFFF);
}

TS_TARGET TS_INLINE Doubles magnitude(Doubles x) {
    return reinterpret_cast<Doubles>(reinterpret_cast<Longs>(x) & 0x7FFFFFFFFFFFFFFF);
}

// Returns a bit mask of the lanes that equal `value`.
TS_TARGET TS_INLINE unsigned lanes_equal(Floats lanes, float value) {
#if TS_VECTOR == 64
    return _mm512_cmp_ps_mask(lanes, _mm512_set1_ps(value), _CMP_EQ_OQ);
#elif TS_VECTOR == 32
    return static_cast<unsigned>(_mm256_movemask_ps(reinterpret_cast<__m256>(lanes == value)));
#else
    const Ints truth = lanes == value;
    return (truth[0] & 1u) | (truth[1] & 2u) | (truth[2] & 4u) | (truth[3] & 8u);
#endif
}

TS_TARGET TS_INLINE unsigned lanes_equal(Doubles lanes, double value) {
#if TS_VECTOR == 64
    return _mm512_cmp_pd_mask(lanes, _mm512_set1_pd(value), _CMP_EQ_OQ);
#elif TS_VECTOR == 32
    return static_cast<unsigned>(_mm256_movemask_pd(reinterpret_cast<__m256d>(lanes == value)));
#else
    const Longs truth = lanes == value;
    return static_cast<unsigned>((truth[0] & 1) | (truth[1] & 2));
#endif
}

// Counts lanes that satisfy a condition.
template <class Real>
class Counter {
  public:
    // Counts nonzero lanes; no lane may be negative.
    TS_TARGET TS_INLINE void add(Reals<Real> lanes) {
#if TS_VECTOR == 64
        const __m512i x = reinterpret_cast<__m512i>(lanes);
        if constexpr (sizeof(Real) == 4) count_ += __builtin_popcount(_mm512_test_epi32_mask(x, x));
        if constexpr (sizeof(Real) == 8) count_ += __builtin_popcount(_mm512_test_epi64_mask(x, x));
#else
        count_ -= reinterpret_cast<Wholes<Real>>(lanes) > 0;
#endif
    }

    TS_TARGET TS_INLINE void add_larger(Reals<Real> a, Reals<Real> b) {
#if TS_VECTOR == 64
        if constexpr (sizeof(Real) == 4) count_ += __builtin_popcount(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ));
        if constexpr (sizeof(Real) == 8) count_ += __builtin_popcount(_mm512_cmp_pd_mask(a, b, _CMP_GT_OQ));
#else
        count_ -= a > b;
#endif
    }

    TS_TARGET TS_INLINE int64_t total() const {
#if TS_VECTOR == 64
        return count_;
#else
        int64_t all = 0;
        for (int64_t i = 0; i < kLanes<Real>; ++i) all += count_[i];
        return all;
#endif
    }

  private:
#if TS_VECTOR == 64
    int64_t count_ = 0;
#else
    Wholes<Real> count_ = Wholes<Real>{};
#endif
};

// Returns one half of the lanes; the builtin keeps them in registers.
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

// Reduces all lanes to one by halving.
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
    TS_INLINE V operator()(V a, V b) const {
        return a + b;
    }
};

struct Larger {
    template <class V>
    TS_INLINE V operator()(V a, V b) const {
        return a > b ? a : b;
    }
};

struct Smaller {
    template <class V>
    TS_INLINE V operator()(V a, V b) const {
        return a < b ? a : b;
    }
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

// Converts to double and adds lanes that are half a vector apart.
TS_TARGET TS_INLINE Doubles doubled(Floats lanes) {
    return in_double(half_of<Half>(lanes, false)) + in_double(half_of<Half>(lanes, true));
}

}  // namespace TS_VECTORS
}  // namespace ts
