// The Python types RecordTemplate, RecordWriter and FastPath, see record_template.cpp, record_writer.cpp and
// hook_fastpath.cpp.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <string>
#include <vector>

#include "device_rows.h"
#include "dlpack.h"
#include "strided_view.h"

namespace ts {

// The constant parts of the record lines of one port, and the dtype, shape and element type of its last tensor; or, for
// a plain value, the complete line except for the numbers.
struct RecordTemplate {
    PyObject_HEAD
    PyObject* kind;  // torch.dtype; for a plain value: the value itself, or its type if only the type is recorded
    PyObject* size;  // torch.Size
    std::vector<int64_t>* shape;
    dlpack::Element element;  // DLPack element type, learned from the first tensor; lanes is 0 until then
    PyObject *head, *tail;    // bytes
    long long count;          // number of elements in terms of `code`
    long long width;          // bytes per element
    int code;
    bool is_literal;      // a plain value: `tail` is the rest of the line
    DeviceLaunch launch;  // for tensors on a device that computes their statistics
    DeviceSketch sketch;  // and their sketch, if one is kept
    PyObject* grid;       // grid of the steps in which the sketch is computed on the device, see StepInfo; null without
    PyObject* about;      // sketch description, for the code that queues the record; null without

    int64_t nbytes() const { return count * width; }
};

// Objects of torch and the context that a writer uses; they live as long as the process.
struct TorchTypes {
    PyObject* types;       // tuple: exact types of plain tensors
    PyObject* exchange;    // their DLPack exchange API, or None
    PyObject* keys_of;     // tensor -> its dispatch keys
    PyObject* plain;       // set: raw_repr() of the dispatch keys of plain tensors
    PyObject* graph_task;  // () -> id of the autograd graph task of this thread, -1 outside of backward
    PyObject* tags;        // ContextVar
    PyObject* no_tags;     // value of `tags` when no tags are set
};

// State of a writer between begin and end.
struct OpenStep {
    PyObject* step = nullptr;      // see dumper/steps/open_step.py
    PyObject* announce = nullptr;  // (step): queues the step's line, which precedes its records
    PyObject* numbers = nullptr;   // iterator: next sequence number
    PyObject* pass_on = nullptr;   // (): queues the waiting lines
    PyObject* send = nullptr;      // ((port, layout), address): writes a record with a payload
    PyObject* sent = nullptr;      // dict: (digest, nbytes) -> number of the payload of this step with these bytes
    // (device, stream, with sketches): allocates rows of statistics; None if no device writes any
    PyObject* room = nullptr;
    PyObject* keys = nullptr;  // (device, stream): (step info, grid, address of keys, address of a zero key, ...) for
                               // sketches; or None
};

struct WriterState;

struct RecordWriter {
    PyObject_HEAD
    TorchTypes torch;
    OpenStep open;
    dlpack::View view;  // null if torch has no exchange API
    dlpack::Stream stream;
    long long serial;   // serial of the open step
    long long waiting;  // number of waiting lines
    long long nbytes;   // bytes of the payloads that wait with them
    PyObject* entries;  // list: (index among the waiting lines, payload number, payload description)
    WriterState* state;
};

// Returns whether a firing at this point is an ordinary one of the open step: in a forward pass, without tags, and not
// in a special mode.
bool is_ordinary(const RecordWriter* writer);

// Queues the line of the open step unless already done; returns false with an exception set on failure.
bool announce(RecordWriter* writer);

// Returns whether the tensor is plain host memory with the dtype and shape of `record_template`, and sets `found` to
// its layout; if not, an exception may be set.
bool find(const RecordWriter* writer, RecordTemplate* record_template, PyObject* tensor, StridedView* found);

// Writes the line of a tensor that find() accepted, and queues the waiting lines if there are many. Returns false if
// the step has ended in the meantime. An exception may be set either way.
bool write(RecordWriter* writer, const RecordTemplate* record_template, const StridedView& view);

// As find(), for plain memory of a CUDA device.
bool find_on_device(const RecordWriter* writer, const RecordTemplate* record_template, PyObject* tensor,
                    StridedView* found);

// Returns whether the sketch of the template's tensors can be computed: no sketch is kept, or the row keys are known
// and the step has the template's grid. If not, an exception may be set.
bool has_keys(const RecordWriter* writer, const RecordTemplate* record_template);

// Launches the statistics, and the sketch if one is kept, of a tensor that find_on_device() accepted, and adds the line
// that waits for them. Returns false without side effects if that is not possible now. An exception may be set either
// way.
bool summarize(RecordWriter* writer, RecordTemplate* record_template, const StridedView& view);

// Writes the line of a full tensor whose bytes are given, if this step has already sent equal bytes: the line refers to
// that payload. Returns false otherwise, with nothing written. An exception may be set either way.
bool repeat(RecordWriter* writer, const RecordTemplate* record_template, const StridedView& view, const uint8_t* bytes);

extern PyTypeObject *template_type, *writer_type;

// Add the types to the module; false with an exception set on failure.
bool add_record_template(PyObject* module);
bool add_record_writer(PyObject* module);
bool add_numbers(PyObject* module);

// Number of CUDA graph captures in progress in any thread: writers decline firings during capture.
extern long long num_captures;
bool add_fast_path(PyObject* module);
bool add_module_call(PyObject* module);

}  // namespace ts
