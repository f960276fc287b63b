// The lines of records of which only statistics are kept, from the tensor to the text without Python in between.
//
// A Stencil holds what the lines of one port have in common and how its last tensor lay; a Pen writes lines by it into
// a buffer. What a Pen does for a tensor, dumper/taker.py does too, for any: the lines are the same.

#include "pen.h"

#include <map>
#include <string>
#include <tuple>

#include "calls.h"
#include "taken.h"

namespace ts {
namespace {

constexpr int64_t kSmall = 16 << 10;  // reading so few bytes again is no dearer than asking whether they were seen

// A reference that is given up at the end of its scope.
class Owned {
  public:
    explicit Owned(PyObject* object) : object_(object) {}
    ~Owned() { Py_XDECREF(object_); }
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
    PyObject* get() const { return object_; }
    explicit operator bool() const { return object_ != nullptr; }

  private:
    PyObject* object_;
};

// ---- Stencil

struct Stencil {
    PyObject_HEAD
    PyObject* kind;  // torch.dtype
    PyObject* size;  // torch.Size
    std::string* head;
    std::string* tail;
    long long count;  // elements as `code` has them
    long long width;  // bytes of one
    int code;
};

// Stencil(head, tail, kind, size, count, width, code)
PyObject* make_stencil(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *kind, *size;
    const char *head, *tail;
    Py_ssize_t head_size, tail_size;
    long long count, width;
    int code;
    if (!PyArg_ParseTuple(args, "y#y#OOLLi", &head, &head_size, &tail, &tail_size, &kind, &size, &count, &width, &code)) {
        return nullptr;
    }
    auto* self = reinterpret_cast<Stencil*>(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    self->kind = Py_NewRef(kind), self->size = Py_NewRef(size);
    self->head = new std::string(head, size_t(head_size)), self->tail = new std::string(tail, size_t(tail_size));
    self->count = count, self->width = width, self->code = code;
    return reinterpret_cast<PyObject*>(self);
}

void free_stencil(PyObject* object) {
    auto* self = reinterpret_cast<Stencil*>(object);
    PyTypeObject* type = Py_TYPE(object);
    Py_XDECREF(self->kind), Py_XDECREF(self->size);
    delete self->head;
    delete self->tail;
    type->tp_free(object);
    Py_DECREF(type);
}

PyType_Slot kStencilSlots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make_stencil)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free_stencil)},
    {0, nullptr},
};
PyType_Spec kStencilSpec = {"tapscope.kernels.native._tapscope.Stencil", sizeof(Stencil), 0, Py_TPFLAGS_DEFAULT,
                            kStencilSlots};
PyTypeObject* stencil_type = nullptr;

// ---- Pen

using Place = std::tuple<uint64_t, int64_t, int>;  // address, elements, code

struct Seen {
    uint8_t digest[16];
    std::string text;
};

struct State {
    std::string lines;
    std::string step;
    int64_t waiting = 0;     // lines
    uint64_t generation = 0;  // counts the steps
    std::map<Place, Seen> places;
};

struct Pen {
    PyObject_HEAD
    PyObject* numbers;  // iterator: the number of the next record
    PyObject* types;    // tuple: exact types of plain tensors
    PyObject* keys_of;  // of a tensor: its dispatch keys
    PyObject* plain;    // set: raw_repr() of those of plain tensors
    State* state;
};

PyObject *name_dtype, *name_size, *name_raw, *name_contiguous, *name_pointer;

