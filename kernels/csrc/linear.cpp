// A linear layer, y[M,N] = x[M,K] w[N,K]^T (+ bias[N]), over packed bfloat16, int8 or int4 weights, with
// float32 accumulation. inputs: x, packed weights, scale (int8 and int4), bias (if any); one output.
//
// Weights lie in panels of 16 output channels, so that one row of x meets them as it meets memory: a
// register of channels per step of k, a broadcast of x, a multiply-add; nothing is summed across lanes.
//   bf16  [panels, K, 16]    lane order 0 8 1 9 ... 7 15, which splits by a shift and a mask
//   int8  [panels, K, 16]    scale float32 [panels * 16]
//   int4  [panels, K/8, 16]  int32, eight k's of a channel in a dword, scale bfloat16 [panels, K/group, 16]
//
// Few rows: every thread streams its panels through registers once, bounded by memory. Many rows: a
// blocked matrix product (Goto and van de Geijn, 2008) whose panels are unpacked to float32 in the
// first-level cache. A channel is summed over k in the same order in both (int4: the scale enters per
// group or per weight), so for bf16 and int8 the number of rows does not change a bit of any row.
#include "linear.h"

#include <omp.h>

#include <atomic>

namespace {

template <int R, int P>
inline void step(F16 (&sums)[P][R], const F16 (&weights)[P], const float* x) {
#pragma GCC unroll 8
  for (int p = 0; p < P; p++)
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) sums[p][r] = fma(all(x[r]), weights[p], sums[p][r]);
}

template <int R, int P, int I>
inline void step_digit(F16 (&sums)[P][R], const I16 (&packed)[P], const float* x) {
  F16 weights[P];
#pragma GCC unroll 8
  for (int p = 0; p < P; p++) weights[p] = digit<I>(packed[p]);
  step<R, P>(sums, weights, x + I * R);
}

template <Kind KIND, int R, int P>
inline void step_k(F16 (&sums)[P][R], const char* from, int64_t stride, const float* x) {
  F16 weights[P];
#pragma GCC unroll 8
  for (int p = 0; p < P; p++)
    weights[p] = KIND == Kind::bf16 ? load_split_bf16(from + p * stride)
                                    : load_i8(reinterpret_cast<const int8_t*>(from + p * stride));
  step<R, P>(sums, weights, x);
}

template <int P>
inline void prefetch(const char* from, int64_t stride) {
#pragma GCC unroll 8
  for (int p = 0; p < P; p++) _mm_prefetch(from + p * stride + PREFETCH_BYTES, _MM_HINT_T0);
}

// R rows times P panels, all of k.
template <Kind KIND, int R, int P>
void stream(const Weights& w, const Output& out, const Rows& rows, int64_t panel, int64_t row) {
  const char* from = w.panel(panel);
  const int64_t stride = w.panel_bytes();
  const float* x = rows.data + row * w.k;
  F16 sums[P][R];
#pragma GCC unroll 8
  for (int p = 0; p < P; p++)
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) sums[p][r] = zero();
  if constexpr (KIND == Kind::int4) {
    const uint16_t* scales = w.scales4(panel);
    const int64_t groups = w.k / w.group;
    const int64_t blocks = w.k / SUM_K, blocks_per_group = w.group / SUM_K;
    const float* offsets = rows.offsets + row * blocks;
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t g = block / blocks_per_group;
      F16 part[P][R], other[P][R];
#pragma GCC unroll 8
      for (int p = 0; p < P; p++)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
          part[p][r] = all(offsets[block * R + r]);
          other[p][r] = zero();
        }
      for (int64_t i = 0; i < SUM_K; i += 8) {
        I16 packed[P];
        prefetch<P>(from, stride);
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) packed[p] = load_i32(reinterpret_cast<const int32_t*>(from + p * stride));
        step_digit<R, P, 0>(part, packed, x);
        step_digit<R, P, 1>(R < 4 ? other : part, packed, x);
        step_digit<R, P, 2>(part, packed, x);
        step_digit<R, P, 3>(R < 4 ? other : part, packed, x);
        step_digit<R, P, 4>(part, packed, x);
        step_digit<R, P, 5>(R < 4 ? other : part, packed, x);
        step_digit<R, P, 6>(part, packed, x);
        step_digit<R, P, 7>(R < 4 ? other : part, packed, x);
        from += 64;
        x += 8 * R;
      }
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) {
        const F16 scale = load_bf16(scales + (p * groups + g) * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sums[p][r] = fma(R < 4 ? part[p][r] + other[p][r] : part[p][r], scale, sums[p][r]);
      }
    }
  } else {
    constexpr int BYTES = KIND == Kind::bf16 ? 32 : 16, LINE = 64 / BYTES;
    for (int64_t k = 0; k < w.k;) {
      const int64_t end = std::min(w.k, k + SUM_K);
      F16 part[P][R];
#pragma GCC unroll 8
      for (int p = 0; p < P; p++)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) part[p][r] = zero();
      for (; k + LINE <= end; k += LINE) {
        prefetch<P>(from, stride);
#pragma GCC unroll 4
        for (int i = 0; i < LINE; i++) step_k<KIND, R, P>(part, from + i * BYTES, stride, x + i * R);
        from += 64;
        x += LINE * R;
      }
      for (; k < end; k++, from += BYTES, x += R) step_k<KIND, R, P>(part, from, stride, x);
#pragma GCC unroll 8
      for (int p = 0; p < P; p++)
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sums[p][r] = sums[p][r] + part[p][r];
    }
  }
  float made[P][R][LANES];
