"""Kernels on disk, and what is known of a launch.

The keys are tested under the simulator. The files are tested with the compiler and without a GPU:
a stand-in device lets Numba compile, and the machine code is compared instead of launched.
"""

import contextlib
import functools
import hashlib
import itertools
import os
import pickle
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from strategies import Backend

from fa2_numba import api, cache, hbm, launch, masking, simulator
from fa2_numba.kernels import fa1, fa2, standard, tile_map
from fa2_numba.problem import Problem
from fa2_numba.tiling import Tiling

TILING = Tiling(8, 8, 4, 8)
NONE, UNCHANGED = masking.none(), masking.unchanged()

# ---- what a kernel was built from ---------------------------------------------------------------

MASKS = [
    NONE,
    masking.causal(),
    masking.causal_skip(),
    masking.window(3, 3),
    masking.prefix_lm(2),
    masking.documents(np.zeros(4, np.int32)),
    masking.boolean(np.ones((4, 4), bool)),
]
SCORES = [UNCHANGED, masking.softcap(5.0), masking.alibi(np.ones(2, np.float32))]
JOINED = [a & b for a, b in itertools.permutations(MASKS[1:], 2)]
IN_TURN = [a.then(b) for a, b in itertools.product(SCORES[1:], repeat=2)]


def fa2_kernel(
    mask: masking.Mask = NONE,
    score: masking.Score = UNCHANGED,
    tiling: Tiling = TILING,
    d: int = 8,
    dtype: str = "fp32",
    widths: tuple[int, int] = (4, 4),
) -> Any:
    return fa2.build(tiling, d, dtype, mask.rule, score.change, *widths)[0]


def different_kernels() -> list[Any]:
    """Kernels of which no two are built from the same."""
    rule, change = NONE.rule, UNCHANGED.change
    return [
        *(fa2_kernel(mask) for mask in MASKS + JOINED),
        fa2_kernel(MASKS[1] & (MASKS[2] & MASKS[3])),
        fa2_kernel((MASKS[1] & MASKS[2]) & MASKS[3]),
        *(fa2_kernel(score=score) for score in SCORES[1:] + IN_TURN),
        fa2_kernel(widths=(4, 1)),
        fa2_kernel(widths=(1, 4)),
        fa2_kernel(dtype="fp16"),
        fa2_kernel(d=16),
        *(
            fa2_kernel(tiling=Tiling(*sizes))
            for sizes in [(16, 8, 4, 8), (8, 16, 4, 8), (8, 8, 8, 4), (8, 8, 8, 8)]
        ),
        tile_map.build(TILING),
        fa1.build_init(TILING, 8, "fp32", 4),
        fa1.build_loop(TILING, 8, "fp32", rule, change, 4, 4)[0],
        fa1.build_finish(TILING, 8, "fp32", True, 4),
        fa1.build_finish(TILING, 8, "fp32", False, 4),
        standard.build_scores(TILING, 8, "fp32", rule, change, 4)[0],
        standard.build_softmax("fp32", 4),
        standard.build_output(TILING, 8, "fp32", True, 4, 4, 4)[0],
        standard.build_output(TILING, 8, "fp32", False, 4, 4, 4)[0],
    ]


def test_different_kernels_have_different_keys() -> None:
    keys = [kernel.build_key for kernel in different_kernels()]
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_different_values_have_different_names() -> None:
    rule = NONE.rule
    values = [
        None,
        "None",
        1,
        "1",
        True,
        (),
        "()",
        (1,),
        ((1,),),
        (1, 2),
        (12,),
        ("1, 2",),
        ((1,), 2),
        (1, (2,)),
        rule,
        masking.Rule(rule.bounds, None, masking._full),
        (rule, rule),
        masking._Joined(rule, rule),
        masking._Sequence(rule, rule),
    ]
    assert len({cache._name(value) for value in values}) == len(values)


def test_a_key_is_the_same_in_every_process() -> None:
    code = "import test_cache; print([k.build_key for k in test_cache.different_kernels()])"
    said = [run(code, PYTHONHASHSEED=seed, NUMBA_ENABLE_CUDASIM="1") for seed in "12"]
    assert said[0] == said[1]
    if simulator.ACTIVE:
        assert said[0] == str([kernel.build_key for kernel in different_kernels()])


