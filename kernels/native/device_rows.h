// Statistics that a CUDA device computes for a writer: the launch of the kernel of kernels/triton/tap.py through the
// driver, the memory that it writes to, and the lines that wait for it.
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
};

// The functions of the driver; null where there is none.
struct Driver {
    using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                           void**);
    using Device = int (*)(int*);
    using Capturing = int (*)(void*, int*);
    Launch launch = nullptr;
    Device device = nullptr;        // that of the current context
    Capturing capturing = nullptr;  // whether a graph is captured on a stream

    static const Driver& get() {
        static const Driver driver = [] {
            Driver found;
            if (void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL)) {
                found.launch = reinterpret_cast<Launch>(dlsym(library, "cuLaunchKernel"));
                found.device = reinterpret_cast<Device>(dlsym(library, "cuCtxGetDevice"));
                found.capturing = reinterpret_cast<Capturing>(dlsym(library, "cuStreamIsCapturing"));
            }
            return found;
        }();
        return driver;
    }
    explicit operator bool() const { return launch && device && capturing; }
};

constexpr long long kRowBytes = 128;
constexpr long long kPartBytes = 96;  // of a program's partial result

// Rows of statistics in the memory of one device, which kernels of one stream write.
struct DeviceRows {
    long long device = -1;
    void* stream = nullptr;
    uint64_t rows = 0, partial = 0, keys = 0;  // addresses: of the rows, of room for partial results, of the hash's key
    long long capacity = 0, used = 0;
    long long parts = 0, parts_used = 0;  // partial results that fit in, and that are taken

    bool has_room(const DeviceLaunch& how) const { return used < capacity && parts_used + how.programs <= parts; }
};

// The line of a record whose statistics are being computed.
struct WaitingLine {
    Owned record_template;
    long long offset;  // of its row; -1 for a plain value
};

// Lines with consecutive numbers.
struct WaitingLines {
    long long first = 0;
    std::vector<WaitingLine> lines;

    bool takes(long long number) const {
        return lines.empty() || number == first + static_cast<long long>(lines.size());
    }
};

// Whether the kernel was launched.
inline bool launch_summary(const DeviceLaunch& how, const DeviceRows& to, uint64_t address, long long count) {
    uint64_t row = to.rows + uint64_t(kRowBytes * to.used), keys = to.keys, scratch = 0;
    uint64_t partial = to.partial + uint64_t(kPartBytes * to.parts_used);
    void* parameters[] = {&address, &count, &keys, &partial, &row, &scratch, &scratch};
    return !Driver::get().launch(how.function, how.programs, 1, 1, how.threads, 1, 1, how.shared, to.stream, parameters,
                                 nullptr);
}

}  // namespace ts
