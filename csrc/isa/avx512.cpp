#define QK_ISA isa_avx512
#include "simd_avx512.h"
#include "table.h"

namespace qk {
extern constexpr Kernels avx512_kernels = QK_ISA::make_table("avx512", false);
extern constexpr Kernels avx512_bf16_kernels = QK_ISA::make_table("avx512-bf16", true);
}
