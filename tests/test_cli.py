"""The commands: what they print, where, and how they end."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
from test_report import Page, real_input, tiny_plan

from fa2_numba import doctor, reference, simulator
from fa2_numba.accounting import sweep
from fa2_numba.cli import main
from fa2_numba.traffic import COLUMNS

pytestmark = pytest.mark.skipif(
    not simulator.ACTIVE, reason="runs on the simulator: NUMBA_ENABLE_CUDASIM=1"
)


@pytest.fixture
def own(tmp_path):
    """A file of one small problem, its mask and its output."""
    x = real_input()
    mask = np.arange(20) < 13
    out, _ = reference.attention_same_precision(x.q, x.k, x.v, mask=mask)
    path = tmp_path / "own.npz"
    np.savez(path, q=x.q, k=x.k, v=x.v, mask=mask, out=out)
    return path


@pytest.fixture
def tiny(monkeypatch):
    """Reports of seconds."""
    monkeypatch.setattr(sweep, "plan", lambda backend, machine: tiny_plan(backend, machine))
    monkeypatch.setattr(sweep, "shipped", lambda: [real_input()])


def rows(capsys):
    """The JSON on stdout, which must be all that is there."""
    return json.loads(capsys.readouterr().out)


# --- doctor, example -------------------------------------------------------------------------


def test_doctor_prints_its_findings(capsys):
    assert main(["doctor"]) == 0
    assert "numba-cuda" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 0
    assert [row["item"] for row in rows(capsys)] == [f.item for f in doctor.diagnose()]


def test_doctor_ends_with_1_where_something_is_broken(capsys, monkeypatch):
    monkeypatch.setattr(
        doctor, "diagnose", lambda: [doctor.Finding("NumPy", "fail", "none", "Do.")]
    )
    assert main(["doctor"]) == 1
    assert "fail" in capsys.readouterr().out


def test_the_example_shows_every_step_and_the_kernel_agrees(capsys):
    assert main(["example"]) == 0
    out = capsys.readouterr().out
    for text in ("i = 1, j = 1", "-12.0000    15.0000", "1.1876     1.0498", "row tile 3", "fa2"):
        assert text in out
    assert main(["example", "--json"]) == 0
    found = rows(capsys)
    inner = [row for row in found if row.get("step") == "inner"]
    assert [(row["i"], row["j"]) for row in inner] == [(i, j) for i in (1, 2, 3) for j in (1, 2, 3)]
    assert inner[0]["S_ij"] == [[4, -3], [-12, 15]]
    assert [row["m_i"] for row in inner[:3]] == [[4, 15], [7, 15], [10, 15]]
    assert np.round(inner[2]["l_i"], 4).tolist() == [1.1876, 1.0498]
    tile = next(row for row in found if row.get("step") == "row tile")
    assert np.round(tile["O_i"], 3).tolist() == [[3.177, 0.270], [1.190, 1.763]]
    by_hand, kernel = found[-2:]
    assert kernel["method"] == "fa2"
    assert by_hand["exact"] and kernel["exact"]
    assert max(by_hand["out_error"], kernel["out_error"]) < 1e-15


# --- io --------------------------------------------------------------------------------------


def test_io_shows_both_sides(capsys):
    assert main(["io", "--n", "16", "--d", "8", "--causal"]) == 0
    out = capsys.readouterr().out
    for text in (
        "standard: N = 16, d = 8, 1 head, fp32",
        "fa1:",
        "predicted",
        "counted",
        "epilogue",
    ):
        assert text in out


def test_io_rows_are_the_tidy_table(capsys):
    argv = "io --n 9 --n-k 13 --d 5 --heads 4 --heads-kv 2 --batch 2 --dtype bf16 --method fa2"
    assert main([*argv.split(), "--window", "3,0", "--block-r", "4", "--json"]) == 0
    found = rows(capsys)
    assert all(list(row) == COLUMNS for row in found)
    columns = {(row["n_q"], row["n_k"], row["heads_kv"], row["block_r"]) for row in found}
    assert columns == {(9, 13, 2, 4)}
    assert {row["mask"] for row in found} == {"window(3,0)"}
    sides = {
        source: {(r["array"], r["op"]): r["sectors"] for r in found if r["source"] == source}
        for source in ("predicted", "counted")
    }
    assert sides["predicted"] == sides["counted"] != {}


def test_io_says_why_it_does_not_count(capsys):
    assert main(["io", "--n", "1048576", "--d", "64", "--method", "fa2"]) == 0
    out = capsys.readouterr().out
    assert "too many for the simulator" in out
    assert "counted\n" not in out
    assert main(["io", "--n", "16", "--d", "64", "--block-r", "128", "--method", "fa2"]) == 0
    assert "bytes of shared memory" in capsys.readouterr().out


def test_io_ends_with_1_if_a_count_differs(capsys, monkeypatch):
    from fa2_numba.accounting import shapes

    honest = shapes.Shape.count

    def wrong(self, method, tiling):
        counted, predicted = honest(self, method, tiling)
        return counted[:-1], predicted

    monkeypatch.setattr(shapes.Shape, "count", wrong)
    assert main(["io", "--n", "4", "--d", "4", "--method", "fa2"]) == 1


# --- check -----------------------------------------------------------------------------------


def test_check_judges_every_method_and_the_files_output(own, capsys):
    assert main(["check", str(own)]) == 0
    out = capsys.readouterr().out
    assert out.count("exact") == 4
    assert main(["check", str(own), "--json", "--causal", "--scale", "0.3"]) == 0
    found = rows(capsys)
    assert [row["method"] for row in found] == ["standard", "fa1", "fa2", "out of the file"]
    assert [row["exact"] for row in found] == [True, True, True, False]  # it was not causal
    assert {row["mask"] for row in found[:3]} == {"causal&boolean"}
    assert found[-1]["lse_error"] is None


def test_check_cuts_what_the_simulator_cannot_run_and_says_so(tmp_path, capsys):
    rng = np.random.default_rng(0)
    np.save(tmp_path / "a.npy", rng.standard_normal((3, 3, 60, 4)).astype(np.float16))
    assert main(["check", str(tmp_path / "a.npy"), "--method", "fa2", "--window", "5,-1"]) == 0
    printed = capsys.readouterr()
    assert "head" in printed.err and "of 3, token 0-47 of 60 only, --all for" in printed.err
    assert main(["check", str(tmp_path / "a.npy"), "--method", "fa2", "--all", "--json"]) == 0
    (row,) = rows(capsys)
    assert (row["heads"], row["n_q"], row["dtype"]) == (3, 60, "fp16")


def test_check_ends_with_1_if_an_output_is_wrong(own, capsys, monkeypatch):
    from fa2_numba import api

    honest = api.measure

    def wrong(*arrays, **arguments):
        found = honest(*arrays, **arguments)
        found.out[0, 0, 0, 0] += 1
        return found

    monkeypatch.setattr(api, "measure", wrong)
    assert main(["check", str(own), "--method", "fa1"]) == 1
    assert "not exact" in capsys.readouterr().out


# --- report ----------------------------------------------------------------------------------


def test_report_writes_its_folder_and_a_summary(tiny, tmp_path, capsys, own):
    folder = tmp_path / "new" / "report"
    assert main(["report", "--output", str(folder), "--input", str(own)]) == 0
    out = capsys.readouterr().out
    names = ("index.html", "traffic.csv", "traffic.json", "checks.json", "figures/growth.svg")
    assert all((folder / name).exists() for name in names)
    for text in (
        "own.npz",
        "FA2, causal",
        "differ",
        "counted rows equal",
        str(folder / "index.html"),
    ):
        assert text in out
    assert "own.npz (token 9-16 of 20)" in "".join(Page((folder / "index.html").read_text()).text)


def test_report_json_is_the_table_alone(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fa2_numba.accounting.plots.draw", lambda rows, plan: [])
    assert main(["report", "--output", str(tmp_path), "--json"]) == 0
    found = rows(capsys)
    assert found == json.loads((tmp_path / "traffic.json").read_text())
    assert {row["source"] for row in found} == {"counted", "predicted"}


@pytest.mark.parametrize("how", ["ctrl-c", "terminate"])
def test_an_interrupted_report_keeps_the_finished_part(tiny, tmp_path, capsys, monkeypatch, how):
    monkeypatch.setattr("fa2_numba.accounting.plots.draw", lambda rows, plan: [])
    run, done = sweep.Experiment.run, []

    def interrupted(self):
        if len(done) == 2:
            if how == "ctrl-c":
                raise KeyboardInterrupt
            os.kill(os.getpid(), signal.SIGTERM)
        done.append(self)
        return run(self)

    monkeypatch.setattr(sweep.Experiment, "run", interrupted)
    assert main(["report", "--output", str(tmp_path)]) == 130
    assert "Interrupted after 2 of" in capsys.readouterr().err
    counted = [
        r for r in json.loads((tmp_path / "traffic.json").read_text()) if r["source"] == "counted"
    ]
    assert {row["method"] for row in counted} == {"standard", "fa1"}
    assert "Interrupted" in (tmp_path / "index.html").read_text()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_report_that_is_wrong_ends_with_1(tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("fa2_numba.accounting.plots.draw", lambda rows, plan: [])
    monkeypatch.setattr(sweep.Sweep, "all_equal", False)
    assert main(["report", "--output", str(tmp_path)]) == 1


# --- what the user gets wrong ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ("", "COMMAND"),
        ("bogus", "COMMAND"),
        ("io", "--n"),
        ("io --n x", "--n"),
        ("io --n 0", "--n"),
        ("io --n 4 --n-k 0", "--n-k"),
        ("io --n 4 --d 257", "--d"),
        ("io --n 4 --heads 3 --heads-kv 2", "--heads-kv"),
        ("io --n 4 --batch -1", "--batch"),
        ("io --n 4 --dtype fp8", "--dtype"),
        ("io --n 4 --method fa9", "--method"),
        ("io --n 4 --window 3", "--window"),
        ("io --n 4 --window=-2,0", "--window"),
        ("io --n 4 --block-r 0", "--block-r"),
        ("check", "FILE"),
        ("check absent.npz", "FILE"),
        ("check a.npy b.npy", "FILE"),
        ("check broken.npz", "FILE"),
        ("check own.npz --scale nan", "scale"),
        ("check own.npz --window=-2,0", "window"),
        ("check own.npz --scale x", "--scale"),
        ("report --input absent.safetensors", "FILE"),
        ("report --output own.npz", "--output"),
        ("report --outpt x", "--outpt"),
    ],
)
def test_bad_input_is_one_line_on_stderr_that_names_the_argument(
    own, capsys, monkeypatch, argv, names
):
    monkeypatch.chdir(own.parent)
    (own.parent / "broken.npz").write_bytes(b"PK\x03\x04")
    assert main(argv.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    *progress, message = printed.err.splitlines()
    assert message.startswith("fa2-numba")
    assert names in message
    assert len(progress) <= 1  # which machine it is
    assert "Traceback" not in printed.err


# --- bench -----------------------------------------------------------------------------------


def test_bench_says_that_it_needs_a_gpu(capsys):
    assert main(["bench", "--n", "256"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        "fa2-numba bench: no GPU can be used, and only a GPU can be timed; "
        "fa2-numba doctor says why\n"
    )


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--n", "0"], "n: got 0, accepted: 1 or more"),
        (["--rounds", "0"], "rounds: got 0, accepted: 1 or more"),
        (["--method", "fa9"], "method: got 'fa9', accepted: standard, fa1, fa2"),
    ],
)
def test_bench_names_the_argument_that_it_refuses(capsys, monkeypatch, argv, message):
    monkeypatch.setattr(doctor, "gpu_usable", lambda: True)
    assert main(["bench", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"fa2-numba bench: {message}")


def test_bench_prints_what_it_timed_and_what_it_did_not(capsys, monkeypatch):
    from fa2_numba.accounting import bench

    def compare(cell, methods, rounds):
        return [cell.row("fa2", [2.0, 1.0, 4.0]), cell.row("torch SDPA", [1.0])], ["fa1: too old"]

    monkeypatch.setattr(doctor, "gpu_usable", lambda: True)
    monkeypatch.setattr(bench, "compare", compare)
    assert main(["bench", "--n", "1024", "--d", "64", "--causal"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("batch 1, 16 heads, N = 1,024, d = 64, bf16, causal, forward\n")
    assert printed.out.index("torch SDPA") < printed.out.index("fa2 ")
    assert printed.err == "not timed: fa1: too old\n"
    assert main(["bench", "--json"]) == 0
    assert [row["milliseconds"] for row in rows(capsys)] == [2.0, 1.0]


# --- before Numba is imported ----------------------------------------------------------------


def process(code, **environment):
    """Run Python without the simulator set, unless `environment` sets it."""
    inherited = {k: v for k, v in os.environ.items() if k != "NUMBA_ENABLE_CUDASIM"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
    )


def test_help_and_doctor_work_without_numba():
    code = "import sys; sys.modules['numba'] = None; from fa2_numba.cli import main; "
    for argv in (["--help"], ["report", "--help"]):
        done = process(f"{code} sys.exit(main({argv}))")
        assert (done.returncode, done.stderr) == (0, "")
        assert "usage: fa2-numba" in done.stdout
    done = process(f"{code} sys.exit(main(['doctor', '--json']))")
    assert done.returncode == 1, done.stderr
    assert any(row["status"] == "fail" for row in json.loads(done.stdout))


@pytest.mark.skipif(bool(doctor.probe(import_numba=False).gpus), reason="this machine has a GPU")
def test_without_a_gpu_the_simulator_is_switched_on_and_named():
    code = "import sys; from fa2_numba.cli import main; sys.exit(main(['example', '--json']))"
    done = process(code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["no GPU: simulator"]
    assert len(json.loads(done.stdout)) == 14
    done = process(code, NUMBA_ENABLE_CUDASIM="0")
    assert done.returncode == 2
    assert done.stderr.startswith("fa2-numba example: NUMBA_ENABLE_CUDASIM: got 0")
    assert done.stderr.count("\n") == 1


def test_the_module_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "fa2_numba", "io"], capture_output=True, text=True, env=os.environ
    )
    assert done.returncode == 2
    assert done.stderr == "fa2-numba io: the following arguments are required: --n\n"
