// Statistics and sketches that a CUDA device computes for a record writer: launches of the kernels of
// kernels/triton/tap.py and sketch.py through the driver, their output buffers, and the record lines that wait for
// them.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "py_util.h"

namespace ts {

// Launch of the kernel that computes the row of statistics for tensors of one template.
struct DeviceLaunch {
    void* function = nullptr;  // CUfunction; null if the device does not compute the statistics
    long long device = 0;
    unsigned programs = 0, threads = 0, shared = 0;
    int overlaps = 0;  // the kernel may start while its predecessor on the stream still runs, see launch.py
};

// Launch of the kernel that computes the sketch of the same tensors.
struct DeviceSketch {
    DeviceLaunch launch;
    long long part[5];  // rows, width, first column, its column in the full tensor, columns
    long long slot;  // index of the first row's key among the keys of the step's rows; -1 for a single row with key 0
};

// CUlaunchAttribute, whose value is a 64-byte union, and CUlaunchConfig.
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

// CUDA driver functions, which return a CUresult (0 for success); null without a driver.
struct Driver {
    using Launch = int (*)(const LaunchConfig*, void*, void**, void**);
    using Device = int (*)(int*);
    using Capturing = int (*)(void*, int*);
    using Copy = int (*)(uint64_t, uint64_t, size_t, void*);
    using Record = int (*)(void*, void*);
    using Wait = int (*)(void*, void*, unsigned);
    using ErrorName = int (*)(int, const char**);
    Launch launch = nullptr;
    Device device = nullptr;        // device of the current context
    Capturing capturing = nullptr;  // capture status of a stream
    Copy copy = nullptr;            // destination, source, bytes, stream; any kind of address
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
constexpr long long kPartBytes = 96;                        // per partial result of a program
constexpr long long kCounterBytes = 1024, kSpanBytes = 32;  // per sketch

// Rows of statistics in device memory, written by kernels of one stream.
struct DeviceRows {
    long long device = -1;
    void* stream = nullptr;
    uint64_t rows = 0, partial = 0, keys = 0;  // addresses: rows, partial results, hash key
    long long capacity = 0, used = 0;
    long long parts = 0, parts_used = 0;  // capacity for partial results, and number in use
    // Sketches: addresses of the counters (0 if these rows have none), of the partial counters, and of the spans that
    // locate the partial counters; capacity for partial counters, and number in use.
    uint64_t counters = 0, partial_counters = 0, spans = 0;
    long long sketch_parts = 0, sketch_parts_used = 0;

    bool has_room(const DeviceLaunch& spec, const DeviceLaunch& sketch) const {
        const bool has_counters = !sketch.function || (counters && sketch_parts_used + sketch.programs <= sketch_parts);
        return used < capacity && parts_used + spec.programs <= parts && has_counters;
    }
};

// Keys of the open step's rows, for sketches on one stream of one device.
struct StepKeys {
    long long device = -1;
    void* stream = nullptr;
    Owned about{nullptr};         // (step info, grid, ...): owns the memory
    uint64_t keys = 0, zero = 0;  // addresses of the keys (0 if unknown) and of a single zero key
};

// A record line whose statistics are still being computed.
struct WaitingLine {
    Owned record_template;
    long long offset;  // byte offset of its row; -1 for a plain value
    Owned sketch;      // the template's sketch description; null without a sketch
};

// Waiting lines with consecutive sequence numbers.
struct WaitingLines {
    long long first = 0;
    std::vector<WaitingLine> lines;

    bool takes(long long number) const {
        return lines.empty() || number == first + static_cast<long long>(lines.size());
    }
};

// Launches a kernel; returns the driver's error code, 0 on success.
inline int launch(const DeviceLaunch& spec, void* stream, void** parameters) {
    const LaunchConfig config = {{spec.programs, 1, 1},       {spec.threads, 1, 1}, spec.shared, stream, &kOverlap,
                                 unsigned(spec.overlaps != 0)};
    return Driver::get().launch(&config, spec.function, parameters, nullptr);
}

// Launches the kernel that completes rows, one program per row, see tap.py.
inline int launch_merge(const DeviceLaunch& spec, void* stream, uint64_t rows) {
    uint64_t scratch = 0;
    void* parameters[] = {&rows, &scratch, &scratch};
    return launch(spec, stream, parameters);
}

// Launches the kernel that computes the next row of statistics.
inline int launch_summary(const DeviceLaunch& spec, const DeviceRows& to, uint64_t address, long long count) {
    uint64_t row = to.rows + uint64_t(kRowBytes * to.used), keys = to.keys, scratch = 0;
    uint64_t partial = to.partial + uint64_t(kPartBytes * to.parts_used);
    void* parameters[] = {&address, &count, &keys, &partial, &row, &scratch, &scratch};
    return launch(spec, to.stream, parameters);
}

// Launches the kernel that computes the sketch of the same tensor.
inline int launch_sketch(DeviceSketch spec, const DeviceRows& to, const StepKeys& step, uint64_t address) {
    uint64_t keys = spec.slot < 0 ? step.zero : step.keys + uint64_t(8 * spec.slot), scratch = 0;
    uint64_t partial = to.partial_counters + uint64_t(kCounterBytes * to.sketch_parts_used);
    uint64_t span = to.spans + uint64_t(kSpanBytes * to.used), out = to.counters + uint64_t(kCounterBytes * to.used);
    long long* part = spec.part;
    void* parameters[] = {&address, part,     part + 1, part + 2, part + 3, part + 4,
                          &keys,    &partial, &span,    &out,     &scratch, &scratch};
    return launch(spec.launch, to.stream, parameters);
}

}  // namespace ts
