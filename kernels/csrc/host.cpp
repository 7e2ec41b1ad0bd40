// The process that runs a candidate: it loads one shared object and calls it on memory that the verifier
// shares with it. It knows no expected output, keeps no time and judges nothing; whatever the candidate
// does to it, only the bytes of the outputs count, and the verifier reads those itself.
//
// Arguments: descriptors of commands, answers, the object, input memory and output memory; the function.
#include <ATen/dlpack.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <immintrin.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

using Kernel = int (*)(const DLTensor* const*, int, DLTensor* const*, int);

constexpr size_t PAGE = 4096;
constexpr int64_t ARRANGE = 1, CALL = 2;

struct Answer {
  int64_t serial, refused, status, control;
};

struct Call {
  std::vector<std::vector<int64_t>> numbers;  // shape and strides of each tensor
  std::vector<DLTensor> tensors;
  std::vector<DLTensor*> inputs, outputs;
};

struct Mapping {
  void* start;
  size_t bytes;
};

[[noreturn]] static void fail(const char* why) {
  if (write(2, why, strlen(why)) < 0) _exit(3);
  _exit(2);
}

static void read_all(int fd, void* into, size_t bytes) {
  for (char* at = static_cast<char*>(into); bytes;) {
    ssize_t got = read(fd, at, bytes);
    if (got <= 0) _exit(0);  // The verifier is done.
    at += got;
    bytes -= got;
  }
}

static void answer(int fd, const Answer& words) {
  if (write(fd, &words, sizeof words) != sizeof words) _exit(0);
}

// A tensor's pages between two that nothing may touch.
static Mapping map_guarded(int fd, size_t offset, size_t bytes, int protection) {
  const size_t whole = bytes + 2 * PAGE;
  char* start = static_cast<char*>(mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  if (start == MAP_FAILED) fail("no address space");
  const int flags = MAP_SHARED | MAP_FIXED | MAP_POPULATE;
  if (mmap(start + PAGE, bytes, protection, flags, fd, offset) == MAP_FAILED) fail("shared memory cannot be mapped");
  return {start, whole};
}

static Kernel load(int object, const char* name) {
  int copy = open("kernel.so", O_WRONLY | O_CREAT | O_TRUNC, 0700);
  char buffer[1 << 16];
  for (ssize_t got; (got = read(object, buffer, sizeof buffer)) > 0;)
    if (write(copy, buffer, got) != got) fail("the object cannot be copied");
  close(copy);
  void* library = dlopen("./kernel.so", RTLD_NOW | RTLD_LOCAL);
  if (!library) fail(dlerror());
  void* function = dlsym(library, name);
  if (!function) fail("it does not export the function");
  return reinterpret_cast<Kernel>(function);
}

static std::vector<Call> arrange(const std::vector<int64_t>& plan, const int memory[2], std::vector<Mapping>& mapped) {
  for (const Mapping& old : mapped) munmap(old.start, old.bytes);
  mapped.clear();
  const int64_t* at = plan.data();
  std::vector<Call> calls(*at++);
  for (Call& call : calls) {
    const int64_t inputs = *at++, all = inputs + *at++;
    call.numbers.resize(all);
    call.tensors.resize(all);
    for (int64_t i = 0; i < all; i++) {
      const int64_t region = *at++, slot = *at++, bytes = *at++, data = *at++;
      const int64_t code = *at++, bits = *at++, ndim = *at++;
      call.numbers[i].assign(at, at + 2 * ndim);
      at += 2 * ndim;
      mapped.push_back(map_guarded(memory[region], slot, bytes, region ? PROT_READ | PROT_WRITE : PROT_READ));
      DLTensor& tensor = call.tensors[i];
      tensor.data = static_cast<char*>(mapped.back().start) + PAGE + data;
      tensor.device = {kDLCPU, 0};
      tensor.ndim = static_cast<int32_t>(ndim);
      tensor.dtype = {static_cast<uint8_t>(code), static_cast<uint8_t>(bits), 1};
      tensor.shape = call.numbers[i].data();
      tensor.strides = call.numbers[i].data() + ndim;
      tensor.byte_offset = 0;
      (i < inputs ? call.inputs : call.outputs).push_back(&tensor);
    }
  }
  return calls;
}

int main(int argc, char** argv) {
  if (argc != 7) fail("wrong arguments");
  const int commands = atoi(argv[1]), answers = atoi(argv[2]);
  const int memory[2] = {atoi(argv[4]), atoi(argv[5])};
  const Kernel kernel = load(atoi(argv[3]), argv[6]);
  std::vector<Mapping> mapped;
  std::vector<Call> calls;
  answer(answers, {0, 0, 0, 0});
  for (;;) {
    int64_t head[4];  // serial, kind, and: words that follow | first call, number of calls
    read_all(commands, head, sizeof head);
    Answer said = {head[0], 0, 0, 0};
    if (head[1] == ARRANGE) {
      std::vector<int64_t> plan(head[2]);
      read_all(commands, plan.data(), plan.size() * sizeof(int64_t));
      calls = arrange(plan, memory, mapped);
    } else if (head[1] == CALL) {
      const unsigned control = _mm_getcsr() & ~0x3fu;
      for (int64_t i = head[2]; i < head[2] + head[3]; i++) {
        Call& call = calls[i];
        const int status = kernel(call.inputs.data(), static_cast<int>(call.inputs.size()), call.outputs.data(),
                                  static_cast<int>(call.outputs.size()));
        if (status) {
          said.refused++;
          said.status = status;
        }
      }
      said.control = (_mm_getcsr() & ~0x3fu) != control || control != 0x1f80;
    }
    answer(answers, said);
  }
}