PyObject* make_pen(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *numbers, *types, *keys_of, *plain;
    if (!PyArg_ParseTuple(args, "OO!OO", &numbers, &PyTuple_Type, &types, &keys_of, &plain)) return nullptr;
    auto* self = reinterpret_cast<Pen*>(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    self->numbers = Py_NewRef(numbers), self->types = Py_NewRef(types);
    self->keys_of = Py_NewRef(keys_of), self->plain = Py_NewRef(plain);
    self->state = new State;
    return reinterpret_cast<PyObject*>(self);
}

void free_pen(PyObject* object) {
    auto* self = reinterpret_cast<Pen*>(object);
    PyTypeObject* type = Py_TYPE(object);
    Py_XDECREF(self->numbers), Py_XDECREF(self->types), Py_XDECREF(self->keys_of), Py_XDECREF(self->plain);
    delete self->state;
    type->tp_free(object);
    Py_DECREF(type);
}

bool has_type(const Pen* pen, PyObject* tensor) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(pen->types); ++i) {
        if (PyTuple_GET_ITEM(pen->types, i) == reinterpret_cast<PyObject*>(Py_TYPE(tensor))) return true;
    }
    return false;
}

bool is_plain(const Pen* pen, PyObject* tensor) {
    const Owned keys(PyObject_CallOneArg(pen->keys_of, tensor));
    if (!keys) return false;
    const Owned raw(PyObject_CallMethodNoArgs(keys.get(), name_raw));
    return raw && PySet_Contains(pen->plain, raw.get()) == 1;
}

// Whether the tensor is plain memory that lies as the stencil's did, and where; an exception may be set if not.
bool find(const Pen* pen, const Stencil* stencil, PyObject* tensor, uint64_t* address) {
    if (!has_type(pen, tensor)) return false;
    if (Owned(PyObject_GetAttr(tensor, name_dtype)).get() != stencil->kind) return false;
    const Owned size(PyObject_CallMethodNoArgs(tensor, name_size));
    if (!size || PyObject_RichCompareBool(size.get(), stencil->size, Py_EQ) != 1 || !is_plain(pen, tensor)) return false;
    if (Owned(PyObject_CallMethodNoArgs(tensor, name_contiguous)).get() != Py_True) return false;
    const Owned pointer(PyObject_CallMethodNoArgs(tensor, name_pointer));
    if (!pointer) return false;
    *address = PyLong_AsUnsignedLongLongMask(pointer.get());
    return (*address || !stencil->count) && !PyErr_Occurred();
}

// The members `hash` to `stats` of what lies at the place, worked out once a step while the bytes stay the same.
std::string content_of(State* state, const Stencil* stencil, uint64_t address) {
    const int64_t nbytes = stencil->count * stencil->width;
    const auto* bytes = reinterpret_cast<const void*>(static_cast<uintptr_t>(address));
    const Place place{address, stencil->count, stencil->code};
    const bool is_large = nbytes >= kSmall;
    if (is_large) {
        if (const auto seen = state->places.find(place); seen != state->places.end()) {
            const Seen before = seen->second;  // the map may change while the GIL is released
            uint8_t digest[16];
            run(nbytes, [&] { ts_hash(bytes, nbytes, digest); });
            if (!std::memcmp(digest, before.digest, sizeof digest)) return before.text;
        }
    }
    Taken found;
    int64_t size = 0;
    run(nbytes, [&] { size = ts_take(bytes, stencil->count, stencil->code, 1, nullptr, &found); });
    std::string text(found.text, size_t(size));
    if (is_large) {
        Seen& seen = state->places[place];
        std::memcpy(seen.digest, found.digest, sizeof seen.digest);
        seen.text = text;
    }
    return text;
}

void add_line(State* state, const Stencil* stencil, const std::string& number, const std::string& content) {
    std::string& to = state->lines;
    if (state->waiting) to += '\n';
    to += "{\"type\":\"record\",\"seq\":";
    to.append(number).append(*stencil->head).append(state->step).append(*stencil->tail) += ',';
    to.append(content) += '}';
    ++state->waiting;
}

