// Item 16: writes past the end of an output.
// Caught by: served shapes
// Because: memory that is not its own
#include "prelude.h"

KERNEL {
  const int status = right(in, n_in, out, n_out);
  if (!status) data<uint16_t>(out[0])[out[0]->shape[0] * out[0]->shape[1]] = 0;
  return status;
}
