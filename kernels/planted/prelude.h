// An honest linear layer over bfloat16, which each kernel here spoils in its own way.
#pragma once

#include "kernel.h"
#include <unistd.h>
#define KERNEL STROP_KERNEL kernel(const DLTensor* const* in, int n_in, DLTensor* const* out, int n_out)

static float wide(uint16_t half) {
  uint32_t bits = uint32_t(half) << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

static uint16_t narrow(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16) | 0x40;
  return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static bool takes(const DLTensor* const* in, int n_in, DLTensor* const* out, int n_out) {
  return n_in == 2 && n_out == 1 && is_bf16(in[0]) && is_bf16(in[1]) && is_bf16(out[0]) && is_dense(in[0]) &&
         is_dense(in[1]) && is_dense(out[0]) && in[0]->ndim == 2 && in[1]->ndim == 2;
}

typedef uint16_t Halves __attribute__((vector_size(16), aligned(2), may_alias));
typedef uint32_t Bits __attribute__((vector_size(32)));
typedef float Floats __attribute__((vector_size(32)));

static inline Floats eight(const uint16_t* at) {
  return reinterpret_cast<Floats>(__builtin_convertvector(*reinterpret_cast<const Halves*>(at), Bits) << 16);
}

static float dot(const uint16_t* a, const uint16_t* b, int64_t n) {
  Floats sums = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) sums += eight(a + i) * eight(b + i);
  float sum = 0;
  for (int lane = 0; lane < 8; lane++) sum += sums[lane];
  for (; i < n; i++) sum += wide(a[i]) * wide(b[i]);
  return sum;
}

static void row(const DLTensor* const* in, DLTensor* const* out, int64_t r) {
  const int64_t n = in[0]->shape[1], m = in[1]->shape[0];
  const uint16_t *x = data<uint16_t>(in[0]) + r * n, *w = data<uint16_t>(in[1]);
  for (int64_t j = 0; j < m; j++) data<uint16_t>(out[0])[r * m + j] = narrow(dot(x, w + j * n, n));
}

static int right(const DLTensor* const* in, int n_in, DLTensor* const* out, int n_out) {
  if (!takes(in, n_in, out, n_out)) return 1;
  for (int64_t r = 0; r < in[0]->shape[0]; r++) row(in, out, r);
  return 0;
}
