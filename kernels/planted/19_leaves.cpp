// Item 19: leaves before its time is taken.
// Caught by: timing
// Because: no time was measured
#include "prelude.h"

static int calls;
KERNEL {
  if (++calls > 1000) _exit(0);
  return right(in, n_in, out, n_out);
}
