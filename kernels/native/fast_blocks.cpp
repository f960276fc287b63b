// Fast comparison kernels: one for each pair of formats that is read without conversion, and each vector length.

#include "fast_blocks.h"

#include "formats.h"

#ifdef TS_WIDE
#define TS_VECTOR 64
#define TS_VECTORS vectors64
#define TS_TARGET TS_WIDE
#include "vectors.h"
#include "elements.h"
#include "lanes.h"
#include "int8_block.h"
#include "block.h"
#include "fp8_block.h"
#undef TS_VECTOR
#undef TS_VECTORS
#undef TS_TARGET
#define TS_VECTOR 32
#define TS_VECTORS vectors32
#define TS_TARGET TS_AVX2
#include "vectors.h"
#include "elements.h"
#include "lanes.h"
#include "int8_block.h"
#include "block.h"
#undef TS_VECTOR
#undef TS_VECTORS
#undef TS_TARGET
#endif
#define TS_VECTOR 16
#define TS_VECTORS vectors16
#define TS_TARGET
#include "vectors.h"
#include "elements.h"
#include "lanes.h"
#include "int8_block.h"
#include "block.h"

namespace ts {
namespace {

// Targets are explicit rather than cloned, because clones are created too late in compilation to keep such wide vectors
// in registers.
#ifdef TS_WIDE
template <class A, class B, bool kTolerance>
TS_WIDE bool wide_block(const Sides& sides, const Tolerance& t, Row* row) {
    return vectors64::fast_block<A, B, kTolerance>(sides, t, row);
}

template <class F>
TS_CODES bool codes_block(const Sides& sides, const Tolerance&, Row* row) {
    return vectors64::code_block<F>(sides, row);
}

template <class A, class B, bool kTolerance>
TS_AVX2 bool avx2_block(const Sides& sides, const Tolerance& t, Row* row) {
    return vectors32::fast_block<A, B, kTolerance>(sides, t, row);
}
#endif

template <class A, class B, bool kTolerance>
bool plain_block(const Sides& sides, const Tolerance& t, Row* row) {
    return vectors16::fast_block<A, B, kTolerance>(sides, t, row);
}

template <class A, class B, bool kTolerance>
FastBlock for_this_processor() {
#ifdef TS_WIDE
    if (kWide) return wide_block<A, B, kTolerance>;
    if (kAvx2) return avx2_block<A, B, kTolerance>;
#endif
    return plain_block<A, B, kTolerance>;
}

template <class A, class B = A>
FastBlock fast_block_of(bool any_tolerance) {
    return any_tolerance ? for_this_processor<A, B, true>() : for_this_processor<A, B, false>();
}

// Selects a kernel for formats that are widened first if there is a tolerance; this reduces compile time.
template <class F>
FastBlock block_without_tolerance(bool any_tolerance) {
    return any_tolerance ? nullptr : for_this_processor<F, F, false>();
}

template <class F>
FastBlock narrow_block(bool any_tolerance) {
#ifdef TS_WIDE
    if (kCodes && !any_tolerance) return codes_block<F>;
#endif
    return block_without_tolerance<F>(any_tolerance);
}

}  // namespace

FastBlock fast_block_of(int a, int b, bool any_tolerance) {
    if (a == kFloat32 && b == kFloat16) return fast_block_of<Float32, Float16>(any_tolerance);
    if (a == kFloat16 && b == kFloat32) return fast_block_of<Float16, Float32>(any_tolerance);
    if (a == kFloat32 && b == kBFloat16) return fast_block_of<Float32, BFloat16>(any_tolerance);
    if (a == kBFloat16 && b == kFloat32) return fast_block_of<BFloat16, Float32>(any_tolerance);
    if (a != b) return nullptr;
    switch (a) {
        case kFloat64: return fast_block_of<Float64>(any_tolerance);
        case kFloat32: return fast_block_of<Float32>(any_tolerance);
        case kFloat16: return fast_block_of<Float16>(any_tolerance);
        case kBFloat16: return fast_block_of<BFloat16>(any_tolerance);
        case kFloat8E4M3: return narrow_block<E4M3>(any_tolerance);
        case kFloat8E5M2: return narrow_block<E5M2>(any_tolerance);
        case kFloat8E4M3Fnuz: return narrow_block<E4M3Fnuz>(any_tolerance);
        case kFloat8E5M2Fnuz: return narrow_block<E5M2Fnuz>(any_tolerance);
        case kInt64: return block_without_tolerance<SmallInt64>(any_tolerance);
        case kInt32: return block_without_tolerance<Int32>(any_tolerance);
        case kInt16: return block_without_tolerance<Int16>(any_tolerance);
        case kInt8: return block_without_tolerance<Byte<int8_t>>(any_tolerance);
        case kUint8: return block_without_tolerance<Byte<uint8_t>>(any_tolerance);
        case kBool: return block_without_tolerance<Byte<bool>>(any_tolerance);
        default: return nullptr;
    }
}

}  // namespace ts
