// Record lines for records that keep only statistics, written without calling Python.
//
// A RecordWriter writes lines from a RecordTemplate into a buffer. dumper/capture/capturer.py does the same for
// arbitrary tensors, with identical lines.

#include "record_writer.h"

#include <pthread.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "py_util.h"
#include "dedup_cache.h"

namespace ts {
namespace {

constexpr long long kMany = 256;      // maximum number of waiting lines: a crash loses lines that are not yet queued
constexpr long long kMuch = 1 << 20;  // maximum bytes of their payloads

}  // namespace

struct WriterState {
    std::string lines;
    std::string step;
    uint64_t generation = 0;  // number of begin and end events of steps
    uint64_t forks = 0;       // num_forks when the step began
    Memo memo;
    std::vector<std::pair<long long, long long>> shared;  // (index among the waiting lines, payload number)
    DeviceRows rows;
    StepKeys keys;
    WaitingLines of_rows;  // lines that wait for rows; never mixed with other waiting lines
};

PyTypeObject* writer_type = nullptr;
long long num_captures = 0;

namespace {

uint64_t num_forks = 0;  // a forked child has no pipeline, and the rank belongs to its parent

PyObject* name_info;

// A step attribute that every firing reads: through its slot in the class, found once, or else by name.
struct StepField {
    const char* text;
    PyObject* name = nullptr;
    PyTypeObject* type = nullptr;
    Py_ssize_t offset = 0;  // offset in objects of `type`; 0 if the attribute is not a slot
};
StepField announced{"announced"}, micro{"micro"}, in_full{"in_full"}, halted{"halted"};

void find_slot(PyTypeObject* type, StepField* field) {
    const Owned found(PyObject_GetAttr(reinterpret_cast<PyObject*>(type), field->name));
    const bool is_member = found && Py_TYPE(found.get()) == &PyMemberDescr_Type;
    const PyMemberDef* member = is_member ? reinterpret_cast<PyMemberDescrObject*>(found.get())->d_member : nullptr;
    field->offset = member && member->type == T_OBJECT_EX ? member->offset : 0;
    Py_XSETREF(field->type, reinterpret_cast<PyTypeObject*>(Py_NewRef(reinterpret_cast<PyObject*>(type))));
    PyErr_Clear();
}

std::array<PyObject*, 7> all_of(const TorchTypes& torch) {
    const auto& [types, exchange, keys_of, plain, graph_task, tags, no_tags] = torch;
    return {types, exchange, keys_of, plain, graph_task, tags, no_tags};
}

// RecordWriter(types, exchange, keys_of, plain, graph_task, tags, no_tags)
PyObject* make_record_writer(PyTypeObject* type, PyObject* args, PyObject*) {
    TorchTypes torch;
    if (!PyArg_ParseTuple(args, "O!OOOOOO", &PyTuple_Type, &torch.types, &torch.exchange, &torch.keys_of, &torch.plain,
                          &torch.graph_task, &torch.tags, &torch.no_tags)) {
        return nullptr;
    }
    auto* self = reinterpret_cast<RecordWriter*>(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    for (PyObject* each : all_of(torch)) Py_INCREF(each);
    self->torch = torch;
    if (const auto* api = dlpack::api_of(torch.exchange)) self->view = api->view, self->stream = api->current_stream;
    self->state = new WriterState, self->entries = PyList_New(0);
    return reinterpret_cast<PyObject*>(self);
}

void close(RecordWriter* writer) {
    ++writer->state->generation;
    const StepKeys keys(std::exchange(writer->state->keys, StepKeys()));
    auto& [step, announce, numbers, pass_on, send, sent, room, keys_of] = writer->open;
    for (PyObject** each : {&step, &announce, &numbers, &pass_on, &send, &sent, &room, &keys_of}) Py_CLEAR(*each);
}

void free_record_writer(PyObject* object) {
    auto* self = reinterpret_cast<RecordWriter*>(object);
    PyTypeObject* type = Py_TYPE(object);
    close(self);
    for (PyObject* each : all_of(self->torch)) Py_XDECREF(each);
    Py_XDECREF(self->entries);
    delete self->state;
    type->tp_free(object);
    Py_DECREF(type);
}

bool is_true(PyObject* step, StepField* field) {
    if (field->type != Py_TYPE(step)) find_slot(Py_TYPE(step), field);
    PyObject* slot =
        field->offset ? *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(step) + field->offset) : nullptr;
    const Owned value(slot ? Py_NewRef(slot) : PyObject_GetAttr(step, field->name));
    return value && PyObject_IsTrue(value.get()) == 1;
}

bool is_without_tags(const RecordWriter* writer) {
    PyObject* tags = nullptr;
    if (PyContextVar_Get(writer->torch.tags, nullptr, &tags) < 0) return false;
    return Owned(tags).get() == writer->torch.no_tags;
}

bool is_in_backward(const RecordWriter* writer) {
    const Owned task(PyObject_CallNoArgs(writer->torch.graph_task));
    return !task || PyLong_AsLong(task.get()) != -1;
}

const uint8_t* at(uint64_t address) { return reinterpret_cast<const uint8_t*>(uintptr_t(address)); }

PyObject* as_tuple(const KnownBytes& seen) {
    return Py_BuildValue("y#y#", seen.text.data(), Py_ssize_t(seen.text.size()),
                         reinterpret_cast<const char*>(seen.digest), Py_ssize_t(sizeof seen.digest));
}

// Queues the waiting lines.
bool pass_on(const RecordWriter* writer) {
    const Owned call(Py_NewRef(writer->open.pass_on));
    return Owned(PyObject_CallNoArgs(call.get())) && !PyErr_Occurred();
}

// Returns the sequence number for the next line that waits for a row, which must follow those that wait already; -1
// with an exception set on failure.
long long next_waiting(const RecordWriter* writer) {
    const Owned next(PyIter_Next(writer->open.numbers));
    const long long number = next ? PyLong_AsLongLong(next.get()) : -1;
    return number < 0 || writer->state->of_rows.takes(number) || pass_on(writer) ? number : -1;
}

// Adds a line that waits for its row of statistics, or the line of a plain value (offset -1) in between.
void add_waiting(RecordWriter* writer, RecordTemplate* record_template, long long number, long long offset) {
    WaitingLines& waiting = writer->state->of_rows;
    if (waiting.lines.empty()) waiting.first = number, waiting.lines.reserve(size_t(kMany));
    PyObject* sketch = offset < 0 ? nullptr : record_template->about;
    waiting.lines.push_back(
        {Owned(Py_NewRef(reinterpret_cast<PyObject*>(record_template))), offset, Owned(Py_XNewRef(sketch))});
    ++writer->waiting;
}

std::string_view text_of(PyObject* bytes) { return {PyBytes_AS_STRING(bytes), size_t(PyBytes_GET_SIZE(bytes))}; }

// Appends a line with the next sequence number. Returns its index among the waiting lines, or -1 with an exception set.
long long add_line(RecordWriter* writer, const RecordTemplate* record_template, const std::string& content) {
    if (!writer->state->of_rows.lines.empty() && !pass_on(writer)) return -1;
    const Owned number(PyIter_Next(writer->open.numbers));
    const Owned digits(number ? PyObject_Str(number.get()) : nullptr);
    const char* text = digits ? PyUnicode_AsUTF8(digits.get()) : nullptr;
    if (!text) return -1;
    std::string& to = writer->state->lines;
    if (writer->waiting) to += '\n';
    to += "{\"type\":\"record\",\"seq\":";
    to.append(text).append(text_of(record_template->head)).append(writer->state->step);
    to.append(text_of(record_template->tail));
    to.append(record_template->is_literal ? "" : ",").append(content) += '}';
    return writer->waiting++;
}

// Queues the waiting lines if they exceed either limit.
void pass_on_if_large(RecordWriter* writer) {
    if (writer->waiting < kMany && writer->nbytes < kMuch) return;
    const Owned pass_on(Py_NewRef(writer->open.pass_on));
    Owned(PyObject_CallNoArgs(pass_on.get()));
}

// Returns the number of the payload with these bytes; 0 if there is none.
long long payload_of(const RecordWriter* writer, const RecordTemplate* record_template, const KnownBytes& seen) {
    const Owned key(Py_BuildValue("y#L", reinterpret_cast<const char*>(seen.digest), Py_ssize_t(sizeof seen.digest),
                                  record_template->nbytes()));
    PyObject* number = key ? PyDict_GetItemWithError(writer->open.sent, key.get()) : nullptr;
    return number ? PyLong_AsLongLong(number) : 0;
}

// (record_template, tensor) -> address of its elements; 0 if they are not contiguous, or the tensor is not plain or
// does not match the template
PyObject* writer_find(PyObject* object, PyObject* const* args, Py_ssize_t count) {
    if (count != 2 || Py_TYPE(args[0]) != template_type)
        return PyErr_Format(PyExc_TypeError, "find(record_template, tensor)");
    StridedView view;
    const bool found =
        find(reinterpret_cast<RecordWriter*>(object), reinterpret_cast<RecordTemplate*>(args[0]), args[1], &view);
    if (!clear_exception()) return nullptr;  // the Python path reports the error
    return PyLong_FromUnsignedLongLong(found && view.outer.empty() ? view.address : 0);
}

// (record_template, tensor) -> whether its line was written; if not, the caller must record the tensor
PyObject* writer_write(PyObject* object, PyObject* const* args, Py_ssize_t count) {
    if (count != 2 || Py_TYPE(args[0]) != template_type)
        return PyErr_Format(PyExc_TypeError, "write(record_template, tensor)");
    auto* self = reinterpret_cast<RecordWriter*>(object);
    auto* record_template = reinterpret_cast<RecordTemplate*>(args[0]);
    StridedView view;
    const bool is_written =
        self->open.step && find(self, record_template, args[1], &view) && write(self, record_template, view);
    return clear_exception() ? PyBool_FromLong(is_written) : nullptr;  // the Python path reports the error
}

// (record_template, address) -> whether the line of a full tensor was written, because this step has already sent equal
// bytes
PyObject* writer_repeat(PyObject* object, PyObject* const* args, Py_ssize_t count) {
    if (count != 2 || Py_TYPE(args[0]) != template_type)
        return PyErr_Format(PyExc_TypeError, "repeat(record_template, address)");
    auto* self = reinterpret_cast<RecordWriter*>(object);
    StridedView view;
    view.address = PyLong_AsUnsignedLongLongMask(args[1]);
    const bool is_written = self->open.step && !PyErr_Occurred() &&
                            repeat(self, reinterpret_cast<RecordTemplate*>(args[0]), view, at(view.address));
    return PyErr_Occurred() ? nullptr : PyBool_FromLong(is_written);
}

// (record_template, text, payload number, payload description or None if already sent) -> None; writes the line
PyObject* writer_keep(PyObject* object, PyObject* const* args, Py_ssize_t count) {
    Py_ssize_t size = 0;
    char* text = nullptr;
    if (count != 4 || Py_TYPE(args[0]) != template_type || PyBytes_AsStringAndSize(args[1], &text, &size) < 0) {
        return PyErr_Format(PyExc_TypeError, "keep(record_template, text, payload, about)");
    }
    auto* self = reinterpret_cast<RecordWriter*>(object);
    const auto* record_template = reinterpret_cast<RecordTemplate*>(args[0]);
    const long long payload = PyLong_AsLongLong(args[2]);
    if (!self->open.step) return PyErr_Format(PyExc_RuntimeError, "no step is open");
    const long long line = PyErr_Occurred() ? -1 : add_line(self, record_template, std::string(text, size_t(size)));
    if (line < 0) return nullptr;
    if (args[3] == Py_None) {
        self->state->shared.emplace_back(line, payload);
    } else {
        const Owned entry(Py_BuildValue("LLO", line, payload, args[3]));
        if (!entry || PyList_Append(self->entries, entry.get()) < 0) return nullptr;
        self->nbytes += record_template->nbytes();
    }
    pass_on_if_large(self);
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

// (record_template, address, target) -> (text, digest) of the bytes at `address`, which are copied to `target`
PyObject* writer_copy(PyObject* object, PyObject* const* args, Py_ssize_t count) {
    if (count != 3 || Py_TYPE(args[0]) != template_type) {
        return PyErr_Format(PyExc_TypeError, "copy(record_template, address, target)");
    }
    const uint64_t address = PyLong_AsUnsignedLongLongMask(args[1]), target = PyLong_AsUnsignedLongLongMask(args[2]);
    if (PyErr_Occurred()) return nullptr;
    const auto* record_template = reinterpret_cast<RecordTemplate*>(args[0]);
    auto& memo = reinterpret_cast<RecordWriter*>(object)->state->memo;
    return as_tuple(memo.read(record_template, address, at(address), reinterpret_cast<void*>(uintptr_t(target))));
}

// (step, its number, its serial, announce, numbers, pass_on, send, sent, room, keys) -> None; begins a step and
// invalidates the dedup cache, because memory is reused for other values
PyObject* writer_begin(PyObject* object, PyObject* args) {
    auto* self = reinterpret_cast<RecordWriter*>(object);
    OpenStep open;
    open.room = open.keys = Py_None;
    const char* number;
    long long serial;
    if (!PyArg_ParseTuple(args, "OsLOOOOO!|OO", &open.step, &number, &serial, &open.announce, &open.numbers,
                          &open.pass_on, &open.send, &PyDict_Type, &open.sent, &open.room, &open.keys)) {
        return nullptr;
    }
    for (PyObject* each :
         {open.step, open.announce, open.numbers, open.pass_on, open.send, open.sent, open.room, open.keys}) {
        Py_INCREF(each);
    }
    close(self);
    self->open = open, self->serial = serial;
    self->state->step = number, self->state->forks = num_forks;
    self->state->memo.forget();
    Py_RETURN_NONE;
}

// () -> None; ends the step: nothing is written until the next one begins
PyObject* writer_end(PyObject* object, PyObject*) {
    close(reinterpret_cast<RecordWriter*>(object));
    Py_RETURN_NONE;
}

PyObject* list_of(const std::vector<std::pair<long long, long long>>& pairs) {
    PyObject* list = PyList_New(Py_ssize_t(pairs.size()));
    for (size_t i = 0; list && i < pairs.size(); ++i) {
        PyObject* pair = Py_BuildValue("LL", pairs[i].first, pairs[i].second);
        if (!pair) return Py_DECREF(list), nullptr;
        PyList_SET_ITEM(list, Py_ssize_t(i), pair);
    }
    return list;
}

// () -> (lines, their number, entries, [(line index, number of a payload already sent)]); removes these lines
PyObject* writer_drain(PyObject* object, PyObject*) {
    auto* self = reinterpret_cast<RecordWriter*>(object);
    std::string& lines = self->state->lines;
    PyObject* fresh = PyList_New(0);
    const Owned shared(list_of(self->state->shared));
    if (!fresh || !shared) return Py_XDECREF(fresh), nullptr;
    const Owned entries(std::exchange(self->entries, fresh));
    const auto for_rows = static_cast<long long>(self->state->of_rows.lines.size());
    PyObject* found = Py_BuildValue("y#LOO", lines.data(), Py_ssize_t(lines.size()), self->waiting - for_rows,
                                    entries.get(), shared.get());
    if (found) lines.clear(), self->state->shared.clear(), self->waiting = for_rows, self->nbytes = 0;
    return found;
}

// (device, stream, addresses of rows, partial results and hash key, capacity of rows and of partial results, and for
// sketches: addresses of counters, partial counters and spans, capacity of partial counters) -> None; sets the buffers
// for the next rows
PyObject* writer_use_rows(PyObject* object, PyObject* args) {
    DeviceRows to;
    unsigned long long stream, rows, partial, keys, counters = 0, partial_counters = 0, spans = 0;
    if (!PyArg_ParseTuple(args, "LKKKKLL|KKKL", &to.device, &stream, &rows, &partial, &keys, &to.capacity, &to.parts,
                          &counters, &partial_counters, &spans, &to.sketch_parts)) {
        return nullptr;
    }
    to.counters = counters, to.partial_counters = partial_counters, to.spans = spans;
    to.stream = reinterpret_cast<void*>(uintptr_t(stream));
    to.rows = rows, to.partial = partial, to.keys = keys;
    reinterpret_cast<RecordWriter*>(object)->state->rows = to;
    Py_RETURN_NONE;
}

// () -> (heads, tails, offsets as int64, first sequence number, rows used, sketch descriptions or None) of the lines
// that wait for rows, as compose_rows takes them. Sketch descriptions have one entry per line, None for a line without
// a sketch. Removes these lines and releases the rows.
PyObject* writer_drain_rows(PyObject* object, PyObject*) {
    auto* self = reinterpret_cast<RecordWriter*>(object);
    const auto waiting = std::exchange(self->state->of_rows, WaitingLines());
    const long long used = std::exchange(self->state->rows, DeviceRows()).used;
    const auto size = Py_ssize_t(waiting.lines.size());
    self->waiting -= size;
    const bool has_sketches = std::any_of(waiting.lines.begin(), waiting.lines.end(),
                                          [](const WaitingLine& line) { return bool(line.sketch); });
    const Owned heads(PyTuple_New(size)), tails(PyTuple_New(size));
    const Owned sketches(has_sketches ? PyTuple_New(size) : Py_NewRef(Py_None));
    const Owned offsets(PyBytes_FromStringAndSize(nullptr, size * Py_ssize_t(sizeof(long long))));
    if (!heads || !tails || !sketches || !offsets) return nullptr;
    for (Py_ssize_t i = 0; i < size; ++i) {
        const auto& [line, offset, sketch] = waiting.lines[size_t(i)];
        const auto* record_template = reinterpret_cast<const RecordTemplate*>(line.get());
        PyTuple_SET_ITEM(heads.get(), i, Py_NewRef(record_template->head));
        PyTuple_SET_ITEM(tails.get(), i, Py_NewRef(record_template->tail));
        if (has_sketches) PyTuple_SET_ITEM(sketches.get(), i, Py_NewRef(sketch ? sketch.get() : Py_None));
        std::memcpy(PyBytes_AS_STRING(offsets.get()) + i * Py_ssize_t(sizeof offset), &offset, sizeof offset);
    }
    return Py_BuildValue("OOOLLO", heads.get(), tails.get(), offsets.get(), waiting.first, used, sketches.get());
}

PyMethodDef kWriterMethods[] = {
    {"begin", writer_begin, METH_VARARGS, nullptr},
    {"find", fast<writer_find>(), METH_FASTCALL, nullptr},
    {"write", fast<writer_write>(), METH_FASTCALL, nullptr},
    {"repeat", fast<writer_repeat>(), METH_FASTCALL, nullptr},
    {"keep", fast<writer_keep>(), METH_FASTCALL, nullptr},
    {"copy", fast<writer_copy>(), METH_FASTCALL, nullptr},
    {"drain", writer_drain, METH_NOARGS, nullptr},
    {"use_rows", writer_use_rows, METH_VARARGS, nullptr},
    {"drain_rows", writer_drain_rows, METH_NOARGS, nullptr},
    {"end", writer_end, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};
PyMemberDef kWriterMembers[] = {
    {"waiting", T_LONGLONG, offsetof(RecordWriter, waiting), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};
PyType_Slot kWriterSlots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make_record_writer)},
    {Py_tp_dealloc, reinterpret_cast<void*>(free_record_writer)},
    {Py_tp_methods, kWriterMethods},
    {Py_tp_members, kWriterMembers},
    {0, nullptr},
};
PyType_Spec kWriterSpec = {"tapscope.kernels.native._tapscope.RecordWriter", sizeof(RecordWriter), 0,
                           Py_TPFLAGS_DEFAULT, kWriterSlots};

bool add_names() {
    for (StepField* each : {&announced, &micro, &in_full, &halted}) {
        if (!(each->name = PyUnicode_InternFromString(each->text))) return false;
    }
    return (name_info = PyUnicode_InternFromString("info"));
}

}  // namespace

bool is_ordinary(const RecordWriter* writer) {
    PyObject* step = writer->open.step;
    return step && writer->state->forks == num_forks && !is_true(step, &micro) && !is_true(step, &in_full) &&
           !is_true(step, &halted) && is_without_tags(writer) && !is_in_backward(writer);
}

bool announce(RecordWriter* writer) {
    const Owned step(Py_NewRef(writer->open.step)), call(Py_NewRef(writer->open.announce));
    return is_true(step.get(), &announced) || Owned(PyObject_CallOneArg(call.get(), step.get()));
}

bool write(RecordWriter* writer, const RecordTemplate* record_template, const StridedView& view) {
    if (record_template->is_literal && !writer->state->of_rows.lines.empty()) {
        const long long number = next_waiting(writer);
        if (number >= 0) add_waiting(writer, const_cast<RecordTemplate*>(record_template), number, -1);
        return number >= 0;
    }
    const uint64_t generation = writer->state->generation;
    std::string content;
    if (!record_template->is_literal) {
        const Dense dense(view, record_template->nbytes());
        if (PyErr_Occurred()) return false;
        content = writer->state->memo.look(record_template, view.address, dense.bytes()).text;
    }
    if (generation != writer->state->generation) return false;  // another thread has ended the step in the meantime
    if (add_line(writer, record_template, content) < 0) return false;
    pass_on_if_large(writer);
    return true;
}

bool has_keys(const RecordWriter* writer, const RecordTemplate* record_template) {
    const DeviceSketch& sketch = record_template->sketch;
    if (!sketch.launch.function) return true;
    const int32_t device = int32_t(record_template->launch.device);
    void* stream = nullptr;
    const Owned info(PyObject_GetAttr(writer->open.step, name_info));
    if (!info || writer->open.keys == Py_None || writer->stream(dlpack::kCuda, device, &stream)) return false;
    StepKeys& known = writer->state->keys;
    if (known.device != device || known.stream != stream || PyTuple_GET_ITEM(known.about.get(), 0) != info.get()) {
        const uint64_t generation = writer->state->generation;
        const Owned call(Py_NewRef(writer->open.keys));
        Owned about(PyObject_CallFunction(call.get(), "iK", int(device),
                                          static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(stream))));
        if (!about || !PyTuple_Check(about.get()) || PyTuple_GET_SIZE(about.get()) < 4) return false;
        if (generation != writer->state->generation || PyTuple_GET_ITEM(about.get(), 0) != info.get()) return false;
        const uint64_t keys = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(about.get(), 2));
        const uint64_t zero = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(about.get(), 3));
        if (PyErr_Occurred()) return false;
        std::exchange(known, StepKeys{device, stream, std::move(about), keys, zero});
    }
    return known.zero && (sketch.slot < 0 || known.keys) &&
           PyObject_RichCompareBool(PyTuple_GET_ITEM(known.about.get(), 1), record_template->grid, Py_EQ) == 1;
}

