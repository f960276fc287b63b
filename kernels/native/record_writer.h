// The types RecordTemplate, RecordWriter and FastPath of Python, see record_template.cpp, writer.cpp and fastpath.cpp.
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

// What the lines of one port have in common, and how its last tensor lay; or all of the lines of a plain value, but for
// the numbers.
struct RecordTemplate {
    PyObject_HEAD
    PyObject* kind;  // torch.dtype; or of a plain value: itself, or its type where it is only named by that
    PyObject* size;  // torch.Size
    std::vector<int64_t>* shape;
    dlpack::Element element;  // as DLPack names it, once a tensor has shown it; lanes is 0 until then
    PyObject *head, *tail;    // bytes
    long long count;          // elements as `code` has them
    long long width;          // bytes of one
    int code;
    bool is_literal;      // a plain value: its tail is the rest of the line
    DeviceLaunch launch;  // where such tensors are on a device, which computes their statistics
    DeviceSketch sketch;  // and their sketch, if that is kept
    PyObject* grid;       // of the steps in which a sketch is taken so, see StepInfo; null without
    PyObject* about;      // of the sketch, for those who queue the record; null without

    int64_t nbytes() const { return count * width; }
};

// What a writer needs of torch and of the context; they live as long as the process.
struct TorchTypes {
    PyObject* types;       // tuple: exact types of plain tensors
    PyObject* exchange;    // their DLPack interface, or None
    PyObject* keys_of;     // of a tensor: its dispatch keys
    PyObject* plain;       // set: raw_repr() of those of plain tensors
    PyObject* graph_task;  // () -> number of what the autograd engine does in this thread, -1 for nothing
    PyObject* tags;        // ContextVar
    PyObject* no_tags;     // what it holds where no tags are set
};

// What it does between begin and end.
struct OpenStep {
    PyObject* step = nullptr;      // see dumper/steps/open_step.py
    PyObject* announce = nullptr;  // (step): queues its line, before those of its records
    PyObject* numbers = nullptr;   // iterator: the number of the next record
    PyObject* pass_on = nullptr;   // (): queues the lines that wait
    PyObject* send = nullptr;      // ((port, layout), address): writes a record whose bytes are to be sent
    PyObject* sent = nullptr;      // dict: (digest, bytes) -> number of the payload of this step that holds them
    // (device, stream, whether for sketches): gives memory for rows of statistics; None where no device writes any
    PyObject* room = nullptr;
    PyObject* keys =
        nullptr;  // (device, stream): (step's info, grid, address of keys, of a zero, ...) for sketches; None
};

struct WriterState;

struct RecordWriter {
    PyObject_HEAD
    TorchTypes around;
    OpenStep open;
    dlpack::View view;  // null where torch has none
    dlpack::Stream stream;
    long long serial;   // of the open step
    long long waiting;  // lines
    long long nbytes;   // of the payloads that wait with them
    PyObject* entries;  // list: (line among those that wait, number of its payload, what is known of that)
    WriterState* state;
};

// Whether a firing now is an ordinary one of the open step: in a forward, without tags, nothing special going on.
bool is_ordinary(const RecordWriter* writer);

// Has the line of the open step queued, unless that was done; false with an exception set.
bool announce(RecordWriter* writer);

// Whether the tensor is plain memory with the record_template's element type and shape, and where; an exception may be
// set if not.
bool find(const RecordWriter* writer, RecordTemplate* record_template, PyObject* tensor, StridedView* found);

// Writes the line of such a tensor, and has the lines that wait queued when they are many; false when its step has
// ended meanwhile. An exception may be set either way.
bool write(RecordWriter* writer, const RecordTemplate* record_template, const StridedView& view);

// Whether the tensor is plain memory of a device with the record_template's element type and shape, and where; an
// exception may be set if not.
bool find_on_device(const RecordWriter* writer, const RecordTemplate* record_template, PyObject* tensor,
                    StridedView* found);

// Whether the keys of the rows are known, and the step has the grid, for the sketch of the template's tensors, if one
// is kept; an exception may be set if not.
bool has_keys(const RecordWriter* writer, const RecordTemplate* record_template);

// Starts to compute the statistics, and the sketch if one is kept, of such a tensor on its device, and adds the line
// that waits for them; false where that is not possible now, and nothing was done. An exception may be set either way.
bool summarize(RecordWriter* writer, RecordTemplate* record_template, const StridedView& view);

// The same for the record of a whole tensor, whose bytes are given, if this step has sent equal ones: the line names
// those. False for others, of which nothing was written. An exception may be set either way.
bool repeat(RecordWriter* writer, const RecordTemplate* record_template, const StridedView& view, const uint8_t* bytes);

extern PyTypeObject *template_type, *writer_type;

// Add the types to the module; false with an exception set.
bool add_record_template(PyObject* module);
bool add_record_writer(PyObject* module);
bool add_numbers(PyObject* module);

// Captures of CUDA graphs under way in any thread: what fires in them is not for a writer.
extern long long num_captures;
bool add_fast_path(PyObject* module);
bool add_module_call(PyObject* module);

}  // namespace ts
