// Loads of vectors from each element format.
//
// Included once per vector length, after vectors.h.

namespace ts {
namespace TS_VECTORS {

// Loads values of a 16-bit format.
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

// An integer below 2^51 in magnitude, also a negative one, fits the mantissa of 1.5 * 2^52.
TS_TARGET TS_INLINE Doubles from_longs(Longs small) {
    constexpr double kMiddle = 0x1.8p52;
    return reinterpret_cast<Doubles>(small + bit_cast<int64_t>(kMiddle)) - kMiddle;
}

TS_TARGET TS_INLINE Doubles from_ints(const uint8_t* bytes) {
    typedef int32_t Part __attribute__((vector_size(TS_VECTOR / 2)));
    const Part ints = load<Part>(bytes, 0);
#if TS_VECTOR == 64
    return _mm512_cvtepi32_pd(reinterpret_cast<__m256i>(ints));
#elif TS_VECTOR == 32
    return _mm256_cvtepi32_pd(reinterpret_cast<__m128i>(ints));
#else
    return __builtin_convertvector(ints, Doubles);
#endif
}

TS_TARGET TS_INLINE Ints from_shorts(const uint8_t* bytes) {
    typedef int16_t Part __attribute__((vector_size(TS_VECTOR / 2)));
    const Part shorts = load<Part>(bytes, 0);
#if TS_VECTOR == 64
    return reinterpret_cast<Ints>(_mm512_cvtepi16_epi32(reinterpret_cast<__m256i>(shorts)));
#elif TS_VECTOR == 32
    return reinterpret_cast<Ints>(_mm256_cvtepi16_epi32(reinterpret_cast<__m128i>(shorts)));
#else
    return __builtin_convertvector(shorts, Ints);
#endif
}

TS_TARGET TS_INLINE Ints from_bytes(const uint8_t* bytes) {
#if TS_VECTOR == 64
    return reinterpret_cast<Ints>(_mm512_cvtepi8_epi32(load<__m128i>(bytes, 0)));
#elif TS_VECTOR == 32
    return reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes))));
#else
    const int32_t four = load<int32_t>(bytes, 0);
    return Ints{four << 24, four << 16, four << 8, four} >> 24;
#endif
}

// Loads one value per lane from an address of any alignment. Without a conversion instruction, a non-finite float16
// becomes 2^16 or more, which exceeds every finite float16; see is_safe.
template <class F>
TS_TARGET TS_INLINE Reals<typename F::Value> widened(const uint8_t* bytes) {
    if constexpr (std::is_same_v<F, Float32>) {
        return load<Floats>(bytes, 0);
    } else if constexpr (std::is_same_v<F, Float64>) {
        return load<Doubles>(bytes, 0);
    } else if constexpr (std::is_same_v<F, SmallInt64>) {
        return from_longs(load<Longs>(bytes, 0));
    } else if constexpr (std::is_same_v<F, Int32>) {
        return from_ints(bytes);
    } else if constexpr (std::is_same_v<F, Int16>) {
        return __builtin_convertvector(from_shorts(bytes), Floats);
    } else if constexpr (sizeof(typename F::Bits) == 2) {
        return from_halves<F>(bytes);
    } else {
        return reinterpret_cast<Floats>(from_bytes(bytes) << F::kShift & F::kKept) * F::kScale;
    }
}

// Two vectors of adjacent values. Their order is unspecified, but is the same for all formats that are compared with
// each other.
template <class F>
struct Two {
    Reals<typename F::Value> first, second;
};

// Decodes FP8 values to bfloat16, two per word.
template <class F>
TS_TARGET TS_INLINE Two<F> read_narrow(const uint8_t* bytes) {
    typedef int16_t Places __attribute__((vector_size(TS_VECTOR)));
    constexpr int16_t kKept = static_cast<int16_t>(F::kKept >> 16);
#if TS_VECTOR == 64
    const Places codes = reinterpret_cast<Places>(_mm512_cvtepi8_epi16(load<__m256i>(bytes, 0)));
#elif TS_VECTOR == 32
    const Places codes = reinterpret_cast<Places>(_mm256_cvtepi8_epi16(load<__m128i>(bytes, 0)));
#else
    typedef int8_t Codes __attribute__((vector_size(TS_VECTOR / 2)));
    const Places codes = __builtin_convertvector(load<Codes>(bytes, 0), Places);
#endif
    const Words words = reinterpret_cast<Words>(codes << (F::kShift - 16) & kKept);
    return {reinterpret_cast<Floats>(words << 16) * F::kScale,
            reinterpret_cast<Floats>(words & 0xFFFF0000u) * F::kScale};
}

template <class F>
TS_TARGET TS_INLINE Two<F> read_two(const uint8_t* bytes) {
    if constexpr (sizeof(typename F::Bits) == 1) {
        return read_narrow<F>(bytes);
    } else {
        return {widened<F>(bytes), widened<F>(bytes + kLanes<typename F::Value> * sizeof(typename F::Bits))};
    }
}

// Decodes two adjacent bfloat16 values from one 32-bit word, which is cheaper than widening each.
TS_TARGET TS_INLINE Two<BFloat16> read_words(const uint8_t* bytes) {
    const Words words = load<Words>(bytes, 0);
    return {reinterpret_cast<Floats>(words << 16), reinterpret_cast<Floats>(words & 0xFFFF0000u)};
}

// A zero-padded copy of a few bytes.
template <size_t kSize>
struct Padded {
    alignas(64) uint8_t bytes[kSize < 64 ? 64 : kSize];

    TS_TARGET TS_INLINE Padded(const uint8_t* from, size_t count) {
#if TS_VECTOR == 64
        for (size_t i = 0; i < sizeof(bytes); i += 64) {
            const unsigned here = static_cast<unsigned>(count < i ? 0 : count - i < 64 ? count - i : 64);
            _mm512_store_si512(bytes + i, _mm512_maskz_loadu_epi8(_bzhi_u64(~uint64_t(0), here), from + i));
        }
#else
        std::memset(bytes, 0, sizeof(bytes));
        std::memcpy(bytes, from, count);
#endif
    }
};

}  // namespace TS_VECTORS
}  // namespace ts
