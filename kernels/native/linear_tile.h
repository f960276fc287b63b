// The loops of linear.cpp for one CPU type. Included once per type, in a namespace that defines its vector types and
// with TS_TILE as the target attribute; hence no include guard.

// Multiplies kRows rows of x by kOuts rows of w. `ahead`, if not null, is the start of the rows of w after the next
// ones. They are prefetched in memory order: no hardware prefetcher recognizes that the kOuts streams are adjacent.
template <int kRows>
TS_TILE void tile(const Linear& call, int64_t row, int64_t out, const Element* ahead) {
    const Element* x = static_cast<const Element*>(call.x) + row * call.stride;
    const Element* w = static_cast<const Element*>(call.w) + out * call.ins;
    Sum sums[kRows][kOuts];
    for (auto& each : sums) {
        for (auto& sum : each) sum = Sum{};
    }
    int64_t k = 0;
    for (; k + kCount <= call.ins; k += kCount) {
        Vector weights[kOuts];
        for (int j = 0; j < kOuts; ++j) {
            weights[j] = load(w + j * call.ins + k);
            if (ahead != nullptr) __builtin_prefetch(ahead + kOuts * k + j * kCount, 0, 2);
        }
        for (int i = 0; i < kRows; ++i) {
            const Vector values = load(x + i * call.stride + k);
            for (int j = 0; j < kOuts; ++j) sums[i][j] = add_product(sums[i][j], values, weights[j]);
        }
    }
    if (const int64_t left = call.ins - k; left > 0) {
        for (int i = 0; i < kRows; ++i) {
            const Vector values = load_some(x + i * call.stride + k, left);
            for (int j = 0; j < kOuts; ++j) {
                sums[i][j] = add_product(sums[i][j], values, load_some(w + j * call.ins + k, left));
            }
        }
    }
    for (int i = 0; i < kRows; ++i) {
        __m128 totals = total(sums[i]);
        if (call.bias != nullptr) totals = _mm_add_ps(totals, load_four(static_cast<const Element*>(call.bias) + out));
        store_four(static_cast<Element*>(call.y) + (row + i) * call.outs + out, totals);
    }
}

template <int kRows>
TS_TILE void few_rows(const Linear& call, int64_t rows, int64_t row, int64_t out, const Element* ahead) {
    if constexpr (kRows > 0) {
        if (rows == kRows) return tile<kRows>(call, row, out, ahead);
        few_rows<kRows - 1>(call, rows, row, out, ahead);
    }
}

// Multiplies rows [first, end) of x by rows [out, stop) of w. Only the last kOuts rows of w may overlap earlier ones;
// they recompute the same bits.
TS_TILE void block(const Linear& call, int64_t first, int64_t end, int64_t out, int64_t stop) {
    for (; out < stop; out += kOuts) {
        const int64_t start = out + kOuts <= call.outs ? out : call.outs - kOuts;
        const bool more = start + 3 * kOuts <= call.outs;
        const Element* ahead = more ? static_cast<const Element*>(call.w) + (start + 2 * kOuts) * call.ins : nullptr;
        int64_t row = first;
        for (; row + kMostRows <= end; row += kMostRows, ahead = nullptr) tile<kMostRows>(call, row, start, ahead);
        few_rows<kMostRows - 1>(call, end - row, row, start, ahead);
    }
}
