// Paged attention for decode requests: see paged.cpp.
#pragma once

#include <cstdint>

namespace ts {

struct Paged {
    const void* query;       // [requests, heads, key_dim]
    const void* keys;        // [pages, page_size, kv_heads, key_dim]
    const void* values;      // [pages, page_size, kv_heads, value_stride], of which the first value_dim are used
    const int32_t* table;    // [requests, table_stride]: pages in order of position
    const int32_t* lengths;  // [requests]: number of positions, including the query's, which is the last
    void* out;               // [requests, heads, value_dim]
    int64_t requests, heads, kv_heads, key_dim, value_dim, value_stride, page_size, table_stride;
    int64_t window;                       // a query attends to the last `window` positions; 0: all
    float scale, key_scale, value_scale;  // key_scale and value_scale: the value of a stored 1, for an 8-bit KV cache
};

// Computes the attention output. `dtype` is that of query and output, `stored` that of the KV cache: equal to `dtype`,
// or an 8-bit float. Returns false and writes nothing if there is no kernel for these dtypes.
bool ts_paged(const Paged& call, int dtype, int stored, int64_t threads);

}  // namespace ts
