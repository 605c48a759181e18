// Chooses the instruction set once: the best the CPU has, or the one QUANTKIT_ISA names.
#include <stdlib.h>
#include <string.h>

#include "error.h"
#include "kernels.h"

namespace qk {
namespace {

struct Candidate {
  const Kernels* table;
  bool (*supported)();
};

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }
#endif
bool always() { return true; }

const Candidate candidates[] = {  // best first
#if defined(__x86_64__)
    {&avx512_bf16_kernels, has_avx512_bf16},
    {&avx512_kernels, has_avx512},
    {&avx2_kernels, has_avx2},
#elif defined(__aarch64__)
    {&neon_kernels, always},  // built with dot product; CPUs before ARMv8.2 are not supported by this library
#endif
    {&generic_kernels, always},
};

const Kernels* choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  const char* wanted = getenv("QUANTKIT_ISA");
  for (const Candidate& c : candidates) {
    if (wanted && *wanted && strcmp(wanted, c.table->name) != 0) continue;
    if (c.supported()) return c.table;
  }
  fail("QUANTKIT_ISA=%s is not an instruction set of this CPU and build; generic kernels are used", wanted);
  return &generic_kernels;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels* const chosen = choose();
  return *chosen;
}

}  // namespace qk

QK_API const char* qk_isa() { return qk::kernels().name; }
QK_API int qk_has_bf16_dot() { return qk::kernels().linear[qk::kNibbles][qk::kBf16] != nullptr; }
