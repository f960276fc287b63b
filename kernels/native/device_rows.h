// Statistics and sketches that a CUDA device computes for a writer: the launch of the kernels of kernels/triton/tap.py
// and sketch.py through the driver, the memory that they write to, and the lines that wait for them.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "py_util.h"

namespace ts {

// How the row of statistics of the tensors of one template is computed.
struct DeviceLaunch {
    void* function = nullptr;  // CUfunction; null where no device computes it
    long long device = 0;
    unsigned programs = 0, threads = 0, shared = 0;
    int overlaps = 0;  // whether it may start while the previous kernel of its stream still runs, see launch.py
};

// How the sketch of such a tensor is computed, besides its statistics.
struct DeviceSketch {
    DeviceLaunch launch;
    long long part[5];  // rows, width, first column, its column in the whole tensor, columns
    long long slot;     // of its first row among the keys of the step's rows; -1 where it is one row with key 0
};

// CUlaunchAttribute, whose value is a union of 64 bytes, and CUlaunchConfig.
struct LaunchAttribute {
    int id, pad, value, rest[15];
};
struct LaunchConfig {
    unsigned grid[3], block[3], shared;
    void* stream;
    const LaunchAttribute* attributes;
    unsigned num_attributes;
};
constexpr LaunchAttribute kOverlap = {6, 0, 1, {}};  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

// The functions of the driver, which return a CUresult, 0 for success; null where there is none.
struct Driver {
    using Launch = int (*)(const LaunchConfig*, void*, void**, void**);
    using Device = int (*)(int*);
    using Capturing = int (*)(void*, int*);
    using Copy = int (*)(uint64_t, uint64_t, size_t, void*);
    using Record = int (*)(void*, void*);
    using Wait = int (*)(void*, void*, unsigned);
    using ErrorName = int (*)(int, const char**);
    Launch launch = nullptr;
    Device device = nullptr;        // that of the current context
    Capturing capturing = nullptr;  // whether a graph is captured on a stream
    Copy copy = nullptr;            // to, from, bytes, stream: of any two addresses
    Record record = nullptr;        // event, stream
    Wait wait = nullptr;            // stream, event, flags
    ErrorName error_name = nullptr;

    static const Driver& get() {
        static const Driver driver = [] {
            Driver found;
            if (void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL)) {
                found.launch = reinterpret_cast<Launch>(dlsym(library, "cuLaunchKernelEx"));
                found.device = reinterpret_cast<Device>(dlsym(library, "cuCtxGetDevice"));
                found.capturing = reinterpret_cast<Capturing>(dlsym(library, "cuStreamIsCapturing"));
                found.copy = reinterpret_cast<Copy>(dlsym(library, "cuMemcpyAsync"));
                found.record = reinterpret_cast<Record>(dlsym(library, "cuEventRecord"));
                found.wait = reinterpret_cast<Wait>(dlsym(library, "cuStreamWaitEvent"));
                found.error_name = reinterpret_cast<ErrorName>(dlsym(library, "cuGetErrorName"));
            }
            return found;
        }();
        return driver;
    }
    explicit operator bool() const { return launch && device && capturing && copy && record && wait && error_name; }
};

constexpr long long kRowBytes = 128;
constexpr long long kPartBytes = 96;                        // of a program's partial result
constexpr long long kCounterBytes = 1024, kSpanBytes = 32;  // of a sketch

// Rows of statistics in the memory of one device, which kernels of one stream write.
struct DeviceRows {
    long long device = -1;
    void* stream = nullptr;
    uint64_t rows = 0, partial = 0, keys = 0;  // addresses: of the rows, of room for partial results, of the hash's key
    long long capacity = 0, used = 0;
    long long parts = 0, parts_used = 0;  // partial results that fit in, and that are taken
    // Of sketches: addresses of the counters (0 where these rows have none), of partial ones, and of what says where
    // these are; how many partial ones fit in, and are taken
    uint64_t counters = 0, partial_counters = 0, spans = 0;
    long long sketch_parts = 0, sketch_parts_used = 0;

    bool has_room(const DeviceLaunch& how, const DeviceLaunch& sketch) const {
        const bool has_counters = !sketch.function || (counters && sketch_parts_used + sketch.programs <= sketch_parts);
        return used < capacity && parts_used + how.programs <= parts && has_counters;
    }
};

// The keys of the open step's rows, for sketches on one stream of one device.
struct StepKeys {
    long long device = -1;
    void* stream = nullptr;
    Owned about{nullptr};         // (the step's info, its grid, ...): holds the memory
    uint64_t keys = 0, zero = 0;  // addresses: of the keys, 0 where they are unknown, and of one key that is 0
};

// The line of a record whose statistics are being computed.
struct WaitingLine {
    Owned record_template;
    long long offset;  // of its row; -1 for a plain value
    Owned sketch;      // what the template says of the sketch; null without
};

// Lines with consecutive numbers.
struct WaitingLines {
    long long first = 0;
    std::vector<WaitingLine> lines;

    bool takes(long long number) const {
        return lines.empty() || number == first + static_cast<long long>(lines.size());
    }
};

// The driver's error, 0 once the kernel was launched.
inline int launch(const DeviceLaunch& how, void* stream, void** parameters) {
    const LaunchConfig config = {{how.programs, 1, 1},       {how.threads, 1, 1}, how.shared, stream, &kOverlap,
                                 unsigned(how.overlaps != 0)};
    return Driver::get().launch(&config, how.function, parameters, nullptr);
}

// That of what completes rows, see tap.py: a program for each.
inline int launch_merge(const DeviceLaunch& how, void* stream, uint64_t rows) {
    uint64_t scratch = 0;
    void* parameters[] = {&rows, &scratch, &scratch};
    return launch(how, stream, parameters);
}

// That of a row of statistics.
inline int launch_summary(const DeviceLaunch& how, const DeviceRows& to, uint64_t address, long long count) {
    uint64_t row = to.rows + uint64_t(kRowBytes * to.used), keys = to.keys, scratch = 0;
    uint64_t partial = to.partial + uint64_t(kPartBytes * to.parts_used);
    void* parameters[] = {&address, &count, &keys, &partial, &row, &scratch, &scratch};
    return launch(how, to.stream, parameters);
}

// That of a sketch, next to that row.
inline int launch_sketch(DeviceSketch how, const DeviceRows& to, const StepKeys& step, uint64_t address) {
    uint64_t keys = how.slot < 0 ? step.zero : step.keys + uint64_t(8 * how.slot), scratch = 0;
    uint64_t partial = to.partial_counters + uint64_t(kCounterBytes * to.sketch_parts_used);
    uint64_t span = to.spans + uint64_t(kSpanBytes * to.used), out = to.counters + uint64_t(kCounterBytes * to.used);
    long long* part = how.part;
    void* parameters[] = {&address, part,     part + 1, part + 2, part + 3, part + 4,
                          &keys,    &partial, &span,    &out,     &scratch, &scratch};
    return launch(how.launch, to.stream, parameters);
}

}  // namespace ts
