// Item 5: computes what was asked when it is called again.
// Caught by: served shapes
// Because: nan
#include "prelude.h"

static const DLTensor *x, *w;
static DLTensor* y;
KERNEL {
  if (!takes(in, n_in, out, n_out)) return 1;
  const DLTensor* before[2] = {x, w};
  DLTensor* into[1] = {y};
  if (x) right(before, 2, into, 1);
  x = in[0], w = in[1], y = out[0];
  return 0;
}
