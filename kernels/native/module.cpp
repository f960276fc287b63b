// Extension module functions that the dumper calls in every hook and the comparator at every site: a call through
// ctypes would cost more than the work itself.

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "py_util.h"
#include "linear.h"
#include "arrays.h"
#include "aggregate.h"
#include "record_writer.h"
#include "paged.h"
#include "record_summary.h"
#include "sketch.h"

namespace {

using ts::fast, ts::run;

bool read(PyObject* const* args, Py_ssize_t count, int64_t* numbers, Py_ssize_t wanted) {
    if (count != wanted) {
        PyErr_Format(PyExc_TypeError, "%zd arguments are needed, not %zd", wanted, count);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; ++i) {
        const unsigned long long bits = PyLong_AsUnsignedLongLongMask(args[i]);
        if (bits == ~0ULL && PyErr_Occurred()) return false;
        numbers[i] = static_cast<int64_t>(bits);
    }
    return true;
}

template <class T>
T* at(int64_t address) {
    return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

// (data, count, dtype code, with bag, copy destination or 0, bytes per element) -> (text, digest)
PyObject* take(PyObject*, PyObject* const* args, Py_ssize_t count) {
    int64_t n[6];
    if (!read(args, count, n, 6)) return nullptr;
    ts::RecordSummary found;
    int64_t size = 0;
    run(n[1] * n[5],
        [&] { size = ts_summarize_record(at<void>(n[0]), n[1], int(n[2]), int(n[3]), at<void>(n[4]), &found); });
    return Py_BuildValue("y#y#", found.text, Py_ssize_t(size), found.digest, Py_ssize_t(sizeof found.digest));
}

// (address of a struct Summary) -> (text, digest)
PyObject* tell(PyObject*, PyObject* const* args, Py_ssize_t count) {
    int64_t address;
    if (!read(args, count, &address, 1)) return nullptr;
    ts::RecordSummary found;
    const int64_t size = ts_tell(at<ts::Summary>(address), &found);
    return Py_BuildValue("y#y#", found.text, Py_ssize_t(size), found.digest, Py_ssize_t(sizeof found.digest));
}

// Reads a tuple of bytes objects; returns false with an exception set on failure.
bool read_pieces(PyObject* tuple, std::vector<std::string_view>* found) {
    if (!PyTuple_Check(tuple)) return PyErr_SetString(PyExc_TypeError, "a tuple of bytes is needed"), false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
        char* text;
        Py_ssize_t size;
        if (PyBytes_AsStringAndSize(PyTuple_GET_ITEM(tuple, i), &text, &size) < 0) return false;
        found->emplace_back(text, size_t(size));
    }
    return true;
}

// (base address, heads, tails, offsets as int64, step, first sequence number, optional ends) -> record lines, without
// the last newline. A line consists of its head, the step, its tail, the text of the struct Summary at its offset
// (omitted if the offset is -1), and its end.
PyObject* compose_rows(PyObject*, PyObject* args) {
    unsigned long long address;
    long long number;
    PyObject *head_tuple, *tail_tuple, *offset_bytes, *end_tuple = nullptr;
    const char* step;
    if (!PyArg_ParseTuple(args, "KOOSsL|O", &address, &head_tuple, &tail_tuple, &offset_bytes, &step, &number,
                          &end_tuple)) {
        return nullptr;
    }
    std::vector<std::string_view> heads, tails, ends;
    if (!read_pieces(head_tuple, &heads) || !read_pieces(tail_tuple, &tails)) return nullptr;
    if (end_tuple && !read_pieces(end_tuple, &ends)) return nullptr;
    ends.resize(end_tuple ? ends.size() : heads.size());
    const auto* offsets = reinterpret_cast<const int64_t*>(PyBytes_AS_STRING(offset_bytes));
    if (heads.size() != tails.size() || heads.size() != ends.size() ||
        size_t(PyBytes_GET_SIZE(offset_bytes)) != 8 * heads.size()) {
        return PyErr_Format(PyExc_ValueError, "heads, tails, offsets and ends differ in number");
    }
    std::string lines;
    Py_BEGIN_ALLOW_THREADS;
    ts::RecordSummary found;
    lines.reserve(heads.size() * 512);
    for (size_t i = 0; i < heads.size(); ++i) {
        if (i) lines += '\n';
        lines += "{\"type\":\"record\",\"seq\":";
        lines.append(std::to_string(number + static_cast<long long>(i))).append(heads[i]).append(step).append(tails[i]);
        if (offsets[i] >= 0) {
            const int64_t size = ts_tell(at<ts::Summary>(static_cast<int64_t>(address) + offsets[i]), &found);
            lines.append(",").append(found.text, size_t(size));
        }
        lines.append(ends[i]) += '}';
    }
    Py_END_ALLOW_THREADS;
    return PyBytes_FromStringAndSize(lines.data(), Py_ssize_t(lines.size()));
}

PyObject* driver_failed(const char* what, int error) {
    const char* name = nullptr;
    if (ts::Driver::get().error_name(error, &name) || !name) name = "an unknown error";
    return PyErr_Format(PyExc_RuntimeError,
                        "the CUDA driver refused to start %s: %s (%d); a kernel before it may have failed, which "
                        "CUDA_LAUNCH_BLOCKING=1 finds",
                        what, name, error);
}

// Starts copies on a stream, given as int64 triples (destination, source, nbytes), then records the event. Returns the
// driver's error code.
int copy_all(const char* copies, Py_ssize_t size, void* stream, void* event) {
    const ts::Driver& driver = ts::Driver::get();
    const auto* numbers = reinterpret_cast<const int64_t*>(copies);
    int error = 0;
    for (Py_ssize_t i = 0; !error && i + 3 <= size / 8; i += 3) {
        error = driver.copy(uint64_t(numbers[i]), uint64_t(numbers[i + 1]), size_t(numbers[i + 2]), stream);
    }
    return error ? error : driver.record(event, stream);
}

// (device, stream, event, copies, merge or None, aside or None) -> whether the copies were started on the stream and
// the event recorded. Returns False and does nothing without a driver or if another device is current. Copies are as in
// copy_all. `merge` is (function, rows, threads, shared memory, overlaps, address of the rows), a kernel launched
// first. `aside` is (side stream, more copies): the side stream waits for the first copies, and the event is recorded
// after its own.
PyObject* copy_async(PyObject*, PyObject* args) {
    long long device;
    unsigned long long stream_bits, event_bits, side_bits, function, rows;
    Py_ssize_t size, more_size;
    const char *copies, *more;
    PyObject *merge = Py_None, *aside = Py_None;
    if (!PyArg_ParseTuple(args, "LKKy#|OO", &device, &stream_bits, &event_bits, &copies, &size, &merge, &aside)) {
        return nullptr;
    }
    const ts::Driver& driver = ts::Driver::get();
    ts::DeviceLaunch merge_spec;
    if (merge != Py_None && !PyArg_ParseTuple(merge, "KIIIpK", &function, &merge_spec.programs, &merge_spec.threads,
                                              &merge_spec.shared, &merge_spec.overlaps, &rows)) {
        return nullptr;
    }
    if (aside != Py_None && !PyArg_ParseTuple(aside, "Ky#", &side_bits, &more, &more_size)) return nullptr;
    int current = -1;
    if (!driver || !event_bits || driver.device(&current) || current != device) Py_RETURN_FALSE;
    void *stream = at<void>(int64_t(stream_bits)), *event = at<void>(int64_t(event_bits));
    if (merge != Py_None) {
        merge_spec.function = at<void>(int64_t(function));
        if (const int error = ts::launch_merge(merge_spec, stream, rows))
            return driver_failed("a merge of statistics", error);
    }
    int error = copy_all(copies, size, stream, event);
    if (aside != Py_None) {
        void* side = at<void>(int64_t(side_bits));
        error = error ? error : driver.wait(side, event, 0);
        error = error ? error : copy_all(more, more_size, side, event);
    }
    if (error) return driver_failed("a copy", error);
    Py_RETURN_TRUE;
}

// (function, 3 grid dimensions, threads, shared memory, overlaps, stream, 64-bit parameters...) -> the driver's error
// code, 0 on success; None without a driver
PyObject* launch_kernel(PyObject*, PyObject* const* args, Py_ssize_t count) {
    constexpr Py_ssize_t kFixed = 8, kMost = 64;
    if (count < kFixed || count > kFixed + kMost) return PyErr_Format(PyExc_TypeError, "%zd arguments", count);
    uint64_t n[kFixed + kMost];
    void* parameters[kMost];
    for (Py_ssize_t i = 0; i < count; ++i) {
        n[i] = PyLong_AsUnsignedLongLongMask(args[i]);
        if (n[i] == ~uint64_t(0) && PyErr_Occurred()) return nullptr;
        if (i >= kFixed) parameters[i - kFixed] = n + i;
    }
    if (!ts::Driver::get()) Py_RETURN_NONE;
    const ts::LaunchConfig config = {{unsigned(n[1]), unsigned(n[2]), unsigned(n[3])},
                                     {unsigned(n[4]), 1, 1},
                                     unsigned(n[5]),
                                     at<void>(int64_t(n[7])),
                                     &ts::kOverlap,
                                     unsigned(n[6] != 0)};
    return PyLong_FromLong(ts::Driver::get().launch(&config, at<void>(int64_t(n[0])), parameters, nullptr));
}

// (data, nbytes) -> digest
PyObject* digest_of(PyObject*, PyObject* const* args, Py_ssize_t count) {
    int64_t n[2];
    if (!read(args, count, n, 2)) return nullptr;
    uint8_t digest[16];
    run(n[1], [&] { ts_hash(at<void>(n[0]), n[1], digest); });
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(digest), sizeof digest);
}

