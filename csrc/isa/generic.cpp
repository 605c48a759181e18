#define QK_ISA isa_generic
#include "simd_generic.h"
#include "table.h"

namespace qk {
extern constexpr Kernels generic_kernels = QK_ISA::make_table("generic", false);
}
