// Item 11: gives zeros.
// Caught by: served shapes
// Because: off by more
#include "prelude.h"

#include <cstring>

KERNEL {
  if (!takes(in, n_in, out, n_out)) return 1;
  memset(out[0]->data, 0, 2 * out[0]->shape[0] * out[0]->shape[1]);
  return 0;
}