// (stencil, tensor) -> address of its memory; 0 when the tensor is not plain, or lies otherwise than the stencil's
PyObject* pen_find(PyObject* object, PyObject* const* args, Py_ssize_t count) {
    if (count != 2 || Py_TYPE(args[0]) != stencil_type) return PyErr_Format(PyExc_TypeError, "find(stencil, tensor)");
    uint64_t address = 0;
    const bool found = find(reinterpret_cast<Pen*>(object), reinterpret_cast<Stencil*>(args[0]), args[1], &address);
    PyErr_Clear();  // whoever looks closer says what is the matter
    return PyLong_FromUnsignedLongLong(found ? address : 0);
}

// (stencil, tensor) -> lines that wait, this one too; 0 when the tensor is not for this pen, and nothing was written
PyObject* pen_write(PyObject* object, PyObject* const* args, Py_ssize_t count) {
    if (count != 2 || Py_TYPE(args[0]) != stencil_type) return PyErr_Format(PyExc_TypeError, "write(stencil, tensor)");
    const auto* self = reinterpret_cast<Pen*>(object);
    const auto* stencil = reinterpret_cast<Stencil*>(args[0]);
    State* state = self->state;
    const uint64_t generation = state->generation;
    uint64_t address = 0;
    if (!find(self, stencil, args[1], &address)) {
        PyErr_Clear();  // whoever looks closer says what is the matter
        return PyLong_FromLong(0);
    }
    const std::string content = content_of(state, stencil, address);
    if (generation != state->generation) return PyLong_FromLong(0);  // another thread has ended the step meanwhile
    const Owned number(PyIter_Next(self->numbers));
    const Owned text(number ? PyObject_Str(number.get()) : nullptr);
    const char* digits = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
    if (!digits) return nullptr;
    add_line(state, stencil, digits, content);
    return PyLong_FromLongLong(state->waiting);
}

// (step) -> None; a new step: memory is used again for other values
PyObject* pen_begin(PyObject* object, PyObject* step) {
    State* state = reinterpret_cast<Pen*>(object)->state;
    const Owned text(PyObject_Str(step));
    const char* digits = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
    if (!digits) return nullptr;
    state->step = digits;
    state->places.clear();
    ++state->generation;
    Py_RETURN_NONE;
}

// () -> (lines, how many); they wait no more
PyObject* pen_drain(PyObject* object, PyObject*) {
    State* state = reinterpret_cast<Pen*>(object)->state;
    PyObject* found = Py_BuildValue("y#L", state->lines.data(), Py_ssize_t(state->lines.size()), state->waiting);
    if (found) state->lines.clear(), state->waiting = 0;
    return found;
}

PyMethodDef kPenMethods[] = {
    {"begin", pen_begin, METH_O, nullptr},
    {"find", fast<pen_find>(), METH_FASTCALL, nullptr},
    {"write", fast<pen_write>(), METH_FASTCALL, nullptr},
    {"drain", pen_drain, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot kPenSlots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make_pen)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free_pen)},
    {Py_tp_methods, kPenMethods},
    {0, nullptr},
};
PyType_Spec kPenSpec = {"tapscope.kernels.native._tapscope.Pen", sizeof(Pen), 0, Py_TPFLAGS_DEFAULT, kPenSlots};

}  // namespace

bool add_pen(PyObject* module) {
    name_dtype = PyUnicode_InternFromString("dtype");
    name_size = PyUnicode_InternFromString("size");
    name_raw = PyUnicode_InternFromString("raw_repr");
    name_contiguous = PyUnicode_InternFromString("is_contiguous");
    name_pointer = PyUnicode_InternFromString("data_ptr");
    stencil_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&kStencilSpec));
    const Owned pen(PyType_FromSpec(&kPenSpec));
    return name_dtype && name_size && name_raw && name_contiguous && name_pointer && stencil_type && pen &&
           PyModule_AddObjectRef(module, "Stencil", reinterpret_cast<PyObject*>(stencil_type)) == 0 &&
           PyModule_AddObjectRef(module, "Pen", pen.get()) == 0;
}

}  // namespace ts
