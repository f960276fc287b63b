// Cache of the tensors that the open step has summarized, so that a repeated tensor is fast; as
// dumper/records/dedup_cache.py.
//
// Equality is decided by a hash of the bytes, never by the address.
#pragma once

#include <cstring>
#include <map>
#include <string>
#include <tuple>

#include "py_util.h"
#include "record_writer.h"
#include "record_summary.h"

namespace ts {

constexpr int64_t kSmall = 16 << 10;  // rereading this few bytes is as cheap as a lookup
constexpr size_t kPlaces = 4096;      // limit on addresses kept from earlier steps, whose memory is reused

struct KnownBytes {
    uint8_t digest[16];
    std::string text;  // the fields `hash` to `stats` of a line
};

class Memo {
  public:
    // Invalidates all entries at the start of a step: memory is reused for other values.
    void forget() {
        ++step_;
        if (places_.size() > kPlaces) places_.clear();
    }

    // Returns true and sets `found` if this step has summarized the tensor at this address and its bytes, which are
    // given, are unchanged.
    bool recall(const RecordTemplate* record_template, uint64_t place, const uint8_t* bytes, KnownBytes* found) const {
        if (record_template->nbytes() < kSmall) return false;
        const auto seen = places_.find({place, record_template->count, record_template->code});
        if (seen == places_.end() || seen->second.step != step_) return false;
        *found = seen->second.seen;  // the map may change while the GIL is released
        uint8_t digest[16];
        run(record_template->nbytes(), [&] { ts_hash(bytes, record_template->nbytes(), digest); });
        return !std::memcmp(digest, found->digest, sizeof digest);
    }

    // Summarizes the bytes at this address, remembers the result, and copies the bytes unless `target` is null.
    KnownBytes read(const RecordTemplate* record_template, uint64_t place, const uint8_t* bytes, void* target) {
        RecordSummary taken;
        int64_t size = 0;
        run(record_template->nbytes(), [&] {
            size = ts_summarize_record(bytes, record_template->count, record_template->code, 1, target, &taken);
        });
        KnownBytes seen;
        std::memcpy(seen.digest, taken.digest, sizeof seen.digest);
        seen.text.assign(taken.text, size_t(size));
        if (record_template->nbytes() >= kSmall) {
            Entry& met = places_[{place, record_template->count, record_template->code}];
            met.seen = seen, met.step = step_;
        }
        return seen;
    }

    KnownBytes look(const RecordTemplate* record_template, uint64_t place, const uint8_t* bytes) {
        KnownBytes found;
        return recall(record_template, place, bytes, &found) ? found : read(record_template, place, bytes, nullptr);
    }

  private:
    using Place = std::tuple<uint64_t, int64_t, int>;  // address of the first element, number of elements, dtype code
    struct Entry {
        KnownBytes seen;
        uint64_t step;
    };
    std::map<Place, Entry> places_;
    uint64_t step_ = 0;
};

}  // namespace ts
