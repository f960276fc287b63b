// Eight bits widened into bfloat16, which holds each of their 256 values.
#pragma once

#include "decode.h"

namespace ts {

constexpr bool is_byte(int dtype) { return kItemSize[dtype] == 1; }

// The bits of a bfloat16 for every code of a format or integer of eight bits; its low and high bytes for the vectors.
struct Codes {
    uint16_t bits[256];
    alignas(64) uint8_t low[256], high[256];

    explicit Codes(int dtype) {
        for (int code = 0; code < 256; ++code) {
            const uint8_t byte = static_cast<uint8_t>(code);
            float value;
            decode_number(dtype, &byte, 1, &value);
            bits[code] = static_cast<uint16_t>(bit_cast<uint32_t>(value) >> 16);
            low[code] = static_cast<uint8_t>(bits[code]), high[code] = static_cast<uint8_t>(bits[code] >> 8);
        }
    }
};

inline const Codes& codes_of(int dtype) {
    static const Codes codes[] = {Codes(kFloat8E4M3), Codes(kFloat8E5M2), Codes(kFloat8E4M3Fnuz), Codes(kFloat8E5M2Fnuz),
                                  Codes(kFloat8E8M0), Codes(kInt8), Codes(kUint8), Codes(kBool)};
    return codes[dtype == kInt8 ? 5 : dtype == kUint8 ? 6 : dtype == kBool ? 7 : dtype - kFloat8E4M3];
}

#ifdef TS_WIDE
#define TS_BYTES __attribute__((target("arch=x86-64-v4,avx512vbmi")))  // and look-ups of bytes, where kBytes
#ifdef TS_NARROW
constexpr bool kBytes = false;
#else
inline const bool kBytes = kWide && __builtin_cpu_supports("avx512vbmi");
#endif

// Whole vectors; returns how many elements are done.
TS_BYTES inline int64_t look_up_vectors(const Codes& codes, const uint8_t* bytes, int64_t n, uint16_t* out) {
    __m512i low[4], high[4];
    for (int i = 0; i < 4; ++i) {
        low[i] = _mm512_load_si512(codes.low + 64 * i), high[i] = _mm512_load_si512(codes.high + 64 * i);
    }
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);  // so that unpacking halves of lanes gives it back
    int64_t done = 0;
    for (; done + 64 <= n; done += 64) {
        const __m512i x = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(bytes + done));
        const __mmask64 upper = _mm512_movepi8_mask(x);
        const __m512i lows = _mm512_mask_blend_epi8(upper, _mm512_permutex2var_epi8(low[0], x, low[1]),
                                                    _mm512_permutex2var_epi8(low[2], x, low[3]));
        const __m512i highs = _mm512_mask_blend_epi8(upper, _mm512_permutex2var_epi8(high[0], x, high[1]),
                                                     _mm512_permutex2var_epi8(high[2], x, high[3]));
        _mm512_storeu_si512(out + done, _mm512_unpacklo_epi8(lows, highs));
        _mm512_storeu_si512(out + done + 32, _mm512_unpackhi_epi8(lows, highs));
    }
    return done;
}
#endif

inline void bytes_to_bfloat16(int dtype, const uint8_t* bytes, int64_t n, uint16_t* out) {
    const Codes& codes = codes_of(dtype);
    int64_t done = 0;
#ifdef TS_WIDE
    if (kBytes) done = look_up_vectors(codes, bytes, n, out);
#endif
    for (; done < n; ++done) out[done] = codes.bits[bytes[done]];
}

}  // namespace ts