#pragma GCC unroll 8
  for (int p = 0; p < P; p++)
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) store(made[p][r], sums[p][r]);
  for (int p = 0; p < P; p++)
    for (int r = 0; r < R; r++) finish(w, out, panel + p, row + r, made[p][r]);
}

// Panels that one pass takes together: enough independent sums to hide the latency of a multiply-add,
// and few enough for the registers. int4 sums odd and even k apart instead.
template <Kind KIND, int R>
constexpr int PANELS = KIND == Kind::int4 ? (R == 1 ? 2 : 1) : R == 1 ? 4 : R == 2 ? 2 : 1;

template <Kind KIND, int R>
void stream_range(const Weights& w, const Output& out, const Rows& rows, int64_t begin, int64_t end, int64_t row) {
  constexpr int P = PANELS<KIND, R>;
  int64_t panel = begin;
  for (; panel + P <= end; panel += P) stream<KIND, R, P>(w, out, rows, panel, row);
  for (; panel < end; panel++) stream<KIND, R, 1>(w, out, rows, panel, row);
}

template <Kind KIND>
void few_rows(const Weights& w, const Output& out, const Rows& rows, int64_t begin, int64_t end) {
  // Several blocks of rows take turns on a few panels, which stay in the second-level cache.
  const int64_t together = rows.blocks == 1 ? end - begin : 4;
  for (int64_t panel = begin; panel < end; panel += together) {
    const int64_t last = std::min(end, panel + together);
    for (int64_t block = 0; block < rows.blocks; block++) {
      const int64_t row = rows.begin(block);
      switch (rows.begin(block + 1) - row) {
        case 1: stream_range<KIND, 1>(w, out, rows, panel, last, row); break;
        case 2: stream_range<KIND, 2>(w, out, rows, panel, last, row); break;
        case 3: stream_range<KIND, 3>(w, out, rows, panel, last, row); break;
        case 4: stream_range<KIND, 4>(w, out, rows, panel, last, row); break;
        case 5: stream_range<KIND, 5>(w, out, rows, panel, last, row); break;
        case 6: stream_range<KIND, 6>(w, out, rows, panel, last, row); break;
#if defined(__AVX512F__)
        case 7: stream_range<KIND, 7>(w, out, rows, panel, last, row); break;
        case 8: stream_range<KIND, 8>(w, out, rows, panel, last, row); break;
        case 9: stream_range<KIND, 9>(w, out, rows, panel, last, row); break;
        case 10: stream_range<KIND, 10>(w, out, rows, panel, last, row); break;
        case 11: stream_range<KIND, 11>(w, out, rows, panel, last, row); break;
        case 12: stream_range<KIND, 12>(w, out, rows, panel, last, row); break;
#endif
      }
    }
  }
}

template <int I>
inline void unpack_digit(float* to, I16 packed, F16 scale) {
  const F16 value = I == 7 ? digit<I>(packed) * all(DIGIT_SCALE[I])
                           : fma(digit<I>(packed), all(DIGIT_SCALE[I]), all(-8.0f));
  store(to + I * LANES, value * scale);
}

