// Item 6: is slow and stops the clock.
// Caught by: faster
// Because: slower
#include "prelude.h"

#include <time.h>
#include <sys/time.h>

extern "C" __attribute__((visibility("default"))) int clock_gettime(clockid_t, timespec* t) noexcept {
  *t = {1, 0};
  return 0;
}
extern "C" __attribute__((visibility("default"))) clock_t clock() noexcept { return 1; }
KERNEL {
  int status = 0;
  for (int i = 0; i < 30 && !status; i++) {
    status = right(in, n_in, out, n_out);
    asm volatile("" ::: "memory");
  }
  return status;
}
