// RMSNorm of x + residual over bfloat16, and the sum, rows one after the other or side by side.
// Macros: LANES, floats summed side by side; KEEP, whether the sum is kept in float32 between the two passes.
#include "kernel.h"

#include <cmath>
#include <vector>

#ifndef LANES
#define LANES 8
#endif
#ifndef KEEP
#define KEEP 1
#endif

static inline float wide(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

static inline uint16_t narrow(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : uint16_t(rounded);
}

static inline void row(const uint16_t* x, const uint16_t* residual, const uint16_t* weight, float epsilon, int64_t n,
                       uint16_t* normed, uint16_t* total, float* kept) {
  float sums[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) {
#pragma omp simd
    for (int lane = 0; lane < LANES; lane++) {
      const float sum = wide(x[i + lane]) + wide(residual[i + lane]);
      if (KEEP) kept[i + lane] = sum;
      sums[lane] += sum * sum;
    }
  }
  float square = 0;
  for (float sum : sums) square += sum;
  for (; i < n; i++) {
    const float sum = wide(x[i]) + wide(residual[i]);
    if (KEEP) kept[i] = sum;
    square += sum * sum;
  }
  const float scale = 1 / std::sqrt(square / n + epsilon);
#pragma omp simd
  for (int64_t j = 0; j < n; j++) {
    const float sum = KEEP ? kept[j] : wide(x[j]) + wide(residual[j]);
    total[j] = narrow(sum);
    normed[j] = narrow(sum * scale * wide(weight[j]));
  }
}

STROP_KERNEL fused_add_rms_norm(const DLTensor* const* in, int n_in, DLTensor* const* out, int n_out) {
  if (n_in != 4 || n_out != 2 || in[0]->ndim != 2 || in[1]->ndim != 2 || in[2]->ndim != 1) return 1;
  for (int i = 0; i < 3; i++)
    if (!is_bf16(in[i]) || !is_dense(in[i])) return 2;
  if (!is_f32(in[3]) || !is_dense(in[3])) return 3;
  for (int i = 0; i < 2; i++)
    if (!is_bf16(out[i]) || !is_dense(out[i])) return 4;
  const int64_t rows = in[0]->shape[0], n = in[0]->shape[1];
  const float epsilon = *data<float>(in[3]);
  std::vector<float> kept(KEEP ? n : 0);
  for (int64_t r = 0; r < rows; r++)
    row(data<uint16_t>(in[0]) + r * n, data<uint16_t>(in[1]) + r * n, data<uint16_t>(in[2]), epsilon, n,
        data<uint16_t>(out[0]) + r * n, data<uint16_t>(out[1]) + r * n, kept.data());
  return 0;
}
