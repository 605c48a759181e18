// Sixteen lanes as a plain array: correct on every CPU, left to the compiler to vectorise.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#define QK_INLINE static inline __attribute__((always_inline))
#define QK_HAS_BF16_DOT 0

namespace qk {
namespace QK_ISA {

struct F {
  float v[16];
};
struct I {
  int32_t v[16];
};
struct B {
  uint8_t v[64];
};

constexpr int kMaxTokens = 4;

#define QK_EACH(body)                \
  F r;                               \
  for (int i = 0; i < 16; i++) {     \
    r.v[i] = (body);                 \
  }                                  \
  return r

QK_INLINE F f_set1(float x) { QK_EACH(x); }
QK_INLINE F f_zero() { return f_set1(0.0f); }
QK_INLINE F f_load(const float* p) {
  F r;
  memcpy(r.v, p, 64);
  return r;
}
QK_INLINE void f_store(float* p, F a) { memcpy(p, a.v, 64); }
QK_INLINE F f_add(F a, F b) { QK_EACH(a.v[i] + b.v[i]); }
QK_INLINE F f_sub(F a, F b) { QK_EACH(a.v[i] - b.v[i]); }
QK_INLINE F f_mul(F a, F b) { QK_EACH(a.v[i] * b.v[i]); }
QK_INLINE F f_div(F a, F b) { QK_EACH(a.v[i] / b.v[i]); }
QK_INLINE F f_fma(F a, F b, F c) { QK_EACH(a.v[i] * b.v[i] + c.v[i]); }
QK_INLINE F f_max(F a, F b) { QK_EACH(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
QK_INLINE F f_min(F a, F b) { QK_EACH(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
QK_INLINE F f_abs(F a) { QK_EACH(fabsf(a.v[i])); }
QK_INLINE F f_round(F a) { QK_EACH(nearbyintf(a.v[i])); }
QK_INLINE F f_ldexp(F a, F n) { QK_EACH(ldexpf(a.v[i], static_cast<int>(n.v[i]))); }
QK_INLINE float f_sum(F a) {
  float s[8];
  for (int i = 0; i < 8; i++) s[i] = a.v[i] + a.v[i + 8];  // pairwise: the error of a vector reduction, not of a chain
  for (int i = 0; i < 4; i++) s[i] += s[i + 4];
  return (s[0] + s[2]) + (s[1] + s[3]);
}
QK_INLINE float f_hmax(F a) {
  float m = a.v[0];
  for (int i = 1; i < 16; i++) m = a.v[i] > m ? a.v[i] : m;
  return m;
}

QK_INLINE float bits_to_float(uint32_t u) {
  float f;
  memcpy(&f, &u, 4);
  return f;
}
QK_INLINE uint32_t float_to_bits(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return u;
}
QK_INLINE float fp16_to_float(uint16_t h) {
  uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {  // zero and subnormals: an integer times 2^-24
    float f = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    return bits_to_float(float_to_bits(f) | sign);
  }
  return bits_to_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
}
QK_INLINE uint16_t float_to_fp16(float f) {
  uint32_t u = float_to_bits(f), sign = (u >> 16) & 0x8000;
  u &= 0x7fffffff;
  if (u > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00);   // NaN
  if (u >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00);  // rounds past 65504
  if (u < 0x38800000u) {                                              // subnormal: let the FPU round at 2^-24
    float scaled = nearbyintf(bits_to_float(u) * 16777216.0f);
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(scaled));
  }
  u += 0xfff + ((u >> 13) & 1);  // round to nearest even
  return static_cast<uint16_t>(sign | ((u >> 13) - (112u << 10)));
}
QK_INLINE uint16_t float_to_bf16(float f) {
  uint32_t u = float_to_bits(f);
  if (f != f) return 0x7fc0;
  return static_cast<uint16_t>((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
QK_INLINE F f_from_fp16(const uint16_t* p) { QK_EACH(fp16_to_float(p[i])); }
QK_INLINE F f_from_bf16(const uint16_t* p) { QK_EACH(bits_to_float(static_cast<uint32_t>(p[i]) << 16)); }
QK_INLINE F f_from_u8(const uint8_t* p) { QK_EACH(static_cast<float>(p[i])); }
QK_INLINE F f_from_s8(const int8_t* p) { QK_EACH(static_cast<float>(p[i])); }
QK_INLINE void f_to_fp16(uint16_t* p, F a) {
  for (int i = 0; i < 16; i++) p[i] = float_to_fp16(a.v[i]);
}
QK_INLINE void f_to_bf16(uint16_t* p, F a) {
  for (int i = 0; i < 16; i++) p[i] = float_to_bf16(a.v[i]);
}
QK_INLINE void f_to_s8(int8_t* p, F a) {
  for (int i = 0; i < 16; i++) {
    float v = nearbyintf(a.v[i]);
    p[i] = static_cast<int8_t>(v > 127.0f ? 127.0f : v < -128.0f ? -128.0f : v);
  }
}

QK_INLINE I i_zero() {
  I r;
  memset(&r, 0, sizeof r);
  return r;
}
QK_INLINE I i_add(I a, I b) {
  // wraps as the vector instructions do; only the bandwidth test adds arbitrary bytes
  for (int i = 0; i < 16; i++) a.v[i] = static_cast<int32_t>(static_cast<uint32_t>(a.v[i]) + static_cast<uint32_t>(b.v[i]));
  return a;
}
QK_INLINE F i_to_f(I a) { QK_EACH(static_cast<float>(a.v[i])); }

QK_INLINE B b_load(const uint8_t* p) {
  B r;
  memcpy(r.v, p, 64);
  return r;
}
QK_INLINE void b_prefetch(const uint8_t*) {}
QK_INLINE B b_low_nibbles(B b) {
  for (int i = 0; i < 64; i++) b.v[i] &= 15;
  return b;
}
QK_INLINE B b_high_nibbles(B b) {
  for (int i = 0; i < 64; i++) b.v[i] >>= 4;
  return b;
}
QK_INLINE I dot_byte(I acc, B b, const int8_t* x) {
  for (int r = 0; r < 16; r++) {
    for (int i = 0; i < 4; i++) acc.v[r] += static_cast<int32_t>(b.v[4 * r + i]) * x[i];
  }
  return acc;
}
QK_INLINE I dot_small(I acc, B b, const int8_t* x) { return dot_byte(acc, b, x); }

template <int Index>
QK_INLINE F f_lookup_nibble(B b, F table) {
  QK_EACH(table.v[(b.v[4 * i + Index / 2] >> (4 * (Index & 1))) & 15]);
}
QK_INLINE F f_load_table16(const float* t) { return f_load(t); }
template <int Index>
QK_INLINE F f_byte(B b) {
  QK_EACH(static_cast<float>(b.v[4 * i + Index]));
}
template <int Index>
QK_INLINE F f_half(B b) {
  QK_EACH(bits_to_float(static_cast<uint32_t>(b.v[4 * i + 2 * Index] | (b.v[4 * i + 2 * Index + 1] << 8)) << 16));
}
#undef QK_EACH

}  // namespace QK_ISA
}  // namespace qk
