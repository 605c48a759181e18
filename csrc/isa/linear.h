// The fused dequantize-and-multiply kernels. For every 16-row tile the codes are read once per kMaxTokens tokens,
// from memory the first time and from L1 after that; scales and zero points are applied once per group.
#pragma once
#include "../kernels.h"

namespace qk {
namespace QK_ISA {

constexpr int64_t kPrefetch = 1024;  // bytes ahead; as in the prototype, where 512 and 2048 were no better

// ---- how eight columns of sixteen rows are read from each kind of weight -------------------------------------

struct Nibbles {
  static constexpr int kBytes = 64;  // per eight columns
  static constexpr float kCentre = 8.0f;

  template <int M>
  QK_INLINE void dot_int8(I (&a)[M], I (&b)[M], const uint8_t* w, const int8_t* x, int64_t ld) {
    const B codes = b_load(w);
    const B low = b_low_nibbles(codes), high = b_high_nibbles(codes);
    for (int m = 0; m < M; m++) {
      a[m] = dot_small(a[m], low, x + m * ld);
      b[m] = dot_small(b[m], high, x + m * ld + 4);
    }
  }

  template <int M, int C>
  QK_INLINE void dot_f32(F (&acc)[M][C], const uint8_t* w, const float* x, int64_t ld) {
    static const float values[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    const F table = f_load_table16(values);
    const B codes = b_load(w);
    one<0, 0>(acc, codes, table, x, ld);
    one<1, 4>(acc, codes, table, x, ld);
    one<2, 1>(acc, codes, table, x, ld);
    one<3, 5>(acc, codes, table, x, ld);
    one<4, 2>(acc, codes, table, x, ld);
    one<5, 6>(acc, codes, table, x, ld);
    one<6, 3>(acc, codes, table, x, ld);
    one<7, 7>(acc, codes, table, x, ld);
  }
  template <int Nibble, int Column, int M, int C>
  QK_INLINE void one(F (&acc)[M][C], B codes, F table, const float* x, int64_t ld) {
    const F v = f_lookup_nibble<Nibble>(codes, table);
    for (int m = 0; m < M; m++) acc[m][Nibble % C] = f_fma(v, f_set1(x[m * ld + Column]), acc[m][Nibble % C]);
  }

#if QK_HAS_BF16_DOT
  struct Tables {
    Table codes;
  };
  QK_INLINE Tables tables() { return {table_bf16({-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7})}; }
  template <int M, int C>
  QK_INLINE void dot_bf16_pairs(F (&acc)[M][C], const uint8_t* w, const uint16_t* x, int64_t ld,
                                       const Tables& t) {
    const B codes = b_load(w);
    const B pairs[4] = {pair_lookup<0>(codes, t.codes), pair_lookup<1>(codes, t.codes), pair_lookup<2>(codes, t.codes),
                        pair_lookup<3>(codes, t.codes)};
    for (int j = 0; j < 4; j++) {
      for (int m = 0; m < M; m++) acc[m][j % C] = dot_bf16(acc[m][j % C], pairs[j], x + m * ld + 2 * j);
    }
  }
#endif
};

struct Bytes {
  static constexpr int kBytes = 128;
  static constexpr float kCentre = 128.0f;

  template <int M>
  QK_INLINE void dot_int8(I (&a)[M], I (&b)[M], const uint8_t* w, const int8_t* x, int64_t ld) {
    const B first = b_load(w), second = b_load(w + 64);
    for (int m = 0; m < M; m++) {
      a[m] = dot_byte(a[m], first, x + m * ld);
      b[m] = dot_byte(b[m], second, x + m * ld + 4);
    }
  }

