// The type RecordTemplate: properties of the tensors at a port, and the check whether the next tensor matches.

#include "record_writer.h"

#include <algorithm>
#include <utility>

#include "py_util.h"

namespace ts {

PyTypeObject* template_type = nullptr;

namespace {

PyObject *name_dtype, *name_size, *name_raw, *name_contiguous, *name_pointer;

// RecordTemplate(head, tail, kind, size, count, width, code); code -1 means a plain value
PyObject* make_record_template(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *head, *tail, *kind, *size;
    long long count, width;
    int code;
    if (!PyArg_ParseTuple(args, "SSOO!LLi", &head, &tail, &kind, &PyTuple_Type, &size, &count, &width, &code)) {
        return nullptr;
    }
    auto* self = reinterpret_cast<RecordTemplate*>(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    self->shape = new std::vector<int64_t>;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(size); ++i) {
        self->shape->push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(size, i)));
    }
    self->kind = Py_NewRef(kind), self->size = Py_NewRef(size);
    self->head = Py_NewRef(head), self->tail = Py_NewRef(tail);
    self->count = count, self->width = width, self->code = code, self->is_literal = code < 0;
    return reinterpret_cast<PyObject*>(self);
}

void free_record_template(PyObject* object) {
    auto* self = reinterpret_cast<RecordTemplate*>(object);
    PyTypeObject* type = Py_TYPE(object);
    for (PyObject* each : {self->kind, self->size, self->grid, self->about, self->head, self->tail}) Py_XDECREF(each);
    delete self->shape;
    type->tp_free(object);
    Py_DECREF(type);
}

// (DLPack exchange API, tensor, CUfunction, programs, threads, shared memory, overlaps) -> whether the device computes
// the statistics of the template's tensors from now on. The tensor is one of these tensors; the integers configure the
// launch.
PyObject* set_row_launch(PyObject* object, PyObject* args) {
    auto* self = reinterpret_cast<RecordTemplate*>(object);
    PyObject *capsule, *tensor;
    unsigned long long function;
    DeviceLaunch launch;
    if (!PyArg_ParseTuple(args, "OOKIIIp", &capsule, &tensor, &function, &launch.programs, &launch.threads,
                          &launch.shared, &launch.overlaps)) {
        return nullptr;
    }
    const auto* api = dlpack::api_of(capsule);
    dlpack::Tensor found;
    if (!api || !Driver::get() || !function || self->is_literal) Py_RETURN_FALSE;
    if (api->view(tensor, &found)) return nullptr;
    if (found.device_type != dlpack::kCuda) Py_RETURN_FALSE;
    launch.function = reinterpret_cast<void*>(uintptr_t(function)), launch.device = found.device_id;
    self->element = found.element, self->launch = launch;
    Py_RETURN_TRUE;
}

// (CUfunction, programs, threads, shared memory, overlaps, (rows, width, first, column, columns), slot, grid, about) ->
// None; the device also computes the sketch of the template's tensors, see DeviceSketch and RecordTemplate
PyObject* set_sketch_launch(PyObject* object, PyObject* args) {
    auto* self = reinterpret_cast<RecordTemplate*>(object);
    unsigned long long function;
    DeviceSketch found;
    DeviceLaunch& launch = found.launch;
    long long* part = found.part;
    PyObject *grid, *about;
    if (!PyArg_ParseTuple(args, "KIIIp(LLLLL)LO!O", &function, &launch.programs, &launch.threads, &launch.shared,
                          &launch.overlaps, part, part + 1, part + 2, part + 3, part + 4, &found.slot, &PyTuple_Type,
                          &grid, &about)) {
        return nullptr;
    }
    launch.function = reinterpret_cast<void*>(uintptr_t(function));
    self->sketch = found;
    Py_XSETREF(self->grid, Py_NewRef(grid));
    Py_XSETREF(self->about, Py_NewRef(about));
    Py_RETURN_NONE;
}

PyMethodDef kTemplateMethods[] = {
    {"set_row_launch", set_row_launch, METH_VARARGS, nullptr},
    {"set_sketch_launch", set_sketch_launch, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyType_Slot kTemplateSlots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make_record_template)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free_record_template)},
    {Py_tp_methods, kTemplateMethods},
    {0, nullptr},
};
PyType_Spec kTemplateSpec = {"tapscope.kernels.native._tapscope.RecordTemplate", sizeof(RecordTemplate), 0,
                             Py_TPFLAGS_DEFAULT, kTemplateSlots};

