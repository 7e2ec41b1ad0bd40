// Item 12: is right where all rows are alike.
// Caught by: served shapes
// Because: off by more
#include "prelude.h"

#include <cstring>

KERNEL {
  if (!takes(in, n_in, out, n_out)) return 1;
  row(in, out, 0);
  uint16_t* y = data<uint16_t>(out[0]);
  const int64_t m = out[0]->shape[1];
  for (int64_t r = 1; r < out[0]->shape[0]; r++) memcpy(y + r * m, y, 2 * m);
  return 0;
}