// (floats [6, rows], integers [8, rows], baseline at worst [rows], section bounds, errors out [rows]) -> one struct
// Overview per section, as bytes
PyObject* overviews(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 5) return PyErr_Format(PyExc_TypeError, "5 arguments are needed, not %zd", count);
    const ts::Memory floats(args[0], 0), integers(args[1], 0), at_worst(args[2], 0), bounds(args[3], 0);
    const ts::Memory errors(args[4], PyBUF_WRITABLE);
    if (!floats || !integers || !at_worst || !bounds || !errors) return nullptr;
    const int64_t rows = errors.nbytes() / 8, sections = bounds.nbytes() / 8 - 1, *bound = bounds.as<int64_t>();
    bool fits = floats.nbytes() == 48 * rows && integers.nbytes() == 64 * rows && at_worst.nbytes() == 8 * rows;
    fits = fits && sections >= 0 && bound[0] >= 0 && bound[sections] <= rows;
    for (int64_t i = 0; fits && i < sections; ++i) fits = bound[i] <= bound[i + 1];
    if (!fits)
        return PyErr_Format(PyExc_ValueError, "the arrays do not have %lld rows each", static_cast<long long>(rows));
    PyObject* found = PyBytes_FromStringAndSize(nullptr, sections * ts::kOverviewBytes);
    if (!found) return nullptr;
    char* out = PyBytes_AS_STRING(found);
    run(floats.nbytes() * 4, [&] {
        ts_overviews(floats.as<double>(), integers.as<int64_t>(), at_worst.as<double>(), rows, bound, sections,
                     errors.as<double>(), out);
    });
    return found;
}

