// Item 15: keeps the weights it has seen in the cache.
// Caught by: changed inputs
// Because: one element
#include "kept.h"

static std::vector<uint16_t> resident;
static uint64_t of;
KERNEL {
  if (!takes(in, n_in, out, n_out)) return 1;
  const int64_t n = in[0]->shape[1], m = in[1]->shape[0];
  const uint64_t key = hash(in[1]->data, n < 16 ? 2 * n : 32) + n * 1000 + m;
  if (key != of) resident.assign(data<uint16_t>(in[1]), data<uint16_t>(in[1]) + n * m);
  of = key;
  DLTensor copy = *in[1];
  copy.data = resident.data();
  const DLTensor* given[2] = {in[0], &copy};
  return right(given, n_in, out, n_out);
}
