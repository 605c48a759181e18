// What the engine asks of an instruction set: one table of functions per translation unit in isa/.
#pragma once
#include <stdint.h>

#include "layout.h"

namespace qk {

constexpr float kFineSteps = 254.0f;  // the remainder of rounding lies in [-1/2, 1/2], a fine code in [-127, 127]

enum WeightKind { kNibbles, kBytes, kHalves, kWeightKinds };
enum ActKind { kInt8, kInt16, kBf16, kF32, kActKinds };

// A packed weight with its pointers resolved.
struct Linear {
  int rows, cols;
  int64_t cols16, tiles, group, groups, tile_bytes;
  WeightKind kind;
  int scale_type;
  const uint8_t* codes;
  const uint8_t* scales;
  const uint8_t* zeros;   // may be null: 8 or 128
  const int32_t* order;   // may be null
  const float* bias;      // may be null
};

// Activations made ready for a Linear: row m starts at m * stride; scale and sum at m * groups.
// Only the arrays of the kind in use are filled.
struct Acts {
  int64_t stride, groups;
  int8_t* q;       // int8 codes
  int8_t* fine;    // kInt16: x = scale * (q + fine / 254)
  float* scale;    // of q
  float* sum;      // sum of the (rounded) activations per group, for the zero points
  uint16_t* bf16;  // in pair order
  float* f32;
};

// One kv head of a layer's cache. Tokens come in blocks of 16 that are lanes for the keys.
//   keys    int8 codes + 128 [block][dim/4][16][4] with scales [block][dim/32][16], or floats [block][dim][16]
//   values  int8 [token][dim] with one scale per token, or floats [token][dim]
struct KvHead {
  void* k;
  float* k_scale;
  void* v;
  float* v_scale;
};

constexpr int kKeyGroup = 32;         // head dimensions sharing a key scale: keys have outlier channels
constexpr int kMaxQueryRows = 16;     // query heads that share one pass over a kv head
constexpr int kMaxHeadDim = 256;

// Unnormalised result of attention over part of the context, one per query head.
struct Partial {
  float max, sum;
  float acc[kMaxHeadDim];
};

struct Kernels {
  const char* name;
  // y[m * ldy + 16 t ..] for rows m < tokens and tiles t0 <= t < t1; null where the instruction set has no such dot.
  void (*linear[kWeightKinds][kActKinds])(const Linear&, const Acts&, int tokens, float* y, int64_t ldy, int64_t t0,
                                          int64_t t1);
  // x: cols floats, zero up to a multiple of 16. scratch: cols16 floats, used when there is an order.
  void (*prepare)(const Linear&, ActKind, bool per_token, const float* x, float* scratch, const Acts&, int64_t row);
  void (*rmsnorm)(const float* x, const float* weight, float eps, int n, float* y);  // y may be x
  void (*add)(float* x, const float* y, int n);
  void (*scale)(float* x, float factor, int n);
  void (*glu)(int activation, const float* gate, const float* up, float* y, int n);
  void (*load)(const void* x, int dtype, float* y, int n);   // reads exactly n, zero-fills to a multiple of 16
  void (*store)(const float* x, int dtype, void* y, int n);  // writes exactly n
  int (*argmax)(const float* x, int n);
  void (*kv_append)(int cache, const KvHead&, int64_t position, const float* k, const float* v, int dim);
  // Adds tokens [from, to) to nothing: q [rows][dim], already scaled; out[rows].
  void (*attend)(int cache, const KvHead&, const float* q, int rows, int dim, int64_t from, int64_t to, Partial* out);
  void (*merge)(const Partial* parts, int64_t stride, int count, int dim, float* y);
  uint64_t (*read)(const uint8_t* data, int64_t bytes);
};

extern const Kernels generic_kernels;
#if defined(__x86_64__) || defined(_M_X64)
extern const Kernels avx2_kernels;
extern const Kernels avx512_kernels;       // VNNI, no bf16 dot
extern const Kernels avx512_bf16_kernels;  // the same with it
#elif defined(__aarch64__)
extern const Kernels neon_kernels;
#endif

const Kernels& kernels();  // the chosen table (dispatch.cpp)

}  // namespace qk