  template <int M, int C>
  QK_INLINE void dot_f32(F (&acc)[M][C], const uint8_t* w, const float* x, int64_t ld) {
    for (int half = 0; half < 2; half++) {
      const B codes = b_load(w + 64 * half);
      one<0>(acc, codes, x + 4 * half, ld);
      one<1>(acc, codes, x + 4 * half, ld);
      one<2>(acc, codes, x + 4 * half, ld);
      one<3>(acc, codes, x + 4 * half, ld);
    }
  }
  template <int Index, int M, int C>
  QK_INLINE void one(F (&acc)[M][C], B codes, const float* x, int64_t ld) {
    const F v = f_sub(f_byte<Index>(codes), f_set1(kCentre));
    for (int m = 0; m < M; m++) acc[m][Index % C] = f_fma(v, f_set1(x[m * ld + Index]), acc[m][Index % C]);
  }

#if QK_HAS_BF16_DOT
  // A byte is its two nibbles: code - 128 = low + 16 (high - 8), each exact in bf16.
  struct Tables {
    Table low, high;
  };
  QK_INLINE Tables tables() {
    return {table_bf16({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}),
            table_bf16({-128, -112, -96, -80, -64, -48, -32, -16, 0, 16, 32, 48, 64, 80, 96, 112})};
  }
  template <int M, int C>
  QK_INLINE void dot_bf16_pairs(F (&acc)[M][C], const uint8_t* w, const uint16_t* x, int64_t ld,
                                       const Tables& t) {
    for (int half = 0; half < 2; half++) {
      const B codes = b_load(w + 64 * half);
      const B even[2] = {pair_lookup<0>(codes, t.low), pair_lookup<1>(codes, t.high)};
      const B odd[2] = {pair_lookup<2>(codes, t.low), pair_lookup<3>(codes, t.high)};
      for (int j = 0; j < 2; j++) {
        for (int m = 0; m < M; m++) {
          acc[m][j % C] = dot_bf16(acc[m][j % C], even[j], x + m * ld + 2 * half);  // columns 0,2 or 4,6
          acc[m][(j + 2) % C] = dot_bf16(acc[m][(j + 2) % C], odd[j], x + m * ld + 4 + 2 * half);
        }
      }
    }
  }
#endif
};

struct Halves {
  static constexpr int kBytes = 256;
  static constexpr float kCentre = 0.0f;

