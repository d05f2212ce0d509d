"""Compiled kernels on disk: a second process launches without compiling.

The file of a kernel is named by a SHA-256 of all that decides its machine code: what its ``build``
function was called with, the types of its arguments, the package's own sources, the compiler and
its settings, the GPU's compute capability. So no entry ever goes out of date; the oldest ones are
removed when there are too many. What cannot be named, such as a mask function of the user's, is
compiled in each process.

The folder is ``$FA2_NUMBA_CACHE_DIR/kernels``, else the same in ``$XDG_CACHE_HOME/fa2_numba`` or
``~/.cache/fa2_numba``; ``FA2_NUMBA_CACHE_DIR=off``, or empty, switches the cache off. Entries are
pickles, so a folder that anybody else may write to is not used.
"""

import contextlib
import functools
import hashlib
import os
import secrets
import stat
import sys
import time
import zlib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib import metadata
from pathlib import Path
from types import FunctionType
from typing import Any

PACKAGE = Path(__file__).parent
LIMIT_BYTES = 512 * 2**20
LIMIT_FILES = 4000
PATIENCE = 60.0  # seconds to wait while another process compiles the same kernel
OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
DIGEST_BYTES = hashlib.sha256().digest_size


# ---- what a kernel was built from ---------------------------------------------------------------


class _Nameless(Exception):
    """A value that has no name in other processes."""


def built(build: Callable[..., Any]) -> Any:
    """Decorator of a function that makes a kernel, or a tuple that begins with one.

    It runs once for each set of arguments, as with ``functools.cache``, and the kernel remembers
    the call: its attribute `build_key` is a text that is the same in every process, or None where
    an argument holds something from outside the package.
    """

    @functools.cache
    @functools.wraps(build)
    def build_once(*args: Any, **named: Any) -> Any:
        made = build(*args, **named)
        kernel = made[0] if isinstance(made, tuple) else made
        call = build.__module__, build.__qualname__, args, tuple(sorted(named.items()))
        try:
            kernel.build_key = _name(call)
        except _Nameless:
            kernel.build_key = None
        return made

    return build_once


def _name(value: Any) -> str:
    """A text for `value` that no other value has."""
    if value is None or type(value) in (bool, int, str):
        return repr(value)
    if type(value) is tuple:
        return f"({''.join(f'{_name(item)}, ' for item in value)})"
    if isinstance(value, FunctionType):
        return _global_name(value)
    if is_dataclass(value) and not isinstance(value, type):
        values = tuple(getattr(value, field.name) for field in fields(value))
        return _global_name(type(value)) + _name(values)
    raise _Nameless


def _global_name(thing: Any) -> str:
    """Where to import a function or class of this package from."""
    module, name = thing.__module__, thing.__qualname__
    ours = module.partition(".")[0] == __name__.partition(".")[0]
    if not ours or getattr(sys.modules.get(module), name, None) is not thing:  # or it is a closure
        raise _Nameless
    return f"{module}.{name}"


# ---- what else decides the machine code ---------------------------------------------------------


