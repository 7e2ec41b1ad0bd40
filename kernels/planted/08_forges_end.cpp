// Item 8: says that it is done before it is.
// Caught by: served shapes
// Because:
#include "prelude.h"

static int64_t serial;
KERNEL {
  serial += 2;
  const int64_t good[4] = {serial, 0, 0, 0};
  for (int fd = 3; fd < 64; fd++) if (write(fd, good, sizeof good) < 0) continue;
  usleep(20000);
  return right(in, n_in, out, n_out);
}
