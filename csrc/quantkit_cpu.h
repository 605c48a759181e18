// The C ABI of _quantkit_cpu, called from Python through ctypes. Every function that can refuse returns 0 on
// success and 1 otherwise; qk_last_error() then holds a sentence. Buffers belong to the caller.
#pragma once
#include <stdint.h>

#if defined(_WIN32)
#define QK_API extern "C" __declspec(dllexport)
#else
#define QK_API extern "C" __attribute__((visibility("default")))
#endif

enum qk_dtype { QK_F32 = 0, QK_F16 = 1, QK_BF16 = 2 };

// How activations enter the dot product.
enum qk_precision {
  QK_INT8 = 0,        // rounded to int8, one scale per weight group
  QK_BF16_DOT = 1,    // rounded to bf16 (exact when x is bf16), products exact, fp32 sums
  QK_FP32 = 2,        // fp32 throughout
  QK_INT8_TOKEN = 3,  // rounded to int8, one scale per token (the W8A8 scheme)
  QK_INT16 = 4,       // two int8 planes, one scale per weight group: errors of 2^-16 of the group's largest
};

enum qk_cache { QK_CACHE_F32 = 0, QK_CACHE_BF16 = 1, QK_CACHE_INT8 = 2 };

// What a packed weight looks like; the byte offsets inside its buffer follow from these numbers alone (layout.h).
struct qk_shape {
  int32_t rows, cols;  // out and in features
  int32_t bits;        // storage width: 4, 8, or 16 (bf16, without scales)
  int32_t group;       // columns sharing a scale, a multiple of 16; 0 = the whole row
  int32_t scale_type;  // qk_dtype
  int32_t has_zero, has_order, has_bias;
};

struct qk_weight {  // a packed weight: shape and 64-byte aligned buffer
  qk_shape shape;
  const void* data;
};

// One decoder block. Weights with data == NULL are absent (norms likewise).
struct qk_layer {
  qk_weight q, k, v, o, gate, up, down;
  const float *input_norm, *q_norm, *k_norm, *attn_post_norm, *mlp_norm, *mlp_post_norm;
  const float *cos, *sin;  // [capacity, rotary_dim / 2]
  int32_t window;          // tokens a query may look back on, itself included; 0 = all
};

struct qk_model_config {
  int32_t layers, hidden, intermediate, heads, kv_heads, head_dim, rotary_dim, vocab;
  int32_t capacity;    // longest sequence
  int32_t chunk;       // most tokens in one forward pass
  int32_t activation;  // 0 SwiGLU, 1 GeGLU (tanh)
  int32_t cache;       // qk_cache
  int32_t precision;   // qk_precision of the blocks
  int32_t head_precision;
  float eps, embed_scale, attn_scale;
  int32_t embed_type;     // qk_dtype of embed_table
  const void* embed_table;  // [vocab, hidden], or NULL: rows are read from `embed`
  qk_weight embed, head;
  const float* final_norm;
  const qk_layer* blocks;
};

QK_API const char* qk_last_error();
QK_API const char* qk_isa();
QK_API int qk_has_bf16_dot();
QK_API int qk_threads();
QK_API int qk_abi_version();
QK_API void qk_advise_huge(void* data, int64_t bytes);

QK_API int64_t qk_packed_bytes(const qk_shape* shape);
// codes: uint8 [rows, cols], or bf16 bits when shape->bits is 16. shift is added to every code (it centres
// symmetric codes of fewer bits). scale [rows, groups] of scale_type, zero uint8 [rows, groups], order int32 [cols],
// bias float [rows]; each may be NULL where the shape says so.
QK_API int qk_pack(const qk_shape* shape, const void* codes, int32_t shift, const void* scale, const uint8_t* zero,
                   const int32_t* order, const float* bias, void* packed);
QK_API int qk_unpack_row(const qk_weight* weight, int32_t row, float* out);

// y[tokens, rows] = x[tokens, cols] @ W^T + bias; x and y contiguous, of the same dtype.
QK_API int qk_linear(const qk_weight* weight, const void* x, void* y, int32_t tokens, int32_t dtype, int32_t precision);

QK_API void* qk_model_create(const qk_model_config* config);
QK_API void qk_model_free(void* model);
// Runs `tokens` ids behind the `position` tokens already cached; logits [all ? tokens : 1, vocab] may be NULL.
QK_API int qk_model_forward(void* model, const int32_t* ids, int32_t tokens, int32_t position, int32_t all, float* logits);
// Greedy: feeds `first` at `position`, then each argmax; stops after `count` tokens or a stop id (which is kept).
// seconds (may be NULL) receives the duration of each step. Returns the number of ids written, or -1.
QK_API int qk_model_generate(void* model, int32_t first, int32_t position, int32_t count, const int32_t* stops,
                             int32_t stop_count, int32_t* out, double* seconds);
QK_API int32_t qk_model_argmax(void* model);  // of the last row of logits computed
QK_API int64_t qk_model_cache_bytes(const void* model);

// Sums `bytes` of memory with all threads (kernels' own loads); returns the seconds taken.
QK_API double qk_read_seconds(const void* data, int64_t bytes);
// Times one linear over `count` weights in turn, inside the library; writes seconds[repeats].
QK_API int qk_time_linear(const qk_weight* weights, int32_t count, const float* x, float* y, int32_t tokens,
                          int32_t precision, int32_t repeats, double* seconds);
