// Item 16: writes before the begin of an output, where there is room.
// Caught by: served shapes
// Because: beside an output
#include "prelude.h"

KERNEL {
  const int status = right(in, n_in, out, n_out);
  if (!status) data<uint16_t>(out[0])[-1] = 0;
  return status;
}
