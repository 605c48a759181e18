// Sixteen lanes as two AVX2 registers (AVX2, FMA and F16C).
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define QK_INLINE static inline __attribute__((always_inline))
#define QK_HAS_BF16_DOT 0

namespace qk {
namespace QK_ISA {

struct F {
  __m256 a, b;  // lanes 0..7 and 8..15
};
struct I {
  __m256i a, b;
};
using B = I;

constexpr int kMaxTokens = 2;  // 16 registers: two tokens are what fits without spills

QK_INLINE F f_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
QK_INLINE F f_set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
QK_INLINE F f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
QK_INLINE void f_store(float* p, F v) {
  _mm256_storeu_ps(p, v.a);
  _mm256_storeu_ps(p + 8, v.b);
}
QK_INLINE F f_add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
QK_INLINE F f_sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
QK_INLINE F f_mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
QK_INLINE F f_div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
QK_INLINE F f_fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
QK_INLINE F f_max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
QK_INLINE F f_min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
QK_INLINE F f_abs(F x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
QK_INLINE F f_round(F x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
// a * 2^n for n in [-126, 127], which is all that f_exp asks for.
QK_INLINE __m256 ldexp8(__m256 x, __m256 n) {
  __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(e));
}
QK_INLINE F f_ldexp(F x, F n) { return {ldexp8(x.a, n.a), ldexp8(x.b, n.b)}; }
QK_INLINE float f_sum(F x) {
  __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 h = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  h = _mm_add_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_add_ss(h, _mm_movehdup_ps(h)));
}
QK_INLINE float f_hmax(F x) {
  __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 h = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  h = _mm_max_ps(h, _mm_movehl_ps(h, h));
  return _mm_cvtss_f32(_mm_max_ss(h, _mm_movehdup_ps(h)));
}

QK_INLINE __m128i load128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
QK_INLINE __m128i load64(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
QK_INLINE F f_from_fp16(const uint16_t* p) { return {_mm256_cvtph_ps(load128(p)), _mm256_cvtph_ps(load128(p + 8))}; }
QK_INLINE __m256 bf16_8(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load128(p)), 16));
}
QK_INLINE F f_from_bf16(const uint16_t* p) { return {bf16_8(p), bf16_8(p + 8)}; }
QK_INLINE F f_from_u8(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load64(p))), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load64(p + 8)))};
}
QK_INLINE F f_from_s8(const int8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load64(p))), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load64(p + 8)))};
}
QK_INLINE void f_to_fp16(uint16_t* p, F v) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v.a, mode));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(v.b, mode));
}
QK_INLINE __m256i round_bf16(__m256 v) {
  __m256i u = _mm256_castps_si256(v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
}
QK_INLINE void f_to_bf16(uint16_t* p, F v) {
  // packus works within 128-bit halves; the permute puts the four quarters back in order
  __m256i r = _mm256_packus_epi32(round_bf16(v.a), round_bf16(v.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(r, 0xd8));
}
QK_INLINE void f_to_s8(int8_t* p, F v) {
  __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b));
  w = _mm256_permute4x64_epi64(w, 0xd8);
  __m128i r = _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), r);
}

QK_INLINE I i_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
QK_INLINE I i_add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
QK_INLINE F i_to_f(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
QK_INLINE int32_t read_i32(const void* p) {
  int32_t v;
  memcpy(&v, p, 4);
  return v;
}

QK_INLINE B b_load(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
QK_INLINE void b_prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
QK_INLINE B b_low_nibbles(B x) {
  const __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
QK_INLINE B b_high_nibbles(B x) {
  const __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), m), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), m)};
}
// Codes up to 15: 2 * 15 * 128 fits the saturating int16 of maddubs.
QK_INLINE I dot_small(I acc, B w, const int8_t* x) {
  const __m256i q = _mm256_set1_epi32(read_i32(x)), one = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(_mm256_maddubs_epi16(w.a, q), one)),
          _mm256_add_epi32(acc.b, _mm256_madd_epi16(_mm256_maddubs_epi16(w.b, q), one))};
}
// Codes up to 255 would saturate maddubs, so even and odd bytes are multiplied as int16.
QK_INLINE __m256i dot_byte8(__m256i acc, __m256i w, __m256i even, __m256i odd) {
  __m256i e = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)), even);
  __m256i o = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), odd);
  return _mm256_add_epi32(acc, _mm256_add_epi32(e, o));
}
QK_INLINE I dot_byte(I acc, B w, const int8_t* x) {
  const __m256i q = _mm256_set1_epi32(read_i32(x));
  const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(q, 8), 8), odd = _mm256_srai_epi16(q, 8);
  return {dot_byte8(acc.a, w.a, even, odd), dot_byte8(acc.b, w.b, even, odd)};
}

// A 16-entry float table in two registers: look up both halves by the low 3 bits and choose by bit 3.
QK_INLINE __m256 lookup8(__m256i index, F table) {
  __m256 low = _mm256_permutevar8x32_ps(table.a, index), high = _mm256_permutevar8x32_ps(table.b, index);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
}
template <int Index>
QK_INLINE F f_lookup_nibble(B x, F table) {
  return {lookup8(_mm256_srli_epi32(x.a, 4 * Index), table), lookup8(_mm256_srli_epi32(x.b, 4 * Index), table)};
}
QK_INLINE F f_load_table16(const float* t) { return f_load(t); }
template <int Index>
QK_INLINE F f_byte(B x) {
  const __m256i m = _mm256_set1_epi32(255);
  return {_mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x.a, 8 * Index), m)),
          _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x.b, 8 * Index), m))};
}
QK_INLINE __m256 half8(__m256i x, bool high) {
  return _mm256_castsi256_ps(high ? _mm256_and_si256(x, _mm256_set1_epi32(static_cast<int>(0xffff0000u)))
                                  : _mm256_slli_epi32(x, 16));
}
template <int Index>
QK_INLINE F f_half(B x) {
  return {half8(x.a, Index == 1), half8(x.b, Index == 1)};
}

}  // namespace QK_ISA
}  // namespace qk
