// Memory layout of a tensor: one contiguous run, or runs with gaps between them.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "py_util.h"
#include "dlpack.h"

namespace ts {

struct StridedView {
    struct Steps {             // one dimension over runs
        int64_t size, stride;  // stride in bytes
    };
    uint64_t address = 0;      // of the first element
    int64_t run = 0;           // bytes of a contiguous run
    std::vector<Steps> outer;  // dimensions over runs, innermost first; empty if the tensor is one run
};

// Computes the layout of a tensor. Returns false if no two elements are adjacent: tensors that must be read element by
// element are handled elsewhere.
inline bool find_strided_view(const dlpack::Tensor& tensor, StridedView* out) {
    const int64_t width = tensor.element.bits * tensor.element.lanes / 8;
    out->address = reinterpret_cast<uintptr_t>(tensor.data) + tensor.byte_offset, out->run = width;
    for (int32_t i = tensor.ndim; i-- > 0;) {
        const int64_t size = tensor.shape[i], stride = tensor.strides[i] * width;
        if (size == 0) return out->run = 0, out->outer.clear(), true;
        if (size == 1) continue;
        if (out->outer.empty() && stride == out->run) {
            out->run *= size;
        } else if (!out->outer.empty() && stride == out->outer.back().size * out->outer.back().stride) {
            out->outer.back().size *= size;
        } else {
            out->outer.push_back({size, stride});
        }
    }
    return out->outer.empty() || out->run > width;
}

inline uint8_t* gather_over(const StridedView& view, size_t dims, const uint8_t* from, uint8_t* to) {
    if (dims == 0) return std::memcpy(to, from, size_t(view.run)), to + view.run;
    const auto& [size, stride] = view.outer[dims - 1];
    for (int64_t i = 0; i < size; ++i) to = gather_over(view, dims - 1, from + i * stride, to);
    return to;
}

// The elements of a tensor in C order and contiguous: in place, or in a copy owned by this object.
class Dense {
  public:
    Dense(const StridedView& view, int64_t nbytes) : bytes_(reinterpret_cast<const uint8_t*>(uintptr_t(view.address))) {
        if (view.outer.empty()) return;
        copy_.reset(new (std::nothrow) uint8_t[size_t(nbytes)]);
        if (copy_) run(nbytes, [&] { gather_over(view, view.outer.size(), bytes_, copy_.get()); });
        bytes_ = copy_.get();
        if (!copy_) PyErr_NoMemory();
    }
    const uint8_t* bytes() const { return bytes_; }

  private:
    const uint8_t* bytes_;  // null with an exception set if the copy could not be allocated
    std::unique_ptr<uint8_t[]> copy_;
};

}  // namespace ts
