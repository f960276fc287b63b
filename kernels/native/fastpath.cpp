// What a hook asks first: a firing of which a pen can take everything never reaches the dumper's Python.
//
// A FastPath answers True when it has taken the firing, and False, having done nothing, for any other: one that is not
// the first here in its step, whose value is not as one of the last was, in a step of which anything is unusual. Then
// dumper/collector.py takes it, and the records are the same.

#include "pen.h"

#include <structmember.h>

#include <utility>
#include <vector>

#include "calls.h"

namespace ts {
namespace {

struct FastPath {
    PyObject_HEAD
    Pen* pen;
    PyObject* patterns;  // tuple: how the last values lay, see dumper/pattern.py
    long long serial;   // of the last step in which something fired here in the first micro-batch
    vectorcallfunc call;
};

// One leaf that is to be recorded.
struct Leaf {
    Stencil* stencil;
    PyObject* where;  // where the whole tensor is kept: (port, layout); else null
    Lying lying;
};
using Leaves = std::vector<Leaf>;

bool is_as_known(const Stencil* stencil, PyObject* value) {
    if (PyType_Check(stencil->kind)) return stencil->kind == reinterpret_cast<PyObject*>(Py_TYPE(value));
    return Py_TYPE(stencil->kind) == Py_TYPE(value) && PyObject_RichCompareBool(stencil->kind, value, Py_EQ) == 1;
}

bool match_leaf(const Pen* pen, PyObject* known, PyObject* where, PyObject* value, Leaves* found) {
    auto* stencil = reinterpret_cast<Stencil*>(known);
    Lying lying;
    if (stencil->is_literal ? !is_as_known(stencil, value) : !find(pen, stencil, value, &lying)) return false;
    found->push_back({stencil, where, std::move(lying)});
    return true;
}

// Whether the value lies as the pattern says; an exception may be set if not.
bool match(const Pen* pen, PyObject* pattern, PyObject* value, Leaves* found) {
    if (Py_TYPE(pattern) == stencil_type) return match_leaf(pen, pattern, nullptr, value, found);
    if (PyList_CheckExact(pattern)) {
        return match_leaf(pen, PyList_GET_ITEM(pattern, 0), PyList_GET_ITEM(pattern, 1), value, found);
    }
    if (pattern == Py_None) return value == Py_None;
    if (!PyTuple_CheckExact(pattern) || !PyTuple_CheckExact(value)) return false;
    const Py_ssize_t size = PyTuple_GET_SIZE(pattern);
    if (PyTuple_GET_SIZE(value) != size) return false;
    for (Py_ssize_t i = 0; i < size; ++i) {
        if (!match(pen, PyTuple_GET_ITEM(pattern, i), PyTuple_GET_ITEM(value, i), found)) return false;
    }
    return true;
}

// As match, for keyword arguments: the pattern is (name, pattern, name, pattern, ...).
bool match_keywords(const Pen* pen, PyObject* pattern, PyObject* keywords, Leaves* found) {
    Py_ssize_t place = 0, i = 0;
    PyObject *name, *value;
    if (PyTuple_GET_SIZE(pattern) != 2 * PyDict_GET_SIZE(keywords)) return false;
    for (; PyDict_Next(keywords, &place, &name, &value); i += 2) {
        if (PyObject_RichCompareBool(PyTuple_GET_ITEM(pattern, i), name, Py_EQ) != 1) return false;
        if (!match(pen, PyTuple_GET_ITEM(pattern, i + 1), value, found)) return false;
    }
    return true;
}

// The leaves of (output) or (args, kwargs).
bool match_call(const Pen* pen, PyObject* pattern, PyObject* const* args, Py_ssize_t count, Leaves* found) {
    if (count == 1) return match(pen, pattern, args[0], found);
    return count == 2 && PyTuple_CheckExact(pattern) && PyTuple_GET_SIZE(pattern) == 2 && PyDict_Check(args[1]) &&
           match(pen, PyTuple_GET_ITEM(pattern, 0), args[0], found) &&
           match_keywords(pen, PyTuple_GET_ITEM(pattern, 1), args[1], found);
}

// Whether the step with this number is still open: another thread may end it.
bool is_open(const Pen* pen, long long serial) { return pen->open.step && pen->serial == serial; }

// Whether the leaf was taken; an exception may be set either way.
bool take(Pen* pen, const Leaf& leaf, long long serial) {
    if (!leaf.where) return write(pen, leaf.stencil, leaf.lying);
    const Owned send(Py_NewRef(pen->open.send));
    const Dense dense(leaf.lying, leaf.stencil->nbytes());
    if (PyErr_Occurred() || !is_open(pen, serial)) return false;
    if (repeat(pen, leaf.stencil, leaf.lying, dense.bytes())) return true;
    if (PyErr_Occurred() || !is_open(pen, serial)) return false;
    const Owned at(PyLong_FromVoidPtr(const_cast<uint8_t*>(dense.bytes())));
    return at && (Owned(PyObject_CallFunctionObjArgs(send.get(), leaf.where, at.get(), nullptr)), true);
}

bool take_all(Pen* pen, const Leaves& leaves) {
    const long long serial = pen->serial;
    for (const Leaf& leaf : leaves) {
        if (!is_open(pen, serial) || !take(pen, leaf, serial) || PyErr_Occurred()) return false;
    }
    return true;
}

// Whether the value lies as one of the patterns says; false with an exception set where it is not for us to catch.
bool match_any(const Pen* pen, PyObject* patterns, PyObject* const* args, Py_ssize_t count, Leaves* found) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(patterns); ++i) {
        if (match_call(pen, PyTuple_GET_ITEM(patterns, i), args, count, found)) return true;
        if (!forgive()) return false;
        found->clear();
    }
    return false;
}

