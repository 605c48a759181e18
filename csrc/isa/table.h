// Fills one Kernels table from the templates of this translation unit. Included last, with QK_ISA defined.
#pragma once
#include "attention.h"
#include "linear.h"
#include "vector.h"

namespace qk {
namespace QK_ISA {

static constexpr Kernels make_table(const char* name, bool bf16_dot) {
  Kernels k{};
  k.name = name;
  k.linear[kNibbles][kInt8] = linear<Nibbles, Int8Dot>;
  k.linear[kBytes][kInt8] = linear<Bytes, Int8Dot>;
  k.linear[kNibbles][kInt16] = linear<Nibbles, Int16Dot>;
  k.linear[kBytes][kInt16] = linear<Bytes, Int16Dot>;
  k.linear[kNibbles][kF32] = linear<Nibbles, F32Dot>;
  k.linear[kBytes][kF32] = linear<Bytes, F32Dot>;
  k.linear[kHalves][kF32] = linear<Halves, F32Dot>;
#if QK_HAS_BF16_DOT
  if (bf16_dot) {
    k.linear[kNibbles][kBf16] = linear<Nibbles, Bf16Dot>;
    k.linear[kBytes][kBf16] = linear<Bytes, Bf16Dot>;
    k.linear[kHalves][kBf16] = linear<Halves, Bf16Dot>;
  }
#else
  (void)bf16_dot;
#endif
  k.prepare = prepare;
  k.rmsnorm = rmsnorm;
  k.add = add;
  k.scale = scale;
  k.glu = glu;
  k.load = load;
  k.store = store;
  k.argmax = argmax;
  k.kv_append = kv_append;
  k.attend = attend;
  k.merge = merge;
  k.read = read;
  return k;
}

}  // namespace QK_ISA
}  // namespace qk
