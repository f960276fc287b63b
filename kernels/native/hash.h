// The hash defined in digests.py: sums of products over blocks of 8 KiB, each mixed with the index of its block, so
// that blocks can be hashed in any order.
#pragma once

#include "common.h"

namespace ts {

constexpr uint64_t kStep = 0x9E3779B97F4A7C15u, kOther = 0xD6E8FEB86659FD93u;
constexpr uint64_t kMixA = 0xBF58476D1CE4E5B9u, kMixB = 0x94D049BB133111EBu;

constexpr uint64_t mix64(uint64_t z) {
    z = (z ^ (z >> 30)) * kMixA;
    z = (z ^ (z >> 27)) * kMixB;
    return z ^ (z >> 31);
}

constexpr int64_t kHashWords = 1024, kHashBlock = 8 * kHashWords;  // words and bytes per block
constexpr int64_t kKeyShift = 8;  // words by which the key of the second sum is shifted

struct Keys {
    alignas(64) uint64_t words[kHashWords + kKeyShift];
};

constexpr Keys make_keys() {
    Keys keys{};
    for (uint64_t i = 0; i < kHashWords + kKeyShift; ++i) keys.words[i] = mix64((i + 1) * kStep);
    return keys;
}

inline constexpr Keys kKeys = make_keys();

// The two sums of products over the words of one block.
struct Products {
    uint64_t one = 0, two = 0;

    TS_INLINE void add(uint64_t word, int64_t index) {
        one += of(word, kKeys.words[index]), two += of(word, kKeys.words[index + kKeyShift]);
    }

  private:
    static TS_INLINE uint64_t of(uint64_t word, uint64_t key) {
        const auto low = static_cast<uint32_t>(word + key), high = static_cast<uint32_t>((word >> 32) + (key >> 32));
        return static_cast<uint64_t>(low) * high;
    }
};

struct Hash {
    uint64_t h1 = 0, h2 = 0;

    void add(const Products& sums, int64_t block) {
        const uint64_t number = static_cast<uint64_t>(block) + 1;
        h1 += mix64(sums.one + number * kStep), h2 += mix64(sums.two + number * kOther);
    }

    void finish(uint64_t nbytes) { h1 = mix64(h1 + nbytes), h2 = mix64(h2 + nbytes); }
};

#ifdef TS_WIDE
// As Products, eight words at a time, starting at a block boundary.
class WideProducts {
  public:
    TS_WIDE TS_INLINE WideProducts() {}  // a defaulted constructor would be compiled for baseline x86-64

    TS_WIDE TS_INLINE void add(__m512i words, int64_t index) {
        one_ = _mm512_add_epi64(one_, of(words, index));
        two_ = _mm512_add_epi64(two_, of(words, index + kKeyShift));
    }

    TS_WIDE TS_INLINE Products total() const {
        Products sums;
        sums.one = static_cast<uint64_t>(_mm512_reduce_add_epi64(one_));
        sums.two = static_cast<uint64_t>(_mm512_reduce_add_epi64(two_));
        return sums;
    }

  private:
    TS_WIDE static TS_INLINE __m512i of(__m512i words, int64_t index) {
        const __m512i halves = _mm512_add_epi32(words, _mm512_load_si512(kKeys.words + index));
        return _mm512_mul_epu32(
            halves, _mm512_shuffle_epi32(halves, _MM_PERM_DDBB));  // a shift could use only one of the two vector ports
    }

    __m512i one_ = _mm512_setzero_si512(), two_ = _mm512_setzero_si512();
};

TS_WIDE inline Products multiply_widely(const uint8_t* bytes, int64_t words) {
    WideProducts products;
    for (int64_t i = 0; i < words; i += 8) products.add(_mm512_loadu_si512(bytes + 8 * i), i);
    return products.total();
}

TS_AVX2 TS_INLINE __m256i four_products(__m256i words, int64_t index) {
    const auto* keys = reinterpret_cast<const __m256i*>(kKeys.words + index);
    const __m256i halves = _mm256_add_epi32(words, _mm256_load_si256(keys));
    return _mm256_mul_epu32(halves, _mm256_srli_epi64(halves, 32));
}

TS_AVX2 TS_INLINE uint64_t reduce(__m256i four) {
    const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
    return static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_add_epi64(two, _mm_unpackhi_epi64(two, two))));
}

TS_AVX2 inline Products multiply_by_fours(const uint8_t* bytes, int64_t words) {
    __m256i one = _mm256_setzero_si256(), two = one;
    for (int64_t i = 0; i < words; i += 4) {
        const __m256i four = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes + 8 * i));
        one = _mm256_add_epi64(one, four_products(four, i));
        two = _mm256_add_epi64(two, four_products(four, i + kKeyShift));
    }
    Products sums;
    sums.one = reduce(one), sums.two = reduce(two);
    return sums;
}
#endif

// Adds the words of a block from index `done` on; a partial last word is zero-extended.
inline void add_rest(const uint8_t* bytes, int64_t nbytes, int64_t done, Products* sums) {
    const int64_t words = nbytes / 8, tail = nbytes % 8;
    Products rest = *sums;
    for (int64_t i = done; i < words; ++i) rest.add(load<uint64_t>(bytes, i), i);
    if (tail) {
        uint8_t last[8] = {};
        std::memcpy(last, bytes + words * 8, static_cast<size_t>(tail));
        rest.add(load<uint64_t>(last, 0), words);
    }
    *sums = rest;
}

// Returns the two sums of at most one block.
inline Products products_of(const uint8_t* bytes, int64_t nbytes) {
    Products sums;
    int64_t done = 0;
#ifdef TS_WIDE
    done = nbytes / 64 * 8;
    sums = kWide ? multiply_widely(bytes, done) : kAvx2 ? multiply_by_fours(bytes, done) : Products{};
    if (!kWide && !kAvx2) done = 0;
#endif
    add_rest(bytes, nbytes, done, &sums);
    return sums;
}

// Hashes bytes that start at byte `offset` of their tensor, which must be a block boundary.
inline void hash_bytes(const uint8_t* bytes, int64_t nbytes, int64_t offset, Hash* hash) {
    int64_t block = offset / kHashBlock;
    for (int64_t done = 0; done < nbytes; done += kHashBlock, ++block) {
        const int64_t size = nbytes - done < kHashBlock ? nbytes - done : kHashBlock;
        hash->add(products_of(bytes + done, size), block);
    }
}

}  // namespace ts
