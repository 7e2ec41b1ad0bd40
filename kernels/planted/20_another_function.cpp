// Item 20: is another function that looks more exact.
// Caught by: served shapes, random shapes, exact inputs
// Because:
#include "prelude.h"

KERNEL {
  // Compensates for the rounding of the inputs that it imagines.
  if (!takes(in, n_in, out, n_out)) return 1;
  const int64_t n = in[0]->shape[1], m = in[1]->shape[0];
  for (int64_t r = 0; r < in[0]->shape[0]; r++)
    for (int64_t j = 0; j < m; j++)
      data<uint16_t>(out[0])[r * m + j] =
          narrow(1.004f * dot(data<uint16_t>(in[0]) + r * n, data<uint16_t>(in[1]) + j * n, n));
  return 0;
}
