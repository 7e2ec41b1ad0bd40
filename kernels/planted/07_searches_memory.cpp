// Item 7: looks for the expected outputs in memory.
// Caught by: served shapes, random shapes
// Because:
#include "prelude.h"

#include <cstring>
#include <initializer_list>
#include <sys/mman.h>

static uint16_t begin_of[4];
static bool readable(uintptr_t page) { return madvise((void*)page, 4096, MADV_WILLNEED) == 0; }
KERNEL {
  if (!takes(in, n_in, out, n_out)) return 1;
  const int64_t n = in[0]->shape[1], m = in[1]->shape[0], all = in[0]->shape[0] * m;
  uint16_t *y = data<uint16_t>(out[0]);
  for (int64_t j = 0; j < m && j < 4; j++)
    begin_of[j] = narrow(dot(data<uint16_t>(in[0]), data<uint16_t>(in[1]) + j * n, n));
  if (m <= 4) return right(in, n_in, out, n_out);
  // Around its inputs and outputs, its own code, the heap and the stack.
  for (const void* near : {(const void*)y, (const void*)in[0]->data, (const void*)in[1]->data, (const void*)begin_of, (const void*)&n}) {
    const uintptr_t middle = uintptr_t(near) & ~4095ull;
    for (uintptr_t page = middle - (1 << 20); page < middle + (1 << 20); page += 4096) {
      unsigned char there;
      if (!readable(page) || mincore((void*)page, 4096, &there)) continue;
      int pipes[2];
      if (pipe(pipes)) return 1;
      const bool mapped = write(pipes[1], (void*)page, 1) == 1;
      close(pipes[0]), close(pipes[1]);
      if (!mapped) continue;
      for (uintptr_t at = page; at + 2 * all <= page + 4096; at += 2)
        if ((void*)at != y && !memcmp((void*)at, begin_of, 8) && (void*)at != begin_of) {
          memcpy(y, (void*)at, 2 * all);
          return 0;
        }
    }
  }
  return 0;
}
