// Item 16: reads past the end of an input.
// Caught by: served shapes
// Because: memory that is not its own
#include "prelude.h"

KERNEL {
  if (!takes(in, n_in, out, n_out)) return 1;
  const volatile uint16_t* w = data<uint16_t>(in[1]) + in[1]->shape[0] * in[1]->shape[1];
  (void)*w;
  return right(in, n_in, out, n_out);
}
