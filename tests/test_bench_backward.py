"""The benchmark of gradients without a GPU: arguments, peers on the CPU, a whole run on fakes."""

import itertools
import json
import math
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from fa2_numba import reference, simulator

backward = pytest.importorskip("benchmarks.backward")
forward = pytest.importorskip("benchmarks.forward")
comparison = pytest.importorskip("benchmarks.comparison")
peers = pytest.importorskip("benchmarks.peers")
peers_backward = pytest.importorskip("benchmarks.peers_backward")
Implementation = peers.Implementation


# --- arguments -------------------------------------------------------------------------------


def test_the_setting_is_the_forward_passs():
    given = backward.arguments([])
    assert (given.dims, given.sizes) == ([128, 64, 256], [1024, 2048, 4096, 8192, 16384])
    assert (given.causal, given.regime, given.dtype) == (["full", "causal"], ["sustained"], "bf16")
    cells = list(itertools.product(given.dims, given.causal, given.sizes))
    assert len(cells) == 30
    assert set(given.implementations) < set(peers_backward.IMPLEMENTATIONS)
    assert tuple(given.sections) == backward.SECTIONS
    assert all(hasattr(backward.Run, section) for section in given.sections)


def test_operations_are_two_and_a_half_times_the_forward_passs():
    sizes = (4096, 128, True, "bf16")
    forward = comparison.tokens_cell(*sizes)
    cell = comparison.tokens_cell(*sizes, "backward")
    assert cell.teraflop() == 2.5 * forward.teraflop()
    assert cell.row("x", [1.0])["direction"] == "backward"


def test_what_is_asked_for_is_compiled_before():
    argv = "--dims 64 --causal causal --implementations fa3_backward,cudnn --sections".split()
    (job,) = backward.to_compile(backward.arguments([*argv, "cells"]))
    assert job == ("fa3_backward", comparison.tokens_cell(1024, 64, True, "bf16", "backward"))
    jobs = backward.to_compile(backward.arguments([*argv, "fp32,host,deterministic,cells"]))
    assert len(jobs) == len(set(jobs))
    assert {name for name, _ in jobs} == set(peers_backward.COMPILED) - {"fa4"}
    assert {cell.dtype for name, cell in jobs if name == "fa2_backward"} == {"fp32"}
    assert ("fa3_autograd", comparison.host_cell("bf16", "backward")) in jobs


# --- gradients that are right, and that are not ----------------------------------------------


@pytest.fixture
def exact():
    return pytest.importorskip("benchmarks.exact", exc_type=ImportError)


