// The "R16" layout: sixteen rows interleaved so that rows are lanes and no horizontal sum is ever needed.
//
//   4 bits   [rows/16][cols/8][16 rows][4 bytes]   byte i: low nibble column i, high nibble column i + 4
//   8 bits   [rows/16][cols/4][16 rows][4 bytes]   byte i: column i
//   16 bits  [rows/16][cols/8][4 pairs][16 rows]   pairs of bf16: columns (0,2) (4,6) (1,3) (5,7)
//
// The odd pair order is what shifting a dword of nibbles yields: shift 0 leaves columns 0 and 2 in the low bits of
// its two words, shift 4 columns 4 and 6, and so on. One buffer therefore serves the int8 dot, the bf16 dot and
// fp32; the bf16 activations are stored in pair order instead (pair_order below).
// Behind the codes: scales [rows/16][groups][16], zeros likewise (bytes), order int32, bias float.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "quantkit_cpu.h"

namespace qk {

constexpr int pair_order[8] = {0, 2, 4, 6, 1, 3, 5, 7};

constexpr int64_t round_up(int64_t n, int64_t m) { return (n + m - 1) / m * m; }

struct Layout {
  int64_t cols16, tiles, group, groups, tile_bytes;
  int64_t scales, zeros, order, bias, total;  // byte offsets; codes stand at 0
};

inline int64_t scale_bytes(int scale_type) { return scale_type == QK_F32 ? 4 : 2; }

inline Layout layout_of(const qk_shape& s) {
  Layout l{};
  l.cols16 = round_up(s.cols, 16);
  l.tiles = round_up(s.rows, 16) / 16;
  l.group = s.group ? s.group : l.cols16;
  l.groups = (s.cols + l.group - 1) / l.group;
  l.tile_bytes = l.cols16 * 16 * s.bits / 8;
  const int64_t cells = l.tiles * 16 * l.groups;
  l.scales = round_up(l.tiles * l.tile_bytes, 64);
  l.zeros = l.scales + (s.bits == 16 ? 0 : round_up(cells * scale_bytes(s.scale_type), 64));
  l.order = l.zeros + (s.has_zero ? round_up(cells, 64) : 0);
  l.bias = l.order + (s.has_order ? round_up(4 * int64_t{s.cols}, 64) : 0);
  l.total = l.bias + (s.has_bias ? l.tiles * 64 : 0);
  return l;
}

}  // namespace qk
