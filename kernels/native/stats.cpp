// Statistics and both digests of one tensor in one pass: each block is hashed, summed and copied while it is in the L1
// cache. The digests are defined in digests.py; the numpy reference is reference.py.

#include "multiset_hash.h"
#include "bytes.h"
#include "decode.h"
#include "floats.h"
#include "stream.h"
#include "record_summary.h"
#include "text.h"
#include "fused_stats_block.h"

namespace ts {
namespace {

// ---- floating-point formats

template <class F, bool kBag>
TS_INLINE void float_block(const uint8_t* bytes, int64_t n, Summary* out) {
    using Bits = typename F::Bits;
    using Value = typename F::Value;
    constexpr bool kPairs = sizeof(Bits) == 2;  // two values per 32-bit word: cheaper than widening each
    Extremes<F> extremes;
    Sums<Value> sums, odd;
    Mixed<Bits, kBag> mixed;
    for (int64_t i = 0; i < n; ++i) {
        const Bits bits = load<Bits>(bytes, i);
        extremes.add(bits), mixed.set(i, bits);
        if constexpr (!kPairs) sums.add(F::value(bits));
    }
    if constexpr (kPairs) {
        for (int64_t i = 0; i < n / 2; ++i) {
            const uint32_t two = load<uint32_t>(bytes, i);
            sums.add(F::low_half(two)), odd.add(F::high_half(two));
        }
        if (n % 2) sums.add(F::value(load<Bits>(bytes, n - 1)));
        sums.sum += odd.sum, sums.squares += odd.squares;
    }
    out->bag += mixed.total(n);
    conclude<F>(extremes, sums, bytes, n, out);
}

// ---- integers

template <class Item, bool kBag>
TS_INLINE void integer_block(const uint8_t* bytes, int64_t n, Summary* out) {
    using T = typename Item::Bits;
    using Bits = std::make_unsigned_t<T>;
    Mixed<Bits, kBag> mixed;
    T low = std::numeric_limits<T>::max(), high = std::numeric_limits<T>::min();
    double sum = 0, sumsq = 0;
    int64_t zeros = 0;
    for (int64_t i = 0; i < n; ++i) {
        const T item = load<T>(bytes, i);
        mixed.set(i, static_cast<Bits>(item));
        const double value = static_cast<double>(item);
        low = item < low ? item : low;
        high = item > high ? item : high;
        zeros += item == 0;
        sum += value;
        sumsq += value * value;
    }
    out->bag += mixed.total(n);
    out->finite += n;
    out->zeros += zeros;
    out->sum += sum;
    out->sumsq += sumsq;
    out->extend(static_cast<double>(low), static_cast<double>(high));
}

// ---- dispatch

// Processes a block that starts at byte `offset` of its tensor: statistics, hash and optionally bag.
using Block = void (*)(const uint8_t* bytes, int64_t n, int64_t offset, Summary* out);

struct BlockKernels {
    int64_t width;          // bytes per element
    Block block, with_bag;  // null for one-byte elements: the histogram gives the bag for free
};

#define TS_BLOCK(name, body, T)                                                                                \
    TS_CLONES void name(const uint8_t* bytes, int64_t n, Summary* out) { body<T, false>(bytes, n, out); }      \
    TS_CLONES void name##_bag(const uint8_t* bytes, int64_t n, Summary* out) { body<T, true>(bytes, n, out); } \
    constexpr BlockKernels name##_way = {sizeof(T::Bits), hashed<sizeof(T::Bits), name>,                       \
                                         hashed<sizeof(T::Bits), name##_bag>};

template <int64_t kWidth, void (*body)(const uint8_t*, int64_t, Summary*)>
void hashed(const uint8_t* bytes, int64_t n, int64_t offset, Summary* out) {
    hash_bytes(bytes, n * kWidth, offset, &out->hash);
    body(bytes, n, out);
}

TS_BLOCK(float64, float_block, Float64)
TS_BLOCK(float32, float_block, Float32)
TS_BLOCK(float16, float_block, Float16)
TS_BLOCK(bfloat16, float_block, BFloat16)
TS_BLOCK(int64, integer_block, Integer<int64_t>)
TS_BLOCK(int32, integer_block, Integer<int32_t>)
TS_BLOCK(int16, integer_block, Integer<int16_t>)
TS_BLOCK(uint64, integer_block, Integer<uint64_t>)
TS_BLOCK(uint32, integer_block, Integer<uint32_t>)
TS_BLOCK(uint16, integer_block, Integer<uint16_t>)
#undef TS_BLOCK

constexpr BlockKernels byte_way = {1, nullptr, nullptr};
constexpr BlockKernels kWays[] = {
    // in the order of Dtype
    float64_way, float32_way, float16_way, bfloat16_way, byte_way,   byte_way,   byte_way,   byte_way, byte_way,
    int64_way,   int32_way,   int16_way,   byte_way,     uint64_way, uint32_way, uint16_way, byte_way, byte_way,
};

#ifdef TS_WIDE
template <class F>
constexpr BlockKernels wide_way = {sizeof(typename F::Bits), wide_block<F, false>, wide_block<F, true>};
#endif

BlockKernels way_of(int dtype) {
#ifdef TS_WIDE
    if (kDot && dtype == kFloat32) return wide_way<Float32>;
    if (kDot && dtype == kFloat16) return wide_way<Float16>;
    if (kDot && dtype == kBFloat16) return wide_way<BFloat16>;
#endif
    return kWays[dtype];
}

void summarize_blocks(const uint8_t* bytes, BlockKernels way, bool bag, uint8_t* target, Summary* out) {
    const Block block = bag ? way.with_bag : way.block;
    const int64_t most = block_of(way.width);
    const bool stream = target && out->count * way.width >= kStream;
    for (int64_t done = 0; done < out->count; done += most) {
        const int64_t n = out->count - done < most ? out->count - done : most;
        const int64_t offset = done * way.width, nbytes = n * way.width;
        block(bytes + offset, n, offset, out);
        if (target) copy_block(target + offset, bytes + offset, nbytes, stream);
    }
    finish_copy(stream);
}

void write_digest(const Hash& hash, uint8_t* out) {
    for (int i = 0; i < 8; ++i) {
        out[i] = static_cast<uint8_t>(hash.h1 >> (56 - 8 * i));
        out[8 + i] = static_cast<uint8_t>(hash.h2 >> (56 - 8 * i));
    }
}

}  // namespace
}  // namespace ts

