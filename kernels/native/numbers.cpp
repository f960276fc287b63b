// Sequence numbers of records: an iterator from 0 whose take() reserves several numbers atomically.

#include "record_writer.h"

namespace ts {
namespace {

struct Numbers {
    PyObject_HEAD
    long long next;
};

PyObject* next_number(PyObject* object) { return PyLong_FromLongLong(reinterpret_cast<Numbers*>(object)->next++); }

// (N) -> the first of N reserved consecutive numbers
PyObject* take(PyObject* object, PyObject* count) {
    const long long wanted = PyLong_AsLongLong(count);
    if (wanted == -1 && PyErr_Occurred()) return nullptr;
    auto* self = reinterpret_cast<Numbers*>(object);
    const long long first = self->next;
    self->next += wanted;
    return PyLong_FromLongLong(first);
}

void free_numbers(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    type->tp_free(object);
    Py_DECREF(type);
}

PyMethodDef kMethods[] = {
    {"take", take, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot kSlots[] = {
    {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free_numbers)},
    {Py_tp_iter, reinterpret_cast<void*>(PyObject_SelfIter)},
    {Py_tp_iternext, reinterpret_cast<void*>(next_number)},
    {Py_tp_methods, kMethods},
    {0, nullptr},
};
PyType_Spec kSpec = {"tapscope.kernels.native._tapscope.Numbers", sizeof(Numbers), 0, Py_TPFLAGS_DEFAULT, kSlots};

}  // namespace

bool add_numbers(PyObject* module) {
    const Owned type(PyType_FromSpec(&kSpec));
    return type && PyModule_AddObjectRef(module, "Numbers", type.get()) == 0;
}

}  // namespace ts
