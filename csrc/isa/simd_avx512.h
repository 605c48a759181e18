// Sixteen lanes in one AVX-512 register. VNNI is assumed, BF16 is checked at run time by the dispatcher:
// the compiler never emits a bf16 instruction unless dot_bf16 below is reached.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define QK_INLINE static inline __attribute__((always_inline))
#define QK_HAS_BF16_DOT 1

namespace qk {
namespace QK_ISA {

using F = __m512;   // 16 floats
using I = __m512i;  // 16 int32
using B = __m512i;  // 64 bytes

constexpr int kMaxTokens = 8;  // tokens that share one pass over a weight tile; 8 leaves no spills in 32 registers

QK_INLINE F f_zero() { return _mm512_setzero_ps(); }
QK_INLINE F f_set1(float x) { return _mm512_set1_ps(x); }
QK_INLINE F f_load(const float* p) { return _mm512_loadu_ps(p); }
QK_INLINE void f_store(float* p, F v) { _mm512_storeu_ps(p, v); }
QK_INLINE F f_add(F a, F b) { return _mm512_add_ps(a, b); }
QK_INLINE F f_sub(F a, F b) { return _mm512_sub_ps(a, b); }
QK_INLINE F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
QK_INLINE F f_div(F a, F b) { return _mm512_div_ps(a, b); }
QK_INLINE F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
QK_INLINE F f_max(F a, F b) { return _mm512_max_ps(a, b); }
QK_INLINE F f_min(F a, F b) { return _mm512_min_ps(a, b); }
QK_INLINE F f_abs(F a) { return _mm512_abs_ps(a); }
QK_INLINE float f_sum(F a) { return _mm512_reduce_add_ps(a); }
QK_INLINE float f_hmax(F a) { return _mm512_reduce_max_ps(a); }
QK_INLINE F f_round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
QK_INLINE F f_ldexp(F a, F n) { return _mm512_scalef_ps(a, n); }

QK_INLINE F f_from_fp16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
QK_INLINE F f_from_bf16(const uint16_t* p) {
  __m512i w = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
}
QK_INLINE F f_from_u8(const uint8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
QK_INLINE F f_from_s8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
QK_INLINE void f_to_fp16(uint16_t* p, F v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// Round to nearest even in integer arithmetic: works without the BF16 extension, and keeps subnormals and NaN.
QK_INLINE void f_to_bf16(uint16_t* p, F v) {
  __m512i u = _mm512_castps_si512(v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  r = _mm512_mask_mov_epi32(r, nan, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(r));
}
QK_INLINE void f_to_s8(int8_t* p, F v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
}

QK_INLINE I i_zero() { return _mm512_setzero_si512(); }
QK_INLINE I i_add(I a, I b) { return _mm512_add_epi32(a, b); }
QK_INLINE F i_to_f(I a) { return _mm512_cvtepi32_ps(a); }
QK_INLINE int32_t read_i32(const void* p) {
  int32_t v;
  memcpy(&v, p, 4);
  return v;
}

QK_INLINE B b_load(const uint8_t* p) { return _mm512_loadu_si512(p); }
QK_INLINE void b_prefetch(const uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }
QK_INLINE B b_low_nibbles(B b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
QK_INLINE B b_high_nibbles(B b) { return _mm512_and_si512(_mm512_srli_epi16(b, 4), _mm512_set1_epi8(15)); }

// acc[r] += sum over i<4 of b[4r+i] (unsigned) * x[i] (signed), exactly.
QK_INLINE I dot_small(I acc, B b, const int8_t* x) { return _mm512_dpbusd_epi32(acc, b, _mm512_set1_epi32(read_i32(x))); }
QK_INLINE I dot_byte(I acc, B b, const int8_t* x) { return dot_small(acc, b, x); }

// Nibble number Index of each dword (from the low end), as 16 floats through a 16-entry table.
template <int Index>
QK_INLINE F f_lookup_nibble(B b, F table) {
  return _mm512_permutexvar_ps(_mm512_srli_epi32(b, 4 * Index), table);
}
QK_INLINE F f_load_table16(const float* t) { return _mm512_loadu_ps(t); }
template <int Index>
QK_INLINE F f_byte(B b) {  // byte number Index of each dword, 0..255
  return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(b, 8 * Index), _mm512_set1_epi32(255)));
}
template <int Index>
QK_INLINE F f_half(B b) {  // bf16 number Index of each dword
  return _mm512_castsi512_ps(Index ? _mm512_and_si512(b, _mm512_set1_epi32(static_cast<int>(0xffff0000u)))
                                   : _mm512_slli_epi32(b, 16));
}

// ---- bf16 dot: each dword lane holds a pair of bf16 values -------------------------------------------------
using Table = __m512i;  // 32 bf16 entries, the upper 16 a copy of the lower: the fifth index bit does not matter

QK_INLINE Table table_bf16(const float (&values)[16]) {
  alignas(64) uint16_t t[32];
  for (int i = 0; i < 32; i++) {
    uint32_t u;
    memcpy(&u, &values[i & 15], 4);
    t[i] = static_cast<uint16_t>(u >> 16);
  }
  return _mm512_load_si512(t);
}
// Nibbles Index and Index+4 of each dword (bits 4*Index of its two words) as a bf16 pair.
template <int Index>
QK_INLINE B pair_lookup(B b, Table t) {
  return _mm512_permutexvar_epi16(_mm512_srli_epi32(b, 4 * Index), t);
}
QK_INLINE F dot_bf16(F acc, B pairs, const uint16_t* x) {
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(pairs),
                          reinterpret_cast<__m512bh>(_mm512_set1_epi32(read_i32(x))));
}

}  // namespace QK_ISA
}  // namespace qk
