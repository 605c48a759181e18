// Sixteen lanes as four NEON registers (AArch64 with the dot-product extension, ARMv8.2 and later).
#pragma once
#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#define QK_INLINE static inline __attribute__((always_inline))
#define QK_HAS_BF16_DOT 0

namespace qk {
namespace QK_ISA {

struct F {
  float32x4_t v[4];
};
struct I {
  int32x4_t v[4];
};
struct B {
  uint8x16_t v[4];
};

constexpr int kMaxTokens = 4;

#define QK_EACH(type, body)       \
  type r;                         \
  for (int i = 0; i < 4; i++) {   \
    r.v[i] = (body);              \
  }                               \
  return r

QK_INLINE F f_set1(float x) { QK_EACH(F, vdupq_n_f32(x)); }
QK_INLINE F f_zero() { return f_set1(0.0f); }
QK_INLINE F f_load(const float* p) { QK_EACH(F, vld1q_f32(p + 4 * i)); }
QK_INLINE void f_store(float* p, F a) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, a.v[i]);
}
QK_INLINE F f_add(F a, F b) { QK_EACH(F, vaddq_f32(a.v[i], b.v[i])); }
QK_INLINE F f_sub(F a, F b) { QK_EACH(F, vsubq_f32(a.v[i], b.v[i])); }
QK_INLINE F f_mul(F a, F b) { QK_EACH(F, vmulq_f32(a.v[i], b.v[i])); }
QK_INLINE F f_div(F a, F b) { QK_EACH(F, vdivq_f32(a.v[i], b.v[i])); }
QK_INLINE F f_fma(F a, F b, F c) { QK_EACH(F, vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
QK_INLINE F f_max(F a, F b) { QK_EACH(F, vmaxq_f32(a.v[i], b.v[i])); }
QK_INLINE F f_min(F a, F b) { QK_EACH(F, vminq_f32(a.v[i], b.v[i])); }
QK_INLINE F f_abs(F a) { QK_EACH(F, vabsq_f32(a.v[i])); }
QK_INLINE F f_round(F a) { QK_EACH(F, vrndnq_f32(a.v[i])); }
QK_INLINE F f_ldexp(F a, F n) {
  QK_EACH(F, vmulq_f32(a.v[i], vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.v[i]), vdupq_n_s32(127)), 23))));
}
QK_INLINE float f_sum(F a) { return vaddvq_f32(vaddq_f32(vaddq_f32(a.v[0], a.v[1]), vaddq_f32(a.v[2], a.v[3]))); }
QK_INLINE float f_hmax(F a) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3]))); }

QK_INLINE F f_from_fp16(const uint16_t* p) { QK_EACH(F, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))); }
QK_INLINE F f_from_bf16(const uint16_t* p) {
  QK_EACH(F, vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vld1_u16(p + 4 * i)), 16)));
}
QK_INLINE F f_from_u8(const uint8_t* p) {
  uint8x16_t b = vld1q_u8(p);
  uint16x8_t lo = vmovl_u8(vget_low_u8(b)), hi = vmovl_u8(vget_high_u8(b));
  return {{vcvtq_f32_u32(vmovl_u16(vget_low_u16(lo))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(lo))),
           vcvtq_f32_u32(vmovl_u16(vget_low_u16(hi))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(hi)))}};
}
QK_INLINE F f_from_s8(const int8_t* p) {
  int8x16_t b = vld1q_s8(p);
  int16x8_t lo = vmovl_s8(vget_low_s8(b)), hi = vmovl_s8(vget_high_s8(b));
  return {{vcvtq_f32_s32(vmovl_s16(vget_low_s16(lo))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(lo))),
           vcvtq_f32_s32(vmovl_s16(vget_low_s16(hi))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(hi)))}};
}
QK_INLINE void f_to_fp16(uint16_t* p, F a) {
  for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.v[i])));
}
QK_INLINE void f_to_bf16(uint16_t* p, F a) {
  for (int i = 0; i < 4; i++) {
    uint32x4_t u = vreinterpretq_u32_f32(a.v[i]);
    uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
    uint32x4_t r = vshrq_n_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
    r = vbslq_u32(vceqq_f32(a.v[i], a.v[i]), r, vdupq_n_u32(0x7fc0));  // NaN is the only value unequal to itself
    vst1_u16(p + 4 * i, vmovn_u32(r));
  }
}
QK_INLINE void f_to_s8(int8_t* p, F a) {
  int16x8_t lo = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(a.v[0])), vqmovn_s32(vcvtnq_s32_f32(a.v[1])));
  int16x8_t hi = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(a.v[2])), vqmovn_s32(vcvtnq_s32_f32(a.v[3])));
  vst1q_s8(p, vcombine_s8(vqmovn_s16(lo), vqmovn_s16(hi)));
}

