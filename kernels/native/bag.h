// The bag of digests.py: a sum over the elements in which their order plays no part.
#pragma once

#include "hash.h"

namespace ts {

struct Bag {  // the two sums over the pieces of one block
    int64_t low = 0;
    uint32_t high = 0;

    uint64_t total(int64_t elements) const {
        return static_cast<uint64_t>(elements) * kStep + static_cast<uint64_t>(low) + (static_cast<uint64_t>(high) << 32);
    }
};

inline uint64_t bag_of_byte(int code) { return mix64((static_cast<uint64_t>(code) + 1) * kStep); }

namespace {

template <class Bits>
TS_INLINE Bits spread(Bits bits) {
    constexpr uint64_t kFactor = sizeof(Bits) == 2 ? 0x9E3B : sizeof(Bits) == 4 ? 0x9E3779B1 : kStep;
    const Bits z = static_cast<Bits>(static_cast<std::common_type_t<Bits, uint32_t>>(bits) * static_cast<Bits>(kFactor));
    return static_cast<Bits>(z ^ (z >> (sizeof(Bits) == 2 ? 5 : 7)));
}

// At most kBlock elements: the sum of their pieces, each below 2^15, then fits 32 bits.
template <class Bits>
TS_INLINE uint64_t bag_block(const uint8_t* bytes, int64_t n) {
    alignas(64) Bits room[kBlock];
    for (int64_t i = 0; i < n; ++i) room[i] = spread(load<Bits>(bytes, i));
    const uint8_t* pieces = reinterpret_cast<const uint8_t*>(room);
    int32_t low = 0;
    uint32_t high = 0;
    for (int64_t i = 0; i < n * static_cast<int64_t>(sizeof(Bits) / 2); ++i) {
        const int32_t piece = load<int16_t>(pieces, i);
        low += piece;
        high += static_cast<uint32_t>(piece * piece);
    }
    return Bag{low, high}.total(n);
}

TS_CLONES uint64_t bag_block2(const uint8_t* bytes, int64_t n) { return bag_block<uint16_t>(bytes, n); }
TS_CLONES uint64_t bag_block4(const uint8_t* bytes, int64_t n) { return bag_block<uint32_t>(bytes, n); }
TS_CLONES uint64_t bag_block8(const uint8_t* bytes, int64_t n) { return bag_block<uint64_t>(bytes, n); }

}  // namespace
}  // namespace ts
