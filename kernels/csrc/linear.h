// What the linear kernel is made of: packed weights, rows of x as it wants them, and where sums go.
#pragma once

#include "kernel.h"
#include "vector.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace {

#if defined(__AVX512F__)
constexpr int MAX_ROWS = 12;
#else
constexpr int MAX_ROWS = 6;
#endif
constexpr int64_t FEW_ROWS = 4 * MAX_ROWS;
constexpr int64_t BLOCK_ROWS = 40 * 6;
constexpr int64_t BLOCK_K = 256;
constexpr int64_t BLOCK_PANELS = 8;
constexpr int64_t PREFETCH_BYTES = 1024;
// So many products are summed before they are added to the rest: errors grow with the root of it and of
// the number of such sums, instead of with the root of k.
constexpr int64_t SUM_K = 32;

enum class Kind { bf16, int8, int4 };

struct Weights {
  Kind kind;
  const char* packed;
  const void* scale;
  int64_t k, panels, group;

  int64_t panel_bytes() const { return kind == Kind::bf16 ? k * 32 : kind == Kind::int8 ? k * 16 : k * 8; }
  const char* panel(int64_t i) const { return packed + i * panel_bytes(); }
  const uint16_t* scales4(int64_t i) const {
    return static_cast<const uint16_t*>(scale) + i * (k / group) * LANES;
  }
};

// Rows of x as float32, in blocks of at most MAX_ROWS rows that lie [k, rows].
struct Rows {
  float* data;
  // int4, few rows: the first value of every sum of SUM_K products, [K / SUM_K, rows] for each block.
  float* offsets;
  int64_t rows, blocks;

  int64_t begin(int64_t block) const { return block * rows / blocks; }
};

struct Output {
  char* data;
  int64_t row_stride, channels;
  bool bf16;
  const void* bias;
  bool bias_bf16;
};

// The eight int4 values of a dword are read where they stand: masked and converted, the value at digit i
// of sixteen is 16^i times too large, which x makes up for, exactly. Digits 0 to 6 hold q + 8, and the
// sum starts at -8 times the sum of x; digit 7, which carries the sign, holds q itself.
constexpr float DIGIT_SCALE[8] = {1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 0x1p-28f};

void scale_digits(const Weights& w, const Rows& rows, int64_t block) {
  const int64_t from = rows.begin(block), count = rows.begin(block + 1) - from, parts = w.k / SUM_K;
  float* x = rows.data + from * w.k;
  float* offsets = rows.offsets + from * parts;
  for (int64_t i = 0; i < parts; i++)
    for (int64_t r = 0; r < count; r++) {
      float sum = 0;
      for (int64_t k = i * SUM_K; k < (i + 1) * SUM_K; k++) {
        sum += k % 8 == 7 ? 0 : x[k * count + r];
        x[k * count + r] *= DIGIT_SCALE[k % 8];
      }
      offsets[i * count + r] = -8 * sum;
    }
}

class Scratch {
 public:
  float* floats(size_t count) {
    if (count > size_) {
      std::free(data_);
      size_ = (count + 1023) / 1024 * 1024;
      data_ = static_cast<float*>(std::aligned_alloc(64, size_ * sizeof(float)));
      if (!data_) throw std::bad_alloc();
    }
    return data_;
  }
  ~Scratch() { std::free(data_); }

 private:
  float* data_ = nullptr;
  size_t size_ = 0;
};

template <bool BF16>
void gather(const DLTensor* x, int64_t first, const Rows& rows, int64_t block) {
  const int64_t k = x->shape[1], from = rows.begin(block), count = rows.begin(block + 1) - from;
  float* to = rows.data + from * k;
  for (int64_t r = 0; r < count; r++) {
    const int64_t at = (first + from + r) * x->strides[0];
    if constexpr (BF16) {
      const uint16_t* source = data<uint16_t>(x) + at;
      for (int64_t i = 0; i < k; i++) to[i * count + r] = float_of_bf16(source[i]);
    } else {
      const float* source = data<float>(x) + at;
      for (int64_t i = 0; i < k; i++) to[i * count + r] = source[i];
    }
  }
}

// From memory: sums that are handed over by value would live there all along.
void finish(const Weights& w, const Output& out, int64_t panel, int64_t row, const float* made) {
  const int64_t channel = panel * LANES;
  F16 sum = load(made);
  if (w.kind == Kind::int8) sum = sum * load(static_cast<const float*>(w.scale) + channel);
  const int64_t count = std::min<int64_t>(LANES, out.channels - channel);
  if (count == LANES) {
    if (out.bias)
      sum = sum + (out.bias_bf16 ? load_bf16(static_cast<const uint16_t*>(out.bias) + channel)
                                 : load(static_cast<const float*>(out.bias) + channel));
    if (out.bf16) store_bf16(reinterpret_cast<uint16_t*>(out.data) + row * out.row_stride + channel, sum);
    else store(reinterpret_cast<float*>(out.data) + row * out.row_stride + channel, sum);
    return;
  }
  float values[LANES];
  store(values, sum);
  for (int64_t i = 0; out.bias && i < count; i++)
    values[i] += out.bias_bf16 ? float_of_bf16(static_cast<const uint16_t*>(out.bias)[channel + i])
                               : static_cast<const float*>(out.bias)[channel + i];
  if (out.bf16) {
    uint16_t rounded[LANES];
    store_bf16(rounded, load(values));
    std::copy_n(rounded, count, reinterpret_cast<uint16_t*>(out.data) + row * out.row_stride + channel);
  } else {
    std::copy_n(values, count, reinterpret_cast<float*>(out.data) + row * out.row_stride + channel);
  }
}

}  // namespace