// (output) or (args, kwargs) -> whether the firing is taken
PyObject* answer(PyObject* object, PyObject* const* args, size_t flags, PyObject*) {
    auto* self = reinterpret_cast<FastPath*>(object);
    if (self->serial == self->pen->serial || !PyTuple_CheckExact(self->patterns)) Py_RETURN_FALSE;
    const Owned patterns(Py_NewRef(self->patterns));
    Leaves leaves;
    bool is_taken = false;
    if (is_ordinary(self->pen) && match_any(self->pen, patterns.get(), args, PyVectorcall_NARGS(flags), &leaves)) {
        self->serial = self->pen->serial;
        is_taken = take_all(self->pen, leaves);
    }
    return forgive() ? PyBool_FromLong(is_taken) : nullptr;  // whoever looks closer says what is the matter
}

// FastPath(pen)
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject* pen;
    if (!PyArg_ParseTuple(args, "O!", pen_type, &pen)) return nullptr;
    auto* self = reinterpret_cast<FastPath*>(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    self->pen = reinterpret_cast<Pen*>(Py_NewRef(pen)), self->patterns = PyTuple_New(0);
    self->serial = -1, self->call = answer;
    return reinterpret_cast<PyObject*>(self);
}

void free(PyObject* object) {
    auto* self = reinterpret_cast<FastPath*>(object);
    PyTypeObject* type = Py_TYPE(object);
    Py_XDECREF(self->pen), Py_XDECREF(self->patterns);
    type->tp_free(object);
    Py_DECREF(type);
}

PyMemberDef kMembers[] = {
    {"patterns", T_OBJECT, offsetof(FastPath, patterns), 0, nullptr},
    {"serial", T_LONGLONG, offsetof(FastPath, serial), 0, nullptr},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(FastPath, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot kSlots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free)},
    {Py_tp_members, kMembers},
    {0, nullptr},
};
PyType_Spec kSpec = {"tapscope.kernels.native._tapscope.FastPath", sizeof(FastPath), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, kSlots};

}  // namespace

bool add_fast_path(PyObject* module) {
    const Owned type(PyType_FromSpec(&kSpec));
    return type && PyModule_AddObjectRef(module, "FastPath", type.get()) == 0;
}

}  // namespace ts
