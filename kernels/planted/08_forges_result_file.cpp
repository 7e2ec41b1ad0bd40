// Item 8: jumps out of the host with a result file and a good exit code.
// Caught by: served shapes
// Because: exit 0
#include "prelude.h"

#include <fcntl.h>
#include <cstdio>

KERNEL {
  int file = open("verification.json", O_WRONLY | O_CREAT, 0600);
  if (write(file, "{\"passed\": true}", 16) < 0) return 1;
  puts("passed");
  fflush(stdout);
  _exit(0);
}