  template <int M, int C>
  QK_INLINE void dot_f32(F (&acc)[M][C], const uint8_t* w, const float* x, int64_t ld) {
    for (int j = 0; j < 4; j++) {
      const B pair = b_load(w + 64 * j);
      const F a = f_half<0>(pair), b = f_half<1>(pair);
      for (int m = 0; m < M; m++) {
        acc[m][j % C] = f_fma(a, f_set1(x[m * ld + pair_order[2 * j]]), acc[m][j % C]);
        acc[m][j % C] = f_fma(b, f_set1(x[m * ld + pair_order[2 * j + 1]]), acc[m][j % C]);
      }
    }
  }

#if QK_HAS_BF16_DOT
  struct Tables {};
  QK_INLINE Tables tables() { return {}; }
  template <int M, int C>
  QK_INLINE void dot_bf16_pairs(F (&acc)[M][C], const uint8_t* w, const uint16_t* x, int64_t ld,
                                       const Tables&) {
    for (int j = 0; j < 4; j++) {
      const B pair = b_load(w + 64 * j);
      for (int m = 0; m < M; m++) acc[m][j % C] = dot_bf16(acc[m][j % C], pair, x + m * ld + 2 * j);
    }
  }
#endif
};

// ---- scales, zero points, bias -------------------------------------------------------------------------------

QK_INLINE F load_scale(const Linear& w, int64_t cell) {
  switch (w.scale_type) {
    case QK_F16: return f_from_fp16(reinterpret_cast<const uint16_t*>(w.scales) + cell * 16);
    case QK_BF16: return f_from_bf16(reinterpret_cast<const uint16_t*>(w.scales) + cell * 16);
    default: return f_load(reinterpret_cast<const float*>(w.scales) + cell * 16);
  }
}

template <int M>
QK_INLINE void write_tile(const Linear& w, const F (&total)[M], int64_t tile, float* y, int64_t ldy) {
  const F bias = w.bias ? f_load(w.bias + tile * 16) : f_zero();
  for (int m = 0; m < M; m++) f_store(y + m * ldy + tile * 16, f_add(total[m], bias));
}

// Enough independent sums to hide the latency of the dot when few tokens share it.
constexpr int chains(int tokens) { return tokens == 1 ? 4 : tokens == 2 ? 2 : 1; }

template <int M, int C>
QK_INLINE F total_of(const F (&part)[M][C], int m) {
  F sum = part[m][0];
  for (int c = 1; c < C; c++) sum = f_add(sum, part[m][c]);
  return sum;
}

// ---- one tile, M tokens, by kind of activation ---------------------------------------------------------------

struct Int8Dot {
  template <class W, int M>
  static void tile(const Linear& w, const Acts& x, int64_t row, int64_t tile, float* y, int64_t ldy) {
    F total[M];
    for (int m = 0; m < M; m++) total[m] = f_zero();
    const uint8_t* p = w.codes + tile * w.tile_bytes;
    const int8_t* q = x.q + row * x.stride;
    for (int64_t g = 0; g < w.groups; g++) {
      I a[M], b[M];
      for (int m = 0; m < M; m++) a[m] = b[m] = i_zero();
      const int64_t k1 = (g + 1) * w.group < w.cols16 ? (g + 1) * w.group : w.cols16;
#pragma GCC unroll 4
      for (int64_t k = g * w.group; k < k1; k += 8, p += W::kBytes) {
        b_prefetch(p + kPrefetch);
        W::dot_int8(a, b, p, q + k, x.stride);
      }
      const int64_t cell = tile * w.groups + g;
      const F scale = load_scale(w, cell);
      const F zero = w.zeros ? f_from_u8(w.zeros + cell * 16) : f_set1(W::kCentre);
      for (int m = 0; m < M; m++) {
        const int64_t i = (row + m) * x.groups + g;
        const F offset = f_mul(zero, f_set1(x.sum[i]));
        const F d = f_sub(f_mul(i_to_f(i_add(a[m], b[m])), f_set1(x.scale[i])), offset);
        total[m] = f_fma(d, scale, total[m]);
      }
    }
    write_tile(w, total, tile, y, ldy);
  }
  static int64_t bytes_per_column() { return 1; }
};

// Activations in two int8 planes. Half the speed of one plane, yet twice that of the bf16 dot (which is bound by its
// table lookups: 28 GB/s per Zen 4 core in cache against 56), and closer to fp32 activations than bf16 is.
struct Int16Dot {
  template <class W, int M>
  static void tile(const Linear& w, const Acts& x, int64_t row, int64_t tile, float* y, int64_t ldy) {
    constexpr bool kFewTokens = M <= 2;  // then four chains hide the latency; else eight tokens do, and registers are short
    F total[M];
    for (int m = 0; m < M; m++) total[m] = f_zero();
    const uint8_t* p = w.codes + tile * w.tile_bytes;
    const int8_t *coarse = x.q + row * x.stride, *fine = x.fine + row * x.stride;
    for (int64_t g = 0; g < w.groups; g++) {
      I a[M], b[M], c[M], d[M];
      for (int m = 0; m < M; m++) a[m] = b[m] = c[m] = d[m] = i_zero();
      const int64_t k1 = (g + 1) * w.group < w.cols16 ? (g + 1) * w.group : w.cols16;
#pragma GCC unroll 4
      for (int64_t k = g * w.group; k < k1; k += 8, p += W::kBytes) {
        b_prefetch(p + kPrefetch);
        W::dot_int8(a, kFewTokens ? b : a, p, coarse + k, x.stride);
        W::dot_int8(c, kFewTokens ? d : c, p, fine + k, x.stride);
      }
      const int64_t cell = tile * w.groups + g;
      const F scale = load_scale(w, cell);
      const F zero = w.zeros ? f_from_u8(w.zeros + cell * 16) : f_set1(W::kCentre);
      for (int m = 0; m < M; m++) {
        if (kFewTokens) a[m] = i_add(a[m], b[m]), c[m] = i_add(c[m], d[m]);
        const int64_t i = (row + m) * x.groups + g;
        const F both = f_fma(i_to_f(c[m]), f_set1(1.0f / kFineSteps), i_to_f(a[m]));
        const F offset = f_mul(zero, f_set1(x.sum[i]));
        total[m] = f_fma(f_sub(f_mul(both, f_set1(x.scale[i])), offset), scale, total[m]);
      }
    }
    write_tile(w, total, tile, y, ldy);
  }
  static int64_t bytes_per_column() { return 2; }
};

// The group loop that both floating kernels share: dot(part, codes, k) adds eight columns.
template <class W, int M, class Dot>
QK_INLINE void float_tile(const Linear& w, const Acts& x, int64_t row, int64_t tile, float* y, int64_t ldy, Dot dot) {
  constexpr int C = chains(M);
  F total[M];
  for (int m = 0; m < M; m++) total[m] = f_zero();
  const uint8_t* p = w.codes + tile * w.tile_bytes;
  for (int64_t g = 0; g < w.groups; g++) {
    F part[M][C];
    for (int m = 0; m < M; m++) {
      for (int c = 0; c < C; c++) part[m][c] = f_zero();
    }
    const int64_t k1 = (g + 1) * w.group < w.cols16 ? (g + 1) * w.group : w.cols16;
#pragma GCC unroll 4
    for (int64_t k = g * w.group; k < k1; k += 8, p += W::kBytes) {
      b_prefetch(p + kPrefetch);
      dot(part, p, k);
    }
    if (W::kCentre == 0.0f) {  // bf16 weights carry no scale
      for (int m = 0; m < M; m++) total[m] = f_add(total[m], total_of(part, m));
      continue;
    }
    const int64_t cell = tile * w.groups + g;
    const F scale = load_scale(w, cell);
    if (w.zeros) {  // codes were centred, so only the distance of the zero point from the centre is left
      const F away = f_sub(f_set1(W::kCentre), f_from_u8(w.zeros + cell * 16));
      for (int m = 0; m < M; m++) part[m][0] = f_fma(away, f_set1(x.sum[(row + m) * x.groups + g]), part[m][0]);
    }
    for (int m = 0; m < M; m++) total[m] = f_fma(total_of(part, m), scale, total[m]);
  }
  write_tile(w, total, tile, y, ldy);
}

struct F32Dot {
  template <class W, int M>
  static void tile(const Linear& w, const Acts& x, int64_t row, int64_t tile, float* y, int64_t ldy) {
    const float* values = x.f32 + row * x.stride;
    float_tile<W, M>(w, x, row, tile, y, ldy, [&](F(&part)[M][chains(M)], const uint8_t* p, int64_t k) __attribute__((always_inline)) {
      W::dot_f32(part, p, values + k, x.stride);
    });
  }
  static int64_t bytes_per_column() { return 4; }
};

#if QK_HAS_BF16_DOT
struct Bf16Dot {
  template <class W, int M>
  static void tile(const Linear& w, const Acts& x, int64_t row, int64_t tile, float* y, int64_t ldy) {
    const uint16_t* values = x.bf16 + row * x.stride;
    const auto tables = W::tables();
    float_tile<W, M>(w, x, row, tile, y, ldy, [&](F(&part)[M][chains(M)], const uint8_t* p, int64_t k) __attribute__((always_inline)) {
      W::dot_bf16_pairs(part, p, values + k, x.stride, tables);
    });
  }
  static int64_t bytes_per_column() { return 2; }
};
#endif

// ---- all tiles -----------------------------------------------------------------------------------------------

constexpr int64_t kActBlock = 384 << 10;  // bytes of activations kept in L2 while the weights stream past

template <class W, class Dot, int M>
QK_INLINE int tokens_by(const Linear& w, const Acts& x, int m, int m1, int64_t t, float* y, int64_t ldy) {
  for (; m + M <= m1; m += M) Dot::template tile<W, M>(w, x, m, t, y + m * ldy, ldy);
  return m;
}

template <class W, class Dot>
static void linear(const Linear& w, const Acts& x, int tokens, float* y, int64_t ldy, int64_t t0, int64_t t1) {
  int64_t fit = kActBlock / (w.cols16 * Dot::bytes_per_column()) / kMaxTokens * kMaxTokens;
  const int block = static_cast<int>(fit < 2 * kMaxTokens ? 2 * kMaxTokens : fit);
  for (int m0 = 0; m0 < tokens; m0 += block) {
    const int m1 = m0 + block < tokens ? m0 + block : tokens;
    for (int64_t t = t0; t < t1; t++) {
      int m = tokens_by<W, Dot, kMaxTokens>(w, x, m0, m1, t, y, ldy);
      if (kMaxTokens > 4) m = tokens_by<W, Dot, 4>(w, x, m, m1, t, y, ldy);
      if (kMaxTokens > 2) m = tokens_by<W, Dot, 2>(w, x, m, m1, t, y, ldy);
      tokens_by<W, Dot, 1>(w, x, m, m1, t, y, ldy);
    }
  }
}

}  // namespace QK_ISA
}  // namespace qk
