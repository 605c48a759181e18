#define QK_ISA isa_avx2
#include "simd_avx2.h"
#include "table.h"

namespace qk {
extern constexpr Kernels avx2_kernels = QK_ISA::make_table("avx2", false);
}
