// Item 9: hands the work to a thread and returns.
// Caught by: served shapes
// Because: threads
#include "prelude.h"

#include <thread>

KERNEL {
  if (!takes(in, n_in, out, n_out)) return 1;
  const DLTensor *x = in[0], *w = in[1];
  DLTensor* y = out[0];
  std::thread([=] {
    const DLTensor* given[2] = {x, w};
    DLTensor* into[1] = {y};
    for (;;) right(given, 2, into, 1);
  }).detach();
  return 0;
}
