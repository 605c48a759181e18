#include "linear.h"

#include <string.h>

#include <chrono>
#include <mutex>

#include "error.h"
#include "pool.h"
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace qk {

const char* why_not(const qk_shape& s) {
  if (s.rows < 1 || s.cols < 1) return "a weight needs at least one row and one column";
  if (s.bits != 4 && s.bits != 8 && s.bits != 16) return "codes are stored in 4, 8 or 16 bits";
  if (s.group < 0 || s.group % 16) return "the group must be a multiple of 16 columns, or 0 for the whole row";
  if (s.bits == 16 && (s.group || s.has_zero || s.has_order)) return "bf16 weights have no group, zero point or order";
  if (s.scale_type < QK_F32 || s.scale_type > QK_BF16) return "scales are float32, float16 or bfloat16";
  // 255 * 127 * 65536 is the last product that an int32 sum holds
  if ((s.group ? s.group : s.cols) > 65536) return "more than 65536 columns share a scale, which would overflow int32 sums";
  return nullptr;
}

Linear open(const qk_weight& weight) {
  const qk_shape& s = weight.shape;
  const Layout l = layout_of(s);
  const uint8_t* base = static_cast<const uint8_t*>(weight.data);
  Linear w{};
  w.rows = s.rows;
  w.cols = s.cols;
  w.cols16 = l.cols16;
  w.tiles = l.tiles;
  w.group = l.group;
  w.groups = l.groups;
  w.tile_bytes = l.tile_bytes;
  w.kind = s.bits == 4 ? kNibbles : s.bits == 8 ? kBytes : kHalves;
  w.scale_type = s.scale_type;
  w.codes = base;
  w.scales = base + l.scales;
  w.zeros = s.has_zero ? base + l.zeros : nullptr;
  w.order = s.has_order ? reinterpret_cast<const int32_t*>(base + l.order) : nullptr;
  w.bias = s.has_bias ? reinterpret_cast<const float*>(base + l.bias) : nullptr;
  return w;
}

ActKind act_kind(const Linear& w, int precision) {
  const bool integer = precision == QK_INT8 || precision == QK_INT8_TOKEN;
  if (integer && kernels().linear[w.kind][kInt8]) return kInt8;
  if (precision == QK_INT16 && kernels().linear[w.kind][kInt16]) return kInt16;
  // bf16 weights have no integer dot, and not every CPU has a bf16 one; fp32 is at least as precise as both
  const bool bf16 = integer || precision == QK_BF16_DOT;
  return bf16 && kernels().linear[w.kind][kBf16] ? kBf16 : kF32;
}

static int64_t act_stride(const Linear& w) { return round_up(w.cols16, 64); }

void ActBuffer::fit(const Linear& w, int tokens) {
  code_data_ = codes_.reserve(act_stride(w) * tokens * 4);
  scale_data_ = scales_.reserve_of<float>(w.groups * tokens);
  sum_data_ = sums_.reserve_of<float>(w.groups * tokens);
  scratch_ = scratch_buffer_.reserve_of<float>(w.cols16);
}

Acts ActBuffer::view(const Linear& w) const {
  Acts a{};
  a.stride = act_stride(w);
  a.groups = w.groups;
  a.q = static_cast<int8_t*>(code_data_);
  a.fine = a.q + codes_.size() / 2;  // behind all rows: codes_ has four bytes per column
  a.bf16 = static_cast<uint16_t*>(code_data_);
  a.f32 = static_cast<float*>(code_data_);
  a.scale = scale_data_;
  a.sum = sum_data_;
  return a;
}

static float scale_at(const Linear& w, int64_t i) {
  if (w.scale_type == QK_F32) return reinterpret_cast<const float*>(w.scales)[i];
  float value[16];
  kernels().load(reinterpret_cast<const uint16_t*>(w.scales) + i, w.scale_type, value, 1);
  return value[0];
}

void unpack_row(const Linear& w, int row, float* out) {
  const int64_t tile = row / 16, lane = row % 16;
  const uint8_t* codes = w.codes + tile * w.tile_bytes;
  if (w.kind == kHalves) {
    const uint16_t* pairs = reinterpret_cast<const uint16_t*>(codes);
    for (int k = 0; k < w.cols; k++) {
      int at = 0;
      while (pair_order[at] != k % 8) at++;
      const uint32_t bits = static_cast<uint32_t>(pairs[k / 8 * 128 + at / 2 * 32 + lane * 2 + at % 2]) << 16;
      memcpy(out + k, &bits, 4);
    }
    return;
  }
  for (int64_t g = 0; g < w.groups; g++) {
    const int64_t cell = (tile * w.groups + g) * 16 + lane;
    const float scale = scale_at(w, cell);
    const int zero = w.zeros ? w.zeros[cell] : w.kind == kNibbles ? 8 : 128;
    const int64_t k1 = (g + 1) * w.group < w.cols ? (g + 1) * w.group : w.cols;
    for (int64_t k = g * w.group; k < k1; k++) {
      int code;
      if (w.kind == kBytes) {
        code = codes[k / 4 * 64 + lane * 4 + k % 4];
      } else {
        const uint8_t byte = codes[k / 8 * 64 + lane * 4 + k % 4];
        code = k % 8 < 4 ? byte & 15 : byte >> 4;
      }
      out[w.order ? w.order[k] : k] = static_cast<float>(code - zero) * scale;
    }
  }
}

namespace {

// Workspace of the stand-alone operator; one call at a time uses it.
struct Workspace {
  ActBuffer acts;
  Buffer rows, out;
};

// Prepares the activations in all threads, then multiplies; y32 has round_up(rows, 16) columns.
void multiply(const Linear& w, const ActBuffer& acts, ActKind kind, bool per_token_scale, const void* x, int dtype,
              float* x32, float* y32, void* y, int tokens) {
  const Kernels& k = kernels();
  const Acts a = acts.view(w);
  const int64_t width = w.tiles * 16, size = dtype == QK_F32 ? 4 : 2;
  run_team_on([&](int id, int threads, Barrier& barrier) {
    const Share rows(tokens, id, threads), tiles(w.tiles, id, threads);
    for (int64_t m = rows.first; m < rows.last; m++) {
      float* row = x32 + m * w.cols16;
      k.load(static_cast<const uint8_t*>(x) + m * w.cols * size, dtype, row, w.cols);
      float* scratch = w.order ? y32 + tokens * width + id * w.cols16 : nullptr;
      k.prepare(w, kind, per_token_scale, row, scratch, a, m);
    }
    barrier.wait();
    k.linear[w.kind][kind](w, a, tokens, y32, width, tiles.first, tiles.last);
    const int64_t c0 = tiles.first * 16, c1 = tiles.last * 16 < w.rows ? tiles.last * 16 : w.rows;
    if (c0 >= c1) return;
    for (int64_t m = 0; m < tokens; m++) {
      uint8_t* out = static_cast<uint8_t*>(y) + (m * w.rows + c0) * size;
      k.store(y32 + m * width + c0, dtype, out, static_cast<int>(c1 - c0));
    }
  });
}

}  // namespace
}  // namespace qk

