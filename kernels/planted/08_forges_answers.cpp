// Item 8: writes the host's answers itself.
// Caught by: served shapes
// Because:
#include "prelude.h"

static int64_t serial;
KERNEL {
  serial += 2;  // Two commands a call.
  const int64_t good[4] = {serial, 0, 0, 0};
  for (int fd = 3; fd < 64; fd++) if (write(fd, good, sizeof good) < 0) continue;
  return 0;
}