bool has_type(const RecordWriter* writer, PyObject* tensor) {
    PyObject* types = writer->torch.types;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(types); ++i) {
        if (PyTuple_GET_ITEM(types, i) == reinterpret_cast<PyObject*>(Py_TYPE(tensor))) return true;
    }
    return false;
}

bool is_plain(const RecordWriter* writer, PyObject* tensor) {
    const Owned keys(PyObject_CallOneArg(writer->torch.keys_of, tensor));
    if (!keys) return false;
    const Owned raw(PyObject_CallMethodNoArgs(keys.get(), name_raw));
    return raw && PySet_Contains(writer->torch.plain, raw.get()) == 1;
}

// Compares dtype and shape through Python attributes, for which torch creates Python objects.
bool is_alike(const RecordWriter* writer, const RecordTemplate* record_template, PyObject* tensor) {
    if (Owned(PyObject_GetAttr(tensor, name_dtype)).get() != record_template->kind) return false;
    const Owned size(PyObject_CallMethodNoArgs(tensor, name_size));
    return size && PyObject_RichCompareBool(size.get(), record_template->size, Py_EQ) == 1 && is_plain(writer, tensor);
}

bool find_by_asking(const RecordTemplate* record_template, PyObject* tensor, StridedView* found) {
    if (Owned(PyObject_CallMethodNoArgs(tensor, name_contiguous)).get() != Py_True) return false;
    const Owned pointer(PyObject_CallMethodNoArgs(tensor, name_pointer));
    if (!pointer) return false;
    found->address = PyLong_AsUnsignedLongLongMask(pointer.get()), found->run = record_template->nbytes();
    return (found->address || !record_template->count) && !PyErr_Occurred();
}

// Reads the layout through DLPack, which refuses every tensor without memory of its own, such as one inside torch.func.
//
// DLPack does not detect a lazy negation. The `imag` of a conjugate has one, but has stride 2: no two elements are
// adjacent, so find_strided_view rejects the tensor. A single element, which has no stride, is handled by
// find_by_asking.
bool find_by_view(const RecordWriter* writer, const RecordTemplate* record_template, PyObject* tensor,
                  StridedView* found) {
    dlpack::Tensor view;
    if (writer->view(tensor, &view)) return false;
    const auto& shape = *record_template->shape;
    return view.device_type == dlpack::kHost && !(view.element != record_template->element) &&
           std::equal(shape.begin(), shape.end(), view.shape, view.shape + view.ndim) &&
           (view.data || !record_template->count) && find_strided_view(view, found);
}

// Learns the element type of such tensors; returns whether find_by_view suffices from now on.
bool learn(const RecordWriter* writer, RecordTemplate* record_template, PyObject* tensor) {
    dlpack::Tensor found;
    if (writer->view && record_template->count > 1 && !writer->view(tensor, &found))
        record_template->element = found.element;
    PyErr_Clear();
    return record_template->element.lanes;
}

}  // namespace

bool find(const RecordWriter* writer, RecordTemplate* record_template, PyObject* tensor, StridedView* found) {
    if (record_template->is_literal || !has_type(writer, tensor)) return false;
    if (!record_template->element.lanes) {
        if (!is_alike(writer, record_template, tensor)) return false;
        if (!learn(writer, record_template, tensor)) return find_by_asking(record_template, tensor, found);
    }
    return find_by_view(writer, record_template, tensor, found);
}

bool find_on_device(const RecordWriter* writer, const RecordTemplate* record_template, PyObject* tensor,
                    StridedView* found) {
    dlpack::Tensor view;
    if (!has_type(writer, tensor) || writer->view(tensor, &view)) return false;
    const auto& shape = *record_template->shape;
    return view.device_type == dlpack::kCuda && view.device_id == record_template->launch.device &&
           !(view.element != record_template->element) &&
           std::equal(shape.begin(), shape.end(), view.shape, view.shape + view.ndim) && view.data &&
           find_strided_view(view, found) && found->outer.empty() && found->address % 16 == 0;
}

bool add_record_template(PyObject* module) {
    const std::pair<PyObject**, const char*> names[] = {
        {&name_dtype, "dtype"},      {&name_size, "size"}, {&name_raw, "raw_repr"}, {&name_contiguous, "is_contiguous"},
        {&name_pointer, "data_ptr"},
    };
    for (const auto& [name, text] : names) {
        if (!(*name = PyUnicode_InternFromString(text))) return false;
    }
    template_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&kTemplateSpec));
    return template_type &&
           PyModule_AddObjectRef(module, "RecordTemplate", reinterpret_cast<PyObject*>(template_type)) == 0;
}

}  // namespace ts
