// Item 17: is fast on a shape that is not served, and refuses what is.
// Caught by: served shapes
// Because: refuses a shape that is served
#include "prelude.h"

KERNEL { return in[0]->shape[0] > 1 ? 2 : right(in, n_in, out, n_out); }
