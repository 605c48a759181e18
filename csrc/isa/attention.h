// Decode attention over one kv head. All query heads that share it are the rows of one pass, so every cached byte
// is read from memory once; the context is walked in tiles of 128 tokens with a running maximum (flash decoding).
#pragma once
#include "../kernels.h"
#include "math.h"

namespace qk {
namespace QK_ISA {

constexpr int kTile = 128;
constexpr float kMinusInfinity = -1e30f;

QK_INLINE int64_t groups_of(int dim) { return (dim + kKeyGroup - 1) / kKeyGroup; }

// ---- queries -------------------------------------------------------------------------------------------------

// For an int8 cache each query row is two int8 planes, q = fine_scale * fine + coarse_scale * coarse: 15 bits, so
// that only the cache rounds, not the query.
struct Queries {
  const float* f32;
  int8_t coarse[kMaxQueryRows][kMaxHeadDim], fine[kMaxQueryRows][kMaxHeadDim];
  float coarse_scale[kMaxQueryRows][kMaxHeadDim / kKeyGroup], fine_scale[kMaxQueryRows][kMaxHeadDim / kKeyGroup];
  float offset[kMaxQueryRows][kMaxHeadDim / kKeyGroup];  // 128 * sum of q, because key codes are k + 128
};

static void split_queries(const float* q, int rows, int dim, Queries& out) {
  for (int r = 0; r < rows; r++) {
    for (int g = 0; g < groups_of(dim); g++) {
      const int d0 = g * kKeyGroup, d1 = d0 + kKeyGroup < dim ? d0 + kKeyGroup : dim;
      F peak = f_zero();
      for (int d = d0; d < d1; d += 16) peak = f_max(peak, f_abs(f_load(q + r * dim + d)));
      const float s = f_hmax(peak) / 127.0f, inverse = s > 1e-37f ? 1.0f / s : 0.0f;
      F sum = f_zero(), fine_sum = f_zero();
      for (int d = d0; d < d1; d += 16) {
        const F v = f_mul(f_load(q + r * dim + d), f_set1(inverse));
        const F coarse = f_round(v);
        const F fine = f_round(f_mul(f_sub(v, coarse), f_set1(kFineSteps)));
        f_to_s8(&out.coarse[r][d], coarse);
        f_to_s8(&out.fine[r][d], fine);
        sum = f_add(sum, coarse);
        fine_sum = f_add(fine_sum, fine);
      }
      out.coarse_scale[r][g] = s;
      out.fine_scale[r][g] = s / kFineSteps;
      out.offset[r][g] = 128.0f * (s * f_sum(sum) + s / kFineSteps * f_sum(fine_sum));
    }
  }
}

// ---- the three kinds of cache --------------------------------------------------------------------------------

struct CacheInt8 {
  // Scores of sixteen tokens against rows r0 .. r0 + R.
  template <int R>
  QK_INLINE void scores(const KvHead& kv, const Queries& q, int r0, int dim, int64_t block, F (&out)[R]) {
    const uint8_t* codes = static_cast<const uint8_t*>(kv.k) + block * dim * 16;
    const int64_t groups = groups_of(dim);
    for (int r = 0; r < R; r++) out[r] = f_zero();
    for (int g = 0; g < groups; g++) {
      const int d0 = g * kKeyGroup, d1 = d0 + kKeyGroup < dim ? d0 + kKeyGroup : dim;
      I coarse[R], fine[R];
      for (int r = 0; r < R; r++) coarse[r] = fine[r] = i_zero();
      for (int d = d0; d < d1; d += 4) {
        const B k = b_load(codes + d * 16);
        for (int r = 0; r < R; r++) {
          coarse[r] = dot_byte(coarse[r], k, &q.coarse[r0 + r][d]);
          fine[r] = dot_byte(fine[r], k, &q.fine[r0 + r][d]);
        }
      }
      const F scale = f_load(kv.k_scale + (block * groups + g) * 16);
      for (int r = 0; r < R; r++) {
        F s = f_sub(f_mul(i_to_f(coarse[r]), f_set1(q.coarse_scale[r0 + r][g])), f_set1(q.offset[r0 + r][g]));
        s = f_fma(i_to_f(fine[r]), f_set1(q.fine_scale[r0 + r][g]), s);
        out[r] = f_fma(s, scale, out[r]);
      }
    }
  }
  QK_INLINE F value(const KvHead& kv, int64_t at) { return f_from_s8(static_cast<const int8_t*>(kv.v) + at); }
  static constexpr bool kValueScale = true, kIntegerQueries = true;
};

struct F32Element {
  using Type = float;
  QK_INLINE F get(const float* p) { return f_load(p); }
  QK_INLINE void put(float* p, F v) { f_store(p, v); }
};
struct Bf16Element {
  using Type = uint16_t;
  QK_INLINE F get(const uint16_t* p) { return f_from_bf16(p); }
  QK_INLINE void put(uint16_t* p, F v) { f_to_bf16(p, v); }
};

template <class Element>
struct CacheFloat {
  using Type = typename Element::Type;
  template <int R>
  QK_INLINE void scores(const KvHead& kv, const Queries& q, int r0, int dim, int64_t block, F (&out)[R]) {
    const Type* keys = static_cast<const Type*>(kv.k) + block * dim * 16;
    for (int r = 0; r < R; r++) out[r] = f_zero();
    for (int d = 0; d < dim; d++) {
      const F k = Element::get(keys + d * 16);
      for (int r = 0; r < R; r++) out[r] = f_fma(k, f_set1(q.f32[(r0 + r) * dim + d]), out[r]);
    }
  }
  QK_INLINE F value(const KvHead& kv, int64_t at) { return Element::get(static_cast<const Type*>(kv.v) + at); }
  static constexpr bool kValueScale = false, kIntegerQueries = false;
};

// ---- one tile of up to 128 tokens ----------------------------------------------------------------------------

template <class Cache, int R>
QK_INLINE void score_rows(const KvHead& kv, const Queries& q, int r0, int dim, int64_t b0, int64_t b1,
                          float (*s)[kTile]) {
  for (int64_t b = b0; b < b1; b++) {
    F out[R];
    Cache::template scores<R>(kv, q, r0, dim, b, out);
    for (int r = 0; r < R; r++) f_store(&s[r0 + r][(b - b0) * 16], out[r]);
  }
}

// acc[r][d ..] += sum over the tile's tokens of p[r][t] * V[t][d ..], for N vectors of sixteen dimensions.
template <class Cache, int R, int N>
QK_INLINE void add_values(const KvHead& kv, int r0, int dim, int d, int64_t first, int tokens, float (*p)[kTile],
                          Partial* out) {
  F acc[R][N];
  for (int r = 0; r < R; r++) {
    for (int n = 0; n < N; n++) acc[r][n] = f_load(&out[r0 + r].acc[d + 16 * n]);
  }
  for (int t = 0; t < tokens; t++) {
    F v[N];
    for (int n = 0; n < N; n++) v[n] = Cache::value(kv, (first + t) * dim + d + 16 * n);
    for (int r = 0; r < R; r++) {
      const F weight = f_set1(p[r0 + r][t]);
      for (int n = 0; n < N; n++) acc[r][n] = f_fma(weight, v[n], acc[r][n]);
    }
  }
  for (int r = 0; r < R; r++) {
    for (int n = 0; n < N; n++) f_store(&out[r0 + r].acc[d + 16 * n], acc[r][n]);
  }
}

template <class Cache, int R>
QK_INLINE void value_rows(const KvHead& kv, int r0, int dim, int64_t first, int tokens, float (*p)[kTile], Partial* out) {
  int d = 0;
  for (; d + 64 <= dim; d += 64) add_values<Cache, R, 4>(kv, r0, dim, d, first, tokens, p, out);
  for (; d < dim; d += 16) add_values<Cache, R, 1>(kv, r0, dim, d, first, tokens, p, out);
}

// Turns one row of scores into weights relative to the running maximum and rescales what was summed before.
QK_INLINE void soften(float* s, int tokens, int dim, Partial& out) {
  F peak = f_set1(out.max);
  for (int t = 0; t < tokens; t += 16) peak = f_max(peak, f_load(s + t));
  const float top = f_hmax(peak);
  const float fade = f_sum(f_exp(f_set1(out.max - top))) / 16.0f;
  F sum = f_zero();
  for (int t = 0; t < tokens; t += 16) {
    const F e = f_exp(f_sub(f_load(s + t), f_set1(top)));
    f_store(s + t, e);
    sum = f_add(sum, e);
  }
  out.max = top;
  out.sum = out.sum * fade + f_sum(sum);
  for (int d = 0; d < dim; d += 16) f_store(out.acc + d, f_mul(f_load(out.acc + d), f_set1(fade)));
}

template <class Cache>
static void attend_cache(const KvHead& kv, const float* q, int rows, int dim, int64_t from, int64_t to, Partial* out) {
  Queries queries;
  queries.f32 = q;
  if (Cache::kIntegerQueries) split_queries(q, rows, dim, queries);
  for (int r = 0; r < rows; r++) {
    out[r].max = kMinusInfinity;
    out[r].sum = 0.0f;
    for (int d = 0; d < dim; d += 16) f_store(out[r].acc + d, f_zero());
  }
  float s[kMaxQueryRows][kTile];
  const int64_t last = (to + 15) / 16;
  for (int64_t b0 = from / 16; b0 < last; b0 += kTile / 16) {
    const int64_t b1 = b0 + kTile / 16 < last ? b0 + kTile / 16 : last, first = b0 * 16;
    const int tokens = static_cast<int>(b1 - b0) * 16;
    int r = 0;
    for (; r + 4 <= rows; r += 4) score_rows<Cache, 4>(kv, queries, r, dim, b0, b1, s);
    if (rows - r == 3) score_rows<Cache, 3>(kv, queries, r, dim, b0, b1, s);
    if (rows - r == 2) score_rows<Cache, 2>(kv, queries, r, dim, b0, b1, s);
    if (rows - r == 1) score_rows<Cache, 1>(kv, queries, r, dim, b0, b1, s);
    for (r = 0; r < rows; r++) {
      for (int64_t t = first; t < from; t++) s[r][t - first] = kMinusInfinity;
      for (int64_t t = to; t < first + tokens; t++) s[r][t - first] = kMinusInfinity;
      soften(s[r], tokens, dim, out[r]);
      // f_exp leaves 1e-38 where zero is meant; the masked lanes may hold another sequence's leftovers
      for (int64_t t = first; t < from; t++) s[r][t - first] = 0.0f;
      for (int64_t t = to; t < first + tokens; t++) s[r][t - first] = 0.0f;
      if (Cache::kValueScale) {
        for (int t = 0; t < tokens; t += 16) f_store(s[r] + t, f_mul(f_load(s[r] + t), f_load(kv.v_scale + first + t)));
      }
    }
    r = 0;
    for (; r + 4 <= rows; r += 4) value_rows<Cache, 4>(kv, r, dim, first, tokens, s, out);
    if (rows - r == 3) value_rows<Cache, 3>(kv, r, dim, first, tokens, s, out);
    if (rows - r == 2) value_rows<Cache, 2>(kv, r, dim, first, tokens, s, out);
    if (rows - r == 1) value_rows<Cache, 1>(kv, r, dim, first, tokens, s, out);
  }
}

static void attend(int cache, const KvHead& kv, const float* q, int rows, int dim, int64_t from, int64_t to, Partial* out) {
  switch (cache) {
    case QK_CACHE_INT8: return attend_cache<CacheInt8>(kv, q, rows, dim, from, to, out);
    case QK_CACHE_BF16: return attend_cache<CacheFloat<Bf16Element>>(kv, q, rows, dim, from, to, out);
    default: return attend_cache<CacheFloat<F32Element>>(kv, q, rows, dim, from, to, out);
  }
}

// ---- writing, merging ----------------------------------------------------------------------------------------

template <class Element>
static void append_float(const KvHead& kv, int64_t position, const float* k, const float* v, int dim) {
  using Type = typename Element::Type;
  Type* keys = static_cast<Type*>(kv.k) + position / 16 * dim * 16 + position % 16;
  Type* values = static_cast<Type*>(kv.v) + position * dim;
  for (int d = 0; d < dim; d += 16) {
    Type block[16];
    Element::put(block, f_load(k + d));
    for (int i = 0; i < 16; i++) keys[(d + i) * 16] = block[i];
    Element::put(values + d, f_load(v + d));
  }
}

static void append_int8(const KvHead& kv, int64_t position, const float* k, const float* v, int dim) {
  const int64_t block = position / 16, lane = position % 16, groups = groups_of(dim);
  uint8_t* keys = static_cast<uint8_t*>(kv.k) + block * dim * 16 + lane * 4;
  for (int g = 0; g < groups; g++) {
    const int d0 = g * kKeyGroup, d1 = d0 + kKeyGroup < dim ? d0 + kKeyGroup : dim;
    F peak = f_zero();
    for (int d = d0; d < d1; d += 16) peak = f_max(peak, f_abs(f_load(k + d)));
    const float s = f_hmax(peak) / 127.0f;
    const F inverse = f_set1(s > 1e-37f ? 1.0f / s : 0.0f);
    kv.k_scale[(block * groups + g) * 16 + lane] = s;
    for (int d = d0; d < d1; d += 16) {
      int8_t code[16];
      f_to_s8(code, f_mul(f_load(k + d), inverse));
      for (int i = 0; i < 16; i++) keys[(d + i) / 4 * 64 + (d + i) % 4] = static_cast<uint8_t>(code[i] + 128);
    }
  }
  F peak = f_zero();
  for (int d = 0; d < dim; d += 16) peak = f_max(peak, f_abs(f_load(v + d)));
  const float s = f_hmax(peak) / 127.0f;
  const F inverse = f_set1(s > 1e-37f ? 1.0f / s : 0.0f);
  kv.v_scale[position] = s;
  int8_t* values = static_cast<int8_t*>(kv.v) + position * dim;
  for (int d = 0; d < dim; d += 16) f_to_s8(values + d, f_mul(f_load(v + d), inverse));
}

static void kv_append(int cache, const KvHead& kv, int64_t position, const float* k, const float* v, int dim) {
  switch (cache) {
    case QK_CACHE_INT8: return append_int8(kv, position, k, v, dim);
    case QK_CACHE_BF16: return append_float<Bf16Element>(kv, position, k, v, dim);
    default: return append_float<F32Element>(kv, position, k, v, dim);
  }
}

// One query head from the partials of `count` threads, stride apart; those with sum 0 saw none of the context.
static void merge(const Partial* parts, int64_t stride, int count, int dim, float* y) {
  float top = kMinusInfinity;
  for (int i = 0; i < count; i++) {
    const Partial& p = parts[i * stride];
    if (p.sum > 0.0f && p.max > top) top = p.max;
  }
  float sum = 0.0f;
  for (int d = 0; d < dim; d += 16) f_store(y + d, f_zero());
  for (int i = 0; i < count; i++) {
    const Partial& p = parts[i * stride];
    if (p.sum <= 0.0f) continue;
    const float weight = f_sum(f_exp(f_set1(p.max - top))) / 16.0f;
    sum += p.sum * weight;
    for (int d = 0; d < dim; d += 16) f_store(y + d, f_fma(f_load(p.acc + d), f_set1(weight), f_load(y + d)));
  }
  const F inverse = f_set1(1.0f / sum);
  for (int d = 0; d < dim; d += 16) f_store(y + d, f_mul(f_load(y + d), inverse));
}

}  // namespace QK_ISA
}  // namespace qk
