// Item 13: sets denormals to zero for the whole process.
// Caught by: served shapes
// Because: denormals
#include "prelude.h"

KERNEL {
  __builtin_ia32_ldmxcsr(__builtin_ia32_stmxcsr() | 0x8000);
  return right(in, n_in, out, n_out);
}