def every_second(args: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i - j) % 2 == 0


def disguised() -> Callable[..., Any]:
    """A user's function that says it is one of the package."""

    @functools.wraps(masking._below)
    def visible(args: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return j < i

    return visible


@pytest.mark.parametrize(
    "mask",
    [
        masking.custom(every_second),
        masking.custom(lambda args, b, h, i, j: j < i, name="lambda"),
        masking.custom(disguised()),
        masking.causal() & masking.custom(every_second),
        masking.Mask("own bounds", masking.Rule(lambda args, b, h, i, N_k: (0, i))),
    ],
    ids=lambda mask: mask.name,
)
def test_a_mask_of_the_users_has_no_key(mask: masking.Mask) -> None:
    kernel = fa2_kernel(mask)
    assert kernel.build_key is None
    assert fa2_kernel(mask) is kernel  # and is built once all the same


def test_a_score_change_of_the_users_has_no_key() -> None:
    own = masking.score(lambda args, i, j, s: s, name="own")
    made = masking.Score("made", masking.Change(lambda acc: masking._make_softcap(acc)))
    for score in (own, own.then(SCORES[1]), SCORES[1].then(own), made):
        assert fa2_kernel(score=score).build_key is None


def test_a_function_put_in_place_of_the_packages_has_no_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(masking, "_below", every_second)
    assert fa2_kernel(masking.custom(masking._below)).build_key is None


def test_a_build_runs_once_for_each_call() -> None:
    calls = []

    @cache.built
    def build(*sizes: int, **options: str) -> Any:
        calls.append((sizes, options))
        return SimpleNamespace(), 3

    assert build(1, 2, dtype="fp32") is build(1, 2, dtype="fp32")
    assert build(2, 1, dtype="fp32")[0].build_key != build(1, 2, dtype="fp32")[0].build_key
    assert build(1, 2, dtype="fp64")[0].build_key != build(1, 2, dtype="fp32")[0].build_key
    assert len(calls) == 3


# ---- files --------------------------------------------------------------------------------------


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """A device of compute capability 9.0, as far as the compiler asks; nothing is loaded on it."""
    from numba import cuda
    from numba.cuda import codegen, dispatcher

    device = SimpleNamespace(compute_capability=(9, 0))
    context = SimpleNamespace(device=device)
    patch.setattr(dispatcher, "get_current_device", lambda: device)
    patch.setattr(cuda, "get_current_device", lambda: device)
    patch.setattr(codegen, "devices", SimpleNamespace(get_context=lambda *_: context))
    patch.setattr(dispatcher._Kernel, "bind", lambda self: self._codelibrary.get_cubin())
    patch.setattr(cache, "SOURCES", "of the tests")  # the real ones may be edited meanwhile
    patch.setattr(cache, "_sources", lambda: "of the tests")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where the entries go."""
    stand_in(monkeypatch)
    monkeypatch.setenv("FA2_NUMBA_CACHE_DIR", str(tmp_path))
    yield tmp_path / "kernels"


def run(code: str, **environment: str) -> str:
    """What `code` prints in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def counted(array: np.ndarray) -> hbm.Counted:
    """What ``Counted(array)`` is, without putting a tally on a device."""
    made = object.__new__(hbm.Counted)
    made.__dict__.update(data=array, tally=np.zeros((1, 2, 3), np.int64), row=0, phases=1)
    return made


def doubler(key: str | None = "doubler", threads: int = 0) -> Any:
    """A small kernel that says it was built from `key`."""

    def double(A):
        A[0,] = A[0,] * A[0,]

    kernel = hbm.jit(double, "double", threads)
    kernel.build_key = key
    return kernel


def types_of(kernel: Any, *args: Any) -> tuple[Any, ...]:
    return tuple(kernel.typeof_pyval(arg) for arg in args)


FLOATS = np.zeros(4, np.float32)


def machine_code(ready: Any) -> bytes:
    return bytes(ready._codelibrary.get_cubin().code)


def compile_doubler(key: str | None = "doubler") -> bytes:
    """Machine code of a new `doubler`, from wherever `cache.compiled` takes it."""
    kernel = doubler(key)
    types = types_of(kernel, FLOATS)
    ready = cache.compiled(kernel, types)
    assert kernel.overloads[types] is ready
    return machine_code(ready)


def forbid_compiling(patch: pytest.MonkeyPatch) -> None:
    from numba.cuda import dispatcher

    def compiles(*args: Any, **options: Any) -> None:
        raise AssertionError("the compiler was called")

    patch.setattr(dispatcher._Kernel, "__init__", compiles)


@pytest.fixture
def compilations(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the kernels that the compiler has been called for."""
    from numba.cuda import dispatcher

    names: list[str] = []
    compiles = dispatcher._Kernel.__init__

    def counting(self: Any, function: Any, *args: Any, **options: Any) -> None:
        names.append(function.__name__)
        compiles(self, function, *args, **options)

    monkeypatch.setattr(dispatcher._Kernel, "__init__", counting)
    return names


def tile_map_kernel(wrap: Callable[[np.ndarray], Any]) -> tuple[Any, tuple[Any, ...]]:
    """A kernel of the package, with the types of its plain or counted arguments."""
    kernel = tile_map.build(TILING)
    mask, kinds = np.zeros((1, 1, 8, 8), np.uint8), np.zeros((1, 1, 1, 1), np.uint8)
    return kernel, types_of(kernel, wrap(mask), wrap(kinds))


def load_tile_maps() -> None:
    """In a process without a compiler: print hashes of the machine code."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        forbid_compiling(patch)
        for wrap in (lambda array: array, counted):
            ready = cache.compiled(*tile_map_kernel(wrap))
            assert ready.extensions == [hbm._PrepareArguments]
            print(hashlib.sha256(machine_code(ready)).hexdigest())


@pytest.mark.codegen
def test_another_process_does_not_compile(folder: Path) -> None:
    stored = []
    for wrap in (lambda array: array, counted):
        ready = cache.compiled(*tile_map_kernel(wrap))
        stored.append(hashlib.sha256(machine_code(ready)).hexdigest())
    assert stored[0] != stored[1]
    code = "import test_cache; test_cache.load_tile_maps()"
    assert run(code, NUMBA_ENABLE_CUDASIM="0", PYTHONHASHSEED="1").split() == stored


@pytest.mark.codegen
def test_a_loaded_kernel_is_the_stored_one(folder: Path, compilations: list[str]) -> None:
    kernel = doubler()
    types = types_of(kernel, counted(FLOATS))
    first, second = cache.compiled(kernel, types), cache.compiled(doubler(), types)
    assert compilations == ["double"] and first is not second
    left, right = (vars(ready) for ready in (first, second))
    for name in ("entry_name", "signature", "extensions", "cooperative", "debug"):
        assert left[name] == right[name], name
    argument = counted(FLOATS)
    assert second.argument_types == types
    assert [e.prepare_args(types[0], argument) for e in second.extensions] == [
        e.prepare_args(types[0], argument) for e in first.extensions
    ]


@pytest.mark.codegen
def test_everything_that_decides_the_code_is_in_the_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from numba import cuda
    from numba.cuda.core import config

    kernel, bounded, other = doubler(), doubler(threads=512), doubler("other")
    types = types_of(kernel, FLOATS)
    paths = [
        cache._path(kernel, types),
        cache._path(bounded, types),
        cache._path(other, types),
        cache._path(kernel, types_of(kernel, counted(FLOATS))),
        cache._path(kernel, types_of(kernel, FLOATS.astype(np.float64))),
        cache._path(kernel, types_of(kernel, FLOATS[::2])),
    ]
    for place, name, value in (
        (cache, "SOURCES", "edited"),
        (cache, "_compiler", lambda: ("another",)),
        (config, "EXTEND_VARIABLE_LIFETIMES", 1),
        (cuda, "get_current_device", lambda: SimpleNamespace(compute_capability=(10, 0))),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, value)
            paths.append(cache._path(kernel, types))
    assert None not in paths and len(set(paths)) == len(paths)
    assert cache._path(doubler(), types) == paths[0]


@pytest.mark.codegen
def test_what_the_key_cannot_tell_has_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = doubler(None)
    types = types_of(kernel, FLOATS)
    assert cache._path(kernel, types) is None  # a function of the user's
    kernel = doubler()
    assert cache._path(kernel, types) is not None
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_compiler", lambda: None)
        assert cache._path(kernel, types) is None
    kernel.targetoptions["lto"] = False
    assert cache._path(kernel, types) is None


@pytest.mark.codegen
def test_a_toolkit_that_cannot_be_found_has_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda import pathfinder

    assert cache._compiler.__wrapped__() is not None
    monkeypatch.setattr(
        pathfinder, "load_nvidia_dynamic_lib", lambda name: SimpleNamespace(abs_path=None)
    )
    assert cache._compiler.__wrapped__() is None


def test_an_edited_source_is_another_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "PACKAGE", tmp_path)
    hashes = set()
    for text in ("x = 1\n", "x = 2\n"):
        (tmp_path / "a.py").write_text(text)
        hashes.add(cache._sources())
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    hashes.add(cache._sources())
    assert len(hashes) == 3


@pytest.mark.codegen
def test_nothing_is_stored_once_the_sources_are_edited(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_sources", lambda: "edited")
    compile_doubler()
    assert list(folder.glob("*.kernel")) == []


def spoiled(good: bytes, foreign: bytes) -> dict[str, bytes]:
    def packed(content: bytes) -> bytes:
        return hashlib.sha256(content).digest() + content

    return {
        "empty": b"",
        "short": good[:20],
        "truncated": good[:-1],
        "one bit off": good[:-1] + bytes([good[-1] ^ 1]),
        "text": b"not a kernel",
        "not compressed": packed(b"x"),
        "not a pickle": packed(zlib.compress(b"x")),
        "another pickle": packed(zlib.compress(b"N.")),  # None
        "for other types": foreign,
    }


@pytest.mark.codegen
@pytest.mark.parametrize("kind", spoiled(b"x", b""))
def test_a_spoiled_file_is_replaced(folder: Path, compilations: list[str], kind: str) -> None:
    code = compile_doubler()
    (path,) = folder.glob("*.kernel")
    good, kernel = path.read_bytes(), doubler()
    cache.compiled(kernel, types_of(kernel, FLOATS.astype(np.float64)))
    (other,) = set(folder.glob("*.kernel")) - {path}
    path.write_bytes(spoiled(good, other.read_bytes())[kind])
    assert len(compilations) == 2
    assert len(compile_doubler()) == len(code) and len(compilations) == 3
    compile_doubler()
    assert len(compilations) == 3


class Trap:
    """Whoever unpickles it makes a folder."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.codegen
@pytest.mark.parametrize("signed", [False, True])
def test_a_file_with_another_hash_is_not_unpickled(folder: Path, signed: bool) -> None:
    compile_doubler()
    (path,) = folder.glob("*.kernel")
    packed = zlib.compress(pickle.dumps(Trap(folder / "trap")))
    path.write_bytes((hashlib.sha256(packed).digest() if signed else bytes(32)) + packed)
    compile_doubler()
    assert (folder / "trap").exists() == signed  # the trap itself works


@pytest.mark.codegen
@pytest.mark.parametrize("setting", ["", "off"])
def test_the_cache_can_be_switched_off(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    compilations: list[str],
    setting: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FA2_NUMBA_CACHE_DIR", setting)
    compile_doubler()
    compile_doubler()
    assert len(compilations) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.codegen
def test_a_folder_that_cannot_be_made_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FA2_NUMBA_CACHE_DIR", str(tmp_path / "file"))
    assert compile_doubler()
    assert cache._folder() is None


@pytest.mark.codegen
def test_a_file_that_cannot_be_written_is_done_without(
    monkeypatch: pytest.MonkeyPatch, folder: Path, compilations: list[str]
) -> None:
    def full(*args: Any) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert compile_doubler()
    assert [path.suffix for path in folder.iterdir()] == [".lock"]
    compile_doubler()
    assert len(compilations) == 2


@pytest.mark.skipif(os.name != "posix", reason="modes of files are POSIX")
def test_only_a_folder_of_ones_own_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA2_NUMBA_CACHE_DIR", str(tmp_path / "new"))
    folder = cache._folder()
    assert folder is not None and folder.stat().st_mode & 0o777 == 0o700
    for mode in (0o720, 0o702):
        folder.chmod(mode)
        assert cache._folder() is None
    folder.chmod(0o755)
    assert cache._folder() == folder
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    assert cache._folder() is None


def test_where_the_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FA2_NUMBA_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache._folder() == tmp_path / ".cache" / "fa2_numba" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache._folder() == tmp_path / "xdg" / "fa2_numba" / "kernels"


@pytest.mark.parametrize("limit", ["LIMIT_FILES", "LIMIT_BYTES"])
def test_the_oldest_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    for n in range(5):
        path = tmp_path / f"{4 - n}.kernel"
        path.write_bytes(b"12")
        os.utime(path, (n, n))
    (tmp_path / "notes.txt").write_text("not of the cache")
    os.utime(tmp_path / "notes.txt", (0, 0))
    monkeypatch.setattr(cache, limit, {"LIMIT_FILES": 3, "LIMIT_BYTES": 7}[limit])
    cache._prune(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "0.kernel",
        "1.kernel",
        "2.kernel",
        "notes.txt",
    ]


def compile_and_tell() -> None:
    """In one of many processes: print the hash of the machine code, and how often it compiled."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        from numba.cuda import dispatcher

        compiles, calls = dispatcher._Kernel.__init__, []

        def slow(self: Any, *args: Any, **options: Any) -> None:
            calls.append(args)
            time.sleep(1)  # long enough for the others to come
            compiles(self, *args, **options)

        patch.setattr(dispatcher._Kernel, "__init__", slow)
        print(hashlib.sha256(compile_doubler()).hexdigest(), len(calls))


@pytest.mark.codegen
@pytest.mark.skipif(os.name != "posix", reason="without POSIX locks, each compiles")
def test_of_many_processes_one_compiles(folder: Path) -> None:
    started = [
        subprocess.Popen(
            [sys.executable, "-c", "import test_cache; test_cache.compile_and_tell()"],
            cwd=Path(__file__).parent,
            env=os.environ | {"NUMBA_ENABLE_CUDASIM": "0"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(4)
    ]
    said = [process.communicate()[0].split() for process in started]
    assert [process.returncode for process in started] == [0] * 4
    assert len({code for code, _ in said}) == 1
    assert sum(int(calls) for _, calls in said) == 1


@pytest.mark.codegen
@pytest.mark.skipif(os.name != "posix", reason="POSIX locks")
def test_a_lock_is_waited_for_only_so_long(
    folder: Path, monkeypatch: pytest.MonkeyPatch, compilations: list[str]
) -> None:
    """A process that hangs while it compiles does not hang the others."""
    path = cache._path(kernel := doubler(), types_of(kernel, FLOATS))
    assert path is not None
    monkeypatch.setattr(cache, "PATIENCE", 0.2)
    with cache._turn(path):
        begin = time.monotonic()
        compile_doubler()
        assert time.monotonic() - begin >= 0.2
        assert len(compilations) == 1 and path.exists()
        monkeypatch.setattr(cache, "PATIENCE", 60.0)
        begin = time.monotonic()
        with cache._turn(path):  # the file is there: nothing to wait for
            assert time.monotonic() - begin < 30


# ---- launches -----------------------------------------------------------------------------------


def operands(backend: Backend, method: str) -> launch.Operands:
    """The operands of a small call."""
    problem = Problem(method, "fp32", 1, 2, 1, 9, 8, 8, TILING, NONE, UNCHANGED)
    arrays = {
        name: backend.to_device(np.zeros(problem.layout(name).shape, np.float32))
        for name in "QKVOL"
    }
    return launch.Operands(
        problem,
        arrays,
        lambda shape, dtype: (backend.to_device(np.zeros(shape, dtype)),) * 2,
        0,
        1.0,
        counted=False,
    )


def test_launches_are_told(backend: Backend) -> None:
    A = operands(backend, "fa1")
    api.METHODS["fa1"](A.problem, A)
    init, loop, finish = A.launches
    assert [init.kernel, loop.kernel, finish.kernel] == ["fa1_init", "fa1_loop", "fa1_finish"]
    _, shared_bytes = TILING.shared_layout(8, "fp32")
    assert (loop.blocks, loop.threads, loop.shared_bytes) == (2, TILING.threads, shared_bytes)
    for told in A.launches:
        if backend.name == "simulator":
            assert (told.registers, told.local_bytes, told.blocks_per_sm) == (0, 0, 0)
        else:
            assert 0 < told.registers <= 255 and told.local_bytes >= 0 and told.blocks_per_sm > 0
    assert A.launches == [init, loop, finish]


def test_no_launch_is_told_where_none_was(backend: Backend) -> None:
    A = operands(backend, "fa2")
    A.run(None, 0, 32, 0)
    assert A.launches == []


def elf(*sections: tuple[int, int]) -> bytes:
    """A 64-bit ELF file with no more than these sections' (flags, size)."""
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, 64)
    struct.pack_into("<HH", header, 0x3A, 64, len(sections))
    table = (struct.pack("<8xQ8x8xQ24x", flags, size) for flags, size in sections)
    return bytes(header) + b"".join(table)


ELF = elf((0, 77), (0x6, 4096), (0x2, 999), (0x6, 128))


def test_the_driver_is_asked_for_the_launch_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def blocks(*question: Any) -> int:
        asked.append(question)
        return 7

    context = SimpleNamespace(
        device=SimpleNamespace(id=1), get_active_blocks_per_multiprocessor=blocks
    )
    function = SimpleNamespace(
        module=SimpleNamespace(context=context), attrs=SimpleNamespace(regs=42, local=16)
    )
    entered = []

    @contextlib.contextmanager
    def on_device(device: int) -> Iterator[None]:
        entered.append(device)
        yield
        entered.append("left")

    library = SimpleNamespace(
        get_cufunc=lambda: function, get_cubin=lambda: SimpleNamespace(code=ELF)
    )
    compiled = SimpleNamespace(_codelibrary=library)
    monkeypatch.setattr(launch, "on_device", on_device)
    problem = Problem("fa2", "fp32", 1, 2, 1, 9, 8, 8, TILING, NONE, UNCHANGED)
    A = launch.Operands(problem, {}, None, 0, 1.0, False, device=1)
    A.launched.append(launch.Launched("fa2", compiled, 9, 128, 50_000, ()))
    assert A.launches == [launch.Launch("fa2", 9, 128, 50_000, 42, 16, 7, 4096 + 128)]
    assert asked == [(function, 128, 50_000)] and entered == [1, "left"]


# ---- on a GPU -----------------------------------------------------------------------------------


def attend_and_count(may_compile: bool) -> None:
    """In a process of its own: print hashes of what a kernel computes and counts."""
    import cupy

    q, k, v = cupy.random.default_rng(0).standard_normal((3, 1, 2, 40, 64), np.float32)
    with pytest.MonkeyPatch.context() as patch:
        if not may_compile:
            forbid_compiling(patch)
        for mask in (masking.causal(), masking.window(3, 3) & masking.causal_skip()):
            told = api.measure(q, k, v, mask=mask)
            plain = api.attention(q, k, v, mask=mask)
            print(
                hashlib.sha256(cupy.asnumpy(plain).tobytes() + str(told.rows).encode()).hexdigest()
            )


@pytest.mark.gpu
def test_another_process_launches_what_was_stored(tmp_path: Path) -> None:
    """Plain and counted kernels, with more than 48 KB of shared memory, run from their files."""
    said = [
        run(
            f"import test_cache; test_cache.attend_and_count({may_compile})",
            FA2_NUMBA_CACHE_DIR=str(tmp_path),
        )
        for may_compile in (True, False)
    ]
    assert said[0] == said[1]
    assert len(list((tmp_path / "kernels").glob("*.kernel"))) == 4