def tensors(dtype, shape=(1, 2, 96, 32)):
    """q, k, v and dout."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(0)
    kind = getattr(torch, peers.TORCH_DTYPES[dtype])
    return tuple(torch.randn(shape, generator=generator).to(kind) for _ in range(4))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [32, 40, 1024])
def test_gradients_in_float64_are_the_references(exact, monkeypatch, causal, rows):
    monkeypatch.setattr(exact, "ROWS_AT_ONCE", rows)
    q, k, v, dout = tensors("fp32")
    found = exact.gradients(*(x[0, 1] for x in (q, k, v, dout)), causal)
    arrays = [x[:, 1:].double().numpy() for x in (dout, q, k, v)]
    expected = reference.attention_backward(
        *arrays, mask=reference.causal_mask(96, 96) if causal else None
    )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs[0, 0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_rounded_gradients_are_right_and_wrong_ones_are_not(exact, dtype, causal):
    inputs = tensors(dtype)
    heads = {(0, h): exact.gradients(*(x[0, h] for x in inputs), causal) for h in (0, 1)}
    rounded = tuple(
        inputs[0].new_tensor(np.stack([heads[0, h][n].numpy() for h in (0, 1)])[None])
        for n in range(3)
    )
    found = exact.gradient_errors(rounded, heads, dtype)
    assert found["right"] and found["rows"] == 192
    assert 0 < found["dk_rms"] < exact.gradient_bound(dtype, 96, 32) / 2
    same = exact.gradient_differences(rounded, rounded, dtype)
    assert same == {"rms_difference": 0.0, "alike": True}
    for place in range(3):
        for change in (0.98, math.nan, 0.0):
            wrong = [x.clone() for x in rounded]
            wrong[place][0, 1] *= change
            assert not exact.gradient_errors(wrong, heads, dtype)["right"]
            assert not exact.gradient_differences(wrong, rounded, dtype)["alike"]
        row = [x.clone() for x in rounded]
        row[place][0, 1, 8] = 0
        assert not exact.gradient_errors(row, heads, dtype)["right"]


# --- peers, where they run on the CPU --------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_what_autograd_recorded_gives_the_gradients_again_and_again(exact, causal):
    inputs = tensors("fp32")
    call = peers_backward.IMPLEMENTATIONS["torch-fa2"].call(*inputs, causal=causal)
    heads = {(0, h): exact.gradients(*(x[0, h] for x in inputs), causal) for h in (0, 1)}
    for _ in range(2):
        assert exact.gradient_errors(call(), heads, "fp32")["right"]
    assert not any(x.requires_grad for x in inputs)


@pytest.mark.skipif(not simulator.ACTIVE, reason="CPU tensors are taken on the simulator")
def test_ours_through_autograd(exact):
    inputs = tensors("fp32", (1, 1, 8, 8))
    call = peers_backward.IMPLEMENTATIONS["fa3_autograd"].call(*inputs, causal=True)
    heads = {(0, 0): exact.gradients(*(x[0, 0] for x in inputs), True)}
    assert exact.gradient_errors(call(), heads, "fp32")["right"]
    assert backward.equal_bits(call)


def test_ours_is_called_with_the_output_and_the_lse(monkeypatch):
    seen = []

    def attention(q, k, v, **options):
        seen.append(options)
        return "out", "lse"

    def attention_backward(*arrays, **options):
        seen.append((arrays, options))
        return "dq", "dk", "dv"

    package = peers_backward.fa2_numba
    monkeypatch.setattr(package, "attention", attention, raising=False)
    monkeypatch.setattr(package, "attention_backward", attention_backward, raising=False)
    ours = peers_backward.IMPLEMENTATIONS["fa3_backward_deterministic"]
    call = ours.call("q", "k", "v", "dout", causal=True)
    assert seen == [{"causal": True, "method": "fa3", "return_lse": True}]
    assert ours.output(call()) == ("dq", "dk", "dv")
    assert seen[1] == (
        ("dout", "q", "k", "v", "out", "lse"),
        {"causal": True, "method": "fa3", "deterministic": True},
    )
    assert len(seen) == 2  # the output is not computed again


# --- a run -----------------------------------------------------------------------------------


class Asleep:
    """A watch that reads nothing."""

    failure = ""

    def taken(self):
        return {"power_w": 1.0}

    def close(self):
        pass


def fails(*inputs, causal):
    raise NotImplementedError("no kernel\n for d")


def wrong(q, k, v, dout, causal):
    right = peers_backward.IMPLEMENTATIONS["torch-fa2"].make(q, k, v, dout, causal=causal)
    return lambda: tuple(2 * x for x in right())


def slow_to_fail(q, k, v, dout, causal):
    def call():
        raise RuntimeError("an illegal memory access")

    return call


@pytest.fixture
def machine(monkeypatch, exact):
    """Small cells on the CPU, with torch's flash kernel in place of most; 2 ms a call."""
    torch = pytest.importorskip("torch")
    for module, theirs, others in (
        (backward, peers_backward.IMPLEMENTATIONS,
         (("cudnn", wrong), ("fa4", fails), ("torch-efficient", slow_to_fail))),
        (forward, peers.IMPLEMENTATIONS, (("cudnn", fails), ("fa4", fails))),
    ):  # fmt: skip
        made = dict.fromkeys(theirs, theirs["torch-fa2"])
        made |= {name: Implementation(name, make) for name, make in others}
        monkeypatch.setattr(module, "IMPLEMENTATIONS", made)
        monkeypatch.setattr(module.Run, "implementations", made)
    monkeypatch.setattr(peers, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(comparison, "holding", lambda regime: None)
    monkeypatch.setattr(comparison, "extra_bytes", lambda call: len(call()))
    monkeypatch.setattr(comparison, "TOKENS", 64)
    monkeypatch.setattr(comparison, "HIDDEN", 128)
    monkeypatch.setattr(comparison, "MEMORY_N", 64)
    monkeypatch.setattr(comparison, "HOST_CALLS", 20)
    monkeypatch.setattr(backward, "ACCURACY_N", 64)
    monkeypatch.setattr(backward, "DETERMINISTIC_SIZES", (32,))
    monkeypatch.setattr(backward, "FP32_SIZES", (32,))
    monkeypatch.setattr(forward, "HEADLINE_N", 64)
    monkeypatch.setattr(forward, "extra_bytes", lambda call: len(call()))
    monkeypatch.setattr(forward, "CROSSOVER_SIZES", (32, 64))

    def take_turns(calls, rounds, *options, **more):
        for call in calls:
            call()
        return [[2.0] * n for n in ([rounds] * len(calls) if isinstance(rounds, int) else rounds)]

    monkeypatch.setattr(comparison, "take_turns", take_turns)


@pytest.fixture
def run(machine, tmp_path):
    """Gradients on that machine."""
    given = backward.arguments("--dims 64 --rounds 3".split())
    given.sizes = [32, 64]
    return backward.Run(given, {"gpu": "g"}, tmp_path / "b.json", Asleep(), time.monotonic())


def test_every_section_is_recorded(run, monkeypatch, capsys):
    monkeypatch.setattr(run, "matrix_product", lambda: None)
    comparison.one_section(run, "host")
    comparison.measured(run)
    record = json.loads(run.target.read_text())
    assert not [skip for skip in record["skipped"] if "section" in skip]

    timed = {(row["implementation"], row["n"], row["causal"]) for row in record["rows"]}
    sizes = list(itertools.product((32, 64), (False, True)))
    assert timed == {(name, *size) for name in ("fa3_backward", "torch-fa2") for size in sizes}
    row = record["rows"][0]
    assert (row["direction"], row["batch"], row["heads"]) == ("backward", 2, 2)
    assert (row["milliseconds"], row["rounds"], row["power_w"]) == (2.0, 3, 1.0)

    reasons = {(skip["implementation"], skip["reason"]) for skip in record["skipped"]}
    assert ("fa4", "NotImplementedError: no kernel for d") in reasons
    assert ("torch-efficient", "RuntimeError: an illegal memory access") in reasons
    assert ("cudnn", "its output is not right: see checks") in reasons
    assert {check["peer"] for check in record["checks"]} == {"torch-fa2"}  # cuDNN's is not right

    shown = {row["implementation"] for row in record["accuracy"]}
    assert shown == {"fa3_backward", "fa3_backward_deterministic", "fa2_backward", "torch-fa2",
                     "cudnn"}  # fmt: skip
    assert len(record["accuracy"]) == 5 * 3 * 2
    first = record["memory"]["rows"][0]
    assert (first["implementation"], first["extra_bytes"]) == ("fa3_backward", 3)
    assert record["memory"]["output_bytes"] == 3 * 64 * 128 * 2
    assert len(record["deterministic"]) == 2 * 2 * 2
    assert all(row["equal_bits"] for row in record["deterministic"])
    assert {row["dtype"] for row in record["fp32"]} == {"fp32"}
    hosts = [row["implementation"] for row in record["host"]["rows"]]
    assert hosts == ["fa3_backward", "cudnn", "torch-fa2", "fa3_autograd"]


def test_cells_after_the_time_are_told(run):
    run.begin -= 60 * run.options.minutes + 1
    comparison.one_section(run, "cells")
    comparison.one_section(run, "fp32")
    assert (run.record["rows"], run.record["fp32"]) == ([], [])
    late = [skip for skip in run.record["skipped"] if "not started" in skip["reason"]]
    assert len(late) == len(run.record["skipped"]) == 4 + 4


@pytest.mark.parametrize("module", [forward, backward], ids=["forward", "backward"])
def test_from_the_command_line_to_the_record(machine, module, tmp_path, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    from benchmarks import watch

    compiled = []
    gpu_time = SimpleNamespace(compile_ahead=lambda warm, jobs: compiled.append((warm, jobs)))
    monkeypatch.setitem(sys.modules, "benchmarks.gpu_time", gpu_time)
    monkeypatch.setattr(watch, "Watch", Asleep)
    monkeypatch.setattr(comparison, "environment", lambda: {"gpu": "g", "versions": {}})
    monkeypatch.setattr(comparison, "state", lambda: {"power": "1 W"})
    monkeypatch.setattr(comparison, "MATRIX_SIZES", (8,))
    about = SimpleNamespace(L2_cache_size=50)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    target = tmp_path / "record.json"
    names = ["torch-fa2", "cudnn", module.Run.ours]
    argv = ["x", "--dims", "64", "--implementations", ",".join(names), "--output", str(target)]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(module, "SIZES", (32, 64))
    module.main()
    record = json.loads(target.read_text())
    assert set(module.SECTIONS) - {"cells"} | {"rows", "matrix_product"} < set(record)
    assert all(record[name] for name in set(module.SECTIONS) - {"cells"})
    assert not [skip for skip in record["skipped"] if "section" in skip]
    assert {row["direction"] for row in record["rows"]} == {module.Run.direction}
    sizes = {(row["implementation"], row["n"], row["causal"]) for row in record["rows"]}
    assert len(sizes) == len(record["rows"]) == 2 * 2 * 2  # all but cuDNN's
    assert record["setting"]["l2"].startswith("q, k, v")
    assert record["watch_failure"] == ""
    ((warm, jobs),) = compiled
    assert warm.__module__ == (
        "benchmarks.peers" if module is forward else "benchmarks.peers_backward"
    )
    assert jobs
    assert "wrote record.json" in capsys.readouterr().out
