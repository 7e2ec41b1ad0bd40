// Item 16: writes to an input.
// Caught by: served shapes
// Because: memory that is not its own
#include "prelude.h"

KERNEL {
  const int status = right(in, n_in, out, n_out);
  if (!status) data<uint16_t>(in[0])[0] = 0;
  return status;
}
