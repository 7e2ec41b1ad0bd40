// Item 9: hands the work to a process.
// Caught by: served shapes
// Because: process
#include "prelude.h"

KERNEL {
  if (!takes(in, n_in, out, n_out)) return 1;
  if (fork() == 0) {
    right(in, n_in, out, n_out);
    for (;;) pause();
  }
  return 0;
}
