// Item 13: drops the last bit of the weights.
// Caught by: served shapes, random shapes, exact inputs
// Because:
#include "prelude.h"

#include <vector>

KERNEL {
  if (!takes(in, n_in, out, n_out)) return 1;
  const int64_t n = in[0]->shape[1], m = in[1]->shape[0];
  std::vector<uint16_t> weight(data<uint16_t>(in[1]), data<uint16_t>(in[1]) + n * m);
  for (uint16_t& w : weight) w &= 0xfffe;
  for (int64_t r = 0; r < in[0]->shape[0]; r++)
    for (int64_t j = 0; j < m; j++)
      data<uint16_t>(out[0])[r * m + j] = narrow(dot(data<uint16_t>(in[0]) + r * n, weight.data() + j * n, n));
  return 0;
}
