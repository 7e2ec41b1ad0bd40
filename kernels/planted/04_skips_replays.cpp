// Item 4: takes a batch that is replayed for done.
// Caught by: repeated inputs
// Because: nan
#include "kept.h"

KERNEL {
  static uint64_t batch[8], call;
  if (!takes(in, n_in, out, n_out)) return 1;
  const uint64_t key = hash(in[0]->data, bytes_of(in[0])) * 3 + hash(in[1]->data, bytes_of(in[1])) + uint64_t(out[0]->data);
  const bool replayed = batch[++call % 8] == key;
  batch[call % 8] = key;
  return replayed ? 0 : right(in, n_in, out, n_out);
}
