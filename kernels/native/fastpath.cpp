// What a hook asks first: a firing of which a pen can take everything never reaches the dumper's Python.
//
// A FastPath answers True when it has taken the firing, and False, having done nothing, for any other: one that is not
// the first here in its step, whose tensor lies otherwise than the last one, in a step of which anything is unusual.
// Then dumper/collector.py takes it, and the records are the same.

#include "pen.h"

#include <structmember.h>

#include "calls.h"

namespace ts {
namespace {

constexpr long long kMany = 64;  // lines that wait in a pen at most: until they are queued only a crash can lose them

struct FastPath {
    PyObject_HEAD
    Pen* pen;
    PyObject* stencil;  // Stencil of the one port that it knows; None while nothing may be taken
    PyObject* port;     // where whole tensors are kept: the port; None where only statistics are
    long long serial;   // of the last step in which something fired here in the first micro-batch
    vectorcallfunc call;
};

// The tensor of an output, or of (args, kwargs) that hold nothing else; null for any other.
PyObject* only_value(PyObject* const* args, Py_ssize_t count) {
    if (count == 1) return args[0];
    if (count != 2 || !PyTuple_Check(args[0]) || !PyDict_Check(args[1])) return nullptr;
    return PyTuple_GET_SIZE(args[0]) == 1 && PyDict_GET_SIZE(args[1]) == 0 ? PyTuple_GET_ITEM(args[0], 0) : nullptr;
}

// Whether the tensor at the address was taken; an exception may be set either way.
bool take(FastPath* path, const Stencil* stencil, uint64_t address) {
    Pen* pen = path->pen;
    if (path->port != Py_None) {
        const Owned send(Py_NewRef(pen->open.send)), port(Py_NewRef(path->port)), at(PyLong_FromUnsignedLongLong(address));
        return at && (Owned(PyObject_CallFunctionObjArgs(send.get(), port.get(), at.get(), nullptr)), true);
    }
    const long long waiting = write_at(pen, stencil, address);
    if (waiting >= kMany) {
        const Owned pass_on(Py_NewRef(pen->open.pass_on));
        Owned(PyObject_CallNoArgs(pass_on.get()));
    }
    return waiting > 0;
}

// (output) or (args, kwargs) -> whether the firing is taken
PyObject* answer(PyObject* object, PyObject* const* args, size_t flags, PyObject*) {
    auto* self = reinterpret_cast<FastPath*>(object);
    const Pen* pen = self->pen;
    PyObject* value = only_value(args, PyVectorcall_NARGS(flags));
    if (!value || self->stencil == Py_None || self->serial == pen->serial) Py_RETURN_FALSE;
    const Owned held(Py_NewRef(self->stencil));
    auto* stencil = reinterpret_cast<Stencil*>(held.get());
    uint64_t address = 0;
    bool is_taken = false;
    if (Py_TYPE(held.get()) == stencil_type && is_ordinary(pen) && find(pen, stencil, value, &address)) {
        self->serial = pen->serial;
        is_taken = take(self, stencil, address);
    }
    PyErr_Clear();  // whoever looks closer says what is the matter
    return PyBool_FromLong(is_taken);
}

// FastPath(pen)
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject* pen;
    if (!PyArg_ParseTuple(args, "O!", pen_type, &pen)) return nullptr;
    auto* self = reinterpret_cast<FastPath*>(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    self->pen = reinterpret_cast<Pen*>(Py_NewRef(pen));
    self->stencil = Py_NewRef(Py_None), self->port = Py_NewRef(Py_None);
    self->serial = -1, self->call = answer;
    return reinterpret_cast<PyObject*>(self);
}

int visit(PyObject* object, visitproc visit, void* arg) {
    auto* self = reinterpret_cast<FastPath*>(object);
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->pen);
    Py_VISIT(self->stencil);
    Py_VISIT(self->port);
    return 0;
}

int forget(PyObject* object) {
    auto* self = reinterpret_cast<FastPath*>(object);
    Py_XSETREF(self->stencil, Py_NewRef(Py_None));
    Py_XSETREF(self->port, Py_NewRef(Py_None));
    return 0;
}

void free(PyObject* object) {
    auto* self = reinterpret_cast<FastPath*>(object);
    PyTypeObject* type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    Py_XDECREF(self->pen), Py_XDECREF(self->stencil), Py_XDECREF(self->port);
    type->tp_free(object);
    Py_DECREF(type);
}

PyMemberDef kMembers[] = {
    {"stencil", T_OBJECT, offsetof(FastPath, stencil), 0, nullptr},
    {"port", T_OBJECT, offsetof(FastPath, port), 0, nullptr},
    {"serial", T_LONGLONG, offsetof(FastPath, serial), 0, nullptr},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(FastPath, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot kSlots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_traverse, reinterpret_cast<void*>(visit)},
    {Py_tp_clear, reinterpret_cast<void*>(forget)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free)},
    {Py_tp_members, kMembers},
    {0, nullptr},
};
PyType_Spec kSpec = {"tapscope.kernels.native._tapscope.FastPath", sizeof(FastPath), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, kSlots};

}  // namespace

bool add_fast_path(PyObject* module) {
    const Owned type(PyType_FromSpec(&kSpec));
    return type && PyModule_AddObjectRef(module, "FastPath", type.get()) == 0;
}

}  // namespace ts