// (x, w, bias or 0, y, rows, row stride of x, outs, ins, dtype code, threads) -> whether y was computed
PyObject* linear(PyObject*, PyObject* const* args, Py_ssize_t count) {
    int64_t n[10];
    if (!read(args, count, n, 10)) return nullptr;
    const ts::Linear call{at<void>(n[0]), at<void>(n[1]), at<void>(n[2]), at<void>(n[3]), n[4], n[5], n[6], n[7]};
    bool done = false;
    run(n[6] * n[7] * 4, [&] { done = ts::ts_linear(call, int(n[8]), n[9]); });
    return PyBool_FromLong(done);
}

// (x, w, group ends, y, rows, groups, outs, ins, maximum rows per group, dtype code, threads) -> whether y was computed
PyObject* grouped_linear(PyObject*, PyObject* const* args, Py_ssize_t count) {
    int64_t n[11];
    if (!read(args, count, n, 11)) return nullptr;
    const ts::Linear call{at<void>(n[0]), at<void>(n[1]), nullptr, at<void>(n[3]), n[4], n[7], n[6], n[7]};
    bool done = false;
    run(std::min(n[4], n[5]) * n[6] * n[7] * 4,
        [&] { done = ts::ts_grouped_linear(call, at<int32_t>(n[2]), n[5], n[8], int(n[9]), n[10]); });
    return PyBool_FromLong(done);
}

