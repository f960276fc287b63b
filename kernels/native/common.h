// Element formats and how to decode them; shared by every source file in this directory.
//
// Non-finite values are detected by integer tests on the bits, because the sums are compiled with associative math. No
// code here changes the floating-point environment: no flush-to-zero, no -ffast-math.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#pragma GCC diagnostic ignored "-Wpsabi"  // vectors are passed to inlined functions only

#define TS_ABI 15  // must equal ABI in library.py

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the hash reads words in memory order and needs a little-endian machine"
#endif

// One build runs on every x86-64 CPU: the loader picks a clone through an ifunc, which requires gcc and glibc.
// TS_PORTABLE disables everything that is specific to a compiler or CPU, TS_NARROW disables 64-byte vectors; the tests
// compare all three builds.
#if defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 12 && !defined(__clang__) && defined(__GLIBC__) && \
    !defined(TS_PORTABLE)
#ifdef TS_NARROW
#define TS_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define TS_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#endif
#define TS_AVX2 __attribute__((target("arch=x86-64-v3")))            // 32-byte vectors, if kAvx2
#define TS_WIDE __attribute__((target("arch=x86-64-v4")))            // 64-byte vectors, if kWide
#define TS_DOT __attribute__((target("arch=x86-64-v4,avx512vnni")))  // and dot products of integers, if kDot
#define TS_CODES __attribute__((target("arch=x86-64-v4,avx512vbmi,avx512vbmi2,avx512bf16")))  // fp8_block.h, if kCodes
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // gcc's own header reads an uninitialized variable on purpose
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#define TS_CLONES
#endif

#define TS_INLINE inline __attribute__((always_inline))
#define TS_EXPORT extern "C" __attribute__((visibility("default")))

