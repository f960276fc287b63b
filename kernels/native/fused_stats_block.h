// One block of a floating-point format in 64-byte vectors: hash, statistics and bag from a single load of each vector,
// which balances the two vector ports of the CPU. The results are identical to those of the separate blocks.
#pragma once

#include "multiset_hash.h"
#include "floats.h"

#ifdef TS_WIDE

namespace ts {

template <class F>
class WideExtremes {
  public:
    TS_WIDE TS_INLINE WideExtremes() {}  // a defaulted constructor would be compiled for baseline x86-64

    TS_WIDE TS_INLINE void add(__m512i words) {
        if constexpr (k32) {
            low_ = _mm512_min_epu32(low_, words), high_ = _mm512_max_epu32(high_, words);
            signed_low_ = _mm512_min_epi32(signed_low_, words), signed_high_ = _mm512_max_epi32(signed_high_, words);
        } else {
            low_ = _mm512_min_epu16(low_, words), high_ = _mm512_max_epu16(high_, words);
            signed_low_ = _mm512_min_epi16(signed_low_, words), signed_high_ = _mm512_max_epi16(signed_high_, words);
        }
    }

    TS_WIDE TS_INLINE Extremes<F> total() const {
        Extremes<F> all;
        const __m512i ones = _mm512_set1_epi32(-1), sign = _mm512_set1_epi32(kLeast);
        all.low = least(low_);
        all.high = static_cast<Bits>(~least(_mm512_xor_si512(high_, ones)));
        all.signed_low = static_cast<Signed>(least(_mm512_xor_si512(signed_low_, sign)) ^ kSign);
        all.signed_high =
            static_cast<Signed>(~least(_mm512_xor_si512(signed_high_, _mm512_xor_si512(ones, sign))) ^ kSign);
        return all;
    }

  private:
    using Bits = typename F::Bits;
    using Signed = std::make_signed_t<Bits>;
    static constexpr bool k32 = sizeof(Bits) == 4;
    static constexpr Bits kSign = static_cast<Bits>(~kMagnitude<F>);
    static constexpr int kLargest = k32 ? 0x7FFFFFFF : 0x7FFF7FFF;
    static constexpr int kLeast = k32 ? ~kLargest : static_cast<int>(0x80008000u);

    // Returns the minimum over the lanes as unsigned numbers.
    TS_WIDE static TS_INLINE Bits least(__m512i lanes) {
        if constexpr (k32) {
            return _mm512_reduce_min_epu32(lanes);
        } else {
            const __m256i half = _mm256_min_epu16(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64(lanes, 1));
            const __m128i rest = _mm_min_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
            return static_cast<Bits>(_mm_extract_epi16(_mm_minpos_epu16(rest), 0));
        }
    }

    __m512i low_ = _mm512_set1_epi32(-1), high_ = _mm512_setzero_si512();
    __m512i signed_low_ = _mm512_set1_epi32(kLargest), signed_high_ = _mm512_set1_epi32(kLeast);
};

class WideSums {
  public:
    TS_WIDE TS_INLINE WideSums() {}

    template <class F>
    TS_WIDE TS_INLINE void add(__m512i words, const uint8_t* bytes) {
        if constexpr (std::is_same_v<F, Float32>) {
            take(_mm512_castsi512_ps(words), 0);
        } else if constexpr (std::is_same_v<F, BFloat16>) {
            take(_mm512_castsi512_ps(_mm512_slli_epi32(words, 16)), 0);
            take(_mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32(-0x10000))), 1);
        } else {
            take(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes))), 0);
            take(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + 32))), 1);
        }
    }

    TS_WIDE TS_INLINE Sums<float> total() const {
        Sums<float> all;
        all.sum = _mm512_reduce_add_ps(_mm512_add_ps(sum_[0], sum_[1]));
        all.squares = _mm512_reduce_add_ps(_mm512_add_ps(squares_[0], squares_[1]));
        return all;
    }

  private:
    TS_WIDE TS_INLINE void take(__m512 values, int lane) {
        sum_[lane] = _mm512_add_ps(sum_[lane], values);
        squares_[lane] = _mm512_fmadd_ps(values, values, squares_[lane]);
    }

    __m512 sum_[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()},
           squares_[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
};

template <class Bits>
class WidePieces {
  public:
    TS_DOT TS_INLINE WidePieces() {}

    TS_DOT TS_INLINE void add(__m512i words) {
        advance();
        constexpr int kFactor = static_cast<int>(Spread<Bits>::kFactor);
        if constexpr (sizeof(Bits) == 2) {
            product_ = _mm512_mullo_epi16(words, _mm512_set1_epi16(static_cast<int16_t>(kFactor)));
        } else {
            product_ = _mm512_mullo_epi32(words, _mm512_set1_epi32(kFactor));
        }
    }

    TS_DOT TS_INLINE Pieces total() {
        advance();
        Pieces sums;
        sums.low = _mm512_reduce_add_epi32(low_);
        sums.high = static_cast<uint32_t>(_mm512_reduce_add_epi32(high_));
        return sums;
    }

  private:
    TS_DOT TS_INLINE void advance() {  // adds the previous call's product, which is ready by now
        constexpr int kShift = Spread<Bits>::kShift;
        const __m512i z = product_;
        const __m512i shifted = sizeof(Bits) == 2 ? _mm512_srli_epi16(z, kShift) : _mm512_srli_epi32(z, kShift);
        const __m512i pieces = _mm512_xor_si512(z, shifted);
        low_ = _mm512_dpwssd_epi32(low_, pieces, _mm512_set1_epi16(1));
        high_ = _mm512_dpwssd_epi32(high_, pieces, pieces);
    }

    __m512i product_ = _mm512_setzero_si512();
    __m512i low_ = _mm512_setzero_si512(), high_ = _mm512_setzero_si512();
};

// Processes a block that starts at byte `offset` of its tensor; it is also one hash block.
template <class F, bool kBag>
TS_DOT void wide_block(const uint8_t* bytes, int64_t n, int64_t offset, Summary* out) {
    using Bits = typename F::Bits;
    constexpr int64_t kWidth = sizeof(Bits), kEach = 64 / kWidth;
    static_assert(block_of(kWidth) * kWidth == kHashBlock, "the sums of products are of one block");
    WideProducts wide_products;
    WideExtremes<F> wide_extremes;
    WideSums wide_sums;
    WidePieces<Bits> wide_pieces;
    int64_t done = 0;
    for (; done + kEach <= n; done += kEach) {
        const __m512i words = _mm512_loadu_si512(bytes + done * kWidth);
        wide_products.add(words, done / (8 / kWidth));
        wide_extremes.add(words);
        wide_sums.template add<F>(words, bytes + done * kWidth);
        if constexpr (kBag) wide_pieces.add(words);
    }
    Products products = wide_products.total();
    add_rest(bytes, n * kWidth, done / (8 / kWidth), &products);
    out->hash.add(products, offset / kHashBlock);
    Extremes<F> extremes = wide_extremes.total();
    Sums<float> sums = wide_sums.total();
    Pieces pieces = wide_pieces.total();
    for (; done < n; ++done) {
        const Bits bits = load<Bits>(bytes, done);
        extremes.add(bits), sums.add(F::value(bits));
        if constexpr (kBag) pieces.add(Spread<Bits>::of(bits));
    }
    if constexpr (kBag) out->bag += pieces.total(n);
    conclude<F>(extremes, sums, bytes, n, out);
}

}  // namespace ts

#endif
