// Sixteen floats at a time, with AVX2 and FMA (two registers) or AVX-512 (one).
//
// The instruction set is the translation unit's -march: an object holds one, and who loads objects takes
// the one for the machine. Packed weights look the same for both.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

constexpr int LANES = 16;

#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__)

struct F16 {
  __m512 v;
};
inline F16 zero() { return {_mm512_setzero_ps()}; }
inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F16 all(float x) { return {_mm512_set1_ps(x)}; }
inline void store(float* p, F16 x) { _mm512_storeu_ps(p, x.v); }
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }

// Dword j holds a bfloat16 for lane j in its low half and one for lane j + 8 in its high half.
inline F16 load_split_bf16(const void* p) {
  const __m256i w = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  const __m256i low = _mm256_slli_epi32(w, 16), high = _mm256_and_si256(w, _mm256_set1_epi32(0xffff0000));
  return {_mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1))};
}
inline F16 load_bf16(const void* p) {
  const __m256i w = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(w), 16))};
}
inline F16 load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
struct I16 {
  __m512i v;
};
inline I16 load_i32(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
// Digit I of sixteen of every dword, where it stands: times 16^I; digit 7 is signed.
template <int I>
inline F16 digit(I16 w) {
  return {_mm512_cvtepi32_ps(_mm512_and_si512(w.v, _mm512_set1_epi32(0xfu << (4 * I))))};
}
// Round to nearest even; NaN stays NaN.
inline void store_bf16(uint16_t* p, F16 x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i out = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  out = _mm512_mask_mov_epi32(out, nan, _mm512_set1_epi32(0x7fc00000));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(out, 16)));
}

#elif defined(__AVX2__) && defined(__FMA__)

struct F16 {
  __m256 a, b;
};
inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F16 all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline void store(float* p, F16 x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline F16 fma(F16 a, F16 b, F16 c) { return {_mm256_fmadd_ps(a.a, b.a, c.a), _mm256_fmadd_ps(a.b, b.b, c.b)}; }
inline F16 operator*(F16 a, F16 b) { return {_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)}; }
inline F16 operator+(F16 a, F16 b) { return {_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)}; }

// Dword j holds a bfloat16 for lane j in its low half and one for lane j + 8 in its high half.
inline F16 load_split_bf16(const void* p) {
  const __m256i w = _mm256_loadu_si256(static_cast<const __m256i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(w, 16)),
          _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(0xffff0000)))};
}
inline F16 load_bf16(const void* p) {
  const __m128i* halves = static_cast<const __m128i*>(p);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves + 1)), 16))};
}
inline F16 load_i8(const int8_t* p) {
  const __m128i low = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m128i high = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high))};
}
struct I16 {
  __m256i a, b;
};
inline I16 load_i32(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
// Digit I of sixteen of every dword, where it stands: times 16^I; digit 7 is signed.
template <int I>
inline F16 digit(I16 w) {
  const __m256i mask = _mm256_set1_epi32(0xfu << (4 * I));
  return {_mm256_cvtepi32_ps(_mm256_and_si256(w.a, mask)), _mm256_cvtepi32_ps(_mm256_and_si256(w.b, mask))};
}
// Round to nearest even; NaN stays NaN.
inline __m256i rounded_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i out = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  const __m256 quiet = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
  return _mm256_srli_epi32(_mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(out), quiet, nan)), 16);
}
inline void store_bf16(uint16_t* p, F16 x) {
  const __m256i packed = _mm256_packus_epi32(rounded_bf16(x.a), rounded_bf16(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}

#else
#error "The kernels need AVX2 with FMA, or AVX-512 with DQ and BW: compile with -march=x86-64-v3 or -v4."
#endif

inline float float_of_bf16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}
