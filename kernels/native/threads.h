// Parallel execution on torch's OpenMP threads, if libgomp is loaded. Threads of our own would compete with them,
// because idle OpenMP threads keep spinning.
#pragma once

#include <atomic>
#include <cstdint>

#ifdef __linux__
#include <dlfcn.h>
#endif

namespace ts {

using Fork = void (*)(void (*)(void*), void*, unsigned, unsigned);  // GOMP_parallel, part of libgomp's stable interface

inline Fork fork_of_process() {
#ifdef __linux__
    return reinterpret_cast<Fork>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
#else
    return nullptr;
#endif
}

// Calls work(piece) for each of `pieces`, on at most `threads` threads including the calling one. Each thread takes the
// next piece when it finishes one, so that a thread delayed by other programs does not delay the rest.
template <class Work>
void in_parallel(int64_t pieces, int64_t threads, Work work) {
    static const Fork fork = fork_of_process();
    struct Shared {
        Work* work;
        int64_t pieces;
        std::atomic<int64_t> next{0};
    } shared{&work, pieces};
    auto take_pieces = [](void* data) {
        auto& all = *static_cast<Shared*>(data);
        for (int64_t piece; (piece = all.next.fetch_add(1, std::memory_order_relaxed)) < all.pieces;)
            (*all.work)(piece);
    };
    if (threads > pieces) threads = pieces;
    if (threads > 1 && fork != nullptr) {
        fork(take_pieces, &shared, static_cast<unsigned>(threads), 0);
    } else {
        take_pieces(&shared);
    }
}

}  // namespace ts
