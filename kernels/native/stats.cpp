// Statistics and both digests of one tensor in one pass: a block is hashed, summed and copied while it lies in the L1
// cache. The digests are defined in digests.py; the plain reference of all of this is reference.py.

#include "bag.h"
#include "decode.h"
#include "summary.h"
#include "text.h"

namespace ts {
namespace {

// ---- floating formats

// The four extremes of a block's bits as integers, which need no look at a sign: as unsigned numbers the negative
// values come last and the largest magnitude of them is the greatest; as signed ones they come first.
template <class F>
struct Extremes {
    using Bits = typename F::Bits;
    using Signed = std::make_signed_t<Bits>;
    Bits low = std::numeric_limits<Bits>::max(), high = 0;
    Signed signed_low = std::numeric_limits<Signed>::max(), signed_high = std::numeric_limits<Signed>::min();

    TS_INLINE void add(Bits bits) {
        const Signed same = static_cast<Signed>(bits);
        low = bits < low ? bits : low;
        high = bits > high ? bits : high;
        signed_low = same < signed_low ? same : signed_low;
        signed_high = same > signed_high ? same : signed_high;
    }

    static Bits magnitude(Bits bits) { return bits & kMagnitude<F>; }
    bool any_positive() const { return signed_high >= 0; }
    bool any_negative() const { return high > kMagnitude<F>; }
    double least() const { return F::value(any_negative() ? high : low); }
    double most() const { return F::value(any_positive() ? static_cast<Bits>(signed_high) : low); }
    bool any_tiny() const {
        return magnitude(low) < F::kMinNormal || magnitude(static_cast<Bits>(signed_low)) < F::kMinNormal;
    }
    bool any_nonfinite() const {
        return magnitude(high) >= F::kNonfinite || magnitude(static_cast<Bits>(signed_high)) >= F::kNonfinite;
    }
};

// A block with non-finite values, or with squares that float32 cannot hold: everything masked, in double.
template <class F>
TS_INLINE void careful_block(const uint8_t* bytes, int64_t n, Summary* out) {
    using Bits = typename F::Bits;
    double sum = 0, sumsq = 0, low = out->min, high = out->max;
    int64_t nan = 0, infinite = 0, negative = 0;
    for (int64_t i = 0; i < n; ++i) {
        const Bits bits = load<Bits>(bytes, i), magnitude = bits & kMagnitude<F>;
        const bool finite = magnitude < F::kNonfinite;
        const double value = F::value(finite ? bits : Bits(0));
        nan += magnitude > F::kNonfinite;
        infinite += magnitude == F::kNonfinite;
        negative += bits == static_cast<Bits>(F::kNonfinite | ~kMagnitude<F>);
        sum += value;
        sumsq += value * value;
        low = finite && value < low ? value : low;
        high = finite && value > high ? value : high;
    }
    out->nan += nan;
    out->posinf += infinite - negative;
    out->neginf += negative;
    out->finite -= nan + infinite;
    out->sum += sum;
    out->sumsq += sumsq;
    out->extend(low, high);
}

template <class F>
TS_INLINE void count_tiny(const uint8_t* bytes, int64_t n, Summary* out) {
    using Bits = typename F::Bits;
    Bits tiny = 0, zeros = 0;  // a block fits 16 bits
    for (int64_t i = 0; i < n; ++i) {
        const Bits magnitude = load<Bits>(bytes, i) & kMagnitude<F>;
        tiny = static_cast<Bits>(tiny + (magnitude < F::kMinNormal));
        zeros = static_cast<Bits>(zeros + (magnitude == 0));
    }
    out->zeros += zeros;
    out->subnormals += tiny - zeros;
}

template <class Value>
struct Sums {
    Value sum = 0, squares = 0;

