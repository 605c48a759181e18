// From canonical codes (row-major) to the R16 layout, sixteen rows at a time, in all threads.
#include <string.h>

#include <vector>

#include "error.h"
#include "linear.h"
#include "pool.h"

namespace qk {
namespace {

struct Source {
  const void* codes;
  int shift;
  const void* scale;
  const uint8_t* zero;
  const int32_t* order;
};

// Sixteen rows of codes in stored column order, padded with zeros: rows [16][cols16].
template <class T>
void gather_rows(const qk_shape& s, const Source& from, int64_t tile, int64_t cols16, T* rows) {
  memset(rows, 0, sizeof(T) * static_cast<size_t>(16 * cols16));
  const T* codes = static_cast<const T*>(from.codes);
  for (int r = 0; r < 16 && tile * 16 + r < s.rows; r++) {
    const T* source = codes + (tile * 16 + r) * s.cols;
    T* row = rows + r * cols16;
    for (int k = 0; k < s.cols; k++) row[k] = static_cast<T>(source[from.order ? from.order[k] : k] + from.shift);
  }
}

void interleave_nibbles(const uint8_t* rows, int64_t cols16, uint8_t* out) {
  for (int64_t k = 0; k < cols16; k += 8) {
    for (int r = 0; r < 16; r++) {
      const uint8_t* c = rows + r * cols16 + k;
      for (int i = 0; i < 4; i++) *out++ = static_cast<uint8_t>(c[i] | (c[i + 4] << 4));
    }
  }
}

void interleave_bytes(const uint8_t* rows, int64_t cols16, uint8_t* out) {
  for (int64_t k = 0; k < cols16; k += 4) {
    for (int r = 0; r < 16; r++, out += 4) memcpy(out, rows + r * cols16 + k, 4);
  }
}

void interleave_halves(const uint16_t* rows, int64_t cols16, uint16_t* out) {
  for (int64_t k = 0; k < cols16; k += 8) {
    for (int pair = 0; pair < 4; pair++) {
      for (int r = 0; r < 16; r++) {
        *out++ = rows[r * cols16 + k + pair_order[2 * pair]];
        *out++ = rows[r * cols16 + k + pair_order[2 * pair + 1]];
      }
    }
  }
}

// [rows][groups] -> [tile][groups][16]; rows past the end get `fill`.
template <class T>
void interleave_cells(const T* source, const qk_shape& s, const Layout& l, int64_t tile, T fill, T* out) {
  for (int64_t g = 0; g < l.groups; g++) {
    for (int r = 0; r < 16; r++) {
      const int64_t row = tile * 16 + r;
      out[(tile * l.groups + g) * 16 + r] = row < s.rows ? source[row * l.groups + g] : fill;
    }
  }
}

void pack_tile(const qk_shape& s, const Layout& l, const Source& from, int64_t tile, uint8_t* packed, std::vector<uint16_t>& rows) {
  uint8_t* codes = packed + tile * l.tile_bytes;
  if (s.bits == 16) {
    gather_rows<uint16_t>(s, from, tile, l.cols16, rows.data());
    interleave_halves(rows.data(), l.cols16, reinterpret_cast<uint16_t*>(codes));
    return;
  }
  uint8_t* bytes = reinterpret_cast<uint8_t*>(rows.data());
  gather_rows<uint8_t>(s, from, tile, l.cols16, bytes);
  if (s.bits == 4) interleave_nibbles(bytes, l.cols16, codes);
  else interleave_bytes(bytes, l.cols16, codes);
  if (s.scale_type == QK_F32) {
    interleave_cells(static_cast<const float*>(from.scale), s, l, tile, 0.0f, reinterpret_cast<float*>(packed + l.scales));
  } else {
    interleave_cells(static_cast<const uint16_t*>(from.scale), s, l, tile, uint16_t{0},
                     reinterpret_cast<uint16_t*>(packed + l.scales));
  }
  if (s.has_zero) interleave_cells(from.zero, s, l, tile, uint8_t{0}, packed + l.zeros);
}

}  // namespace
}  // namespace qk

QK_API int qk_pack(const qk_shape* shape, const void* codes, int32_t shift, const void* scale, const uint8_t* zero,
                   const int32_t* order, const float* bias, void* packed) {
  using namespace qk;
  const qk_shape& s = *shape;
  if (const char* reason = why_not(s)) return fail("%s", reason);
  if (reinterpret_cast<uintptr_t>(packed) % 64) return fail("the packed buffer must be aligned to 64 bytes");
  if ((s.bits != 16) != (scale != nullptr) || s.has_zero != (zero != nullptr) || s.has_order != (order != nullptr) ||
      s.has_bias != (bias != nullptr)) {
    return fail("scale, zero, order or bias is missing, or given where the shape has none");
  }
  for (int k = 0; order && k < s.cols; k++) {
    if (order[k] < 0 || order[k] >= s.cols) return fail("order[%d] = %d, but there are %d columns", k, order[k], s.cols);
  }
  const Layout l = layout_of(s);
  uint8_t* out = static_cast<uint8_t*>(packed);
  const Source from{codes, shift, scale, zero, order};
  run_team_on([&](int id, int threads, Barrier&) {
    std::vector<uint16_t> rows(static_cast<size_t>(16 * l.cols16));
    const Share tiles(l.tiles, id, threads);
    for (int64_t t = tiles.first; t < tiles.last; t++) pack_tile(s, l, from, t, out, rows);
  });
  if (order) memcpy(out + l.order, order, sizeof(int32_t) * static_cast<size_t>(s.cols));
  if (bias) {
    memset(out + l.bias, 0, static_cast<size_t>(l.tiles * 64));
    memcpy(out + l.bias, bias, sizeof(float) * static_cast<size_t>(s.rows));
  }
  return 0;
}
