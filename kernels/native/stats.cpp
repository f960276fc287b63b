// Statistics and both digests of one tensor in one pass: a block is hashed, summed and copied while it lies in the L1
// cache. The digests are defined in digests.py; the plain reference of all of this is reference.py.

#include "bag.h"
#include "summary.h"
#include "text.h"

namespace ts {
namespace {

// ---- floating formats

// Bits as a signed integer that sorts as the value does.
template <class F>
TS_INLINE auto sort_key(typename F::Bits bits) {
    using Signed = std::make_signed_t<typename F::Bits>;
    const Signed fill = static_cast<Signed>(static_cast<Signed>(bits) >> (8 * sizeof(bits) - 1));
    return static_cast<Signed>(bits ^ (static_cast<typename F::Bits>(fill) & kMagnitude<F>));
}

template <class F>
TS_INLINE double from_key(std::make_signed_t<typename F::Bits> key) {  // sort_key is its own inverse
    return F::value(static_cast<typename F::Bits>(sort_key<F>(static_cast<typename F::Bits>(key))));
}

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
TS_INLINE void float_block(const uint8_t* bytes, int64_t n, Summary* out) {
    using Bits = typename F::Bits;
    using Signed = std::make_signed_t<Bits>;
    Bits nonfinite = 0, tiny = 0, zeros = 0;  // n <= kBlock fits 16 bits
    Signed low = std::numeric_limits<Signed>::max(), high = std::numeric_limits<Signed>::min();
    typename F::Value sum = 0, sumsq = 0;
    for (int64_t i = 0; i < n; ++i) {
        const Bits bits = load<Bits>(bytes, i), magnitude = bits & kMagnitude<F>;
        const Signed key = sort_key<F>(bits);
        const typename F::Value value = F::value(bits);
        nonfinite = static_cast<Bits>(nonfinite + (magnitude >= F::kNonfinite));
        tiny = static_cast<Bits>(tiny + (magnitude < F::kMinNormal));
        zeros = static_cast<Bits>(zeros + (magnitude == 0));
        low = key < low ? key : low;
        high = key > high ? key : high;
        sum += value;
        sumsq += value * value;
    }
    out->finite += n;
    out->zeros += zeros;
    out->subnormals += tiny - zeros;
    const double least = from_key<F>(low), most = from_key<F>(high), absmax = most > -least ? most : -least;
    const bool safe = sizeof(typename F::Value) == 8 || absmax == 0 || (absmax >= kSafeLow && absmax <= kSafeHigh);
    if (nonfinite || !safe) return careful_block<F>(bytes, n, out);
    out->sum += sum;
    out->sumsq += sumsq;
    out->extend(least, most);
}

// ---- integers

template <class T>
TS_INLINE void integer_block(const uint8_t* bytes, int64_t n, Summary* out) {
    T low = std::numeric_limits<T>::max(), high = std::numeric_limits<T>::min();
    double sum = 0, sumsq = 0;
    int64_t zeros = 0;
    for (int64_t i = 0; i < n; ++i) {
        const T item = load<T>(bytes, i);
        const double value = static_cast<double>(item);
        low = item < low ? item : low;
        high = item > high ? item : high;
        zeros += item == 0;
        sum += value;
        sumsq += value * value;
    }
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
    switch (dtype) {
        case kFloat8E4M3: return kE4M3.values[code];
        case kFloat8E5M2: return kE5M2.values[code];
        case kInt8: return static_cast<int8_t>(code);
        case kBool: return code != 0;
        default: return code;
    }
}

void digest_histogram(int dtype, const Histogram& histogram, Summary* out) {
    const bool is_float = dtype == kFloat8E4M3 || dtype == kFloat8E5M2;
    const int min_normal = dtype == kFloat8E4M3 ? 0x08 : 0x04, infinity = dtype == kFloat8E5M2 ? 0x7C : 0x80;
    for (int code = 0; code < 256; ++code) {
        uint64_t total = 0;
        for (const auto& lane : histogram.counts) total += lane[code];
        const int64_t n = static_cast<int64_t>(total);
        const int magnitude = code & 0x7F;
        if (!n) continue;
        out->bag += total * bag_of_byte(code);
        if (is_float && magnitude == infinity) {
            (code & 0x80 ? out->neginf : out->posinf) += n;
        } else if (is_float && (magnitude == 0x7F || magnitude > infinity)) {
            out->nan += n;
        } else {
            const double value = byte_value(dtype, code), times = static_cast<double>(n);
            out->finite += n;
            out->zeros += value == 0 ? n : 0;
            out->subnormals += is_float && magnitude && magnitude < min_normal ? n : 0;
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

#define TS_BLOCK(name, body) \
    TS_CLONES void name(const uint8_t* bytes, int64_t n, Summary* out) { body(bytes, n, out); }
TS_BLOCK(float64_block, float_block<Float64>)
TS_BLOCK(float32_block, float_block<Float32>)
TS_BLOCK(float16_block, float_block<Float16>)
TS_BLOCK(bfloat16_block, float_block<BFloat16>)
TS_BLOCK(int64_block, integer_block<int64_t>)
TS_BLOCK(int32_block, integer_block<int32_t>)
TS_BLOCK(int16_block, integer_block<int16_t>)
TS_BLOCK(uint64_block, integer_block<uint64_t>)
TS_BLOCK(uint32_block, integer_block<uint32_t>)
TS_BLOCK(uint16_block, integer_block<uint16_t>)
#undef TS_BLOCK

struct Way {
    int64_t width;  // bytes of an element
    Block block;    // null: one byte, by histogram
};

uint64_t bag_of(const uint8_t* bytes, int64_t n, int64_t width) {
    return width == 2 ? bag_block2(bytes, n) : width == 4 ? bag_block4(bytes, n) : bag_block8(bytes, n);
}

constexpr Way kByte = {1, nullptr};
constexpr Way kWays[] = {
    // in the order of Dtype
    {8, float64_block}, {4, float32_block}, {2, float16_block}, {2, bfloat16_block}, kByte, kByte,
    {8, int64_block}, {4, int32_block}, {2, int16_block}, kByte,
    {8, uint64_block}, {4, uint32_block}, {2, uint16_block}, kByte, kByte,
};

void summarize_wide(const uint8_t* bytes, Way way, uint8_t* target, Summary* out) {
    for (int64_t done = 0; done < out->count; done += kBlock) {
        const int64_t n = out->count - done < kBlock ? out->count - done : kBlock;
        const int64_t offset = done * way.width, nbytes = n * way.width;
        hash_bytes(bytes + offset, nbytes, offset, &out->hash);
        way.block(bytes + offset, n, out);
        out->bag += bag_of(bytes + offset, n, way.width);
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
TS_EXPORT void ts_summarize(const void* data, int64_t count, int dtype, void* target, ts::Summary* result) {
    const ts::Way way = ts::kWays[dtype];
    const auto* bytes = static_cast<const uint8_t*>(data);
    auto* copy = static_cast<uint8_t*>(target);
    ts::Summary out;
    out.count = count;
    if (way.block) {
        ts::summarize_wide(bytes, way, copy, &out);
    } else {
        ts::summarize_bytes(bytes, dtype, copy, &out);
    }
    out.finish(static_cast<uint64_t>(count * way.width));
    *result = out;
}

// Returns the length of the text.
TS_EXPORT int64_t ts_take(const void* data, int64_t count, int dtype, void* target, ts::Taken* result) {
    ts_summarize(data, count, dtype, target, &result->summary);
    ts::write_digest(result->summary.hash, result->digest);
    return ts::write_text(result->summary, result->text);
}

TS_EXPORT void ts_hash(const void* data, int64_t nbytes, uint8_t* digest) {
    ts::Hash hash;
    ts::hash_bytes(static_cast<const uint8_t*>(data), nbytes, 0, &hash);
    hash.finish(static_cast<uint64_t>(nbytes));
    ts::write_digest(hash, digest);
}
