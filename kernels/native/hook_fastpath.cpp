// Fast path of a hook: a firing that the record writer can handle completely never reaches the dumper's Python code.
//
// A FastPath returns True when it has recorded the firing. It returns False, without side effects, if the firing is not
// the first of this hook in its step, if the value matches none of the known patterns, or if the step is not ordinary.
// dumper/taps/collector.py then records the firing, with the same records.

#include "record_writer.h"

#include <structmember.h>

#include <utility>
#include <vector>

#include "py_util.h"

namespace ts {
namespace {

PyObject* name_row_ranges;

struct FastPath {
    PyObject_HEAD
    RecordWriter* writer;
    PyObject* patterns;  // tuple: structure of the last values, see dumper/taps/firing_pattern.py
    long long serial;    // serial of the last step in which this hook fired in the first microbatch
    vectorcallfunc call;
};

// One leaf to record.
struct Leaf {
    RecordTemplate* record_template;
    PyObject* where;  // (port, layout) if the full tensor is kept; else null
    Owned value;      // owned: a property may create a new object at each access
    StridedView view;
};
using Leaves = std::vector<Leaf>;

bool is_as_known(const RecordTemplate* record_template, PyObject* value) {
    if (PyType_Check(record_template->kind))
        return record_template->kind == reinterpret_cast<PyObject*>(Py_TYPE(value));
    return Py_TYPE(record_template->kind) == Py_TYPE(value) &&
           PyObject_RichCompareBool(record_template->kind, value, Py_EQ) == 1;
}

// Returns whether the tensors of a row set hold these rows (a tuple, or None) in the open step.
bool holds_rows(const RecordWriter* writer, PyObject* row_set, PyObject* rows) {
    const Owned ranges(PyObject_GetAttr(writer->open.step, name_row_ranges));
    if (!ranges || !PyDict_Check(ranges.get())) return false;
    PyObject* found = PyDict_GetItemWithError(ranges.get(), row_set);
    return !PyErr_Occurred() && PyObject_RichCompareBool(found ? found : Py_None, rows, Py_EQ) == 1;
}

bool match_leaf(const RecordWriter* writer, PyObject* known, PyObject* where, PyObject* value, Leaves* found) {
    auto* record_template = reinterpret_cast<RecordTemplate*>(known);
    StridedView view;
    if (record_template->is_literal) {
        if (!is_as_known(record_template, value)) return false;
    } else if (record_template->launch.function) {
        if (where || num_captures || writer->open.room == Py_None) return false;
        if (!find_on_device(writer, record_template, value, &view) || !has_keys(writer, record_template)) return false;
    } else if (!find(writer, record_template, value, &view)) {
        return false;
    }
    found->push_back({record_template, where, Owned(Py_NewRef(value)), std::move(view)});
    return true;
}

bool match(const RecordWriter* writer, PyObject* pattern, PyObject* value, Leaves* found);

// As match, for a dict: from index `first` on, the pattern (a tuple or list) is name, pattern, name, pattern, ...
bool match_items(const RecordWriter* writer, PyObject* pattern, Py_ssize_t first, PyObject* items, Leaves* found) {
    PyObject* const* known = PySequence_Fast_ITEMS(pattern) + first;
    Py_ssize_t place = 0;
    PyObject *name, *value;
    if (PySequence_Fast_GET_SIZE(pattern) - first != 2 * PyDict_GET_SIZE(items)) return false;
    for (; PyDict_Next(items, &place, &name, &value); known += 2) {
        if (PyObject_RichCompareBool(known[0], name, Py_EQ) != 1 || !match(writer, known[1], value, found))
            return false;
    }
    return true;
}

// Matches a tensor that is kept in full or holds the rows of a row set.
bool match_tensor(const RecordWriter* writer, PyObject* pattern, PyObject* value, Leaves* found) {
    PyObject *where = PyList_GET_ITEM(pattern, 1), *row_set = PyList_GET_ITEM(pattern, 2);
    return (row_set == Py_None || holds_rows(writer, row_set, PyList_GET_ITEM(pattern, 3))) &&
           match_leaf(writer, PyList_GET_ITEM(pattern, 0), where == Py_None ? nullptr : where, value, found);
}

// Matches a mapping or dataclass.
bool match_object(const RecordWriter* writer, PyObject* pattern, PyObject* value, Leaves* found) {
    const Py_ssize_t size = PyList_GET_SIZE(pattern);
    if (PyList_GET_ITEM(pattern, 0) != reinterpret_cast<PyObject*>(Py_TYPE(value))) return false;
    if (PyDict_Check(value)) return match_items(writer, pattern, 1, value, found);
    for (Py_ssize_t i = 1; i < size; i += 2) {
        const Owned field(PyObject_GetAttr(value, PyList_GET_ITEM(pattern, i)));
        if (!field || !match(writer, PyList_GET_ITEM(pattern, i + 1), field.get(), found)) return false;
    }
    return true;
}

// Returns whether the value has the structure of the pattern, and collects its leaves; if not, an exception may be set.
bool match(const RecordWriter* writer, PyObject* pattern, PyObject* value, Leaves* found) {
    if (Py_TYPE(pattern) == template_type) return match_leaf(writer, pattern, nullptr, value, found);
    if (PyList_CheckExact(pattern)) {
        const bool is_tensor = Py_TYPE(PyList_GET_ITEM(pattern, 0)) == template_type;
        return (is_tensor ? match_tensor : match_object)(writer, pattern, value, found);
    }
    if (pattern == Py_None) return value == Py_None;
    if (!PyTuple_CheckExact(pattern) || !PyTuple_CheckExact(value)) return false;
    const Py_ssize_t size = PyTuple_GET_SIZE(pattern);
    if (PyTuple_GET_SIZE(value) != size) return false;
    for (Py_ssize_t i = 0; i < size; ++i) {
        if (!match(writer, PyTuple_GET_ITEM(pattern, i), PyTuple_GET_ITEM(value, i), found)) return false;
    }
    return true;
}

// Matches (output) or (args, kwargs) and collects the leaves.
bool match_call(const RecordWriter* writer, PyObject* pattern, PyObject* const* args, Py_ssize_t count, Leaves* found) {
    if (count == 1) return match(writer, pattern, args[0], found);
    return count == 2 && PyTuple_CheckExact(pattern) && PyTuple_GET_SIZE(pattern) == 2 && PyDict_Check(args[1]) &&
           match(writer, PyTuple_GET_ITEM(pattern, 0), args[0], found) &&
           match_items(writer, PyTuple_GET_ITEM(pattern, 1), 0, args[1], found);
}

// Returns whether the step with this serial is still open: another thread may end it.
bool is_open(const RecordWriter* writer, long long serial) { return writer->open.step && writer->serial == serial; }

// Returns whether the leaf was recorded; an exception may be set either way.
bool take(RecordWriter* writer, const Leaf& leaf, long long serial) {
    if (leaf.record_template->launch.function) return summarize(writer, leaf.record_template, leaf.view);
    if (!leaf.where) return write(writer, leaf.record_template, leaf.view);
    const Owned send(Py_NewRef(writer->open.send));
    const Dense dense(leaf.view, leaf.record_template->nbytes());
    if (PyErr_Occurred() || !is_open(writer, serial)) return false;
    if (repeat(writer, leaf.record_template, leaf.view, dense.bytes())) return true;
    if (PyErr_Occurred() || !is_open(writer, serial)) return false;
    const Owned at(PyLong_FromVoidPtr(const_cast<uint8_t*>(dense.bytes())));
    return at && (Owned(PyObject_CallFunctionObjArgs(send.get(), leaf.where, at.get(), nullptr)), true);
}

bool take_all(RecordWriter* writer, const Leaves& leaves) {
    const long long serial = writer->serial;
    if (!is_open(writer, serial) || !announce(writer)) return false;
    for (const Leaf& leaf : leaves) {
        if (!is_open(writer, serial) || !take(writer, leaf, serial) || PyErr_Occurred()) return false;
    }
    return true;
}

// Returns whether the value matches one of the patterns. If false, an exception is set only if it must propagate.
bool match_any(const RecordWriter* writer, PyObject* patterns, PyObject* const* args, Py_ssize_t count, Leaves* found) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(patterns); ++i) {
        if (match_call(writer, PyTuple_GET_ITEM(patterns, i), args, count, found)) return true;
        if (!clear_exception()) return false;
        found->clear();
    }
    return false;
}