QK_INLINE I i_zero() { QK_EACH(I, vdupq_n_s32(0)); }
QK_INLINE I i_add(I a, I b) { QK_EACH(I, vaddq_s32(a.v[i], b.v[i])); }
QK_INLINE F i_to_f(I a) { QK_EACH(F, vcvtq_f32_s32(a.v[i])); }
QK_INLINE int32_t read_i32(const void* p) {
  int32_t v;
  memcpy(&v, p, 4);
  return v;
}

QK_INLINE B b_load(const uint8_t* p) { QK_EACH(B, vld1q_u8(p + 16 * i)); }
QK_INLINE void b_prefetch(const uint8_t* p) { __builtin_prefetch(p); }
QK_INLINE B b_low_nibbles(B b) { QK_EACH(B, vandq_u8(b.v[i], vdupq_n_u8(15))); }
QK_INLINE B b_high_nibbles(B b) { QK_EACH(B, vshrq_n_u8(b.v[i], 4)); }
QK_INLINE I dot_small(I acc, B b, const int8_t* x) {
  const int8x16_t q = vreinterpretq_s8_s32(vdupq_n_s32(read_i32(x)));
  QK_EACH(I, vdotq_s32(acc.v[i], vreinterpretq_s8_u8(b.v[i]), q));
}
// sdot wants signed bytes: use b - 128 and add 128 * sum(x) back as two dots with 64.
QK_INLINE I dot_byte(I acc, B b, const int8_t* x) {
  const int8x16_t q = vreinterpretq_s8_s32(vdupq_n_s32(read_i32(x)));
  const int8x16_t half = vdupq_n_s8(64);
  const int32x4_t offset = vdotq_s32(vdotq_s32(vdupq_n_s32(0), half, q), half, q);
  QK_EACH(I, vdotq_s32(vaddq_s32(acc.v[i], offset), vreinterpretq_s8_u8(veorq_u8(b.v[i], vdupq_n_u8(128))), q));
}

// The table is -8..7 for every caller, so arithmetic replaces the lookup NEON lacks for floats.
template <int Index>
QK_INLINE F f_lookup_nibble(B b, F table) {
  float32x4_t first = vdupq_n_f32(vgetq_lane_f32(table.v[0], 0));
  float32x4_t step = vsubq_f32(vdupq_n_f32(vgetq_lane_f32(table.v[0], 1)), first);
  QK_EACH(F, vfmaq_f32(first, step,
                       vcvtq_f32_u32(vandq_u32(vshlq_u32(vreinterpretq_u32_u8(b.v[i]), vdupq_n_s32(-4 * Index)),
                                               vdupq_n_u32(15)))));
}
QK_INLINE F f_load_table16(const float* t) { return f_load(t); }
template <int Index>
QK_INLINE F f_byte(B b) {
  QK_EACH(F, vcvtq_f32_u32(vandq_u32(vshlq_u32(vreinterpretq_u32_u8(b.v[i]), vdupq_n_s32(-8 * Index)), vdupq_n_u32(255))));
}
template <int Index>
QK_INLINE F f_half(B b) {
  QK_EACH(F, vreinterpretq_f32_u32(Index ? vandq_u32(vreinterpretq_u32_u8(b.v[i]), vdupq_n_u32(0xffff0000u))
                                         : vshlq_n_u32(vreinterpretq_u32_u8(b.v[i]), 16)));
}
#undef QK_EACH

}  // namespace QK_ISA
}  // namespace qk
