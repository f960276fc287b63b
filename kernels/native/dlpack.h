// Memory layout of a torch tensor without calling Python: the part of DLPack's exchange API (version 1,
// https://dmlc.github.io/dlpack/latest/c_api.html) that a record writer uses.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>

namespace ts::dlpack {

constexpr int32_t kHost = 1, kCuda = 2;

struct Element {
    uint8_t code, bits;
    uint16_t lanes;
    bool operator!=(const Element& other) const {
        return code != other.code || bits != other.bits || lanes != other.lanes;
    }
};

struct Tensor {
    void* data;
    int32_t device_type, device_id;
    int32_t ndim;
    Element element;
    int64_t* shape;
    int64_t* strides;  // in elements
    uint64_t byte_offset;
};

using View = int (*)(void* object, Tensor* out);  // borrows the tensor; -1 with an exception set
using Stream = int (*)(int32_t device_type, int32_t device_id, void** out);  // stream of the calling thread

struct ExchangeApi {
    uint32_t major, minor;
    ExchangeApi* previous;
    void *allocator, *from_object, *to_object;
    View view;
    Stream current_stream;
};

// Returns the API in a type's `__dlpack_c_exchange_api__` capsule; null if it is missing or has another version.
inline const ExchangeApi* api_of(PyObject* capsule) {
    if (!PyCapsule_IsValid(capsule, "dlpack_exchange_api")) return nullptr;
    const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    return api->major == 1 ? api : nullptr;
}

}  // namespace ts::dlpack
