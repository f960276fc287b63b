// Element formats that the fast comparison blocks read directly, in addition to the floating-point formats of common.h.
#pragma once

#include "decode.h"

namespace ts {

// An integer converted to Real, which is exact for all values that are read this way.
template <class T, class Real>
struct Whole {
    using Bits = T;
    using Value = Real;
    static TS_INLINE Real value(Bits bits) { return static_cast<Real>(bits); }
};

using Int16 = Whole<int16_t, float>;
using Int32 = Whole<int32_t, double>;
using SmallInt64 = Whole<int64_t, double>;  // magnitudes below kSmall

constexpr uint64_t kSmall =
    uint64_t(1) << 51;  // limit of the magnitudes that SmallInt64 reads, see widened in elements.h

// An 8-bit integer type T, or bool; see int8_block.h.
template <class T>
struct Byte {
    using Bits = uint8_t;
    using Value = float;
};

// An 8-bit floating-point format. Exponent and mantissa are shifted to their place in a float32, which leaves each
// value, subnormal or not, too small by the same power of two (kScale corrects this).
template <int kMantissa, int kBias, Special kSpecial>
struct Narrow {
    using Bits = uint8_t;
    using Value = float;
    static constexpr int kShift = 23 - kMantissa;
    static constexpr int32_t kKept = static_cast<int32_t>(0x80000000u | 0x7Fu << kShift);
    static constexpr float kScale = scale(1.0f, 127 - kBias);
    static constexpr Table kTable = make_table(kMantissa, kBias, kSpecial);
    static constexpr bool kHasNegativeZero = kSpecial != Special::kFnuz;

    static TS_INLINE float value(Bits bits) {  // for finite values only
        const int32_t moved = static_cast<int32_t>(static_cast<uint32_t>(static_cast<int8_t>(bits)) << kShift);
        return bit_cast<float>(moved & kKept) * kScale;
    }

    static TS_INLINE bool is_finite(Bits rank) { return rank < kLimit; }
    static TS_INLINE Bits rank(Bits bits) {  // non-finite codes rank highest
        return static_cast<Bits>(kSpecial == Special::kFnuz ? bits ^ 0x7F : bits & 0x7F);
    }

  private:
    static constexpr Bits kLimit = kSpecial == Special::kFnuz ? 0xFF : kSpecial == Special::kInfinity ? 0x7C : 0x7F;
};

using E4M3 = Narrow<3, 7, Special::kOneNan>;
using E5M2 = Narrow<2, 15, Special::kInfinity>;
using E4M3Fnuz = Narrow<3, 8, Special::kFnuz>;
using E5M2Fnuz = Narrow<2, 16, Special::kFnuz>;

struct E8M0 {  // only an exponent, placed as in a float32; the smallest value is a subnormal float32
    using Bits = uint8_t;
    static TS_INLINE float value(Bits bits) { return bit_cast<float>(bits ? uint32_t(bits) << 23 : uint32_t(1) << 22); }
    static TS_INLINE bool is_finite(Bits rank) { return rank < 0xFF; }
    static TS_INLINE Bits rank(Bits bits) { return bits; }
};

template <class F>
TS_INLINE void widen_narrow(const uint8_t* bytes, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = F::is_finite(F::rank(bytes[i])) ? F::value(bytes[i]) : __builtin_nanf("");
}

// As decode_number, but an infinity may become NaN.
TS_INLINE void widen_to_float(int dtype, const uint8_t* bytes, int64_t n, float* out) {
    switch (dtype) {
        case kFloat8E4M3: return widen_narrow<E4M3>(bytes, n, out);
        case kFloat8E5M2: return widen_narrow<E5M2>(bytes, n, out);
        case kFloat8E4M3Fnuz: return widen_narrow<E4M3Fnuz>(bytes, n, out);
        case kFloat8E5M2Fnuz: return widen_narrow<E5M2Fnuz>(bytes, n, out);
        case kFloat8E8M0: return widen_narrow<E8M0>(bytes, n, out);
        default: return decode_number(dtype, bytes, n, out);
    }
}

}  // namespace ts