    TS_INLINE void add(Value value) { sum += value, squares += value * value; }
};

template <class F, bool kBag>
TS_INLINE void float_block(const uint8_t* bytes, int64_t n, Summary* out) {
    using Bits = typename F::Bits;
    using Value = typename F::Value;
    constexpr bool kPairs = sizeof(Bits) == 2;  // two values in one 32-bit word: cheaper than widening each
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
    out->finite += n;
    if (extremes.any_tiny()) count_tiny<F>(bytes, n, out);
    const double least = extremes.least(), most = extremes.most(), absmax = most > -least ? most : -least;
    const bool safe = sizeof(Value) == 8 || absmax == 0 || (absmax >= kSafeLow && absmax <= kSafeHigh);
    if (extremes.any_nonfinite() || !safe) return careful_block<F>(bytes, n, out);
    out->sum += sums.sum;
    out->sumsq += sums.squares;
    out->extend(least, most);
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

// ---- one byte per element: counting the 256 codes says everything, exactly

struct Histogram {
    uint64_t counts[4][256] = {};  // four, so that neighbours of equal value do not wait for each other
};

double byte_value(int dtype, int code) {
    if (const Table* table = table_of(dtype)) return table->values[code];
    return dtype == kInt8 ? static_cast<int8_t>(code) : dtype == kBool ? code != 0 : code;
}

void digest_histogram(int dtype, const Histogram& histogram, Summary* out) {
    const Table* table = table_of(dtype);
    for (int code = 0; code < 256; ++code) {
        uint64_t total = 0;
        for (const auto& lane : histogram.counts) total += lane[code];
        const int64_t n = static_cast<int64_t>(total);
        if (!n) continue;
        out->bag += total * bag_of_byte(code);
        const double value = byte_value(dtype, code), times = static_cast<double>(n);
        const uint64_t bits = bit_cast<uint64_t>(value), magnitude = bits & kMagnitude<Float64>;
        if (magnitude > Float64::kNonfinite) {
            out->nan += n;
        } else if (magnitude == Float64::kNonfinite) {
            (bits == magnitude ? out->posinf : out->neginf) += n;
        } else {
            out->finite += n;
            out->zeros += magnitude == 0 ? n : 0;
            out->subnormals += table && magnitude && (code & 0x7F) < table->min_normal ? n : 0;
            out->sum += value * times;
            out->sumsq += value * value * times;
            out->extend(value, value);
        }
    }
}

void summarize_bytes(const uint8_t* bytes, int dtype, uint8_t* target, Summary* out) {
    Histogram histogram;
    for (int64_t done = 0; done < out->count; done += kBlock) {
        const int64_t end = done + kBlock < out->count ? done + kBlock : out->count;
        hash_bytes(bytes + done, end - done, done, &out->hash);
        for (int64_t i = done; i < end; ++i) ++histogram.counts[i & 3][bytes[i]];
        if (target) std::memcpy(target + done, bytes + done, static_cast<size_t>(end - done));
    }
    digest_histogram(dtype, histogram, out);
}

// ---- dispatch

using Block = void (*)(const uint8_t*, int64_t, Summary*);

struct Way {
    int64_t width;          // bytes of an element
    Block block, with_bag;  // null: one byte, by histogram, where the bag comes for nothing
};

#define TS_BLOCK(name, body, T)                                                                               \
    TS_CLONES void name(const uint8_t* bytes, int64_t n, Summary* out) { body<T, false>(bytes, n, out); }     \
    TS_CLONES void name##_bag(const uint8_t* bytes, int64_t n, Summary* out) { body<T, true>(bytes, n, out); } \
    constexpr Way name##_way = {sizeof(T::Bits), name, name##_bag};
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

constexpr Way byte_way = {1, nullptr, nullptr};
constexpr Way kWays[] = {
    // in the order of Dtype
    float64_way, float32_way, float16_way, bfloat16_way, byte_way, byte_way, byte_way, byte_way, byte_way,
    int64_way, int32_way, int16_way, byte_way, uint64_way, uint32_way, uint16_way, byte_way, byte_way,
};

void summarize_wide(const uint8_t* bytes, Way way, bool bag, uint8_t* target, Summary* out) {
    const Block block = bag ? way.with_bag : way.block;
    const int64_t most = block_of(way.width);
    for (int64_t done = 0; done < out->count; done += most) {
        const int64_t n = out->count - done < most ? out->count - done : most;
        const int64_t offset = done * way.width, nbytes = n * way.width;
        hash_bytes(bytes + offset, nbytes, offset, &out->hash);
        block(bytes + offset, n, out);
        if (target) std::memcpy(target + offset, bytes + offset, static_cast<size_t>(nbytes));
    }
}

struct Taken {  // what Python reads; _LAYOUT in summary.py
    Summary summary;
    uint8_t digest[16];
    char text[kTextRoom];
};

void write_digest(const Hash& hash, uint8_t* out) {
    for (int i = 0; i < 8; ++i) {
        out[i] = static_cast<uint8_t>(hash.h1 >> (56 - 8 * i));
        out[8 + i] = static_cast<uint8_t>(hash.h2 >> (56 - 8 * i));
    }
}

}  // namespace
}  // namespace ts

TS_EXPORT int ts_abi() { return TS_ABI; }

// Fills the summary alone; `target` may be null.
TS_EXPORT void ts_summarize(const void* data, int64_t count, int dtype, int bag, void* target, ts::Summary* result) {
    const ts::Way way = ts::kWays[dtype];
    const auto* bytes = static_cast<const uint8_t*>(data);
    auto* copy = static_cast<uint8_t*>(target);
    ts::Summary out;
    out.count = count;
    if (way.block) {
        ts::summarize_wide(bytes, way, bag != 0, copy, &out);
    } else {
        ts::summarize_bytes(bytes, dtype, copy, &out);
    }
    out.finish(static_cast<uint64_t>(count * way.width));
    *result = out;
}

// Returns the length of the text.
TS_EXPORT int64_t ts_take(const void* data, int64_t count, int dtype, int bag, void* target, ts::Taken* result) {
    ts_summarize(data, count, dtype, bag, target, &result->summary);
    ts::write_digest(result->summary.hash, result->digest);
    return ts::write_text(result->summary, bag != 0, result->text);
}

TS_EXPORT void ts_hash(const void* data, int64_t nbytes, uint8_t* digest) {
    ts::Hash hash;
    ts::hash_bytes(static_cast<const uint8_t*>(data), nbytes, 0, &hash);
    hash.finish(static_cast<uint64_t>(nbytes));
    ts::write_digest(hash, digest);
}
