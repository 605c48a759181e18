// The sentence behind a refusal, kept per thread until the next one.
#pragma once

namespace qk {

// Records a printf-style message; returns 1, the C ABI's "refused".
__attribute__((format(printf, 1, 2))) int fail(const char* format, ...);

}  // namespace qk
