// The hash of summary.py's docstring: sums over 64-bit words, each mixed with its index, so blocks come in any order.
#pragma once

#include "common.h"

namespace ts {

constexpr uint64_t kStep = 0x9E3779B97F4A7C15u, kMixA = 0xBF58476D1CE4E5B9u, kMixB = 0x94D049BB133111EBu;
constexpr uint64_t kRound = 0xD6E8FEB86659FD93u;

template <class T>  // uint64_t, or a vector of them
TS_INLINE T mix64(T z) {
    z = (z ^ (z >> 30)) * kMixA;
    z = (z ^ (z >> 27)) * kMixB;
    return z ^ (z >> 31);
}

struct Hash {
    uint64_t h1 = 0, h2 = 0;

    void finish(uint64_t nbytes) { h1 = mix64(h1 + nbytes), h2 = mix64(h2 + nbytes); }
};

namespace {

using Words = uint64_t __attribute__((vector_size(64)));
using Loaded = uint64_t __attribute__((vector_size(64), aligned(1), may_alias));

// Eight words at a time. Their indices are counted along, because a 64-bit product costs three times an addition.
TS_CLONES void hash_words(const uint8_t* bytes, int64_t words, uint64_t first, Hash* hash) {
    Words h1 = {}, h2 = {}, index = {1, 2, 3, 4, 5, 6, 7, 8};
    index = (index + first) * kStep;
    int64_t done = 0;
    for (; done + 8 <= words; done += 8) {
        const Words mixed = mix64(*reinterpret_cast<const Loaded*>(bytes + done * 8) + index), again = mixed * kRound;
        index += 8 * kStep;
        h1 += mixed;
        h2 += again ^ (again >> 32);
    }
    for (; done < words; ++done) {
        const uint64_t mixed = mix64(load<uint64_t>(bytes, done) + (first + static_cast<uint64_t>(done) + 1) * kStep);
        const uint64_t again = mixed * kRound;
        hash->h1 += mixed;
        hash->h2 += again ^ (again >> 32);
    }
    for (int lane = 0; lane < 8; ++lane) hash->h1 += h1[lane], hash->h2 += h2[lane];
}

}  // namespace

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
