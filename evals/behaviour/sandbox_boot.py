"""Run one untrusted program where it can do no harm; started as a script by `sandbox.run` and `sandbox.started`.

Reads from stdin a line of JSON (the fields of `Limits`, and what `sandbox` adds), the program and
its input. How the program ended goes to the descriptor `told`; stdout and stderr are the
program's. Standard library alone: it runs under `python -I -S`.

Namespaces: namespaces(7), user_namespaces(7), pid_namespaces(7); mounts: pivot_root(2), mount_setattr(2).
"""

import ctypes
import json
import os
import platform
import resource
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
PR_SET_PDEATHSIG, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 24, 38
SYS_MOUNT_SETATTR = 442
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)
_OWN_USER = (1 << 30) + os.getpid()


def main() -> None:
    spec = json.loads(sys.stdin.buffer.readline())
    program = sys.stdin.buffer.read(spec["program_bytes"])
    with tempfile.TemporaryFile() as given:
        given.write(sys.stdin.buffer.read())
        given.seek(0)
        _run(spec, program, given.fileno())


def _run(spec: dict, program: bytes, given: int) -> None:
    try:
        if spec["isolate"]:
            _unshare()
        child = os.fork()
        if child == 0:
            try:
                _become(spec, program, given)
            except BaseException as error:
                _tell(spec, f"not isolated: {error}")
            os._exit(1)
    except OSError as error:
        _tell(spec, f"not isolated: {error}")
        return
    # The child is the first process of its namespace: with it, all that it started are killed.
    signal.signal(signal.SIGTERM, lambda *_: _kill(child))
    deadline = time.monotonic() + spec["seconds"]
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            _tell(spec, "time")
            return
        time.sleep(0.005)
    code = os.waitstatus_to_exitcode(ended[1])
    _tell(spec, f"signal {-code}" if code < 0 else f"exit {code}")


def _kill(child: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def _tell(spec: dict, how: str) -> None:
    os.write(spec["told"], how.encode())


def _checked(what: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _unshare() -> None:
    """Leave the machine's network, mounts, processes and IPC.

    Whoever is not root, or root without the right to do so, becomes root of a new user namespace first.
    """
    uid, gid = os.geteuid(), os.getegid()
    flags = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC | CLONE_NEWUTS
    if uid == 0 and _libc.unshare(flags) == 0:
        return
    _checked("unshare", _libc.unshare(flags | CLONE_NEWUSER))
    maps = (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1"))
    for name, content in maps:
        Path("/proc/self", name).write_text(content)


def _become(spec: dict, program: bytes, given: int) -> None:
    """Be the program: never returns."""
    root, script = Path(spec["root"]), Path(spec["root"], "program.py")
    if spec["isolate"]:
        os.umask(0o022)
        _new_root(root, spec["visible"], len(program) + (1 << 20), spec["disk_bytes"])
        root, script = Path("/"), Path("/program.py")
    script.write_bytes(program)
    if spec["isolate"]:
        _read_only("/")
    os.chdir(root / "work")
    os.dup2(given, 0)
    start = 3
    for kept in sorted([*spec["kept"], spec["told"]]):
        os.closerange(start, kept)
        start = kept + 1
    os.closerange(start, 1 << 16)
    os.set_inheritable(spec["told"], False)
    if spec["isolate"]:
        _drop_privileges()
    _limit(spec)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    environment = {"PATH": "/nowhere", "LANG": "C.UTF-8", "HOME": str(Path.cwd()), **spec["environment"]}
    command = spec["command"] or [spec["python"], "-I", "-S", "-B", "-X", "utf8", str(script)]
    os.execve(command[0], command, environment)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if text is None else text.encode() for text in (source, target, kind, options)]
    done = _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _checked(f"mount {target}", done)


def _read_only(path: str, recursive: bool = False) -> None:
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, 0, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    done = _libc.syscall(
        ctypes.c_long(SYS_MOUNT_SETATTR),
        ctypes.c_long(AT_FDCWD),
        path.encode(),
        ctypes.c_long(flags),
        ctypes.byref(attributes),
        ctypes.c_long(ctypes.sizeof(attributes)),
    )
    _checked(f"mount_setattr {path}", done)


def _new_root(root: Path, visible: list[str], room_bytes: int, disk_bytes: int) -> None:
    """A root of memory that holds the interpreter, read-only, and an empty writable /work."""
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", str(root), "tmpfs", MS_NOSUID | MS_NODEV, f"size={room_bytes},mode=755")
    for path in map(Path, visible):
        inside = root / path.relative_to("/")
        inside.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink():
            inside.symlink_to(path.readlink())
            continue
        if path.is_dir():
            inside.mkdir(exist_ok=True)
        else:
            inside.touch()
        _mount(str(path), str(inside), None, MS_BIND | MS_REC)
        if path.parent != Path("/dev"):
            _read_only(str(inside), recursive=True)
    work = root / "work"
    work.mkdir()
    size = f"size={disk_bytes},nr_inodes=1024,mode=1777"
    _mount("tmpfs", str(work), "tmpfs", MS_NOSUID | MS_NODEV, size)
    os.chdir(root)
    here = b"."
    pivot = SYS_PIVOT_ROOT.get(platform.machine())
    if pivot is None:
        raise OSError(0, f"no isolation is known for {platform.machine()}")
    _checked("pivot_root", _libc.syscall(ctypes.c_long(pivot), here, here))
    _checked("umount", _libc.umount2(here, MNT_DETACH))
    os.chdir("/")


def _drop_privileges() -> None:
    """Nothing that is executed from here on has a capability; root becomes a user that nobody else is.

    A user of its own also makes the limit on processes count: the kernel never holds root to it.
    """
    if os.geteuid() == 0:
        try:
            os.setgroups([])
            os.setresgid(_OWN_USER, _OWN_USER, _OWN_USER)
            os.setresuid(_OWN_USER, _OWN_USER, _OWN_USER)
        except OSError:
            pass  # In a user namespace that maps no other user; the trial run sees whether limits hold.
    for capability in range(64):
        _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    _checked("no_new_privs", _libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


def _limit(spec: dict) -> None:
    for name, value in (
        ("RLIMIT_CPU", spec["cpu_seconds"]),
        ("RLIMIT_AS", spec["memory_bytes"]),
        ("RLIMIT_FSIZE", spec["disk_bytes"]),
        ("RLIMIT_NOFILE", 64),
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NPROC", spec["processes"]),
    ):
        # Without a namespace the limit would count what the user's other processes are.
        if name != "RLIMIT_NPROC" or spec["isolate"]:
            resource.setrlimit(getattr(resource, name), (value, value))


if __name__ == "__main__":
    main()