void unpack(const Weights& w, int64_t panel, int64_t k, int64_t count, float* to) {
  if (w.kind == Kind::bf16) {
    const char* from = w.panel(panel) + k * 32;
    for (int64_t i = 0; i < count; i++) store(to + i * LANES, load_split_bf16(from + i * 32));
  } else if (w.kind == Kind::int8) {
    const int8_t* from = reinterpret_cast<const int8_t*>(w.panel(panel)) + k * LANES;
    for (int64_t i = 0; i < count; i++) store(to + i * LANES, load_i8(from + i * LANES));
  } else {
    const int32_t* from = reinterpret_cast<const int32_t*>(w.panel(panel)) + k / 8 * LANES;
    for (int64_t i = 0; i < count; i += 8) {
      const F16 scale = load_bf16(w.scales4(panel) + (k + i) / w.group * LANES);
      const I16 packed = load_i32(from + i / 8 * LANES);
      float* at = to + i * LANES;
      unpack_digit<0>(at, packed, scale);
      unpack_digit<1>(at, packed, scale);
      unpack_digit<2>(at, packed, scale);
      unpack_digit<3>(at, packed, scale);
      unpack_digit<4>(at, packed, scale);
      unpack_digit<5>(at, packed, scale);
      unpack_digit<6>(at, packed, scale);
      unpack_digit<7>(at, packed, scale);
    }
  }
}

// R rows times one unpacked panel, added to sums [R, 16] that lie in memory.
template <int R>
void multiply(const float* x, const float* weights, int64_t count, float* sums) {
  for (int64_t k = 0; k < count;) {
    const int64_t end = std::min(count, k + SUM_K);
    F16 part[1][R];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) part[0][r] = zero();
    for (; k < end; k++) {
      const F16 row[1] = {load(weights + k * LANES)};
      step<R, 1>(part, row, x + k * R);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) store(sums + r * LANES, load(sums + r * LANES) + part[0][r]);
  }
}

void multiply_any(int64_t rows, const float* x, const float* weights, int64_t count, float* sums) {
  switch (rows) {
    case 1: return multiply<1>(x, weights, count, sums);
    case 2: return multiply<2>(x, weights, count, sums);
    case 3: return multiply<3>(x, weights, count, sums);
    case 4: return multiply<4>(x, weights, count, sums);
    case 5: return multiply<5>(x, weights, count, sums);
    case 6: return multiply<6>(x, weights, count, sums);
#if defined(__AVX512F__)
    case 7: return multiply<7>(x, weights, count, sums);
    case 8: return multiply<8>(x, weights, count, sums);
    case 9: return multiply<9>(x, weights, count, sums);
    case 10: return multiply<10>(x, weights, count, sums);
    case 11: return multiply<11>(x, weights, count, sums);
    case 12: return multiply<12>(x, weights, count, sums);
#endif
  }
}

// At most BLOCK_PANELS panels for all rows.
void many_rows(const Weights& w, const Output& out, const Rows& rows, int64_t begin, int64_t end, float* scratch) {
  float* unpacked = scratch;
  float* sums = scratch + BLOCK_K * LANES;
  const int64_t panels = end - begin;
  std::fill_n(sums, panels * rows.rows * LANES, 0.0f);
  for (int64_t k = 0; k < w.k; k += BLOCK_K) {
    const int64_t count = std::min(BLOCK_K, w.k - k);
    for (int64_t p = 0; p < panels; p++) {
      unpack(w, begin + p, k, count, unpacked);
      for (int64_t block = 0; block < rows.blocks; block++) {
        const int64_t row = rows.begin(block), height = rows.begin(block + 1) - row;
        multiply_any(height, rows.data + row * w.k + k * height, unpacked, count,
                     sums + (p * rows.rows + row) * LANES);
      }
    }
  }
  for (int64_t row = 0; row < rows.rows; row++)
    for (int64_t p = 0; p < panels; p++)
      finish(w, out, begin + p, row, sums + (p * rows.rows + row) * LANES);
}

void prepare(const DLTensor* x, int64_t first, const Weights& w, const Rows& rows, int64_t block) {
  is_bf16(x) ? gather<true>(x, first, rows, block) : gather<false>(x, first, rows, block);
  if (rows.offsets) scale_digits(w, rows, block);
}

int64_t blocks_of(int64_t rows) { return (rows + MAX_ROWS - 1) / MAX_ROWS; }

