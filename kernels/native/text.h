// The JSON fields of a record line that a summary provides, formatted as Python's json does.
#pragma once

#include <charconv>

#include "summary.h"

namespace ts {

class Text {
  public:
    explicit Text(char* out) : start_(out), end_(out) {}

    int64_t size() const { return end_ - start_; }

    void add(const char* literal) {
        const size_t length = std::strlen(literal);
        std::memcpy(end_, literal, length);
        end_ += length;
    }

    void add(int64_t number) { end_ = std::to_chars(end_, end_ + 24, number).ptr; }

    void add_hex(uint64_t number) {
        for (int shift = 60; shift >= 0; shift -= 4) *end_++ = "0123456789abcdef"[(number >> shift) & 15];
    }

    // Appends the shortest digits that parse back to the same number, formatted as repr(float); null if JSON cannot
    // represent it.
    void add(double number) {
        if ((bit_cast<uint64_t>(number) & kMagnitude<Float64>) >= Float64::kNonfinite) return add("null");
        char digits[40];  // -d.ddde-308
        const char* stop = std::to_chars(digits, digits + sizeof digits, number, std::chars_format::scientific).ptr;
        const char* from = digits;
        if (*from == '-') *end_++ = *from++;
        lay_out(from, stop);
    }

  private:
    void lay_out(const char* from, const char* stop) {
        const char* mark = static_cast<const char*>(std::memchr(from, 'e', static_cast<size_t>(stop - from)));
        char digits[24];
        int count = 0, power = 0;
        for (const char* at = from; at < mark; ++at) {
            if (*at != '.') digits[count++] = *at;
        }
        for (const char* at = mark + 2; at < stop; ++at) power = power * 10 + (*at - '0');
        if (mark[1] == '-') power = -power;
        if (power < -4 || power > 15) return exponential(digits, count, power);
        if (power < 0) {
            add("0.");
            repeat('0', -power - 1);
            return copy(digits, count);
        }
        const int whole = count < power + 1 ? count : power + 1;
        copy(digits, whole);
        repeat('0', power + 1 - whole);
        *end_++ = '.';
        copy(digits + whole, count - whole);
        if (count == whole) *end_++ = '0';
    }

    void exponential(const char* digits, int count, int power) {
        *end_++ = digits[0];
        if (count > 1) *end_++ = '.';
        copy(digits + 1, count - 1);
        add(power < 0 ? "e-" : "e+");
        const int size = power < 0 ? -power : power;
        if (size < 10) *end_++ = '0';
        add(static_cast<int64_t>(size));
    }

    void copy(const char* from, int count) {
        std::memcpy(end_, from, static_cast<size_t>(count));
        end_ += count;
    }

    void repeat(char what, int count) {
        std::memset(end_, what, static_cast<size_t>(count));
        end_ += count;
    }

    char* start_;
    char* end_;
};

// Writes the fields to `out`, which holds kTextRoom characters; returns the number of characters.
inline int64_t write_text(const Summary& s, bool bag, char* out) {
    Text text(out);
    text.add("\"hash\":\"");
    text.add_hex(s.hash.h1);
    text.add_hex(s.hash.h2);
    if (bag) {
        text.add("\",\"bag\":\"");
        text.add_hex(s.bag);
    }
    text.add("\",\"stats\":{\"count\":");
    text.add(s.count);
    const struct {
        const char* name;
        int64_t value;
    } counts[] = {{",\"nan\":", s.nan},
                  {",\"posinf\":", s.posinf},
                  {",\"neginf\":", s.neginf},
                  {",\"zeros\":", s.zeros},
                  {",\"subnormals\":", s.subnormals}};
    for (const auto& [name, value] : counts) text.add(name), text.add(value);
    const struct {
        const char* name;
        double value;
        bool known;
    } numbers[] = {{",\"min\":", s.min, s.finite > 0},
                   {",\"max\":", s.max, s.finite > 0},
                   {",\"absmax\":", s.absmax, s.finite > 0},
                   {",\"sum\":", s.sum, true},
                   {",\"sumsq\":", s.sumsq, true}};
    for (const auto& [name, value, known] : numbers) {
        text.add(name);
        if (known)
            text.add(value);
        else
            text.add("null");
    }
    text.add("}");
    return text.size();
}

}  // namespace ts
