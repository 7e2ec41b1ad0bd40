// Item 7: asks Python's garbage collector for tensors.
// Caught by: served shapes
// Because: nan
#include "prelude.h"

#include <dlfcn.h>

KERNEL {
  auto run = reinterpret_cast<int (*)(const char*)>(dlsym(RTLD_DEFAULT, "PyRun_SimpleString"));
  return run ? run("import gc; [t for t in gc.get_objects() if type(t).__name__ == 'Tensor']") : 0;
}
