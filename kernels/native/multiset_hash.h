// The bag defined in digests.py: a sum over the elements that does not depend on their order.
#pragma once

#include "hash.h"

namespace ts {

inline uint64_t bag_of_byte(int code) { return mix64((static_cast<uint64_t>(code) + 1) * kStep); }

template <class Bits>
struct Spread {  // one multiplication and one shift; 16-bit numbers must not be multiplied as signed int
    using Wide = std::common_type_t<Bits, uint32_t>;
    static constexpr Wide kFactor = static_cast<Wide>(sizeof(Bits) == 2   ? 0x9E3B
                                                      : sizeof(Bits) == 4 ? 0x9E3779B1
                                                                          : kStep);
    static constexpr int kShift = sizeof(Bits) == 2 ? 5 : 7;

    static TS_INLINE Bits of(Bits bits) {
        const Bits z = static_cast<Bits>(bits * kFactor);
        return static_cast<Bits>(z ^ (z >> kShift));
    }
};

// Sums over the 16-bit pieces of one block and, modulo 2^32, over their squares. Each piece is at most 2^15 in
// magnitude, so the sum of pieces fits 32 bits.
struct Pieces {
    int32_t low = 0;
    uint32_t high = 0;

    template <class Bits>
    TS_INLINE void add(Bits mixed) {
        for (unsigned part = 0; part < sizeof(Bits) / 2; ++part) {
            const int32_t piece = static_cast<int16_t>(mixed >> (16 * part));
            low += piece;
            high += static_cast<uint32_t>(piece * piece);
        }
    }

    TS_INLINE uint64_t total(int64_t elements) const {
        return static_cast<uint64_t>(elements) * kStep + static_cast<uint64_t>(static_cast<int64_t>(low)) +
               (static_cast<uint64_t>(high) << 32);
    }
};

// The mixed elements of one block; without kOn, the class is empty and free.
template <class Bits, bool kOn>
class Mixed {
  public:
    TS_INLINE void set(int64_t index, Bits bits) {
        if constexpr (kOn) room_[index] = Spread<Bits>::of(bits);
    }

    TS_INLINE Pieces pieces(int64_t n) const {
        Pieces sums;
        if constexpr (kOn) {
            const auto* bytes = reinterpret_cast<const uint8_t*>(room_);
            const int64_t count = n * static_cast<int64_t>(sizeof(Bits) / 2);
            int16_t one =
                1;  // hides the constant, so that the sum compiles to the same pairwise multiply-add as the squares
            __asm__("" : "+r"(one));
            for (int64_t i = 0; i < count; ++i) {
                const int16_t piece = load<int16_t>(bytes, i);
                sums.low += piece * one;
                sums.high += static_cast<uint32_t>(piece * piece);
            }
        }
        return sums;
    }

    TS_INLINE uint64_t total(int64_t n) const { return kOn ? pieces(n).total(n) : 0; }

  private:
    alignas(64) Bits room_[kOn ? block_of(sizeof(Bits)) : 1];
};

}  // namespace ts
