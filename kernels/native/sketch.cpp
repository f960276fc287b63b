// Sketch counters; the definition and the numpy reference are in sketch.py.

#include "sketch.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "decode.h"

namespace ts {
namespace {

constexpr int64_t kColumns = 256, kLanes = 32, kGroups = 8;
constexpr int64_t kFlush = 4096;  // blocks between moves of float32 sums to float64: bounds the number of summands

TS_INLINE uint32_t mix32(uint32_t h) {
    h = (h ^ h >> 16) * 0x85EBCA6Bu;
    h = (h ^ h >> 13) * 0xC2B2AE35u;
    return h ^ h >> 16;
}

// Adds one block to sums[q][c], where q is the lane permutation of the block (counter = c ^ q). Adding therefore needs
// no shuffle.
TS_CLONES void add_block(const float* values, uint32_t mixed, float* sums) {
    uint32_t words[kLanes];
    for (uint32_t l = 0; l < kLanes; ++l) words[l] = mix32(mixed ^ (l + 1) * 0x85EBCA77u);
    const uint32_t place = mixed >> 24;
    float* const own = sums + (place & 31) * kColumns;
    for (uint32_t g = 0; g < kGroups; ++g) {
        float* __restrict to = own + (g ^ place >> 5) * kLanes;
        const float* from = values + g * kLanes;
        for (int64_t l = 0; l < kLanes; ++l) {
            uint32_t bits;
            std::memcpy(&bits, from + l, 4);
            bits = (bits & 0x7F800000u) == 0x7F800000u ? 0u : bits ^ (words[l] << (7 - g) & 0x80000000u);
            float value;
            std::memcpy(&value, &bits, 4);
            to[l] += value;
        }
    }
}

void flush(std::vector<float>& sums, double* out) {
    for (int64_t q = 0; q < kLanes; ++q) {
        for (int64_t c = 0; c < kColumns; ++c) out[c ^ q] += double(sums[static_cast<size_t>(q * kColumns + c)]);
    }
    std::fill(sums.begin(), sums.end(), 0.0f);
}

TS_CLONES void widen(int dtype, const uint8_t* bytes, int64_t n, float* out) { decode_number(dtype, bytes, n, out); }

}  // namespace

void ts_sketch(const Sketch& call, double* out) {
    std::vector<float> sums(static_cast<size_t>(kLanes * kColumns));
    const int64_t size = kItemSize[call.dtype];
    float values[kColumns];
    int64_t blocks = 0;
    for (int64_t i = 0; i < call.num_rows; ++i) {
        const uint8_t* row = call.data + call.rows[i] * call.width * size;
        for (int64_t r = 0; r < call.num_runs; ++r) {
            const int64_t* run = call.runs + 3 * r;
            const uint8_t* bytes = row + run[0] * size;
            for (int64_t column = run[1], left = run[2]; left > 0;) {
                const int64_t before = column % kColumns;
                const int64_t count = left < kColumns - before ? left : kColumns - before;
                if (count < kColumns) std::memset(values, 0, sizeof values);
                const float* from = values;
                if (call.dtype == kFloat32 && count == kColumns) {
                    from = reinterpret_cast<const float*>(bytes);
                } else {
                    widen(call.dtype, bytes, count, values + before);
                }
                const uint32_t block = static_cast<uint32_t>(column / kColumns);
                add_block(from, mix32(call.keys[i] + block * 0x9E3779B1u), sums.data());
                if (++blocks % kFlush == 0) flush(sums, out);
                bytes += count * size, column += count, left -= count;
            }
        }
    }
    flush(sums, out);
}

}  // namespace ts
