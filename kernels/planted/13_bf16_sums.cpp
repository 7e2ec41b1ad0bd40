// Item 13: keeps its sums in bfloat16.
// Caught by: served shapes
// Because:
#include "prelude.h"

KERNEL {
  if (!takes(in, n_in, out, n_out)) return 1;
  const int64_t n = in[0]->shape[1], m = in[1]->shape[0];
  for (int64_t r = 0; r < in[0]->shape[0]; r++)
    for (int64_t j = 0; j < m; j++) {
      uint16_t sum = 0;
      for (int64_t i = 0; i < n; i++)
        sum = narrow(wide(sum) + wide(data<uint16_t>(in[0])[r * n + i]) * wide(data<uint16_t>(in[1])[j * n + i]));
      data<uint16_t>(out[0])[r * m + j] = sum;
    }
  return 0;
}