QK_API int64_t qk_packed_bytes(const qk_shape* shape) {
  if (const char* reason = qk::why_not(*shape)) return qk::fail("%s", reason), -1;
  return qk::layout_of(*shape).total;
}

QK_API int qk_linear(const qk_weight* weight, const void* x, void* y, int32_t tokens, int32_t dtype, int32_t precision) {
  using namespace qk;
  if (const char* reason = why_not(weight->shape)) return fail("%s", reason);
  if (tokens == 0) return 0;
  static std::mutex one_at_a_time;
  std::lock_guard<std::mutex> lock(one_at_a_time);
  static Workspace space;
  const Linear w = open(*weight);
  const ActKind kind = act_kind(w, precision);
  space.acts.fit(w, tokens);
  float* x32 = space.rows.reserve_of<float>(tokens * w.cols16);
  float* y32 = space.out.reserve_of<float>(tokens * w.tiles * 16 + team_size() * w.cols16);
  multiply(w, space.acts, kind, per_token(precision), x, dtype, x32, y32, y, tokens);
  return 0;
}

QK_API int qk_unpack_row(const qk_weight* weight, int32_t row, float* out) {
  if (row < 0 || row >= weight->shape.rows) return qk::fail("row %d of a weight with %d rows", row, weight->shape.rows);
  qk::unpack_row(qk::open(*weight), row, out);
  return 0;
}

QK_API int qk_threads() { return qk::team_size(); }

QK_API void qk_advise_huge(void* data, int64_t bytes) {
#ifdef __linux__
  // Whole huge pages only; refused on kernels without them, which costs speed and nothing else.
  const uintptr_t from = static_cast<uintptr_t>(qk::round_up(reinterpret_cast<intptr_t>(data), qk::kHugePage));
  const uintptr_t to = (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / qk::kHugePage * qk::kHugePage;
  if (to > from) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
#else
  (void)data, (void)bytes;
#endif
}

namespace {
double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
}  // namespace

QK_API double qk_read_seconds(const void* data, int64_t bytes) {
  std::atomic<uint64_t> sum{0};  // used, so that the reads are not optimised away
  double seconds = 0;
  qk::run_team_on([&](int id, int threads, qk::Barrier& barrier) {
    const qk::Share share(bytes / 256, id, threads);
    barrier.wait();
    const double start = now();
    sum += qk::kernels().read(static_cast<const uint8_t*>(data) + share.first * 256, (share.last - share.first) * 256);
    barrier.wait();
    if (id == 0) seconds = now() - start;
  });
  return sum.load() == 1 ? seconds * (1 + 1e-12) : seconds;
}

QK_API int qk_time_linear(const qk_weight* weights, int32_t count, const float* x, float* y, int32_t tokens,
                          int32_t precision, int32_t repeats, double* seconds) {
  for (int32_t i = 0; i < repeats; i++) {
    const double start = now();
    if (qk_linear(&weights[i % count], x, y, tokens, QK_F32, precision)) return 1;
    seconds[i] = now() - start;
  }
  return 0;
}
