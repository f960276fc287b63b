// Python arrays as seen by native code: addresses are valid as long as the caller holds the arrays.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "decode.h"
#include "row_blocks.h"

namespace ts {

// Buffer of an array, held for the lifetime of this object.
class Memory {
  public:
    Memory(PyObject* array, int flags) : held_(PyObject_GetBuffer(array, &view_, flags | PyBUF_C_CONTIGUOUS) == 0) {}
    ~Memory() {
        if (held_) PyBuffer_Release(&view_);
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    explicit operator bool() const { return held_; }
    Py_ssize_t nbytes() const { return view_.len; }
    template <class T>
    T* as() const {
        return static_cast<T*>(view_.buf);
    }

  private:
    Py_buffer view_;
    bool held_;
};

// Target of an array's __array_struct__ (numpy's array interface, version 3). The buffer protocol would not work:
// arrays of ml_dtypes types do not support it.
struct ArrayStruct {
    int two, nd;
    char kind;
    int itemsize, flags;
    Py_ssize_t *shape, *strides;
    void* data;
    PyObject* descr;

    static constexpr int kNative = 0x0200;  // native byte order
};

// Reads data pointer, shape and row stride of an array with `axes` axes. Returns false with an exception set unless its
// elements are native and contiguous along the last axis.
inline bool read_array(PyObject* array, int axes, int64_t itemsize, const uint8_t** data, int64_t* shape,
                       int64_t* stride) {
    PyObject* capsule = PyObject_GetAttrString(array, "__array_struct__");
    if (capsule == nullptr) return false;
    const auto* found = static_cast<const ArrayStruct*>(PyCapsule_GetPointer(capsule, nullptr));
    bool fits =
        found != nullptr && found->nd == axes && found->itemsize == itemsize && (found->flags & ArrayStruct::kNative);
    if (fits) {
        const int last = axes - 1;
        for (int i = 0; i < axes; ++i) shape[i] = found->shape[i];
        fits = found->strides[last] == itemsize || shape[last] < 2 || shape[0] == 0;
        *data = static_cast<const uint8_t*>(found->data);
        *stride = found->strides[0];
    }
    Py_DECREF(capsule);
    if (!fits && !PyErr_Occurred()) {
        PyErr_Format(PyExc_ValueError,
                     "an array of %d axes, native, with %lld bytes an element next to each other, is needed", axes,
                     static_cast<long long>(itemsize));
    }
    return fits;
}

// Reads one side, (matrix, dtype code, row index or None), to its rows, their number and their width.
inline bool read_rows(PyObject* matrix, int dtype, PyObject* index, Rows* rows, int64_t* count, int64_t* width) {
    if (dtype < 0 || dtype > kBool) return PyErr_Format(PyExc_ValueError, "invalid dtype %d", dtype) != nullptr;
    int64_t shape[2], stride;
    rows->dtype = dtype, rows->index = nullptr;
    if (!read_array(matrix, 2, kItemSize[dtype], &rows->data, shape, &rows->stride)) return false;
    *count = shape[0], *width = shape[1];
    if (index == Py_None) return true;
    const uint8_t* data;
    if (!read_array(index, 1, 8, &data, count, &stride)) return false;
    rows->index = reinterpret_cast<const int64_t*>(data);
    for (int64_t i = 0; i < *count; ++i) {
        if (rows->index[i] < 0 || rows->index[i] >= shape[0]) {
            PyErr_Format(PyExc_IndexError, "row %lld of %lld", static_cast<long long>(rows->index[i]),
                         static_cast<long long>(shape[0]));
            return false;
        }
    }
    return true;
}

// Reads both sides of a strip, see row_blocks.py. Returns false with an exception set on failure.
inline bool read_matrices(PyObject* baseline, PyObject* target, const int* dtypes, PyObject* const* index,
                          Matrices* out) {
    int64_t rows = 0, width = 0;
    if (!read_rows(baseline, dtypes[0], index[0], &out->baseline, &out->rows, &out->width) ||
        !read_rows(target, dtypes[1], index[1], &out->target, &rows, &width)) {
        return false;
    }
    if (rows == out->rows && width == out->width) return true;
    PyErr_SetString(PyExc_ValueError, "both sides must have as many rows of one width");
    return false;
}

}  // namespace ts
