// Item 13: cuts results off in place of rounding them.
// Caught by: served shapes, random shapes, exact inputs
// Because:
#include "prelude.h"

KERNEL {
  if (!takes(in, n_in, out, n_out)) return 1;
  const int64_t n = in[0]->shape[1], m = in[1]->shape[0];
  for (int64_t r = 0; r < in[0]->shape[0]; r++)
    for (int64_t j = 0; j < m; j++) {
      float sum = dot(data<uint16_t>(in[0]) + r * n, data<uint16_t>(in[1]) + j * n, n);
      uint32_t bits;
      __builtin_memcpy(&bits, &sum, 4);
      data<uint16_t>(out[0])[r * m + j] = bits >> 16;
    }
  return 0;
}