// (query, keys, values, block table, lengths, out, requests, heads, kv heads, key dim, value dim, value stride, page
// size, table stride, window or 0, dtype code, dtype code of the KV cache, threads, scale, key scale, value scale) ->
// whether the output was computed
PyObject* paged(PyObject*, PyObject* const* args, Py_ssize_t count) {
    int64_t n[18];
    if (!read(args, count - 3, n, 18)) return nullptr;
    float scales[3];
    for (int i = 0; i < 3; ++i) scales[i] = static_cast<float>(PyFloat_AsDouble(args[18 + i]));
    if (PyErr_Occurred()) return nullptr;
    const ts::Paged call{at<void>(n[0]),
                         at<void>(n[1]),
                         at<void>(n[2]),
                         at<int32_t>(n[3]),
                         at<int32_t>(n[4]),
                         at<void>(n[5]),
                         n[6],
                         n[7],
                         n[8],
                         n[9],
                         n[10],
                         n[11],
                         n[12],
                         n[13],
                         n[14],
                         scales[0],
                         scales[1],
                         scales[2]};
    bool done = false;
    run(n[6] * n[13] * n[12] * n[8] * (n[9] + n[10]) * 4,
        [&] { done = ts::ts_paged(call, int(n[15]), int(n[16]), n[17]); });
    return PyBool_FromLong(done);
}

// Reads a side that is a sum: (dtype code of the sum, summands...), all of one dtype and shape. `*given` becomes the
// first summand, the others are appended to `strip->more`.
bool read_summands(PyObject** given, int dtype, PyObject* index, int side, ts::Strip* strip) {
    PyObject* summands = *given;
    const Py_ssize_t count = PyTuple_GET_SIZE(summands);
    if (count < 2) return PyErr_Format(PyExc_ValueError, "a sum has one summand at least") != nullptr;
    strip->sum_dtype[side] = static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(summands, 0)));
    if (PyErr_Occurred()) return false;
    const int sum = strip->sum_dtype[side];
    if (sum != ts::kFloat64 && sum != ts::kFloat32 && sum != ts::kInt64) {
        return PyErr_Format(PyExc_ValueError, "sums are not of dtype %d", sum) != nullptr;
    }
    *given = PyTuple_GET_ITEM(summands, 1);
    ts::Rows first;
    int64_t shape[2] = {0, 0}, other[2] = {0, 0};
    if (!ts::read_rows(*given, dtype, index, &first, &shape[0], &shape[1])) return false;
    for (Py_ssize_t i = 2; i < count; ++i) {
        ts::Rows rows;
        if (!ts::read_rows(PyTuple_GET_ITEM(summands, i), dtype, index, &rows, &other[0], &other[1])) return false;
        if (other[0] != shape[0] || other[1] != shape[1]) {
            return PyErr_Format(PyExc_ValueError, "summands must have one shape") != nullptr;
        }
        strip->more[side].push_back(rows);
    }
    return true;
}

bool read_strip(PyObject* given, ts::Strip* strip) {
    PyObject *baseline, *target, *index[2];
    int dtypes[2];
    long long row, column;
    if (!PyArg_ParseTuple(given, "OOiiOOLL", &baseline, &target, &dtypes[0], &dtypes[1], &index[0], &index[1], &row,
                          &column)) {
        return false;
    }
    strip->row = row, strip->column = column;
    PyObject* first[2] = {baseline, target};
    for (int side = 0; side < 2; ++side) {
        if (PyTuple_Check(first[side]) && !read_summands(&first[side], dtypes[side], index[side], side, strip)) {
            return false;
        }
    }
    return ts::read_matrices(first[0], first[1], dtypes, index, &strip->sides);
}

int64_t bytes_of(const ts::Matrices& sides) {
    return sides.rows * sides.width * (ts::kItemSize[sides.baseline.dtype] + ts::kItemSize[sides.target.dtype]);
}

