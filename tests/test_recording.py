"""What `benchmarks.test_gpu` and `benchmarks.sanitizer` select, run and read; no GPU is asked."""

import json
import subprocess
import sys

import pytest

sanitizer = pytest.importorskip("benchmarks.sanitizer")
test_gpu = pytest.importorskip("benchmarks.test_gpu")

ABOUT = {"gpu": "a GPU", "driver": "1.2", "versions": {}, "commit": "abc", "date": "2026-01-01"}


# ---- the tests on a GPU -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--name", "a", "--part", "1/2"], "--name: a part"),
        (["--files", "tests/test_ptx.py"], "the record of all tests stays"),
        (["-k", "fa3"], "the record of all tests stays"),
    ],
)
def test_what_does_not_go_together(monkeypatch, capsys, given, message):
    monkeypatch.setattr(sys, "argv", ["test_gpu", *given])
    with pytest.raises(SystemExit):
        test_gpu.options()
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "file", "files", "command"),
    [
        ([], "tests.json", [str(test_gpu.TESTS)], "pytest -m gpu"),
        (["--part", "2/3"], "tests-2of3.json", [str(test_gpu.TESTS)], "pytest -m gpu"),
        (
            ["--name", "few", "--files", "a.py", "b.py", "-k", "not c", "--durations=9"],
            "tests-few.json", ["a.py", "b.py"], "pytest a.py b.py -m gpu -k 'not c' --durations=9",
        ),
    ],
)  # fmt: skip
def test_a_selection_has_its_own_record(monkeypatch, tmp_path, given, file, files, command):
    calls = []

    def run(arguments, plugins):
        calls.append(arguments)
        plugins[0].numbers["passed"] += 1
        return pytest.ExitCode.OK

    monkeypatch.setattr(test_gpu, "environment", lambda: ABOUT)
    monkeypatch.setattr(test_gpu, "results_folder", lambda gpu: tmp_path)
    monkeypatch.setattr(test_gpu.pytest, "main", run)
    environ: dict[str, str] = {}
    monkeypatch.setattr(test_gpu.os, "environ", environ)
    monkeypatch.setattr(sys, "argv", ["test_gpu", "--workers", "1", "--gpus", "2", *given])
    assert test_gpu.main() == 0 and environ["FA2_TEST_GPUS"] == "2"
    assert all(call[: len(files) + 1] == [*files, "-m"] for call in calls)
    assert all(call[call.index("-k") + 1] == ("not c" if "-k" in given else "") for call in calls)
    (written,) = tmp_path.iterdir()
    record = json.loads(written.read_text())
    assert (written.name, record["command"]) == (file, command)


# ---- compute-sanitizer ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "errors"),
    [
        ("ERROR SUMMARY: 0 errors", 0),
        ("ERROR SUMMARY: 12 errors", 12),
        ("RACECHECK SUMMARY: 3 hazards displayed (1 error, 2 warnings)", 3),
    ],
)
def test_a_tool_is_read_by_its_summary(line, errors):
    after = "========= ERROR SUMMARY: 5 errors were not printed"
    assert sanitizer.summary(f"right\n========= {line}\n{after}") == (errors, line)


def test_a_tool_that_breaks_has_no_summary():
    assert sanitizer.summary("Segmentation fault\n") == (None, "")


def recorded(monkeypatch, tmp_path, answers):
    """Exit code and record, where `answers` (tool, is a fault) says what a run finds."""

    def run(path, n, tool, arguments, limit):
        errors = answers(tool, len(arguments) == 2)
        return {"errors": errors, "summary": "", "exit_code": 0, "cases_right": 4, "seconds": 1.0}

    monkeypatch.setattr(sanitizer, "environment", lambda: ABOUT)
    monkeypatch.setattr(sanitizer, "results_folder", lambda gpu: tmp_path)
    monkeypatch.setattr(sanitizer, "run", run)
    monkeypatch.setattr(
        sanitizer, "faults", lambda: {f"a {tool}": tool for tool in sanitizer.TOOLS}
    )
    tool = tmp_path.parent / "compute-sanitizer"
    tool.write_text("#!/bin/sh\necho Version 2026.4.0 'build 1'\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sys, "argv", ["sanitizer", "--compute-sanitizer", str(tool)])
    code = sanitizer.main()
    (written,) = tmp_path.iterdir()
    return code, json.loads(written.read_text())


def test_no_errors_and_a_fault_seen_by_each_tool(monkeypatch, tmp_path):
    code, record = recorded(monkeypatch, tmp_path, lambda tool, fault: int(fault))
    assert code == 0 and record["compute_sanitizer"] == "2026.4.0"
    assert [found["tool"] for found in record["tools"]] == list(sanitizer.TOOLS)
    assert [(f["fault"], f["errors"]) for f in record["faults"]] == [
        (f"a {tool}", 1) for tool in sanitizer.TOOLS
    ]


@pytest.mark.parametrize(
    "answers",
    [
        lambda tool, fault: int(fault or tool == "racecheck"),  # an error in fa3
        lambda tool, fault: int(fault and tool != "racecheck"),  # a tool that sees nothing
        lambda tool, fault: 1 if fault else None if tool == "initcheck" else 0,  # one that broke
    ],
)
def test_all_else_is_a_failure(monkeypatch, tmp_path, answers):
    code, _ = recorded(monkeypatch, tmp_path, answers)
    assert code == 1


def test_the_faults_say_their_tools():
    pytest.importorskip("numba.cuda")
    try:
        found = sanitizer.faults()
    except subprocess.CalledProcessError as failed:
        pytest.fail(failed.stderr)
    assert set(found.values()) == set(sanitizer.TOOLS)
