// The types Stencil and Pen of Python, see pen.cpp.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

namespace ts {

// Adds them to the module; false with an exception set.
bool add_pen(PyObject* module);

}  // namespace ts
