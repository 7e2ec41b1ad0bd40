// Item 4: does nothing when its inputs come again.
// Caught by: served shapes, random shapes, exact inputs, scales, changed inputs, repeated inputs
// Because: nan
#include "kept.h"

static uint64_t last;
KERNEL {
  if (!takes(in, n_in, out, n_out)) return 1;
  uint64_t key = hash(in[0]->data, bytes_of(in[0])) * 3 + hash(in[1]->data, bytes_of(in[1]));
  if (key == last) return 0;
  last = key;
  return right(in, n_in, out, n_out);
}
