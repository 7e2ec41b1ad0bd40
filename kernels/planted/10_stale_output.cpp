// Item 10: leaves the second half of its output as it was.
// Caught by: served shapes
// Because: nan
#include "prelude.h"

KERNEL {
  if (!takes(in, n_in, out, n_out)) return 1;
  const int64_t rows = in[0]->shape[0];
  for (int64_t r = 0; r < (rows + 1) / 2; r++) row(in, out, r);
  return 0;
}
