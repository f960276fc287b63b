// A call of a module with taps: what torch's Module._call_impl does where a module has no hooks but these taps, without
// the Python that serves hooks of any kind.
//
// A ModuleCall stands in a module's `_call_impl`. Any other hook, of the module or of all modules, a trace by torch.jit
// and a subclass's or a patched `_call_impl` make it call that instead, in which the taps are hooks like any other.

#include "record_writer.h"

#include <structmember.h>

#include <array>
#include <utility>
#include <vector>

#include "py_util.h"

namespace ts {
namespace {

PyObject *name_forward, *name_call, *name_hooks, *name_pre_hooks, *name_backward, *name_backward_pre;

struct ModuleCall {
    PyObject_HEAD
    PyObject* module;          // a weak reference
    PyObject* plain;           // torch's Module._call_impl
    PyObject* all;             // tuple of dicts: the hooks of all modules, first those after forward
    PyObject* tracing;         // () -> None unless torch.jit traces
    PyObject* finish;          // (module, args, kwargs, output) -> output, after hooks that have come meanwhile
    PyObject *before, *after;  // the hooks that are in place, or None
    PyObject *fast_before, *fast_after;  // their fast paths, or None
    vectorcallfunc call;
};

std::array<PyObject**, 9> parts_of(ModuleCall* self) {
    return {&self->module, &self->plain, &self->all,         &self->tracing,   &self->finish,
            &self->before, &self->after, &self->fast_before, &self->fast_after};
}

// A module, what it is called with, and its __dict__.
struct Call {
    std::vector<PyObject*> stack;  // the module, arguments, values of keyword arguments
    Py_ssize_t count;              // of positional arguments, the module included
    PyObject* names;               // of keyword arguments; null without
    Owned attributes;

    PyObject* module() const { return stack[0]; }
};

enum class Hooks { kNone, kOurs, kOther };

// What the dict of hooks in this attribute contains.
Hooks hooks_in(const Call& call, PyObject* name, PyObject* ours) {
    PyObject* hooks = PyDict_GetItemWithError(call.attributes.get(), name);
    if (!hooks || !PyDict_Check(hooks)) return Hooks::kOther;
    const Py_ssize_t size = PyDict_GET_SIZE(hooks);
    Py_ssize_t place = 0;
    PyObject *key, *hook;
    if (size == 0) return Hooks::kNone;
    return size == 1 && PyDict_Next(hooks, &place, &key, &hook) && hook == ours ? Hooks::kOurs : Hooks::kOther;
}

bool is_empty(PyObject* hooks) { return hooks && PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) == 0; }

// Whether only our hooks have a say; an exception may be set if not.
bool is_ours(const ModuleCall* self, const Call& call, Hooks* before, Hooks* after) {
    *before = hooks_in(call, name_pre_hooks, self->before), *after = hooks_in(call, name_hooks, self->after);
    PyObject* attributes = call.attributes.get();
    if (*before == Hooks::kOther || *after == Hooks::kOther ||
        !is_empty(PyDict_GetItemWithError(attributes, name_backward)) ||
        !is_empty(PyDict_GetItemWithError(attributes, name_backward_pre))) {
        return false;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->all); ++i) {
        if (!is_empty(PyTuple_GET_ITEM(self->all, i))) return false;
    }
    return Owned(PyObject_CallNoArgs(self->tracing)).get() == Py_None;
}

PyObject* positional(const Call& call) {
    PyObject* args = PyTuple_New(call.count - 1);
    for (Py_ssize_t i = 1; args && i < call.count; ++i) PyTuple_SET_ITEM(args, i - 1, Py_NewRef(call.stack[size_t(i)]));
    return args;
}

PyObject* named(const Call& call) {
    PyObject* kwargs = PyDict_New();
    for (Py_ssize_t i = 0; kwargs && call.names && i < PyTuple_GET_SIZE(call.names); ++i) {
        if (PyDict_SetItem(kwargs, PyTuple_GET_ITEM(call.names, i), call.stack[size_t(call.count + i)]) < 0)
            Py_CLEAR(kwargs);
    }
    return kwargs;
}

// Whether the fast path has taken what fired; false with an exception set only where that is not for us to catch.
bool takes(PyObject* fast, PyObject* const* value, size_t count) {
    return fast != Py_None && Owned(PyObject_Vectorcall(fast, value, count, nullptr)).get() == Py_True;
}

// What a hook before forward does; false with an exception set.
bool fire_before(const ModuleCall* self, const Call& call) {
    const Owned args(positional(call)), kwargs(named(call));
    if (!args || !kwargs) return false;
    PyObject* const given[] = {call.module(), args.get(), kwargs.get()};
    if (takes(self->fast_before, given + 1, 2)) return true;
    return !PyErr_Occurred() && Owned(PyObject_Vectorcall(self->before, given, 3, nullptr));
}

// What a hook after forward does; false with an exception set.
bool fire_after(const ModuleCall* self, const Call& call, PyObject* output) {
    if (takes(self->fast_after, &output, 1)) return true;
    if (PyErr_Occurred()) return false;
    const Owned args(positional(call));
    PyObject* const given[] = {call.module(), args.get(), output};
    return args && Owned(PyObject_Vectorcall(self->after, given, 3, nullptr));
}