namespace ts {

// dtype codes, in the order of CODES in library.py.
enum Dtype : int {
    kFloat64,
    kFloat32,
    kFloat16,
    kBFloat16,
    kFloat8E4M3,
    kFloat8E5M2,
    kFloat8E4M3Fnuz,
    kFloat8E5M2Fnuz,
    kFloat8E8M0,
    kInt64,
    kInt32,
    kInt16,
    kInt8,
    kUint64,
    kUint32,
    kUint16,
    kUint8,
    kBool,
};

constexpr int64_t kBlock = 2048;  // elements summed in float32 before the sums are added to double accumulators

// Elements per block of a summary, in whole hash blocks: narrower elements use more lanes (bytes are counted).
constexpr int64_t block_of(int64_t width) { return width < 4 ? 4 * kBlock / width : kBlock; }

// A float32 block is trusted if its absmax is 0 or within this range: squares neither overflow nor underflow.
constexpr float kSafeLow = 0x1p-48f, kSafeHigh = 0x1p55f;

template <class T>
TS_INLINE T load(const uint8_t* bytes, int64_t index) {  // for any alignment
    T value;
    std::memcpy(&value, bytes + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
}

#ifdef TS_WIDE
inline const bool kAvx2 = (__builtin_cpu_init(), __builtin_cpu_supports("x86-64-v3"));
#ifdef TS_NARROW
constexpr bool kWide = false, kDot = false, kCodes = false;
#else
inline bool is_held_narrow() {  // see _VARIABLE in library.py; the loader's choice of clones is not affected
    const char* setting = std::getenv("TAPSCOPE_NATIVE");
    return setting != nullptr && std::strcmp(setting, "avx2") == 0;
}
inline const bool kWide = kAvx2 && __builtin_cpu_supports("x86-64-v4") && !is_held_narrow();
inline const bool kDot = kWide && __builtin_cpu_supports("avx512vnni");
inline const bool kCodes = kWide && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
                           __builtin_cpu_supports("avx512bf16");
#endif
#endif

template <class To, class From>
TS_INLINE To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the width");
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

// A floating-point format: the type of its bits, the smallest non-finite and the smallest normal magnitude, and its
// decoder.
struct Float64 {
    using Bits = uint64_t;
    using Value = double;
    static constexpr Bits kNonfinite = 0x7FF0000000000000u, kMinNormal = 0x0010000000000000u;
    static TS_INLINE Value value(Bits bits) { return bit_cast<double>(bits); }
};

struct Float32 {
    using Bits = uint32_t;
    using Value = float;
    static constexpr Bits kNonfinite = 0x7F800000u, kMinNormal = 0x00800000u;
    static TS_INLINE Value value(Bits bits) { return bit_cast<float>(bits); }
};

struct BFloat16 {
    using Bits = uint16_t;
    using Value = float;
    static constexpr Bits kNonfinite = 0x7F80u, kMinNormal = 0x0080u;
    static TS_INLINE Value value(Bits bits) { return bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
    static TS_INLINE Value low_half(uint32_t two) { return bit_cast<float>(two << 16); }
    static TS_INLINE Value high_half(uint32_t two) { return bit_cast<float>(two & 0xFFFF0000u); }
};

struct Float16 {
    using Bits = uint16_t;
    using Value = float;
    static constexpr Bits kNonfinite = 0x7C00u, kMinNormal = 0x0400u;
    static TS_INLINE Value value(Bits bits) { return low_half(bits); }
    static TS_INLINE Value high_half(uint32_t two) { return low_half(two >> 16); }
    static TS_INLINE Value low_half(uint32_t two) {
        const uint32_t magnitude = two & 0x7FFFu, sign = (two & 0x8000u) << 16;
        const uint32_t rebias = magnitude >= kNonfinite ? 224u << 23 : 112u << 23;  // 31 -> 255, else 15 -> 127
        const uint32_t normal = (magnitude << 13) + rebias;
        const uint32_t tiny = bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
        return bit_cast<float>((magnitude < kMinNormal ? tiny : normal) | sign);
    }
};

template <class F>
constexpr typename F::Bits kMagnitude = static_cast<typename F::Bits>(~typename F::Bits(0)) >> 1;

// The 256 values of an 8-bit format, computed at compile time. OCP 8-bit Floating Point Specification 1.0; the fnuz
// formats (Noune et al.: 8-bit numerical formats for deep neural networks, 2022) have one NaN in place of -0 and no
// infinity; E8M0 has only an exponent (OCP Microscaling Formats 1.0).
struct Table {
    float values[256];
    int min_normal;  // smallest normal magnitude (the code without its sign)
};

constexpr float scale(float value, int power) {
    for (; power != 0; power += power < 0 ? 1 : -1) value *= power < 0 ? 0.5f : 2.0f;
    return value;
}

enum class Special { kOneNan, kInfinity, kFnuz };

constexpr Table make_table(int mantissa_bits, int bias, Special special) {
    Table table{};
    table.min_normal = 1 << mantissa_bits;
    for (int code = 0; code < 256; ++code) {
        const int magnitude = code & 0x7F, exponent = magnitude >> mantissa_bits;
        const int mantissa = magnitude & ((1 << mantissa_bits) - 1);
        const int whole = exponent ? mantissa + (1 << mantissa_bits) : mantissa;
        float value = scale(static_cast<float>(whole), (exponent ? exponent : 1) - bias - mantissa_bits);
        if (special == Special::kInfinity && magnitude == 0x7C) value = __builtin_inff();
        if (special == Special::kInfinity ? magnitude > 0x7C : special == Special::kOneNan && magnitude == 0x7F) {
            value = __builtin_nanf("");
        }
        table.values[code] = code & 0x80 ? -value : value;
    }
    if (special == Special::kFnuz) table.values[0x80] = __builtin_nanf("");
    return table;
}

constexpr Table make_exponents() {
    Table table{};
    for (int code = 0; code < 255; ++code) table.values[code] = scale(1.0f, code - 127);
    table.values[255] = __builtin_nanf("");
    return table;
}

constexpr Table kE4M3 = make_table(3, 7, Special::kOneNan), kE5M2 = make_table(2, 15, Special::kInfinity);
constexpr Table kE4M3Fnuz = make_table(3, 8, Special::kFnuz), kE5M2Fnuz = make_table(2, 16, Special::kFnuz);
constexpr Table kE8M0 = make_exponents();

// Returns null if the dtype is not an 8-bit floating-point format.
constexpr const Table* table_of(int dtype) {
    return dtype == kFloat8E4M3       ? &kE4M3
           : dtype == kFloat8E5M2     ? &kE5M2
           : dtype == kFloat8E4M3Fnuz ? &kE4M3Fnuz
           : dtype == kFloat8E5M2Fnuz ? &kE5M2Fnuz
           : dtype == kFloat8E8M0     ? &kE8M0
                                      : nullptr;
}

}  // namespace ts
