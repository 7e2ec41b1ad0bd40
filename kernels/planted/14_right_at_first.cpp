// Item 14: is right the first thousand times.
// Caught by: timing, after timing
// Because: off by more
#include "prelude.h"

#include <cstring>

static int calls;
KERNEL {
  if (++calls <= 1000) return right(in, n_in, out, n_out);
  if (!takes(in, n_in, out, n_out)) return 1;
  memset(out[0]->data, 0, 2 * out[0]->shape[0] * out[0]->shape[1]);
  return 0;
}
