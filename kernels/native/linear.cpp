// y = x w' + b for a decode step: x has few rows, and every weight is used once. Libraries repack w on each call to be
// fast for many rows, which takes longer than the product with few. Here w is read in place, once, at memory bandwidth,
// and the sums of 4 of its rows by up to 6 rows of x stay in registers. Each row of y depends only on the corresponding
// row of x, bit for bit.

#include "linear.h"

#include <algorithm>

#include "common.h"
#include "threads.h"

#ifdef TS_WIDE
#define TS_AVX512BF16 __attribute__((target("arch=x86-64-v4,avx512bf16")))

namespace ts {
namespace {

constexpr int kOuts = 4;
constexpr int64_t kRowBlock = 96;    // rows of x, which stay in a core's private cache while all of w streams through
constexpr int64_t kWorth = 1 << 17;  // minimum number of products per thread

TS_AVX2 inline __m128 load_four(const float* p) { return _mm_loadu_ps(p); }
TS_AVX2 inline void store_four(float* p, __m128 values) { _mm_storeu_ps(p, values); }
TS_AVX2 inline __m128 load_four(const uint16_t* p) {
    return _mm_castsi128_ps(
        _mm_slli_epi32(_mm_cvtepu16_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))), 16));
}

// Returns the horizontal sums of four vectors, one per lane.
TS_AVX2 TS_INLINE __m128 total_of_four(__m256 a, __m256 b, __m256 c, __m256 d) {
    const __m256 ab = _mm256_hadd_ps(a, b), cd = _mm256_hadd_ps(c, d), all = _mm256_hadd_ps(ab, cd);
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

namespace avx2 {
#define TS_TILE TS_AVX2
using Element = float;
using Vector = __m256;
using Sum = __m256;
constexpr int kCount = 8, kMostRows = 2;  // limited by 16 registers

TS_TILE TS_INLINE Vector load(const Element* p) { return _mm256_loadu_ps(p); }
TS_TILE TS_INLINE Vector load_some(const Element* p, int64_t n) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), lanes));
}
TS_TILE TS_INLINE Sum add_product(Sum sum, Vector a, Vector b) { return _mm256_fmadd_ps(a, b, sum); }
TS_TILE TS_INLINE __m128 total(const Sum* sums) { return total_of_four(sums[0], sums[1], sums[2], sums[3]); }
#include "linear_tile.h"
#undef TS_TILE
}  // namespace avx2

#ifndef TS_NARROW
TS_WIDE TS_INLINE __m256 half(__m512 v) {
    return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
}

namespace avx512 {
#define TS_TILE TS_WIDE
using Element = float;
using Vector = __m512;
using Sum = __m512;
constexpr int kCount = 16, kMostRows = 6;  // 24 sums and 5 operands in 32 registers

TS_TILE TS_INLINE Vector load(const Element* p) { return _mm512_loadu_ps(p); }
TS_TILE TS_INLINE Vector load_some(const Element* p, int64_t n) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << n) - 1), p);
}
TS_TILE TS_INLINE Sum add_product(Sum sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
TS_TILE TS_INLINE __m128 total(const Sum* s) { return total_of_four(half(s[0]), half(s[1]), half(s[2]), half(s[3])); }
#include "linear_tile.h"
#undef TS_TILE
}  // namespace avx512

namespace avx512bf16 {
#define TS_TILE TS_AVX512BF16
using Element = uint16_t;
using Vector = __m512i;
using Sum = __m512;
constexpr int kCount = 32, kMostRows = 6;

TS_TILE TS_INLINE Vector load(const Element* p) { return _mm512_loadu_si512(p); }
TS_TILE TS_INLINE Vector load_some(const Element* p, int64_t n) {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1u << n) - 1), p);
}
TS_TILE TS_INLINE Sum add_product(Sum sum, Vector a, Vector b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
TS_TILE TS_INLINE __m128 total(const Sum* s) { return total_of_four(half(s[0]), half(s[1]), half(s[2]), half(s[3])); }
TS_TILE TS_INLINE void store_four(Element* p, __m128 values) {  // rounds to nearest even
    const __m128bh narrow = _mm_cvtneps_pbh(values);
    std::memcpy(p, &narrow, 4 * sizeof(Element));
}
#include "linear_tile.h"
#undef TS_TILE
}  // namespace avx512bf16

inline const bool kBf16 = kWide && __builtin_cpu_supports("avx512bf16");
#endif

using Block = void (*)(const Linear&, int64_t, int64_t, int64_t, int64_t);

Block block_for(int dtype) {
#ifndef TS_NARROW
    if (dtype == kBFloat16 && kBf16) return avx512bf16::block;
    if (dtype == kFloat32 && kWide) return avx512::block;
#endif
    return dtype == kFloat32 && kAvx2 ? avx2::block : nullptr;
}

}  // namespace

bool ts_linear(const Linear& call, int dtype, int64_t threads) {
    const Block block = block_for(dtype);
    if (block == nullptr || call.outs < kOuts) return false;
    threads = std::min(threads, call.rows * call.outs * call.ins / kWorth + 1);
    const int64_t width = threads < 2 ? call.outs : (call.outs / (4 * threads) / kOuts + 1) * kOuts;
    const int64_t pieces = (call.outs + width - 1) / width;
    for (int64_t row = 0; row < call.rows; row += kRowBlock) {
        const int64_t end = std::min(row + kRowBlock, call.rows);
        in_parallel(pieces, threads, [&](int64_t piece) {
            block(call, row, end, piece * width, std::min((piece + 1) * width, call.outs));
        });
    }
    return true;
}

bool ts_grouped_linear(const Linear& call, const int32_t* ends, int64_t groups, int64_t most, int dtype,
                       int64_t threads) {
    if (block_for(dtype) == nullptr || call.outs < kOuts) return false;
    int64_t start = 0;
    for (int64_t group = 0; group < groups; start = ends[group++]) {
        if (ends[group] < start || ends[group] - start > most || ends[group] > call.rows) return false;
    }
    const int64_t width = dtype == kFloat32 ? 4 : 2;  // bytes per element
    const auto* x = static_cast<const char*>(call.x);
    const auto* w = static_cast<const char*>(call.w);
    auto* y = static_cast<char*>(call.y);
    start = 0;
    for (int64_t group = 0; group < groups; start = ends[group++]) {
        if (ends[group] == start) continue;
        const Linear one{x + start * call.stride * width,
                         w + group * call.outs * call.ins * width,
                         nullptr,
                         y + start * call.outs * width,
                         ends[group] - start,
                         call.stride,
                         call.outs,
                         call.ins};
        ts_linear(one, dtype, threads);
    }
    return true;
}

}  // namespace ts
#else
namespace ts {

bool ts_linear(const Linear&, int, int64_t) { return false; }
bool ts_grouped_linear(const Linear&, const int32_t*, int64_t, int64_t, int, int64_t) { return false; }

}  // namespace ts
#endif
