// Fast comparison of a block of a row; a separate translation unit, because it takes long to compile.
#pragma once

#include "rows.h"

namespace ts {

// Returns false and leaves the row unchanged if the block must be compared in double.
using FastBlock = bool (*)(const Sides&, const Tolerance&, Row*);

// Returns the kernel that reads both dtypes without conversion, or null if they must be widened first.
FastBlock fast_block_of(int a, int b, bool any_tolerance);

}  // namespace ts
