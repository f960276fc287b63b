// Call of a module with taps: equivalent to torch's Module._call_impl for a module whose only hooks are taps, without
// the Python code that handles arbitrary hooks.
//
// A ModuleCall replaces a module's `_call_impl`. If there is any other hook (on the module or global), a torch.jit
// trace, or a subclass's or patched `_call_impl`, the ModuleCall delegates to the original, in which the taps run as
// ordinary hooks.

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
    PyObject* module;          // weak reference
    PyObject* plain;           // torch's Module._call_impl
    PyObject* all;             // tuple of dicts: global module hooks, forward hooks first
    PyObject* tracing;         // () -> None unless torch.jit is tracing
    PyObject* finish;          // (module, args, kwargs, output) -> output; runs hooks that were added during forward
    PyObject *before, *after;  // the installed hooks, or None
    PyObject *fast_before, *fast_after;  // their fast paths, or None
    vectorcallfunc call;
};

std::array<PyObject**, 9> parts_of(ModuleCall* self) {
    return {&self->module, &self->plain, &self->all,         &self->tracing,   &self->finish,
            &self->before, &self->after, &self->fast_before, &self->fast_after};
}

// A module, its call arguments, and its __dict__.
struct Call {
    std::vector<PyObject*> stack;  // module, positional arguments, values of keyword arguments
    Py_ssize_t count;              // number of positional arguments, including the module
    PyObject* names;               // names of keyword arguments; null without any
    Owned attributes;

    PyObject* module() const { return stack[0]; }
};

enum class Hooks { kNone, kOurs, kOther };

// Classifies the hooks in the dict that this attribute holds.
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

// Returns whether no hooks but ours are present; if not, an exception may be set.
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

// Returns whether the fast path has recorded the firing. If false, an exception is set only if it must propagate.
bool takes(PyObject* fast, PyObject* const* value, size_t count) {
    return fast != Py_None && Owned(PyObject_Vectorcall(fast, value, count, nullptr)).get() == Py_True;
}

// Runs the forward pre-hook; returns false with an exception set on failure.
bool fire_before(const ModuleCall* self, const Call& call) {
    const Owned args(positional(call)), kwargs(named(call));
    if (!args || !kwargs) return false;
    PyObject* const given[] = {call.module(), args.get(), kwargs.get()};
    if (takes(self->fast_before, given + 1, 2)) return true;
    return !PyErr_Occurred() && Owned(PyObject_Vectorcall(self->before, given, 3, nullptr));
}

// Runs the forward hook; returns false with an exception set on failure.
bool fire_after(const ModuleCall* self, const Call& call, PyObject* output) {
    if (takes(self->fast_after, &output, 1)) return true;
    if (PyErr_Occurred()) return false;
    const Owned args(positional(call));
    PyObject* const given[] = {call.module(), args.get(), output};
    return args && Owned(PyObject_Vectorcall(self->after, given, 3, nullptr));
}

PyObject* call_hooked(const ModuleCall* self, const Call& call) {
    Hooks before, after;
    const Owned call_impl(PyObject_GetAttr(reinterpret_cast<PyObject*>(Py_TYPE(call.module())), name_call));
    if (!call_impl) return nullptr;
    if (call_impl.get() != self->plain || !is_ours(self, call, &before, &after)) {
        if (PyErr_Occurred()) return nullptr;
        return PyObject_Vectorcall(call_impl.get(), call.stack.data(), size_t(call.count), call.names);
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

// vectorcall: (*args, **kwargs) of the module
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

// ModuleCall(weak reference to the module, plain, global hooks, tracing, finish, before, after, fast path before, fast
// path after)
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

// (subclass) -> None; enables vectorcall for a subclass whose Python `__call__` exists only for torch.compile
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