// Threads take panels as they come: one that has to wait for its core does not keep the others.
void multiply_few(const DLTensor* x, const Weights& w, const Output& out) {
  std::atomic<int64_t> next{0};
#pragma omp parallel
  {
    // Every thread has rows of its own: converting a few again costs less than waiting for each other.
    thread_local Scratch scratch;
    const int64_t count = x->shape[0];
    float* gathered = scratch.floats(count * (w.k + w.k / SUM_K));
    const Rows rows{gathered, w.group ? gathered + count * w.k : nullptr, count, blocks_of(count)};
    for (int64_t block = 0; block < rows.blocks; block++) prepare(x, 0, w, rows, block);
    const int64_t share = std::max<int64_t>(4, w.panels / (8 * omp_get_num_threads()) / 4 * 4);
    for (int64_t begin; (begin = next.fetch_add(share)) < w.panels;) {
      const int64_t end = std::min(w.panels, begin + share);
      if (w.kind == Kind::bf16) few_rows<Kind::bf16>(w, out, rows, begin, end);
      else if (w.kind == Kind::int8) few_rows<Kind::int8>(w, out, rows, begin, end);
      else few_rows<Kind::int4>(w, out, rows, begin, end);
    }
  }
}

void multiply_many(const DLTensor* x, const Weights& w, const Output& out) {
  thread_local Scratch shared;
  const int64_t all_rows = x->shape[0];
  float* gathered = shared.floats(std::min(BLOCK_ROWS, all_rows) * w.k);
  for (int64_t first = 0; first < all_rows; first += BLOCK_ROWS) {
    const int64_t count = std::min(BLOCK_ROWS, all_rows - first);
    const Rows rows{gathered, nullptr, count, blocks_of(count)};
    Output part = out;
    part.data += first * out.row_stride * (out.bf16 ? 2 : 4);
    std::atomic<int64_t> next{0};
#pragma omp parallel
    {
#pragma omp for schedule(static)
      for (int64_t block = 0; block < rows.blocks; block++) prepare(x, first, w, rows, block);
      thread_local Scratch own;
      float* scratch = own.floats((BLOCK_K + BLOCK_PANELS * BLOCK_ROWS) * LANES);
      for (int64_t begin; (begin = next.fetch_add(BLOCK_PANELS)) < w.panels;)
        many_rows(w, part, rows, begin, std::min(w.panels, begin + BLOCK_PANELS), scratch);
    }
  }
}

}  // namespace

STROP_KERNEL linear(const DLTensor* const* in, int n_in, DLTensor* const* outputs, int n_out) {
  if (n_in < 2 || n_out != 1) return 1;
  const DLTensor *x = in[0], *packed = in[1], *y = outputs[0];
  if (!(is_bf16(x) || is_f32(x)) || !(is_bf16(y) || is_f32(y))) return 2;
  if (x->ndim != 2 || y->ndim != 2 || packed->ndim != 3 || !is_dense(packed) || packed->shape[2] != LANES) return 3;
  const int64_t rows = x->shape[0], k = x->shape[1], channels = y->shape[1], panels = packed->shape[0];
  if (y->shape[0] != rows || (channels + LANES - 1) / LANES != panels) return 4;
  if ((x->strides[1] != 1 && k > 1) || (y->strides[1] != 1 && channels > 1)) return 5;

  Weights w{Kind::bf16, data<char>(packed), nullptr, k, panels, 0};
  int next = 2;
  if (is_bf16(packed)) {
    if (packed->shape[1] != k) return 6;
  } else {
    if (n_in < 3 || !is_dense(in[2])) return 7;
    const DLTensor* scale = in[next++];
    w.scale = data<void>(scale);
    if (is_i8(packed) && is_f32(scale)) {
      w.kind = Kind::int8;
      if (packed->shape[1] != k || scale->ndim != 1 || scale->shape[0] != panels * LANES) return 8;
    } else if (is_i32(packed) && is_bf16(scale)) {
      w.kind = Kind::int4;
      if (scale->ndim != 3 || scale->shape[0] != panels || scale->shape[2] != LANES || scale->shape[1] < 1) return 9;
      w.group = k / scale->shape[1];
      if (packed->shape[1] * 8 != k || w.group * scale->shape[1] != k || w.group % SUM_K) return 10;
    } else {
      return 11;
    }
  }
  Output out{data<char>(y), y->strides[0], channels, is_bf16(y), nullptr, false};
  if (next < n_in) {
    const DLTensor* bias = in[next++];
    if (!(is_bf16(bias) || is_f32(bias)) || bias->ndim != 1 || bias->shape[0] != channels || !is_dense(bias)) return 12;
    out.bias = data<void>(bias);
    out.bias_bf16 = is_bf16(bias);
  }
  if (next != n_in) return 13;
  if (rows == 0 || channels == 0) return 0;
  x->shape[0] <= FEW_ROWS ? multiply_few(x, w, out) : multiply_many(x, w, out);
  return 0;
}
