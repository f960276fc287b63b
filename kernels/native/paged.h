// Attention of decoding requests against paged keys and values: see paged.cpp.
#pragma once

#include <cstdint>

namespace ts {

struct Paged {
    const void* query;       // [requests, heads, key_dim]
    const void* keys;        // [pages, page_size, kv_heads, key_dim]
    const void* values;      // [pages, page_size, kv_heads, value_stride], of which the first value_dim count
    const int32_t* table;    // [requests, table_stride]: pages in order of position
    const int32_t* lengths;  // [requests]: positions, the query's the last of them
    void* out;               // [requests, heads, value_dim]
    int64_t requests, heads, kv_heads, key_dim, value_dim, value_stride, page_size, table_stride;
    int64_t window;                       // a row sees its last `window` positions; 0: all
    float scale, key_scale, value_scale;  // the last two: what a stored 1 means, where keys and values are bytes
};

// `dtype` of query and output, `stored` of keys and values: the same, or an 8-bit float. False where there is no kernel
// for them; nothing is written then.
bool ts_paged(const Paged& call, int dtype, int stored, int64_t threads);

}  // namespace ts