bool summarize(RecordWriter* writer, RecordTemplate* record_template, const StridedView& view) {
    const DeviceLaunch &spec = record_template->launch, &sketch = record_template->sketch.launch;
    const Driver& driver = Driver::get();
    DeviceRows& rows = writer->state->rows;
    void* stream = nullptr;
    int device = -1, is_capturing = 0;
    if (writer->stream(dlpack::kCuda, int32_t(spec.device), &stream) || driver.device(&device) ||
        device != spec.device || driver.capturing(stream, &is_capturing) || is_capturing) {
        return false;
    }
    const WaitingLines& waiting = writer->state->of_rows;
    if (writer->waiting && (waiting.lines.empty() || waiting.lines.size() >= kMany) && !pass_on(writer)) return false;
    const long long number = next_waiting(writer);
    if (number < 0) return false;
    if (rows.device != spec.device || rows.stream != stream || !rows.has_room(spec, sketch)) {
        if (!waiting.lines.empty() && !pass_on(writer)) return false;
        const uint64_t generation = writer->state->generation;
        const Owned room(Py_NewRef(writer->open.room));
        const Owned given(PyObject_CallFunction(room.get(), "LKi", spec.device,
                                                static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(stream)),
                                                int(sketch.function != nullptr)));
        if (!given || generation != writer->state->generation || rows.device != spec.device || rows.stream != stream ||
            !rows.has_room(spec, sketch)) {
            return false;
        }
    }
    if (sketch.function && launch_sketch(record_template->sketch, rows, writer->state->keys, view.address))
        return false;
    if (launch_summary(spec, rows, view.address, record_template->count)) return false;
    rows.parts_used += spec.programs, rows.sketch_parts_used += sketch.programs;
    add_waiting(writer, record_template, number, kRowBytes * rows.used++);
    return true;
}

bool repeat(RecordWriter* writer, const RecordTemplate* record_template, const StridedView& view,
            const uint8_t* bytes) {
    const uint64_t generation = writer->state->generation;
    KnownBytes seen;
    if (record_template->nbytes() < kSmall) {
        seen = writer->state->memo.read(record_template, view.address, bytes, nullptr);
    } else if (!writer->state->memo.recall(record_template, view.address, bytes, &seen)) {
        return false;
    }
    if (generation != writer->state->generation) return false;
    const long long payload = payload_of(writer, record_template, seen);
    const long long line = payload && !PyErr_Occurred() ? add_line(writer, record_template, seen.text) : -1;
    if (line < 0) return false;
    writer->state->shared.emplace_back(line, payload);
    pass_on_if_large(writer);
    return true;
}

bool add_record_writer(PyObject* module) {
    writer_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&kWriterSpec));
    pthread_atfork(nullptr, nullptr, [] { ++num_forks; });
    return add_names() && writer_type &&
           PyModule_AddObjectRef(module, "RecordWriter", reinterpret_cast<PyObject*>(writer_type)) == 0;
}

}  // namespace ts
