// Decoding of any element format to float, double or int64, for formats that the block kernels do not read directly.
#pragma once

#include "common.h"

namespace ts {

constexpr int64_t kItemSize[] = {8, 4, 2, 2, 1, 1, 1, 1, 1, 8, 4, 2, 1, 8, 4, 2, 1, 1};  // in the order of Dtype

constexpr bool is_integer(int dtype) { return dtype >= kInt64; }
constexpr bool is_wide_integer(int dtype) { return dtype == kInt64 || dtype == kUint64; }

// Returns whether float32 represents every value of the format exactly.
constexpr bool fits_float(int dtype) {
    return !(dtype == kFloat64 || is_wide_integer(dtype) || dtype == kInt32 || dtype == kUint32);
}

template <class T>
struct Integer {
    using Bits = T;
    static TS_INLINE T value(Bits bits) { return bits; }
};

struct Bool {
    using Bits = uint8_t;
    static TS_INLINE uint8_t value(Bits bits) { return bits != 0; }
};

template <class Out>
TS_INLINE void decode_table(const Table& table, const uint8_t* bytes, int64_t n, Out* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<Out>(table.values[bytes[i]]);
}

template <class F, class Out>
TS_INLINE void decode(const uint8_t* bytes, int64_t n, Out* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<Out>(F::value(load<typename F::Bits>(bytes, i)));
}

template <class Out>
TS_INLINE void decode_integer(int dtype, const uint8_t* bytes, int64_t n, Out* out) {
    switch (dtype) {
        case kInt64: return decode<Integer<int64_t>>(bytes, n, out);
        case kInt32: return decode<Integer<int32_t>>(bytes, n, out);
        case kInt16: return decode<Integer<int16_t>>(bytes, n, out);
        case kInt8: return decode<Integer<int8_t>>(bytes, n, out);
        case kUint64: return decode<Integer<uint64_t>>(bytes, n, out);
        case kUint32: return decode<Integer<uint32_t>>(bytes, n, out);
        case kUint16: return decode<Integer<uint16_t>>(bytes, n, out);
        case kUint8: return decode<Integer<uint8_t>>(bytes, n, out);
        case kBool: return decode<Bool>(bytes, n, out);
        default: return;
    }
}

template <class Out>
TS_INLINE void decode_number(int dtype, const uint8_t* bytes, int64_t n, Out* out) {
    switch (dtype) {
        case kFloat64: return decode<Float64>(bytes, n, out);
        case kFloat32: return decode<Float32>(bytes, n, out);
        case kFloat16: return decode<Float16>(bytes, n, out);
        case kBFloat16: return decode<BFloat16>(bytes, n, out);
        default: break;
    }
    if (const Table* table = table_of(dtype)) return decode_table(*table, bytes, n, out);
    decode_integer(dtype, bytes, n, out);
}

}  // namespace ts