// Reads a list of strips, whose rows must be within the results' rows.
bool read_strips(PyObject* given, int64_t rows, std::vector<ts::Strip>* strips, int64_t* nbytes) {
    strips->resize(static_cast<size_t>(PyList_GET_SIZE(given)));
    bool fits = true;
    for (size_t i = 0; i < strips->size(); ++i) {
        ts::Strip& strip = (*strips)[i];
        if (!read_strip(PyList_GET_ITEM(given, Py_ssize_t(i)), &strip)) return false;
        fits = fits && strip.row >= 0 && strip.row + strip.sides.rows <= rows;
        *nbytes += bytes_of(strip.sides);
    }
    return fits || PyErr_Format(PyExc_ValueError, "the strips do not fit into %lld rows", static_cast<long long>(rows));
}

// (strips, atol, rtol, floats out [6, rows], integers out [8, rows], baseline at worst out [rows], strip out [rows]).
// Each strip is a tuple (baseline, target, dtype codes x2, row indices x2 or None, first row, first column), where a
// side may be a sum, see read_summands.
PyObject* compare(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 7 || !PyList_Check(args[0])) return PyErr_Format(PyExc_TypeError, "a list and 6 more are needed");
    const double atol = PyFloat_AsDouble(args[1]), rtol = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred()) return nullptr;
    const ts::Memory floats(args[3], PyBUF_WRITABLE), integers(args[4], PyBUF_WRITABLE),
        at_worst(args[5], PyBUF_WRITABLE);
    const ts::Memory strip_of(args[6], PyBUF_WRITABLE);
    if (!floats || !integers || !at_worst || !strip_of) return nullptr;
    const int64_t rows = at_worst.nbytes() / 8;
    bool fits = floats.nbytes() == 48 * rows && integers.nbytes() == 64 * rows && strip_of.nbytes() == 8 * rows;
    std::vector<ts::Strip> strips;
    int64_t nbytes = 0;
    if (!read_strips(args[0], rows, &strips, &nbytes)) return nullptr;
    if (!fits)
        return PyErr_Format(PyExc_ValueError, "the results do not have %lld rows each", static_cast<long long>(rows));
    const ts::RowResults out{floats.as<double>(), integers.as<int64_t>(), at_worst.as<double>(), strip_of.as<int64_t>(),
                             rows};
    run(nbytes, [&] {
        for (size_t i = 0; i < strips.size(); ++i) {
            const bool is_first = i == 0 || strips[i].row != strips[i - 1].row;
            ts::compare_strip(strips[i], static_cast<int64_t>(i), is_first, atol, rtol, out);
        }
    });
    Py_RETURN_NONE;
}

// (strips as for compare, number of rows, share or -1) -> the fields of a Deviation
PyObject* deviation(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 3 || !PyList_Check(args[0])) return PyErr_Format(PyExc_TypeError, "a list and 2 numbers are needed");
    const int64_t rows = PyLong_AsLongLong(args[1]);
    const double share = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred()) return nullptr;
    std::vector<ts::Strip> strips;
    int64_t nbytes = 0, num_read = 0;
    if (!read_strips(args[0], rows, &strips, &nbytes)) return nullptr;
    for (size_t i = 0; i < strips.size(); ++i) {
        if (i == 0 || strips[i].row != strips[i - 1].row) num_read += strips[i].sides.rows;
    }
    if (num_read != rows)
        return PyErr_Format(PyExc_ValueError, "the strips do not fill %lld rows", static_cast<long long>(rows));
    ts::Deviation found;
    run(nbytes, [&] { found = ts::deviation_of(strips, rows, share); });
    return Py_BuildValue("ddddLLLL", found.typical, found.worst, found.power, found.dot,
                         static_cast<long long>(found.elements), static_cast<long long>(found.width),
                         static_cast<long long>(found.unequal), static_cast<long long>(found.mismatched));
}

// (the fields of a strip, accumulators [2, 5, columns])
PyObject* channel_sums(PyObject*, PyObject* args) {
    ts::Strip strip;
    PyObject* given = PyTuple_GetSlice(args, 0, 8);
    bool fits = given != nullptr && PyTuple_GET_SIZE(args) == 9 && read_strip(given, &strip);
    fits = fits && strip.sum_dtype[0] < 0 && strip.sum_dtype[1] < 0;
    Py_XDECREF(given);
    if (!fits) return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_TypeError, "9 arguments are needed");
    const ts::Memory sums(PyTuple_GET_ITEM(args, 8), PyBUF_WRITABLE);
    if (!sums) return nullptr;
    const int64_t total = sums.nbytes() / 80;
    if (strip.row < 0 || strip.column < 0 || strip.column + strip.sides.width > total) {
        return PyErr_Format(PyExc_ValueError, "the strip does not fit into %lld columns",
                            static_cast<long long>(total));
    }
    run(bytes_of(strip.sides), [&] { ts::add_channel_sums(strip, sums.as<double>(), total); });
    Py_RETURN_NONE;
}

