"""The training of a small GPT: two steps on the simulator, and when curves are the same."""

import itertools
import json

import pytest

from fa2_numba import simulator

loss_curves = pytest.importorskip("benchmarks.loss_curves")
OURS, TORCH, WINDOW = loss_curves.OURS, loss_curves.TORCH, loss_curves.WINDOW


@pytest.fixture
def training():
    pytest.importorskip("torch")
    from benchmarks import training

    return training


# --- the rule --------------------------------------------------------------------------------


def run(name, seed, early, late=0.0, steps=100):
    """A curve that falls from 5, `early` above it in the first two fifths and `late` after."""
    losses = [5 - 0.02 * n + (early if n < 0.4 * steps else late) for n in range(steps)]
    return {"attention": name, "seed": seed, "losses": losses}


OF_TORCH = [run(TORCH, 0, 0.0), run(TORCH, 1, 0.1, 0.01), run(TORCH, 2, -0.2, 0.02)]


@pytest.mark.parametrize(
    ("early", "late", "same"),
    [(0.0, 0.0, True), (0.09, 0.015, True), (0.11, 0.0, False), (0.0, 0.025, False)],
)
def test_a_curve_is_the_same_if_it_is_as_close_as_chance_allows(early, late, same):
    """0.1 is the least of the seeds at first, 0.02 the most in the end."""
    found = loss_curves.overlay([run(OURS, 0, early, late), *OF_TORCH])
    assert found["same"] is same
    assert found["ours"] == pytest.approx(max(early, late))
    assert found["seeds"] == pytest.approx(0.1)
    assert (found["again"], found["other_kernels"]) == (None, None)


def test_noise_of_one_seed_is_told_beside():
    again, other = run(TORCH, 0, 0.001), run("torch, cuDNN", 0, 0.003)
    found = loss_curves.overlay([run(OURS, 0, 0.002), *OF_TORCH, again, other])
    assert found["again"] == pytest.approx(0.001)
    assert found["other_kernels"] == pytest.approx(0.003)


def test_nothing_is_said_while_runs_are_missing():
    assert loss_curves.overlay([]) is None
    assert loss_curves.overlay(OF_TORCH) is None
    assert loss_curves.overlay([run(OURS, 0, 0.0), *OF_TORCH[:1]]) is None
    two_seeds = loss_curves.overlay([run(OURS, 0, 0.0), *OF_TORCH[:2]])
    assert two_seeds["same"] is None
    assert "ended before the last seed" in loss_curves.verdict(two_seeds)


def test_curves_are_smoothed_over_a_window():
    assert loss_curves.smoothed([1.0] * 5) == [1.0]  # shorter than a window
    curve = loss_curves.smoothed([0.0] * WINDOW + [WINDOW])
    assert curve == [0.0, 1.0]


# --- the text and the runs -------------------------------------------------------------------


def test_the_text_is_ours_first_and_as_long_as_asked(training):
    found = training.text(100_000)
    assert len(found) == 100_000
    own = sorted([training.ROOT / "README.md", *(training.ROOT / "docs").rglob("*.md")])
    assert found.startswith(own[0].read_bytes()[:1000])
    assert training.text(100_000) == found


def test_the_model_sees_no_byte_that_comes_later(training):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = training.GPT(training.TINY, training.torchs)
    tokens = torch.arange(training.TINY.context)[None]
    changed = tokens.clone()
    changed[0, 5] = 99
    before, after = model(tokens), model(changed)
    assert before.shape == (1, training.TINY.context, 256)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


@pytest.mark.skipif(not simulator.ACTIVE, reason="runs on the simulator")
def test_two_steps_of_every_run(training, tmp_path, capsys, monkeypatch):
    target = tmp_path / "training.json"
    monkeypatch.setattr("sys.argv", ["training", "--tiny", "--output", str(target)])
    monkeypatch.setattr(training.torch.cuda, "is_available", lambda: False)
    training.main()
    record = json.loads(target.read_text())
    ran = [(run["attention"], run["seed"]) for run in record["runs"]]
    failed = [(run["attention"], run["seed"]) for run in record["failed"]]
    assert failed == [("torch, cuDNN", 0)]  # which needs a GPU
    assert sorted(ran + failed) == sorted(training.RUNS)
    losses = {each: run["losses"] for each, run in zip(ran, record["runs"], strict=True)}
    assert losses[OURS, 0] == pytest.approx(losses[TORCH, 0], abs=2e-3)
    assert losses[TORCH, 1] != losses[TORCH, 0]
    for name in itertools.chain(losses.values()):
        assert len(name) == training.TINY.steps
    assert record["overlay"]["same"] is True
    assert len(record["setting"]["text_sha256"]) == 64


def test_without_a_gpu_only_the_trial_runs(training, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["training"])
    monkeypatch.setattr(training.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        training.main()
    assert "only --tiny" in capsys.readouterr().err
