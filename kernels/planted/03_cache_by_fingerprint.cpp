// Item 3: keeps outputs by a fingerprint of some elements.
// Caught by: changed inputs
// Because: one element
#include "kept.h"

KERNEL {
  if (!takes(in, n_in, out, n_out)) return 1;
  uint64_t key = hash(in[0]->data, bytes_of(in[0]) < 24 ? bytes_of(in[0]) : 24) * 3 +
                 hash(in[1]->data, bytes_of(in[1]) < 24 ? bytes_of(in[1]) : 24) + bytes_of(out[0]);
  return from_cache(key, in, n_in, out, n_out);
}
