// The hash of summary.py's docstring: sums over 64-bit words, each mixed with its index, so blocks come in any order.
#pragma once

#include "common.h"

namespace ts {

constexpr uint64_t kStep = 0x9E3779B97F4A7C15u, kMixA = 0xBF58476D1CE4E5B9u, kMixB = 0x94D049BB133111EBu;
constexpr uint64_t kRound = 0xD6E8FEB86659FD93u;

TS_INLINE uint64_t mix64(uint64_t z) {
    z = (z ^ (z >> 30)) * kMixA;
    z = (z ^ (z >> 27)) * kMixB;
    return z ^ (z >> 31);
}

struct Hash {
    uint64_t h1 = 0, h2 = 0;

    void finish(uint64_t nbytes) { h1 = mix64(h1 + nbytes), h2 = mix64(h2 + nbytes); }
};

// One word at a time: without AVX-512 no vector multiplies 64 bits, and what is made of shorter products is slower.
#if defined(__GNUC__) && !defined(__clang__)
__attribute__((optimize("no-tree-vectorize")))
#endif
inline void hash_plainly(const uint8_t* bytes, int64_t words, uint64_t first, Hash* hash) {
    uint64_t h1 = 0, h2 = 0, index = (first + 1) * kStep;
    for (int64_t i = 0; i < words; ++i, index += kStep) {
        const uint64_t mixed = mix64(load<uint64_t>(bytes, i) + index), again = mixed * kRound;
        h1 += mixed;
        h2 += again ^ (again >> 32);
    }
    hash->h1 += h1;
    hash->h2 += h2;
}

#ifdef TS_WIDE
// Eight words at a time. The indices are counted along, because a 64-bit product costs three times an addition. Every
// product is left for the next call to use, which need not wait for it then; a zero on its way adds nothing.
class WideHash {
  public:
    TS_WIDE TS_INLINE explicit WideHash(uint64_t first) {
        const Words lanes = {1, 2, 3, 4, 5, 6, 7, 8};
        index_ = (lanes + first) * kStep;
    }

    TS_WIDE TS_INLINE void add(Words words) {
        advance();
        const Words z = words + index_;
        index_ += 8 * kStep;
        one_ = (z ^ (z >> 30)) * kMixA;
    }

    TS_WIDE TS_INLINE void total(Hash* hash) {
        for (int rest = 0; rest < 3; ++rest) advance(), one_ = Words{};
        hash->h1 += static_cast<uint64_t>(_mm512_reduce_add_epi64(reinterpret_cast<__m512i>(h1_)));
        hash->h2 += static_cast<uint64_t>(_mm512_reduce_add_epi64(reinterpret_cast<__m512i>(h2_)));
    }

  private:
    TS_WIDE TS_INLINE void advance() {
        h2_ += three_ ^ (three_ >> 32);
        const Words mixed = two_ ^ (two_ >> 31);
        h1_ += mixed;
        three_ = mixed * kRound;
        two_ = (one_ ^ (one_ >> 27)) * kMixB;
    }

    Words index_, h1_ = {}, h2_ = {}, one_ = {}, two_ = {}, three_ = {};
};

TS_WIDE inline void hash_widely(const uint8_t* bytes, int64_t words, uint64_t first, Hash* hash) {
    WideHash wide(first);
    int64_t done = 0;
    for (; done + 8 <= words; done += 8) wide.add(load_words(bytes + done * 8));
    wide.total(hash);
    hash_plainly(bytes + done * 8, words - done, first + static_cast<uint64_t>(done), hash);
}
#endif

inline void hash_words(const uint8_t* bytes, int64_t words, uint64_t first, Hash* hash) {
#ifdef TS_WIDE
    if (kWide && words >= 8) return hash_widely(bytes, words, first, hash);
#endif
    hash_plainly(bytes, words, first, hash);
}

// A stretch that starts at byte `offset` of its tensor, a multiple of 8; only the last may have a tail.
inline void hash_bytes(const uint8_t* bytes, int64_t nbytes, int64_t offset, Hash* hash) {
    const int64_t words = nbytes / 8, tail = nbytes % 8;
    const uint64_t first = static_cast<uint64_t>(offset / 8);
    hash_words(bytes, words, first, hash);
    if (tail) {
        uint8_t last[8] = {};
        std::memcpy(last, bytes + words * 8, static_cast<size_t>(tail));
        hash_words(last, 1, first + static_cast<uint64_t>(words), hash);
    }
}

}  // namespace ts
