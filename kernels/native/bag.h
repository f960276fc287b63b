// The bag of digests.py: a sum over the elements in which their order plays no part.
#pragma once

#include "hash.h"

namespace ts {

inline uint64_t bag_of_byte(int code) { return mix64((static_cast<uint64_t>(code) + 1) * kStep); }

// The elements of one block after mixing; without kOn it is nothing and costs nothing.
template <class Bits, bool kOn>
class Mixed {
  public:
    TS_INLINE void set(int64_t index, Bits bits) {
        if constexpr (kOn) room_[index] = mix(bits);
    }

    // For one block: the sum of the pieces, each below 2^15, then fits 32 bits.
    TS_INLINE uint64_t total(int64_t n) const {
        if constexpr (!kOn) return 0;
        const auto* pieces = reinterpret_cast<const uint8_t*>(room_);
        const int64_t count = n * static_cast<int64_t>(sizeof(Bits) / 2);
        int16_t one = 1;  // not a constant: the plain sum is then made of products of pairs, like that of the squares
        __asm__("" : "+r"(one));
        int32_t low = 0;
        uint32_t high = 0;
        for (int64_t i = 0; i < count; ++i) {
            const int16_t piece = load<int16_t>(pieces, i);
            low += piece * one;
            high += static_cast<uint32_t>(piece * piece);
        }
        return static_cast<uint64_t>(n) * kStep + static_cast<uint64_t>(static_cast<int64_t>(low)) +
               (static_cast<uint64_t>(high) << 32);
    }

  private:
    static TS_INLINE Bits mix(Bits bits) {
        using Wide = std::common_type_t<Bits, uint32_t>;  // 16-bit numbers would be multiplied as signed int
        constexpr Wide kFactor = static_cast<Wide>(sizeof(Bits) == 2 ? 0x9E3B : sizeof(Bits) == 4 ? 0x9E3779B1 : kStep);
        const Bits z = static_cast<Bits>(bits * kFactor);
        return static_cast<Bits>(z ^ (z >> (sizeof(Bits) == 2 ? 5 : 7)));
    }

    alignas(64) Bits room_[kOn ? block_of(sizeof(Bits)) : 1];
};

}  // namespace ts
