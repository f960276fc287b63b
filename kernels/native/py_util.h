// Helpers for functions called from Python: owned references, releasing the GIL, and METH_FASTCALL casts.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <utility>

namespace ts {

// A strong reference that is released at the end of its scope.
class Owned {
  public:
    explicit Owned(PyObject* object) : object_(object) {}
    ~Owned() { Py_XDECREF(object_); }
    Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
    Owned& operator=(Owned&& other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    PyObject* get() const { return object_; }
    explicit operator bool() const { return object_ != nullptr; }

  private:
    PyObject* object_;
};

// Clears the current exception. Returns false for an exception that must propagate, such as KeyboardInterrupt.
inline bool clear_exception() {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return false;
    PyErr_Clear();
    return true;
}

// Below this size the GIL is kept: reacquiring it from a busy thread takes up to 5 ms, the work itself less than 0.2
// ms.
constexpr int64_t kBrief = 1 << 20;

template <class Work>
void run(int64_t nbytes, Work work) {
    if (nbytes < kBrief) {
        work();
        return;
    }
    Py_BEGIN_ALLOW_THREADS;
    work();
    Py_END_ALLOW_THREADS;
}

template <PyObject* (*f)(PyObject*, PyObject* const*, Py_ssize_t)>
PyCFunction fast() {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f));
}

}  // namespace ts