// (output) or (args, kwargs) -> whether the firing was recorded
PyObject* call_hook(PyObject* object, PyObject* const* args, size_t flags, PyObject*) {
    auto* self = reinterpret_cast<FastPath*>(object);
    if (self->serial == self->writer->serial || !PyTuple_CheckExact(self->patterns)) Py_RETURN_FALSE;
    const Owned patterns(Py_NewRef(self->patterns));
    Leaves leaves;
    bool is_taken = false;
    if (is_ordinary(self->writer) &&
        match_any(self->writer, patterns.get(), args, PyVectorcall_NARGS(flags), &leaves)) {
        self->serial = self->writer->serial;
        is_taken = take_all(self->writer, leaves);
    }
    return clear_exception() ? PyBool_FromLong(is_taken) : nullptr;  // the Python path reports the error
}

// FastPath(writer)
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject* writer;
    if (!PyArg_ParseTuple(args, "O!", writer_type, &writer)) return nullptr;
    auto* self = reinterpret_cast<FastPath*>(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    self->writer = reinterpret_cast<RecordWriter*>(Py_NewRef(writer)), self->patterns = PyTuple_New(0);
    self->serial = -1, self->call = call_hook;
    return reinterpret_cast<PyObject*>(self);
}

void free(PyObject* object) {
    auto* self = reinterpret_cast<FastPath*>(object);
    PyTypeObject* type = Py_TYPE(object);
    Py_XDECREF(self->writer), Py_XDECREF(self->patterns);
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
    name_row_ranges = PyUnicode_InternFromString("row_ranges");
    return type && name_row_ranges && PyModule_AddObjectRef(module, "FastPath", type.get()) == 0;
}

}  // namespace ts
