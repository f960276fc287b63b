// Paged attention for decode requests, one query row each. Keys and values are read in place from their pages, without
// gather, padding or mask. An 8-bit KV cache is dequantized per block and KV head, once for all query heads of the
// group. Softmax keeps a running maximum across blocks (Milakov and Gimelshein, Online normalizer calculation for
// softmax, arXiv:1805.02867), in float32 throughout.

#include "paged.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "common.h"
#include "threads.h"

namespace ts {
namespace {

constexpr int64_t kPositions =
    32;  // positions per block: the keys and values of all heads stay in a core's private cache

TS_INLINE float value_of(float x) { return x; }
TS_INLINE float value_of(uint16_t x) { return BFloat16::value(x); }

TS_INLINE void put(float x, float* to) { *to = x; }
TS_INLINE void put(float x, uint16_t* to) {  // rounds to nearest even; NaN stays NaN
    const uint32_t bits = bit_cast<uint32_t>(x);
    *to = static_cast<uint16_t>(x != x ? 0x7FC0u : (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

// Decodes 8-bit floats by bit arithmetic, which vectorizes, where table lookups would not. Subnormal codes are
// converted as integers.
struct E4M3 {
    static TS_INLINE float value(uint8_t byte) {
        const uint32_t bits = byte & 0x7Fu, sign = (byte & 0x80u) << 24;
        const float small = static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-9f;
        const float usual = bit_cast<float>((bits << 20) + (120u << 23));
        const float magnitude = bits < 8 ? small : bits == 0x7Fu ? __builtin_nanf("") : usual;
        return bit_cast<float>(bit_cast<uint32_t>(magnitude) | sign);
    }
};

struct E5M2 {
    static TS_INLINE float value(uint8_t byte) {
        const uint32_t bits = byte & 0x7Fu, sign = (byte & 0x80u) << 24;
        const float small = static_cast<float>(static_cast<int32_t>(bits)) * 0x1p-16f;
        const float usual =
            bit_cast<float>((bits << 21) + ((bits < 0x7Cu ? 112u : 224u) << 23));  // 0x7C and up: infinity, NaN
        return bit_cast<float>(bit_cast<uint32_t>(bits < 4 ? small : usual) | sign);
    }
};

// Returns e^x for x <= 0 within 2 ulp; 0 below -87; NaN stays NaN. Polynomial of Cephes (expf.c).
TS_INLINE float exp_of(float x) {
    const float bounded = x < -87.0f ? -87.0f : x;
    const float n = __builtin_floorf(bounded * 1.44269504f + 0.5f);
    const float r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const float power = bit_cast<float>((static_cast<int32_t>(n == n ? n : 0.0f) + 127) << 23);
    const float result = (p * r * r + r + 1.0f) * power;
    return x < -87.0f ? 0.0f : result;
}

template <class T>
TS_INLINE void four_dots(const float* q, const T* a, const T* b, const T* c, const T* d, int64_t n, float* out) {
    float sum_a = 0, sum_b = 0, sum_c = 0, sum_d = 0;
    for (int64_t i = 0; i < n; ++i) {
        const float x = q[i];
        sum_a += x * value_of(a[i]), sum_b += x * value_of(b[i]);
        sum_c += x * value_of(c[i]), sum_d += x * value_of(d[i]);
    }
    out[0] = sum_a, out[1] = sum_b, out[2] = sum_c, out[3] = sum_d;
}

template <class T>
TS_INLINE void add_four(const float* p, const T* a, const T* b, const T* c, const T* d, int64_t n, float* out) {
    const float pa = p[0], pb = p[1], pc = p[2], pd = p[3];
    for (int64_t i = 0; i < n; ++i) {
        out[i] += pa * value_of(a[i]) + pb * value_of(b[i]) + (pc * value_of(c[i]) + pd * value_of(d[i]));
    }
}

template <class T>
TS_INLINE void add_one(float p, const T* a, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] += p * value_of(a[i]);
}

// Running softmax state of one head.
struct SoftmaxState {
    float top = -__builtin_inff(), total = 0;
};

// Pointers to the key and value rows of a block's positions, padded to a multiple of 4 by repeating the last one.
template <class T>
struct Rows {
    const T *keys[kPositions], *values[kPositions];
    int64_t count, padded;
};

template <class T>
TS_INLINE void find_rows(const Paged& call, int64_t request, int64_t first, int64_t end, Rows<T>* rows) {
    const int32_t* pages = call.table + request * call.table_stride;
    rows->count = end - first, rows->padded = (rows->count + 3) / 4 * 4;
    for (int64_t i = 0; i < rows->padded; ++i) {
        const int64_t position = std::min(first + i, end - 1);
        const int64_t slot = pages[position / call.page_size] * call.page_size + position % call.page_size;
        rows->keys[i] = static_cast<const T*>(call.keys) + slot * call.kv_heads * call.key_dim;
        rows->values[i] = static_cast<const T*>(call.values) + slot * call.kv_heads * call.value_stride;
    }
}

// Prefetches one row of the next block while the current block is computed.
template <class T>
TS_INLINE void prefetch(const T* from, int64_t n) {
    for (int64_t i = 0; i < n; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(from + i, 0, 2);
}

// One KV head of an 8-bit block, dequantized: scaled, and rounded once to the compute dtype.
struct Wide {
    std::vector<float> memory;
    Rows<float> rows;

    void make_room(const Paged& call) {
        memory.resize(static_cast<size_t>(kPositions * (call.key_dim + call.value_dim)));
        for (int64_t i = 0; i < kPositions; ++i) rows.keys[i] = key(call, i), rows.values[i] = value(call, i);
    }
    float* key(const Paged& call, int64_t i) { return memory.data() + i * call.key_dim; }
    float* value(const Paged& call, int64_t i) { return key(call, kPositions) + i * call.value_dim; }
};

TS_INLINE float rounded(float x, float) { return x; }
TS_INLINE float rounded(float x, uint16_t) {  // to nearest even; NaN, which the product has made quiet, stays NaN
    const uint32_t bits = bit_cast<uint32_t>(x);
    return bit_cast<float>((bits + 0x7FFFu + (bits >> 16 & 1)) & 0xFFFF0000u);
}

template <class T, class Code>
TS_INLINE void dequantize(const uint8_t* from, int64_t n, float scale, float* to) {
    if ((bit_cast<uint32_t>(scale) & 0x007FFFFFu) == 0) {  // power of two: the product needs no more bits than the code
        for (int64_t i = 0; i < n; ++i) to[i] = Code::value(from[i]) * scale;
    } else {
        for (int64_t i = 0; i < n; ++i) to[i] = rounded(Code::value(from[i]) * scale, T());
    }
}

template <class T, class Code>
TS_INLINE void widen(const Paged& call, const Rows<uint8_t>& rows, const Rows<uint8_t>* ahead, int64_t kv_head,
                     Wide* wide) {
    const int64_t key = kv_head * call.key_dim, value = kv_head * call.value_stride;
    wide->rows.count = rows.count, wide->rows.padded = rows.padded;
    for (int64_t i = 0; i < rows.padded; ++i) {
        dequantize<T, Code>(rows.keys[i] + key, call.key_dim, call.key_scale, wide->key(call, i));
        dequantize<T, Code>(rows.values[i] + value, call.value_dim, call.value_scale, wide->value(call, i));
        if (ahead == nullptr || i >= ahead->count) continue;
        prefetch(ahead->keys[i] + key, call.key_dim);
        prefetch(ahead->values[i] + value, call.value_dim);
    }
}

// Processes one query head and one block. A head's keys and values start `key` and `value` elements into each row.
// `mixed` += softmax weights times values, all relative to the running maximum.
template <class T>
TS_INLINE void one_head(const Paged& call, const Rows<T>& rows, const Rows<T>* ahead, int64_t key, int64_t value,
                        const float* query, SoftmaxState* head, float* mixed) {
    float scores[kPositions];
    for (int64_t i = 0; i < rows.padded; i += 4) {
        const T* const* k = rows.keys + i;
        four_dots(query, k[0] + key, k[1] + key, k[2] + key, k[3] + key, call.key_dim, scores + i);
        for (int64_t j = i; ahead != nullptr && j < i + 4 && j < ahead->count; ++j)
            prefetch(ahead->keys[j] + key, call.key_dim);
    }
    float top = head->top;
    for (int64_t i = 0; i < rows.count; ++i) top = scores[i] > top ? scores[i] : top;
    for (int64_t i = rows.count; i < rows.padded; ++i) scores[i] = -__builtin_inff();
    float total = 0;
    for (int64_t i = 0; i < rows.padded; ++i) {
        scores[i] = exp_of(scores[i] - top);
        total += scores[i];
    }
    if (top > head->top) {
        const float kept = exp_of(head->top - top);
        for (int64_t i = 0; i < call.value_dim; ++i) mixed[i] *= kept;
        head->total *= kept;
    }
    head->top = top, head->total += total;
    int64_t i = 0;
    for (; i + 4 <= rows.count; i += 4) {
        const T* const* v = rows.values + i;
        for (int64_t j = i; ahead != nullptr && j < i + 4 && j < ahead->count; ++j) {
            prefetch(ahead->values[j] + value, call.value_dim);
        }
        add_four(scores + i, v[0] + value, v[1] + value, v[2] + value, v[3] + value, call.value_dim, mixed);
    }
    for (; i < rows.count; ++i) add_one(scores[i], rows.values[i] + value, call.value_dim, mixed);
}

// Processes the query heads of one KV head for one block, whose rows are read directly or dequantized by `Code`.
template <class T, class Code, class Stored>
TS_INLINE void one_group(const Paged& call, const Rows<Stored>& rows, const Rows<Stored>* ahead, int64_t kv_head,
                         const float* queries, SoftmaxState* heads, float* mixed, Wide* wide) {
    const int64_t group = call.heads / call.kv_heads, key = kv_head * call.key_dim, value = kv_head * call.value_stride;
    if constexpr (!std::is_void_v<Code>) widen<T, Code>(call, rows, ahead, kv_head, wide);
    for (int64_t i = 0; i < group; ++i) {
        const float* query = queries + i * call.key_dim;
        float* own = mixed + i * call.value_dim;
        if constexpr (std::is_void_v<Code>) {
            one_head(call, rows, i == 0 ? ahead : nullptr, key, value, query, heads + i, own);
        } else {
            one_head<float>(call, wide->rows, nullptr, 0, 0, query, heads + i, own);
        }
    }
}

// Processes KV heads [first, end) of one request, with all their query heads.
template <class T, class Code>
TS_INLINE void some_heads(const Paged& call, int64_t request, int64_t first, int64_t end, std::vector<float>& memory) {
    using Stored = std::conditional_t<std::is_void_v<Code>, T, uint8_t>;
    thread_local Wide wide;
    if constexpr (!std::is_void_v<Code>) wide.make_room(call);
    const int64_t group = call.heads / call.kv_heads, count = (end - first) * group, length = call.lengths[request];
    memory.assign(static_cast<size_t>(count * (call.key_dim + call.value_dim)), 0.0f);
    std::vector<SoftmaxState> heads(static_cast<size_t>(count));
    float *queries = memory.data(), *mixed = queries + count * call.key_dim;
    const T* query = static_cast<const T*>(call.query) + (request * call.heads + first * group) * call.key_dim;
    for (int64_t i = 0; i < count * call.key_dim; ++i) queries[i] = value_of(query[i]) * call.scale;
    int64_t position = call.window > 0 ? std::max<int64_t>(0, length - call.window) : 0;
    Rows<Stored> rows, ahead;
    if (position < length) find_rows(call, request, position, std::min(position + kPositions, length), &ahead);
    for (; position < length; position += kPositions) {
        rows = ahead;
        const int64_t next = position + kPositions;
        if (next < length) find_rows(call, request, next, std::min(next + kPositions, length), &ahead);
        for (int64_t i = 0; i < count; i += group) {
            one_group<T, Code>(call, rows, next < length ? &ahead : nullptr, first + i / group,
                               queries + i * call.key_dim, &heads[i], mixed + i * call.value_dim, &wide);
        }
    }
    T* out = static_cast<T*>(call.out) + (request * call.heads + first * group) * call.value_dim;
    for (int64_t i = 0; i < count; ++i) {
        const float scale = 1.0f / heads[i].total;
        for (int64_t j = 0; j < call.value_dim; ++j)
            put(mixed[i * call.value_dim + j] * scale, out + i * call.value_dim + j);
    }
}

using Heads = void(const Paged& call, int64_t request, int64_t first, int64_t end, std::vector<float>& memory);

#define TS_HEADS(name, T, Code)                                                                                       \
    TS_CLONES void name(const Paged& call, int64_t request, int64_t first, int64_t end, std::vector<float>& memory) { \
        some_heads<T, Code>(call, request, first, end, memory);                                                       \
    }
TS_HEADS(float_heads, float, void)
TS_HEADS(float_heads_e4m3, float, E4M3)
TS_HEADS(float_heads_e5m2, float, E5M2)
TS_HEADS(bfloat_heads, uint16_t, void)
TS_HEADS(bfloat_heads_e4m3, uint16_t, E4M3)
TS_HEADS(bfloat_heads_e5m2, uint16_t, E5M2)
#undef TS_HEADS

Heads* heads_of(int dtype, int stored) {
    if (dtype != kFloat32 && dtype != kBFloat16) return nullptr;
    const bool is_float = dtype == kFloat32;
    if (stored == dtype) return is_float ? float_heads : bfloat_heads;
    if (stored == kFloat8E4M3) return is_float ? float_heads_e4m3 : bfloat_heads_e4m3;
    if (stored == kFloat8E5M2) return is_float ? float_heads_e5m2 : bfloat_heads_e5m2;
    return nullptr;
}

}  // namespace

bool ts_paged(const Paged& call, int dtype, int stored, int64_t threads) {
    Heads* const heads = heads_of(dtype, stored);
    if (heads == nullptr) return false;
    const int64_t parts = std::min(call.kv_heads, (threads + call.requests - 1) / call.requests);
    in_parallel(call.requests * parts, threads, [&](int64_t piece) {
        thread_local std::vector<float> memory;
        const int64_t part = piece % parts;
        heads(call, piece / parts, part * call.kv_heads / parts, (part + 1) * call.kv_heads / parts, memory);
    });
    return true;
}

}  // namespace ts
