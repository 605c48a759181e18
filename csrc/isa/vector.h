// Everything of a decoder block that is not a matrix product or attention. Buffers are padded with zeros to a
// multiple of sixteen floats, so no loop here has a tail unless it says so.
#pragma once
#include <math.h>

#include "../kernels.h"
#include "math.h"

namespace qk {
namespace QK_ISA {

// ---- activations for a linear --------------------------------------------------------------------------------

QK_INLINE float largest(const float* x, int64_t n) {
  F m = f_zero();
  for (int64_t k = 0; k < n; k += 16) m = f_max(m, f_abs(f_load(x + k)));
  return f_hmax(m);
}

// 127 / peak, or 0 where that would overflow: such activations round to zero.
QK_INLINE float steps_per_unit(float peak) { return peak > 1e-35f ? 127.0f / peak : 0.0f; }

// One scale for n columns: q = round(x / scale), and the sum of q * scale.
QK_INLINE void round_int8(const float* x, int64_t n, float peak, int8_t* q, float* scale, float* sum) {
  const float inverse = steps_per_unit(peak);
  const float step = peak / 127.0f;
  F total = f_zero();
  for (int64_t k = 0; k < n; k += 16) {
    const F v = f_round(f_mul(f_load(x + k), f_set1(inverse)));
    total = f_add(total, v);  // integers below 2^24: exact
    f_to_s8(q + k, v);
  }
  *scale = step;
  *sum = f_sum(total) * step;
}

// The same in two planes: x = scale * (q + fine / 254).
QK_INLINE void round_int16(const float* x, int64_t n, float peak, int8_t* q, int8_t* fine, float* scale, float* sum) {
  const float inverse = steps_per_unit(peak);
  const float step = peak / 127.0f;
  F total = f_zero(), fine_total = f_zero();
  for (int64_t k = 0; k < n; k += 16) {
    const F v = f_mul(f_load(x + k), f_set1(inverse));
    const F coarse = f_round(v);
    const F rest = f_round(f_mul(f_sub(v, coarse), f_set1(kFineSteps)));
    total = f_add(total, coarse);
    fine_total = f_add(fine_total, rest);
    f_to_s8(q + k, coarse);
    f_to_s8(fine + k, rest);
  }
  *scale = step;
  *sum = (f_sum(total) + f_sum(fine_total) / kFineSteps) * step;
}

static void prepare(const Linear& w, ActKind kind, bool per_token, const float* x, float* scratch, const Acts& a,
                    int64_t row) {
  if (w.order) {
    for (int k = 0; k < w.cols; k++) scratch[k] = x[w.order[k]];
    for (int64_t k = w.cols; k < w.cols16; k++) scratch[k] = 0.0f;
    x = scratch;
  }
  const float peak = kind == kInt8 && per_token ? largest(x, w.cols16) : 0.0f;
  for (int64_t g = 0; g < w.groups; g++) {
    const int64_t k0 = g * w.group;
    const int64_t n = (k0 + w.group < w.cols16 ? k0 + w.group : w.cols16) - k0;
    const int64_t at = row * a.stride + k0, cell = row * a.groups + g;
    if (kind == kInt8) {
      round_int8(x + k0, n, per_token ? peak : largest(x + k0, n), a.q + at, a.scale + cell, a.sum + cell);
      continue;
    }
    if (kind == kInt16) {
      round_int16(x + k0, n, largest(x + k0, n), a.q + at, a.fine + at, a.scale + cell, a.sum + cell);
      continue;
    }
    F total = f_zero();
    for (int64_t k = 0; k < n; k += 16) {
      const F v = f_load(x + k0 + k);
      if (kind == kF32) {
        f_store(a.f32 + at + k, v);
        total = f_add(total, v);
      } else {
        uint16_t rounded[16];
        f_to_bf16(rounded, v);
        total = f_add(total, f_from_bf16(rounded));
        for (int i = 0; i < 16; i++) a.bf16[at + k + i] = rounded[(i & 8) + pair_order[i & 7]];
      }
    }
    a.sum[cell] = f_sum(total);
  }
}

// ---- vectors -------------------------------------------------------------------------------------------------

static void rmsnorm(const float* x, const float* weight, float eps, int n, float* y) {
  F squares = f_zero();
  for (int k = 0; k < n; k += 16) squares = f_fma(f_load(x + k), f_load(x + k), squares);
  const F r = f_set1(1.0f / sqrtf(f_sum(squares) / static_cast<float>(n) + eps));
  for (int k = 0; k < n; k += 16) f_store(y + k, f_mul(f_mul(f_load(x + k), r), f_load(weight + k)));
}

static void add(float* x, const float* y, int n) {
  for (int k = 0; k < n; k += 16) f_store(x + k, f_add(f_load(x + k), f_load(y + k)));
}

static void scale(float* x, float factor, int n) {
  for (int k = 0; k < n; k += 16) f_store(x + k, f_mul(f_load(x + k), f_set1(factor)));
}

static void glu(int activation, const float* gate, const float* up, float* y, int n) {
  for (int k = 0; k < n; k += 16) {
    const F g = f_load(gate + k);
    f_store(y + k, f_mul(activation == 0 ? f_silu(g) : f_gelu_tanh(g), f_load(up + k)));
  }
}

static void load(const void* x, int dtype, float* y, int n) {
  const int whole = n & ~15;
  const float* f = static_cast<const float*>(x);
  const uint16_t* h = static_cast<const uint16_t*>(x);
  for (int k = 0; k < whole; k += 16) {
    f_store(y + k, dtype == QK_F32 ? f_load(f + k) : dtype == QK_F16 ? f_from_fp16(h + k) : f_from_bf16(h + k));
  }
  if (whole == n) return;
  float tail_f[16] = {};
  uint16_t tail_h[16] = {};
  if (dtype == QK_F32) memcpy(tail_f, f + whole, sizeof(float) * static_cast<size_t>(n - whole));
  else memcpy(tail_h, h + whole, sizeof(uint16_t) * static_cast<size_t>(n - whole));
  f_store(y + whole, dtype == QK_F32 ? f_load(tail_f) : dtype == QK_F16 ? f_from_fp16(tail_h) : f_from_bf16(tail_h));
}

static void store(const float* x, int dtype, void* y, int n) {
  float* f = static_cast<float*>(y);
  uint16_t* h = static_cast<uint16_t*>(y);
  if (dtype == QK_F32) {
    memcpy(f, x, sizeof(float) * static_cast<size_t>(n));
    return;
  }
  for (int k = 0; k < n; k += 16) {
    uint16_t block[16];
    if (dtype == QK_F16) f_to_fp16(block, f_load(x + k));
    else f_to_bf16(block, f_load(x + k));
    memcpy(h + k, block, sizeof(uint16_t) * static_cast<size_t>(n - k < 16 ? n - k : 16));
  }
}

// The first index of the largest value, as torch.argmax on ties in practice; -1 when n is 0.
static int argmax(const float* x, int n) {
  int best = n > 0 ? 0 : -1;
  int k = 0;
  for (; k + 16 <= n; k += 16) {
    if (!(f_hmax(f_load(x + k)) > x[best])) continue;  // skips almost every block
    for (int i = k; i < k + 16; i++) best = x[i] > x[best] ? i : best;
  }
  for (; k < n; k++) best = x[k] > x[best] ? k : best;
  return best;
}

static uint64_t read(const uint8_t* data, int64_t bytes) {
  I s[4] = {i_zero(), i_zero(), i_zero(), i_zero()};
  for (int64_t i = 0; i + 256 <= bytes; i += 256) {
    for (int j = 0; j < 4; j++) {
      I v;
      memcpy(&v, data + i + 64 * j, sizeof v);
      s[j] = i_add(s[j], v);
    }
  }
  return static_cast<uint64_t>(f_sum(i_to_f(i_add(i_add(s[0], s[1]), i_add(s[2], s[3])))));
}

}  // namespace QK_ISA
}  // namespace qk
