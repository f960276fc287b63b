// Non-temporal copies, which bypass the caches.
#pragma once

#include "common.h"

namespace ts {

constexpr int64_t kStream = 64 << 10;  // tensor size in bytes from which a copy would evict other data from the caches

// Copies a block. Another process reads the copy much later, so large copies bypass the caches and do not load the old
// contents of the target.
TS_INLINE void copy_block(uint8_t* target, const uint8_t* bytes, int64_t nbytes, bool stream) {
#if defined(__SSE2__) && defined(TS_WIDE)
    if (stream && reinterpret_cast<uintptr_t>(target) % 16 == 0) {
        const int64_t whole = nbytes & ~int64_t(63);
        for (int64_t i = 0; i < whole; i += 64) {
            const auto* from = reinterpret_cast<const __m128i*>(bytes + i);
            auto* to = reinterpret_cast<__m128i*>(target + i);
            const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
            const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
            _mm_stream_si128(to, a), _mm_stream_si128(to + 1, b), _mm_stream_si128(to + 2, c),
                _mm_stream_si128(to + 3, d);
        }
        std::memcpy(target + whole, bytes + whole, static_cast<size_t>(nbytes - whole));
        return;
    }
#endif
    std::memcpy(target, bytes, static_cast<size_t>(nbytes));
}

// Orders the non-temporal stores before a later publication of the copy.
TS_INLINE void finish_copy(bool stream) {
#if defined(__SSE2__) && defined(TS_WIDE)
    if (stream) _mm_sfence();
#endif
}

}  // namespace ts
