// Everything that the record line of one tensor needs, from one pass over its bytes.
#pragma once

#include "common.h"
#include "summary.h"

namespace ts {

struct RecordSummary {
    Summary summary;
    uint8_t digest[16];
    char text[kTextRoom];
};

}  // namespace ts

// Summarizes `count` elements and, unless `target` is null, copies them there. Returns the length of the text.
TS_EXPORT int64_t ts_summarize_record(const void* data, int64_t count, int dtype, int bag, void* target,
                                      ts::RecordSummary* result);
// Fills text and digest from an existing summary. Returns the length of the text.
TS_EXPORT int64_t ts_tell(const ts::Summary* summary, ts::RecordSummary* result);
TS_EXPORT void ts_hash(const void* data, int64_t nbytes, uint8_t* digest);
