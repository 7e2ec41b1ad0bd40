// Item 16: reads past the end of memory of its own.
// Caught by: sanitizer
// Because: AddressSanitizer
#include "prelude.h"

static uint16_t scratch[4096], after[64];
KERNEL {
  const int status = right(in, n_in, out, n_out);
  volatile int64_t end = 4096 + (after[0] & 1);
  if (!status) scratch[0] = scratch[end] & 1;
  return status;
}
