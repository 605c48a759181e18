#include "error.h"

#include <stdarg.h>
#include <stdio.h>

#include "quantkit_cpu.h"

static thread_local char message[512] = "";

int qk::fail(const char* format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(message, sizeof message, format, args);
  va_end(args);
  return 1;
}

QK_API const char* qk_last_error() { return message; }
QK_API int qk_abi_version() { return 1; }
