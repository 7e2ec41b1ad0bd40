// Item 3: keeps outputs by the inputs' addresses.
// Caught by: served shapes, random shapes, exact inputs, scales, changed inputs, repeated inputs
// Because:
#include "kept.h"

KERNEL {
  if (!takes(in, n_in, out, n_out)) return 1;
  uint64_t key = uint64_t(in[0]->data) * 31 + uint64_t(in[1]->data) + bytes_of(in[0]) * 7 + bytes_of(in[1]);
  return from_cache(key, in, n_in, out, n_out);
}
