#define QK_ISA isa_neon
#include "simd_neon.h"
#include "table.h"

namespace qk {
extern constexpr Kernels neon_kernels = QK_ISA::make_table("neon", false);
}
