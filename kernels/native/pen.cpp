// The lines of records of which only statistics are kept, without Python in between.
//
// A Pen writes lines by a Stencil into a buffer. What a Pen does for a tensor, dumper/taker.py does too, for any: the
// lines are the same.

#include "pen.h"

#include <pthread.h>
#include <structmember.h>

#include <array>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "calls.h"
#include "taken.h"

namespace ts {
namespace {

constexpr int64_t kSmall = 16 << 10;  // reading so few bytes again is no dearer than asking whether they were seen

constexpr long long kMany = 64;  // lines that wait here at most: until they are queued only a crash can lose them

using Place = std::tuple<uint64_t, int64_t, int>;  // address of the first element, elements, code

struct Seen {
    uint8_t digest[16];
    std::string text;
};

}  // namespace

struct PenState {
    std::string lines;
    std::string step;
    uint64_t generation = 0;  // counts the steps that began or ended
    uint64_t forks = 0;       // of this process when the step began
    std::map<Place, Seen> places;
};

PyTypeObject* pen_type = nullptr;

namespace {

uint64_t num_forks = 0;  // a child has no pipeline, and the rank is its parent's

PyObject *name_announced, *name_micro, *name_in_full, *name_halted;

std::array<PyObject*, 7> all_of(const Surroundings& around) {
    const auto& [types, exchange, keys_of, plain, graph_task, tags, no_tags] = around;
    return {types, exchange, keys_of, plain, graph_task, tags, no_tags};
}

// Pen(types, exchange, keys_of, plain, graph_task, tags, no_tags)
PyObject* make_pen(PyTypeObject* type, PyObject* args, PyObject*) {
    Surroundings around;
    if (!PyArg_ParseTuple(args, "O!OOOOOO", &PyTuple_Type, &around.types, &around.exchange, &around.keys_of,
                          &around.plain, &around.graph_task, &around.tags, &around.no_tags)) {
        return nullptr;
    }
    auto* self = reinterpret_cast<Pen*>(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    for (PyObject* each : all_of(around)) Py_INCREF(each);
    self->around = around;
    self->view = dlpack::view_of(around.exchange);
    self->state = new PenState;
    return reinterpret_cast<PyObject*>(self);
}

void close(Pen* pen) {
    ++pen->state->generation;
    for (PyObject** each : {&pen->open.step, &pen->open.numbers, &pen->open.pass_on, &pen->open.send}) Py_CLEAR(*each);
}

void free_pen(PyObject* object) {
    auto* self = reinterpret_cast<Pen*>(object);
    PyTypeObject* type = Py_TYPE(object);
    close(self);
    for (PyObject* each : all_of(self->around)) Py_XDECREF(each);
    delete self->state;
    type->tp_free(object);
    Py_DECREF(type);
}

bool is_true(PyObject* object, PyObject* name) {
    const Owned value(PyObject_GetAttr(object, name));
    return value && PyObject_IsTrue(value.get()) == 1;
}

bool is_without_tags(const Pen* pen) {
    PyObject* tags = nullptr;
    if (PyContextVar_Get(pen->around.tags, nullptr, &tags) < 0) return false;
    return Owned(tags).get() == pen->around.no_tags;
}

bool is_in_backward(const Pen* pen) {
    const Owned task(PyObject_CallNoArgs(pen->around.graph_task));
    return !task || PyLong_AsLong(task.get()) != -1;
}

// What lies at the place, where this step has met it and its bytes, which are given, are still the same.
bool recall(const PenState* state, const Stencil* stencil, uint64_t place, const uint8_t* bytes, Seen* found) {
    const int64_t nbytes = stencil->count * stencil->width;
    if (nbytes < kSmall) return false;
    const auto seen = state->places.find({place, stencil->count, stencil->code});
    if (seen == state->places.end()) return false;
    *found = seen->second;  // the map may change while the GIL is released
    uint8_t digest[16];
    run(nbytes, [&] { ts_hash(bytes, nbytes, digest); });
    return !std::memcmp(digest, found->digest, sizeof digest);
}

// What lies at the place, noted for this step; and a copy of its bytes where there is a target.
Seen read(PenState* state, const Stencil* stencil, uint64_t place, const uint8_t* bytes, void* target) {
    const int64_t nbytes = stencil->count * stencil->width;
    Taken found;
    int64_t size = 0;
    run(nbytes, [&] { size = ts_take(bytes, stencil->count, stencil->code, 1, target, &found); });
    Seen seen;
    std::memcpy(seen.digest, found.digest, sizeof seen.digest);
    seen.text.assign(found.text, size_t(size));
    if (nbytes >= kSmall) state->places[{place, stencil->count, stencil->code}] = seen;
    return seen;
}

// The members `hash` to `stats` of a line; empty with an exception set where there is no memory.
std::string content_of(PenState* state, const Stencil* stencil, const Lying& lying) {
    const Dense dense(lying, stencil->count * stencil->width);
    if (PyErr_Occurred()) return "";
    Seen found;
    if (recall(state, stencil, lying.address, dense.bytes(), &found)) return found.text;
    return read(state, stencil, lying.address, dense.bytes(), nullptr).text;
}

const uint8_t* at(uint64_t address) { return reinterpret_cast<const uint8_t*>(uintptr_t(address)); }

PyObject* as_tuple(const Seen& seen) {
    return Py_BuildValue("y#y#", seen.text.data(), Py_ssize_t(seen.text.size()),
                         reinterpret_cast<const char*>(seen.digest), Py_ssize_t(sizeof seen.digest));
}

void add_line(Pen* pen, const Stencil* stencil, const std::string& number, const std::string& content) {
    std::string& to = pen->state->lines;
    if (pen->waiting) to += '\n';
    to += "{\"type\":\"record\",\"seq\":";
    to.append(number).append(*stencil->head).append(pen->state->step).append(*stencil->tail);
    to.append(stencil->is_literal ? "" : ",").append(content) += '}';
    ++pen->waiting;
}

// (stencil, tensor) -> address of its elements, one after the other; 0 when they have gaps, or it is not plain or another
// than the stencil's
PyObject* pen_find(PyObject* object, PyObject* const* args, Py_ssize_t count) {
    if (count != 2 || Py_TYPE(args[0]) != stencil_type) return PyErr_Format(PyExc_TypeError, "find(stencil, tensor)");
    Lying lying;
    const bool found = find(reinterpret_cast<Pen*>(object), reinterpret_cast<Stencil*>(args[0]), args[1], &lying);
    if (!forgive()) return nullptr;  // whoever looks closer says what is the matter
    return PyLong_FromUnsignedLongLong(found && lying.outer.empty() ? lying.address : 0);
}

// (stencil, tensor) -> whether its line was written; the tensor is not for this pen otherwise
PyObject* pen_write(PyObject* object, PyObject* const* args, Py_ssize_t count) {
    if (count != 2 || Py_TYPE(args[0]) != stencil_type) return PyErr_Format(PyExc_TypeError, "write(stencil, tensor)");
    auto* self = reinterpret_cast<Pen*>(object);
    auto* stencil = reinterpret_cast<Stencil*>(args[0]);
    Lying lying;
    const bool is_written = self->open.step && find(self, stencil, args[1], &lying) && write(self, stencil, lying);
    return forgive() ? PyBool_FromLong(is_written) : nullptr;  // whoever looks closer says what is the matter
}

// (stencil, address) -> (text, digest) of what this step has met there and is still the same; else None
PyObject* pen_recall(PyObject* object, PyObject* const* args, Py_ssize_t count) {
    if (count != 2 || Py_TYPE(args[0]) != stencil_type) return PyErr_Format(PyExc_TypeError, "recall(stencil, address)");
    const uint64_t address = PyLong_AsUnsignedLongLongMask(args[1]);
    Seen found;
    if (PyErr_Occurred()) return nullptr;
    const auto* self = reinterpret_cast<Pen*>(object);
    if (!recall(self->state, reinterpret_cast<Stencil*>(args[0]), address, at(address), &found)) Py_RETURN_NONE;
    return as_tuple(found);
}

// (stencil, address, target) -> (text, digest) of what lies there, and a copy of it at the target
PyObject* pen_copy(PyObject* object, PyObject* const* args, Py_ssize_t count) {
    if (count != 3 || Py_TYPE(args[0]) != stencil_type) {
        return PyErr_Format(PyExc_TypeError, "copy(stencil, address, target)");
    }
    const uint64_t address = PyLong_AsUnsignedLongLongMask(args[1]), target = PyLong_AsUnsignedLongLongMask(args[2]);
    if (PyErr_Occurred()) return nullptr;
    const auto* stencil = reinterpret_cast<Stencil*>(args[0]);
    auto* state = reinterpret_cast<Pen*>(object)->state;
    return as_tuple(read(state, stencil, address, at(address), reinterpret_cast<void*>(uintptr_t(target))));
}

// (step, its number, its serial, numbers, pass_on, send) -> None; memory is used again for other values
PyObject* pen_begin(PyObject* object, PyObject* args) {
    auto* self = reinterpret_cast<Pen*>(object);
    OpenStep open;
    const char* number;
    long long serial;
    if (!PyArg_ParseTuple(args, "OsLOOO", &open.step, &number, &serial, &open.numbers, &open.pass_on, &open.send)) {
        return nullptr;
    }
    for (PyObject* each : {open.step, open.numbers, open.pass_on, open.send}) Py_INCREF(each);
    close(self);
    self->open = open, self->serial = serial;
    self->state->step = number, self->state->forks = num_forks;
    self->state->places.clear();
    Py_RETURN_NONE;
}

// () -> None; nothing is written until another step begins
PyObject* pen_end(PyObject* object, PyObject*) {
    close(reinterpret_cast<Pen*>(object));
    Py_RETURN_NONE;
}

// () -> (lines, how many); they wait no more
PyObject* pen_drain(PyObject* object, PyObject*) {
    auto* self = reinterpret_cast<Pen*>(object);
    std::string& lines = self->state->lines;
    PyObject* found = Py_BuildValue("y#L", lines.data(), Py_ssize_t(lines.size()), self->waiting);
    if (found) lines.clear(), self->waiting = 0;
    return found;
}

PyMethodDef kPenMethods[] = {
    {"begin", pen_begin, METH_VARARGS, nullptr},
    {"find", fast<pen_find>(), METH_FASTCALL, nullptr},
    {"write", fast<pen_write>(), METH_FASTCALL, nullptr},
    {"recall", fast<pen_recall>(), METH_FASTCALL, nullptr},
    {"copy", fast<pen_copy>(), METH_FASTCALL, nullptr},
    {"drain", pen_drain, METH_NOARGS, nullptr},
    {"end", pen_end, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyMemberDef kPenMembers[] = {
    {"waiting", T_LONGLONG, offsetof(Pen, waiting), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot kPenSlots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make_pen)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free_pen)},
    {Py_tp_methods, kPenMethods},
    {Py_tp_members, kPenMembers},
    {0, nullptr},
};
PyType_Spec kPenSpec = {"tapscope.kernels.native._tapscope.Pen", sizeof(Pen), 0, Py_TPFLAGS_DEFAULT, kPenSlots};

bool add_names() {
    const std::pair<PyObject**, const char*> names[] = {
        {&name_announced, "announced"}, {&name_micro, "micro"}, {&name_in_full, "in_full"}, {&name_halted, "halted"},
    };
    for (const auto& [name, text] : names) {
        if (!(*name = PyUnicode_InternFromString(text))) return false;
    }
    return true;
}

}  // namespace

bool is_ordinary(const Pen* pen) {
    PyObject* step = pen->open.step;
    return step && pen->state->forks == num_forks && is_true(step, name_announced) && !is_true(step, name_micro) &&
           !is_true(step, name_in_full) && !is_true(step, name_halted) && is_without_tags(pen) && !is_in_backward(pen);
}

bool write(Pen* pen, const Stencil* stencil, const Lying& lying) {
    const uint64_t generation = pen->state->generation;
    const std::string content = stencil->is_literal ? "" : content_of(pen->state, stencil, lying);
    if (PyErr_Occurred() || generation != pen->state->generation) return false;  // another thread has ended the step meanwhile
    const Owned number(PyIter_Next(pen->open.numbers));
    const Owned text(number ? PyObject_Str(number.get()) : nullptr);
    const char* digits = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
    if (!digits) return false;
    add_line(pen, stencil, digits, content);
    if (pen->waiting >= kMany) {
        const Owned pass_on(Py_NewRef(pen->open.pass_on));
        Owned(PyObject_CallNoArgs(pass_on.get()));
    }
    return true;
}

bool add_pen(PyObject* module) {
    pen_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&kPenSpec));
    pthread_atfork(nullptr, nullptr, [] { ++num_forks; });
    return add_names() && pen_type &&
           PyModule_AddObjectRef(module, "Pen", reinterpret_cast<PyObject*>(pen_type)) == 0;
}

}  // namespace ts