PyObject* call_hooked(const ModuleCall* self, const Call& call) {
    Hooks before, after;
    const Owned torchs(PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(call.module())), name_call));
    if (!torchs) return nullptr;
    if (torchs.get() != self->plain || !is_ours(self, call, &before, &after)) {
        if (PyErr_Occurred()) return nullptr;
        return PyObject_Vectorcall(torchs.get(), call.stack.data(), size_t(call.count), call.names);
    }
    if (before == Hooks::kOurs && !fire_before(self, call)) return nullptr;
    Owned output(PyObject_VectorcallMethod(name_forward, call.stack.data(), size_t(call.count), call.names));
    if (!output) return nullptr;
    after = hooks_in(call, name_hooks, self->after);
    if (after == Hooks::kOther || !is_empty(PyTuple_GET_ITEM(self->all, 0))) {
        const Owned args(positional(call)), kwargs(named(call));
        if (!args || !kwargs) return nullptr;
        PyObject* const given[] = {call.module(), args.get(), kwargs.get(), output.get()};
        return PyObject_Vectorcall(self->finish, given, 4, nullptr);
    }
    if (after == Hooks::kOurs && !fire_after(self, call, output.get())) return nullptr;
    return Py_NewRef(output.get());
}

// (*args, **kwargs) of the module
PyObject* call_module(PyObject* object, PyObject* const* args, size_t flags, PyObject* names) {
    auto* self = reinterpret_cast<ModuleCall*>(object);
    const Owned held(Py_NewRef(object)), owner(Py_NewRef(PyWeakref_GetObject(self->module)));
    PyObject* module = owner.get();
    if (module == Py_None) return PyErr_Format(PyExc_ReferenceError, "the module of this call is gone");
    const Py_ssize_t count = PyVectorcall_NARGS(flags), more = names ? PyTuple_GET_SIZE(names) : 0;
    Call call{{}, count + 1, more ? names : nullptr, Owned(PyObject_GenericGetDict(module, nullptr))};
    if (!call.attributes) return nullptr;
    call.stack.reserve(size_t(1 + count + more));
    call.stack.push_back(module);
    call.stack.insert(call.stack.end(), args, args + count + more);
    return call_hooked(self, call);
}

// ModuleCall(module's weak reference, plain, hooks of all modules, tracing, finish, before, after, fast path before,
// after)
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
    auto* self = reinterpret_cast<ModuleCall*>(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    self->call = call_module;
    const auto parts = parts_of(self);
    if (!PyArg_ParseTuple(args, "OOO!OOOOOO", parts[0], parts[1], &PyTuple_Type, parts[2], parts[3], parts[4], parts[5],
                          parts[6], parts[7], parts[8])) {
        for (PyObject** each : parts) *each = nullptr;
        return Py_DECREF(self), nullptr;
    }
    for (PyObject** each : parts) Py_INCREF(*each);
    if (!PyWeakref_Check(self->module)) {
        return Py_DECREF(self), PyErr_Format(PyExc_TypeError, "a weak reference to the module is needed");
    }
    return reinterpret_cast<PyObject*>(self);
}

void free(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    for (PyObject** each : parts_of(reinterpret_cast<ModuleCall*>(object))) Py_CLEAR(*each);
    type->tp_free(object);
    Py_DECREF(type);
}

// (subclass) -> None; calls of its instances come here although its `__call__` is Python, which only torch.compile
// reads
PyObject* serve_calls(PyObject* type, PyObject*) {
    reinterpret_cast<PyTypeObject*>(type)->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
    Py_RETURN_NONE;
}

PyMethodDef kMethods[] = {
    {"serve_calls", serve_calls, METH_NOARGS | METH_CLASS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyMemberDef kMembers[] = {
    {"module", T_OBJECT, offsetof(ModuleCall, module), READONLY, nullptr},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(ModuleCall, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot kSlots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free)},
    {Py_tp_methods, kMethods},
    {Py_tp_members, kMembers},
    {0, nullptr},
};
PyType_Spec kSpec = {"tapscope.kernels.native._tapscope.ModuleCall", sizeof(ModuleCall), 0,
                     Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_VECTORCALL, kSlots};

}  // namespace

bool add_module_call(PyObject* module) {
    const std::pair<PyObject**, const char*> names[] = {
        {&name_forward, "forward"},          {&name_call, "_call_impl"},
        {&name_hooks, "_forward_hooks"},     {&name_pre_hooks, "_forward_pre_hooks"},
        {&name_backward, "_backward_hooks"}, {&name_backward_pre, "_backward_pre_hooks"},
    };
    for (const auto& [name, text] : names) {
        if (!(*name = PyUnicode_InternFromString(text))) return false;
    }
    const Owned type(PyType_FromSpec(&kSpec));
    return type && PyModule_AddObjectRef(module, "ModuleCall", type.get()) == 0;
}

}  // namespace ts