TS_EXPORT int ts_abi() { return TS_ABI; }

// Fills the summary only and, unless `target` is null, copies the elements there.
TS_EXPORT void ts_summarize(const void* data, int64_t count, int dtype, int bag, void* target, ts::Summary* result) {
    const ts::BlockKernels way = ts::way_of(dtype);
    const auto* bytes = static_cast<const uint8_t*>(data);
    auto* copy = static_cast<uint8_t*>(target);
    ts::Summary out;
    out.count = count;
    if (way.block) {
        ts::summarize_blocks(bytes, way, bag != 0, copy, &out);
    } else {
        ts::summarize_bytes(bytes, dtype, copy, &out);
    }
    out.finish(static_cast<uint64_t>(count * way.width));
    *result = out;
}

int64_t ts_summarize_record(const void* data, int64_t count, int dtype, int bag, void* target,
                            ts::RecordSummary* result) {
    ts_summarize(data, count, dtype, bag, target, &result->summary);
    ts::write_digest(result->summary.hash, result->digest);
    return ts::write_text(result->summary, bag != 0, result->text);
}

int64_t ts_tell(const ts::Summary* summary, ts::RecordSummary* result) {
    ts::write_digest(summary->hash, result->digest);
    return ts::write_text(*summary, true, result->text);
}

void ts_hash(const void* data, int64_t nbytes, uint8_t* digest) {
    ts::Hash hash;
    ts::hash_bytes(static_cast<const uint8_t*>(data), nbytes, 0, &hash);
    hash.finish(static_cast<uint64_t>(nbytes));
    ts::write_digest(hash, digest);
}