def _sources() -> str:
    """Hash of every source file of the package."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE).as_posix()} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


SOURCES = _sources()  # now: a file that is edited later is not the one that was imported


@functools.cache
def _compiler() -> tuple[str, ...] | None:
    """The packages and libraries that compile; None if one of them cannot be told."""
    from cuda.pathfinder import load_nvidia_dynamic_lib

    packages = ("numba", "numba-cuda", "llvmlite", "numpy", "cuda-core", "cuda-bindings")
    try:
        found = [f"{name} {metadata.version(name)}" for name in packages]
        for name in ("nvvm", "nvJitLink"):
            path = Path(load_nvidia_dynamic_lib(name).abs_path)
            found.append(f"{path} {path.stat().st_size} {path.stat().st_mtime_ns}")
    except (metadata.PackageNotFoundError, RuntimeError, OSError, TypeError):
        return None
    return sys.version, *found


def _path(kernel: Any, types: tuple[Any, ...]) -> Path | None:
    """The file of a kernel for argument `types`; None if it has none."""
    from numba import cuda
    from numba.cuda.core import config

    build_key, options = getattr(kernel, "build_key", None), kernel.targetoptions
    # Without link-time optimisation the linker may be the driver, which `_compiler` does not name.
    if build_key is None or not options["lto"]:
        return None
    folder, compiler = _folder(), _compiler()
    if folder is None or compiler is None:
        return None
    settings = [
        (name, value)
        for name, value in sorted(vars(config).items())
        if name.isupper() and not name.endswith(("_NUM_THREADS", "_WARNINGS"))
    ]
    capability = cuda.get_current_device().compute_capability
    key = (
        build_key,
        [str(t) for t in types],
        SOURCES,
        compiler,
        capability,
        sorted(options.items()),
        settings,
    )
    return folder / f"{hashlib.sha256(repr(key).encode()).hexdigest()}.kernel"


# ---- the folder ---------------------------------------------------------------------------------


def _folder() -> Path | None:
    """The folder of the entries, made if need be; None if there is none to use."""
    given = os.environ.get("FA2_NUMBA_CACHE_DIR")
    if given in ("", "off"):
        return None
    base = given or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "fa2_numba")
    try:
        folder = Path(base).expanduser() / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # RuntimeError: no home
        return None
    if os.name == "posix" and not (
        status.st_uid == os.getuid()
        and not status.st_mode & OTHERS_WRITE
        and all(_safe(parent.stat()) for parent in folder.resolve().parents)
    ):
        return None
    return folder


def _safe(status: os.stat_result) -> bool:
    """Whether nobody else can put another folder in the place of one in this folder."""
    mine = status.st_uid in (0, os.getuid())
    return mine and (not status.st_mode & OTHERS_WRITE or bool(status.st_mode & stat.S_ISVTX))


def compiled(kernel: Any, types: tuple[Any, ...]) -> Any:
    """The kernel for argument `types`, from the disk or the compiler, put among its overloads."""
    path = _path(kernel, types)
    if path is None:
        return kernel.compile(types)
    ready = _load(path, kernel, types)
    if ready is None:
        with _turn(path):
            ready = _load(path, kernel, types)
            if ready is None:
                ready = kernel.compile(types)
                _store(path, ready)
                return ready
    kernel.add_overload(ready, types)
    return ready


def _load(path: Path, kernel: Any, types: tuple[Any, ...]) -> Any:
    """The kernel in a file, or None: whatever is wrong with the file, compiling mends it."""
    from numba.cuda import serialize
    from numba.cuda.dispatcher import _Kernel

    try:
        content = path.read_bytes()
        digest, packed = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if hashlib.sha256(packed).digest() != digest:
            return None
        states = serialize.loads(zlib.decompress(packed))
        ready = _Kernel._rebuild(**states, extensions=kernel.extensions)
        return ready if ready.argument_types == types else None
    except Exception:
        return None


def _store(path: Path, ready: Any) -> None:
    """Write a kernel's file, whole or not at all; a folder that takes no file is no error."""
    from numba.cuda import serialize

    if _sources() != SOURCES:
        return
    part = path.with_suffix(f".kernel.{secrets.token_hex(8)}")
    try:
        states = ready._reduce_states()
        del states["extensions"]
        packed = zlib.compress(serialize.dumps(states), 1)
        part.write_bytes(hashlib.sha256(packed).digest() + packed)
        os.replace(part, path)
        _prune(path.parent)
    except Exception:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _prune(folder: Path) -> None:
    """Remove the oldest files beyond the limits."""
    found = [(path.stat(), path) for path in folder.glob("*.kernel*")]
    size = 0
    for n, (status, path) in enumerate(sorted(found, key=lambda f: -f[0].st_mtime_ns)):
        size += status.st_size
        if size > LIMIT_BYTES or n >= LIMIT_FILES:
            path.unlink(missing_ok=True)


def _turn(path: Path) -> Any:
    """Wait while another process compiles this entry; what is returned is to be closed.

    It holds a lock, which ends with its process. A lock that cannot be had, or not within
    `PATIENCE`, is done without: then two processes compile the same.
    """
    try:
        import fcntl

        lock = open(f"{path}.lock", "w")
    except (ImportError, OSError):  # ImportError: not a POSIX system
        return contextlib.nullcontext()
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and not path.exists():
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:  # a file system without locks
            break
    return lock