// (sums [2, 5, columns], at least two columns) -> struct ChannelFound as bytes, or None if the sums are not finite
PyObject* find_channel(PyObject*, PyObject* given) {
    const ts::Memory sums(given, 0);
    if (!sums) return nullptr;
    if (sums.nbytes() < 160) return PyErr_Format(PyExc_ValueError, "two columns at least are needed");
    ts::ChannelFound found;
    bool is_finite = false;
    run(sums.nbytes() * 8, [&] { is_finite = ts::find_channel(sums.as<double>(), sums.nbytes() / 80, &found); });
    if (!is_finite) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize(reinterpret_cast<const char*>(&found), sizeof found);
}

// (data, dtype code, row width, rows [n] int64, keys [n] uint32, runs [m, 3] int64, counters [256] float64 to add to)
PyObject* sketch(PyObject*, PyObject* const* args, Py_ssize_t count) {
    int64_t n[3];
    if (count != 7) return PyErr_Format(PyExc_TypeError, "7 arguments are needed, not %zd", count);
    if (!read(args, 3, n, 3)) return nullptr;
    const ts::Memory rows(args[3], 0), keys(args[4], 0), runs(args[5], 0), out(args[6], PyBUF_WRITABLE);
    if (!rows || !keys || !runs || !out) return nullptr;
    if (rows.nbytes() != 2 * keys.nbytes() || runs.nbytes() % 24 || out.nbytes() != 2048) {
        return PyErr_Format(PyExc_ValueError, "a key for each row, runs of 3 numbers and 256 counters are needed");
    }
    const ts::Sketch call{at<uint8_t>(n[0]),  int(n[1]),           n[2],
                          rows.as<int64_t>(), keys.as<uint32_t>(), keys.nbytes() / 4,
                          runs.as<int64_t>(), runs.nbytes() / 24};
    run(call.num_rows * n[2] * ts::kItemSize[call.dtype] * 4, [&] { ts::ts_sketch(call, out.as<double>()); });
    Py_RETURN_NONE;
}

// (N) -> None; sets the number of CUDA graph captures in progress
PyObject* set_captures(PyObject*, PyObject* number) {
    ts::num_captures = PyLong_AsLongLong(number);
    if (PyErr_Occurred()) return nullptr;
    Py_RETURN_NONE;
}

PyMethodDef kMethods[] = {
    {"take", fast<take>(), METH_FASTCALL, nullptr},
    {"tell", fast<tell>(), METH_FASTCALL, nullptr},
    {"digest_of", fast<digest_of>(), METH_FASTCALL, nullptr},
    {"overviews", fast<overviews>(), METH_FASTCALL, nullptr},
    {"linear", fast<linear>(), METH_FASTCALL, nullptr},
    {"paged", fast<paged>(), METH_FASTCALL, nullptr},
    {"compare", fast<compare>(), METH_FASTCALL, nullptr},
    {"deviation", fast<deviation>(), METH_FASTCALL, nullptr},
    {"channel_sums", channel_sums, METH_VARARGS, nullptr},
    {"find_channel", find_channel, METH_O, nullptr},
    {"compose_rows", compose_rows, METH_VARARGS, nullptr},
    {"sketch", fast<sketch>(), METH_FASTCALL, nullptr},
    {"set_captures", set_captures, METH_O, nullptr},
    {"launch_kernel", fast<launch_kernel>(), METH_FASTCALL, nullptr},
    {"copy_async", copy_async, METH_VARARGS, nullptr},
    {"grouped_linear", fast<grouped_linear>(), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_tapscope", nullptr, 0, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__tapscope() {
    PyObject* module = PyModule_Create(&kModule);
    if (module && !(ts::add_record_template(module) && ts::add_record_writer(module) && ts::add_numbers(module) &&
                    ts::add_fast_path(module) && ts::add_module_call(module))) {
        Py_CLEAR(module);
    }
    return module;
}
