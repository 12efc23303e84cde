"""The page of a run: what was logged stands on it, what was not says what logs it, and a browser shows it offline."""

import base64
import csv
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from plotly import graph_objects
from torch.utils.tensorboard import SummaryWriter

from lightning_moe_strategy import FSDPCPEPStrategy, MoELanguageModel, PlanCheck, TextDataModule, ThroughputMonitor
from lightning_moe_strategy.callbacks.receipt import Receipt
from lightning_moe_strategy.cli.report import run_report
from lightning_moe_strategy.plan.figures import THEMES
from lightning_moe_strategy.report import expert_series
from lightning_moe_strategy.report.expert_series import Series, Window, append_window, continue_series, read_series
from lightning_moe_strategy.report.load_arithmetic import dead_experts, grouped_skew, skew, what_if
from lightning_moe_strategy.report.metrics import MAX_POINTS, Curve, read_metrics
from lightning_moe_strategy.report.page import page_html, read_report, write_report
from lightning_moe_strategy.report.run_files import read_receipt
from lightning_moe_strategy.report.run_folder import ReportError, RunFolder, find_run
from tests import chromium

LAYERS = ("model.layers.0.experts", "model.layers.1.experts")
MB = 1e6


def window(step: int, *layers: Sequence[int], ep: int = 2, **figures: float) -> Window:
    tokens = tuple(np.array(layer, dtype=np.int64) for layer in layers)
    return Window(since=step - 10, step=step, num_logs=1, ep=ep, tokens=tokens, figures=figures)


def write_series(run: Path, *windows: Window) -> None:
    path = run / expert_series.FILE_NAME
    sizes = [len(layer) for layer in windows[0].tokens]
    continue_series(path, dict(zip(LAYERS, sizes, strict=False)), step=0)
    for each in windows:
        append_window(path, each)


def write_table(run: Path, rows: list[dict[str, object]]) -> None:
    names = dict.fromkeys(name for row in rows for name in row)
    with (run / "metrics.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, [*names])
        table.writeheader()
        table.writerows(rows)


RECEIPTS = [
    {"step": 10, "num_steps": 1, "seconds": 2.0, "exposed": {"gather": 0.1, "dispatch": 0.3}, "first_layer": "1"},
    {"step": 20, "num_steps": 3, "seconds": 1.0, "exposed": {"gather": 0.2, "combine": 0.0}, "first_layer": "0"},
    {"step": 30, "num_steps": 1, "seconds": 1.0, "exposed": {"gather": 0.0}, "first_layer": "0"},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that logged everything, small enough to know every number of it."""
    folder = tmp_path / "logs" / "version_0"
    folder.mkdir(parents=True)
    rows: list[dict[str, object]] = [
        {"step": step, "train_loss_step": 6.0 - step / 10, "lr-AdamW": 1e-3, "tokens_seen": 100 * step}
        for step in (1, 10, 20)
    ]
    rows += [
        {"step": step, "tokens_per_second": speed, "tokens_per_second_per_gpu": speed / 2, "mfu": speed / 1e5}
        | {f"seconds/{phase}": 0.1 for phase in ("data", "forward", "backward", "optimizer")}
        for step, speed in ((10, 900.0), (20, 1000.0), (21, 5000.0))
    ]
    rows += [
        {"step": 2, "plan_check/measured_gb": 81.5, "plan_check/predicted_gb": 80.0},
        {"step": 20, "val_loss": 4.25, "router_loss/z": 0.5, "my metric": 1.0},
        {"step": 20, "expert_load/train/skew": 1.5, "expert_load/train/dead_experts": 7},
    ]
    write_table(folder, rows)
    write_series(
        folder,
        window(10, [1, 1, 1, 1], [4, 0, 0, 4], rank_skew_at_home=1.6, rank_skew_computed=1.0, moved_experts=2.5),
        window(20, [6, 2, 0, 0], [2, 2, 2, 2], rank_skew_at_home=1.5, rank_skew_computed=1.0, moved_experts=1.5),
    )
    (folder / "receipt.jsonl").write_text("".join(json.dumps(line) + "\n" for line in RECEIPTS))
    described = {
        "max_steps": 20,
        "world": 2,
        "device": "CPU",
        "layout": dict(d_rep=1, fsdp=2, cp=1, cp_inter=1, e_rep=1, e_fsdp=1, ep=2),
        "parameters": 1000,
        "expert_parameters": 750,
        "trained_parameters": 1000,
        "model": "MyModel",
        "versions": {"torch": "2.13.0"},
    }
    (folder / "run.json").write_text(json.dumps(described))
    return folder


def data_of(run: Path) -> dict[str, Any]:
    html = page_html(read_report(RunFolder(path=run)))
    (text,) = re.findall(r'<script type="application/json" id="report">(.*?)</script>', html, re.DOTALL)
    return dict(json.loads(text))


def cards(data: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {card["id"]: (card["value"], card["note"]) for card in data["cards"]}


def block(data: dict[str, Any], id: str) -> dict[str, Any]:
    (found,) = [each for each in (*data["training"], *data["load"]) if each["id"] == id]
    return dict(found)


# Arithmetic


def test_what_another_ep_or_etp_would_make_of_the_skew():
    """By hand: 16 rows; at ep 8 the mean is 2, at ep 4 it is 4, at ep 2 it is 8."""
    tokens_E = np.array([8, 0, 2, 2, 1, 1, 1, 1])
    assert [(each.ep, each.mean) for each in what_if([tokens_E], 8)] == [(2, 12 / 8), (4, 8 / 4), (8, 8 / 2)]
    # Neighbours that share their experts in slices take the mean of their loads: (8 + 0) / 2 of 2.
    assert [grouped_skew(tokens_E, 8, etp) for etp in (1, 2, 4, 8)] == [4.0, 2.0, 1.5, 1.0]
    two = what_if([tokens_E, np.ones(8, dtype=np.int64)], 4)
    assert [(each.ep, each.mean, each.worst) for each in two] == [(2, 1.25, 1.5), (4, 1.5, 2.0), (8, 2.5, 4.0)]
    # Layers of 6 and 4 experts: 2 alone divides both, and the ep of the run is shown whatever it is.
    assert [each.ep for each in what_if([np.ones(6), np.ones(4)], 1)] == [1, 2]
    assert skew(np.zeros(3)) == 1.0 and dead_experts(np.array([0, 3, 0])) == 2


# Files


@pytest.mark.parametrize("most", [200, 60_000, 4_000_000_000, 2**40])
def test_counts_of_any_size_come_back_exactly(tmp_path: Path, most: int):
    counts = np.random.default_rng(0).integers(0, most, (3, 2, 5))
    windows = [window(10 * n + 10, *tokens, a_figure=0.1) for n, tokens in enumerate(counts)]
    write_series(tmp_path, *windows)
    found = read_series(tmp_path / expert_series.FILE_NAME)
    assert isinstance(found, Series) and found.layers == LAYERS and found.num_experts == (5, 5)
    for read, each in zip(found.windows, windows, strict=True):
        assert (read.since, read.step, read.figures) == (each.since, each.step, each.figures)
        assert all(np.array_equal(one, other) for one, other in zip(read.tokens, each.tokens, strict=True))


def test_windows_are_added_up_within_one_ep():
    windows = [window(10, [1, 2], a=1.0), window(20, [3, 4], a=2.0), window(30, [5, 6], ep=1), window(40, [7, 8], ep=1)]
    first, second = expert_series.merged(windows, 3)
    assert (first.since, first.step, first.num_logs, first.tokens[0].tolist()) == (0, 20, 2, [4, 6])
    assert first.figures == {"a": 1.5} and (second.since, second.ep, second.tokens[0].tolist()) == (20, 1, [12, 14])


def test_a_line_that_is_no_window_is_left_out(tmp_path: Path):
    write_series(tmp_path, window(10, [1, 2], [3, 4]), window(20, [1, 2], [3, 4]))
    path = tmp_path / expert_series.FILE_NAME
    header, first, second = path.read_text().splitlines()
    wrong = json.dumps(json.loads(second) | {"tokens": "AAAA"})
    path.write_text("\n".join([header, wrong, "[]", '{"step": 1}', first[:50], second]))
    found = read_series(path)
    assert found is not None and [each.step for each in found.windows] == [20]
    path.write_text("")
    assert read_series(path) is None and read_series(tmp_path / "none") is None


def test_the_newest_version_of_the_place_used_last_is_the_run(tmp_path: Path):
    for name, age in (("old/version_12", 500), ("logs/version_9", 100), ("logs/version_10", 300), ("logs/.hidden", 0)):
        (tmp_path / name).mkdir(parents=True)
        file = tmp_path / name / "metrics.csv"
        file.write_text("step\n")
        os.utime(file, (1e9 - age, 1e9 - age))
    found = find_run(tmp_path)
    assert found.path == tmp_path / "logs/version_10"
    assert found.others == ("logs/version_9", "old/version_12")
    assert find_run(tmp_path / "logs/version_9").path == tmp_path / "logs/version_9"
    # A default_root_dir that has a file of its own, and a run with metrics below.
    (tmp_path / "receipt.jsonl").write_text("{}")
    os.utime(tmp_path / "receipt.jsonl", (1e9 - 400, 1e9 - 400))
    assert find_run(tmp_path).path == tmp_path / "logs/version_10"


def test_a_folder_without_a_run_is_one_clear_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for name, words in (("empty", "holds no run"), ("nowhere", "does not exist"), ("file", "is a file")):
        with pytest.raises(ReportError, match=rf"run_dir\('.*{name}'\) {words}"):
            find_run(tmp_path / name)
    assert run_report([str(tmp_path / "empty")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lightning-moe report: run_dir(") and error.count("\n") == 1 and "default_root_dir" in error


def test_a_table_is_read_with_gaps_torn_rows_and_values_that_are_not_finite(tmp_path: Path):
    (tmp_path / "metrics.csv").write_text(
        "epoch,loss,step,other\n0,1.5,3,\n0,2.5,1,\n0,,2,7\n0,nan,4,x\n0,9.5,4,\n0,1.2"
    )
    metrics = read_metrics(tmp_path)
    assert set(metrics.curves) == {"loss", "other"} and metrics.last_step == 4
    assert list(metrics.curves["loss"].steps) == [1, 3, 4] and list(metrics.curves["loss"].values) == [2.5, 1.5, 9.5]
    assert list(metrics.curves["other"].values) == [7.0]


def test_thinning_keeps_every_peak_and_both_ends():
    values = [math.nan if step == 5 else float(step % 7) for step in range(100_000)]
    values[77_777], values[33_333] = 1e6, -1e6
    curve = Curve(name="loss", steps=range(100_000), values=values)
    drawn = curve.thinned()
    assert len(drawn.values) <= MAX_POINTS and drawn.steps[0] == 0 and drawn.steps[-1] == 99_999
    assert max(drawn.values) == 1e6 and min(drawn.values) == -1e6 and list(drawn.steps) == sorted(drawn.steps)
    assert all(values[step] == value for step, value in zip(drawn.steps, drawn.values, strict=True))


def test_tensorboard_events_are_read_where_the_package_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(3):
            writer.add_scalar("train_loss", 2.0 - step / 2, step)
    curve = read_metrics(tmp_path).curves["train_loss"]
    assert list(curve.steps) == [0, 1, 2] and list(curve.values) == [2.0, 1.5, 1.0]
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    metrics = read_metrics(tmp_path)
    assert not metrics.curves and "pip install tensorboard" in metrics.problem


def test_a_receipt_is_weighted_by_its_steps(run: Path):
    """6 seconds: 2 + 3 x 1 + 1; waited: 0.1 + 3 x 0.2 for gathers, 0.3 for dispatch."""
    receipt = read_receipt(run)
    assert receipt is not None and receipt.seconds == pytest.approx(6.0)
    assert dict(receipt.exposed_seconds) == pytest.approx({"gather": 0.7, "dispatch": 0.3})
    assert receipt.exposed_share == pytest.approx(1 / 6) and receipt.first_layer == "0"
    (whole,) = receipt.averaged(1).lines
    assert (whole.step, whole.num_steps, whole.seconds) == (30, 5, pytest.approx(1.2))
    assert whole.exposed["gather"] == pytest.approx(0.14)


# The page


def test_the_summary_is_that_of_the_run(run: Path):
    data = data_of(run)
    assert data["headline"] == "Logged to step 21 of 20, 2,000 tokens seen, train_loss_step from 5.900 to 4.000."
    assert data["well"]
    assert cards(data) == {
        "final-loss": ("4.000", "val_loss 4.250"),
        "tokens-per-second": ("1,000", "median of 3, 500 of a rank"),
        "utilisation": ("1.0%", "median; last 5.0%"),
        "exposed": ("16.7%", "most for gather"),
        # Layer 0: 6 of a mean of 2; layer 1: even. Ranks: 8 of a mean of 4, and even.
        "last-skew": ("2.00", "ranks 1.50, steps 11 to 20"),
        "dead-experts": ("2", "most, 2, in layer 0"),
        "peak": ("81.5 GB", "planned 80.0 GB"),
    }
    facts = dict(data["facts"])
    assert facts["Model"] == "MyModel, 1,000 parameters, 75.0% in experts"
    assert facts["Layout"].endswith("dense mesh d_rep 1, fsdp 2, cp 1; expert mesh e_rep 1, e_fsdp 1, ep 2")


def test_every_position_of_the_slider_shows_its_own_window(run: Path):
    data = data_of(run)
    assert data["positions"] == ["steps 1 to 10", "steps 11 to 20"]
    maps = [drawing["data"][0]["z"] for drawing in block(data, "load")["drawings"]]
    percent = [np.frombuffer(base64.b64decode(z["bdata"]), dtype="<u2").reshape(2, 4) for z in maps]
    assert percent[0].tolist() == [[100] * 4, [200, 0, 0, 200]] and percent[1].tolist() == [[300, 100, 0, 0], [100] * 4]
    ranks = [[trace["y"] for trace in drawing["data"]] for drawing in block(data, "ranks")["drawings"]]
    assert ranks == [[[1, 1], [1, 1]], [[1.5, 0.5], [2, 1]]]  # mean of the layers, busiest layer
    assert [drawing["data"][0]["y"] for drawing in block(data, "dead")["drawings"]] == [[0, 2], [2, 0]]
    assert block(data, "layers")["drawings"][0]["data"][0]["z"] == [[1.0, 3.0], [2.0, 1.0]]
    assert block(data, "what-if")["rows"] == [["2", "1.50", "2.00", "this run"], ["4", "2.00", "3.00", ""]]


def test_red_is_for_experts_that_nobody_chose_alone(tmp_path: Path):
    write_series(tmp_path, window(10, [1, 1998, 1, 0]), window(20, [0, 0, 0, 0]))
    maps = [drawing["data"][0]["z"] for drawing in block(data_of(tmp_path), "load")["drawings"]]
    percent = [np.frombuffer(base64.b64decode(z["bdata"]), dtype="<u2").tolist() for z in maps]
    assert percent == [[1, 400, 1, 0], [0, 0, 0, 0]]


def test_layers_with_other_numbers_of_experts_stand_in_one_map(tmp_path: Path):
    write_series(tmp_path, window(10, [1, 3, 2, 2], [5, 5], ep=1))
    data = data_of(tmp_path)
    assert block(data, "load")["drawings"][0]["data"][0]["z"] == [[50, 150, 100, 100], [100, 100, None, None]]
    assert "ep is 1" in block(data, "ranks")["missing"]


def test_before_and_after_balancing(run: Path):
    shown = block(data_of(run), "balance")
    assert shown["rows"] == [["skew of ranks", "1.50", "1.00"], ["experts moved, of a layer", "0", "1.5"]]
    write_series(run, window(10, [4, 0, 0, 4], [4, 0, 0, 4]), window(20, [2, 2, 2, 2], [4, 0, 2, 2]))
    (run / "run.json").write_text('{"balance": "bias"}')
    rows = {name: values for name, *values in block(data_of(run), "balance")["rows"]}
    assert rows["skew of experts, worst layer"] == ["2.00", "2.00"]
    assert rows["skew of experts, mean of the layers"] == ["2.00", "1.50"]
    assert rows["dead experts, all layers"] == ["4.00", "1.00"]


def test_what_a_section_lacks_is_said(tmp_path: Path):
    """Of an old run: a table of metrics, none of our files."""
    write_table(tmp_path, [{"step": 5, "train_loss": 3.0, "expert_load/train/skew": 1.25}])
    data = data_of(tmp_path)
    words = {each["id"]: each["missing"] for each in (*data["training"], *data["load"])}
    for id, name in (
        ("speed", "ThroughputMonitor(every_n_steps=1)"),
        ("mfu", "peak_flops"),
        ("rate", "LearningRateMonitor()"),
        ("phases", "ThroughputMonitor"),
        ("receipt", "Receipt()"),
        ("memory", "PlanCheck()"),
        ("load", "ExpertLoadMonitor"),
    ):
        assert name in words[id], id
    assert words["loss"] == words["skew"] == "" and cards(data)["last-skew"] == ("1.25", "step 5")
    assert "run.json" in dict(data["facts"])["Layout and versions"] and data["positions"] == []


@pytest.mark.parametrize("sources", [[], ["metrics.csv"], ["expert_load.jsonl"], ["run.json"], ["receipt.jsonl"]])
def test_any_one_source_makes_a_page(run: Path, sources: list[str]):
    for path in run.iterdir():
        if path.name not in sources:
            path.unlink()
    data = data_of(run)
    if "metrics.csv" not in sources:
        assert "CSVLogger" in block(data, "loss")["missing"] and cards(data)["final-loss"][0] == "-"
    assert (block(data, "what-if")["rows"] != []) if "expert_load.jsonl" in sources else data["positions"] == []


def test_a_loss_that_is_not_finite_is_bad_and_a_gap(tmp_path: Path):
    write_table(tmp_path, [{"step": 1, "train_loss": 3.0}, {"step": 2, "train_loss": math.nan}])
    data = data_of(tmp_path)
    assert not data["well"] and cards(data)["final-loss"][0] == "nan"
    assert block(data, "loss")["drawings"][0]["data"][0]["y"] == [3.0, None]


def test_words_of_a_user_cannot_break_the_page(run: Path):
    name = "</script><script>alert(1)</script><b>x</b>"
    write_table(run, [{"step": 1, name: 1.0, f"{name} loss": 2.0}])
    (run / "run.json").write_text(json.dumps({"model": name}))
    html = page_html(read_report(RunFolder(path=run)))
    assert "<script>alert" not in html
    (trace,) = block(data_of(run), "loss")["drawings"][0]["data"]
    assert trace["name"].startswith("&lt;/script&gt;")  # plotly takes tags in names for markup


@pytest.mark.parametrize("theme", list(THEMES))
def test_plotly_knows_every_property_of_every_figure(run: Path, theme: str):
    data = data_of(run)
    for each in (*data["training"], *data["load"]):
        for drawn in each["drawings"]:
            text = re.sub(r'"@([a-z]+)"', lambda match: json.dumps(THEMES[theme][match[1]]), json.dumps(drawn))
            assert "@" not in text
            graph_objects.Figure(json.loads(text))  # raises on a name or a value that plotly.js would ignore


def test_the_command_says_which_run_and_starts_without_torch(run: Path):
    (run.parent / "version_1" / "metrics").mkdir(parents=True)
    code = (
        "import sys; from lightning_moe_strategy.__main__ import main; status = main(); print('torch' in sys.modules)"
    )
    out = run.parent / "my.html"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}; sys.exit(status)", "report", str(run.parent), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == f"run: {run}" and lines[-2:] == [f"page: {out}", "False"]
    assert any(line.split() == ["Final", "loss", "4.000", "val_loss", "4.250"] for line in lines)
    assert out.stat().st_size > 4e6 and sorted(path.name for path in run.parent.iterdir()) == [
        "my.html",
        "version_0",
        "version_1",
    ]


def test_a_page_that_cannot_be_written_leaves_nothing(run: Path, capsys: pytest.CaptureFixture[str]):
    assert run_report([str(run), "--out", str(run / "nowhere" / "page.html")]) == 2
    assert "nowhere/page.html') cannot be written: No such file" in capsys.readouterr().err
    with pytest.raises(ReportError, match="it is a folder"):
        write_report(read_report(RunFolder(path=run)), run)
    assert "page.html" not in str(sorted(run.rglob("*")))


# A browser, and runs as users have them


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory):
    if chromium.executable() is None:
        pytest.skip("No Chromium here: `make browser` installs it.")
    profile = tmp_path_factory.mktemp("chromium")
    with chromium.open_page(profile) as opened:
        yield opened
    shutil.rmtree(profile, ignore_errors=True)


def text(tab: chromium.Page, element: str) -> str:
    return str(tab.evaluate(f"document.getElementById('{element}').textContent"))


@pytest.mark.slow
def test_a_browser_shows_the_page_offline_and_the_slider_follows_the_keyboard(tab: chromium.Page, run: Path):
    assert run_report([str(run)]) == 0
    url = (run / "report.html").as_uri()
    for dark, theme in ((False, "light"), (True, "dark")):
        tab.open(url, dark=dark)
        assert tab.evaluate("document.getElementById('load').layout.font.color") == THEMES[theme]["ink"]
    assert text(tab, "final-loss") == "4.000" and text(tab, "time-value") == "steps 11 to 20"
    drawn = "[...document.getElementById('load').calcdata[0][0].z[1]]"
    assert tab.evaluate(drawn) == [100, 100, 100, 100]
    tab.evaluate("document.getElementById('time').focus()")
    tab.press("ArrowLeft", 37)
    assert text(tab, "time-value") == "steps 1 to 10"
    assert tab.evaluate("document.getElementById('time').getAttribute('aria-valuetext')") == "steps 1 to 10"
    assert tab.evaluate(drawn) == [200, 0, 0, 200]
    for width in (400, 1200):
        tab.open(url, width=width)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.problems == []
    assert {each for each in tab.requests if not each.startswith(("data:", "about:"))} == {url}


def trained(directory: Path) -> dict[str, float]:
    """Train with every callback that a page shows something of; what they say on this rank."""
    torch.manual_seed(0)
    throughput, plan_check, receipt = ThroughputMonitor(every_n_steps=2, peak_flops=1e11), PlanCheck(), Receipt()
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=FSDPCPEPStrategy(fsdp=2, ep=2, balance="redundant"), max_steps=8,
        logger=CSVLogger(str(directory), name="logs"), default_root_dir=str(directory), log_every_n_steps=2,
        callbacks=[throughput, plan_check, receipt, LearningRateMonitor("step")], precision="bf16-mixed",
        val_check_interval=4, check_val_every_n_epoch=None, limit_val_batches=1, num_sanity_val_steps=0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    sizes = {"preset": "tiny", "vocab_size": 300, "hidden": 32, "layers": 2, "num_experts": 8, "top_k": 2}
    data = TextDataModule(vocab_size=300, sequence_length=64, batch_size=2)
    trainer.fit(MoELanguageModel(sizes, warmup_steps=2), data)
    assert plan_check.result is not None
    planned = plan_check.result.planned_bytes
    return {
        "measured": plan_check.result.measured_bytes / MB,
        "planned": math.nan if planned is None else planned / MB,
        "tokens": float(throughput.tokens_seen),
        "mfu": throughput.mfu or math.nan,
    }


@pytest.mark.slow
def test_a_real_run_has_its_own_numbers_on_its_page(
    ranks2: Any, tmp_path: Path, tab: chromium.Page, capsys: pytest.CaptureFixture[str]
):
    said, _ = ranks2(trained, tmp_path)
    assert run_report([str(tmp_path)]) == 0
    assert "without" not in capsys.readouterr().out  # every section has its source
    run = tmp_path / "logs" / "version_0"
    tab.open((run / "report.html").as_uri())
    with (run / "metrics.csv").open() as file:
        rows = [*csv.DictReader(file)]

    def column(name: str) -> list[float]:
        return [float(row[name]) for row in rows if row.get(name)]

    series = read_series(run / "expert_load.jsonl")
    assert (
        series is not None
        and sum(int(layer.sum()) for w in series.windows for layer in w.tokens) == 8 * 2 * 2 * 64 * 2 * 2
    )
    assert text(tab, "final-loss") == f"{column('train_loss_step')[-1]:.3f}"
    assert text(tab, "tokens-per-second") == f"{np.median(column('tokens_per_second')):,.0f}"
    assert text(tab, "utilisation") == f"{np.median(column('mfu')):.1%}" and said["mfu"] == pytest.approx(
        column("mfu")[-1]
    )
    assert text(tab, "last-skew") == f"{column('expert_load/train/skew')[-1]:.2f}"
    assert text(tab, "dead-experts") == f"{column('expert_load/train/dead_experts')[-1]:,.0f}"
    assert text(tab, "peak") == f"{said['measured']:,.2f} MB"
    assert f"planned {said['planned']:,.2f} MB" in text(tab, "cards") and f"{said['tokens']:,.0f}" in text(
        tab, "headline"
    )
    exposed = [json.loads(line) for line in (run / "receipt.jsonl").read_text().splitlines()]
    seconds = sum(line["num_steps"] * line["seconds"] for line in exposed)
    waited = sum(line["num_steps"] * sum(line["exposed"].values()) for line in exposed)
    assert text(tab, "exposed") == f"{waited / seconds:.1%}"
    assert tab.evaluate("document.querySelectorAll('.plot .main-svg').length") >= 12
    assert tab.problems == []


@pytest.mark.slow
def test_a_long_run_of_a_large_model_stays_below_10_mb(tmp_path: Path):
    """1e5 rows of 30 metrics; 79 layers of 256 experts, as many windows as the slider has positions and more."""
    rng, names = np.random.default_rng(0), [f"metric {index}" for index in range(29)]
    with (tmp_path / "metrics.csv").open("w") as file:
        file.write(",".join(["step", "train_loss", *names]) + "\n")
        values = np.char.mod("%.7f", rng.random((1000, 30)))
        for step in range(100_000):
            file.write(f"{step}," + ",".join(values[step % 1000]) + "\n")
    path, sizes = tmp_path / expert_series.FILE_NAME, {f"layers.{index}.experts": 256 for index in range(79)}
    continue_series(path, sizes, step=0)
    for step in range(10, 610, 10):
        append_window(path, window(step, *rng.integers(0, 10_000, (79, 256)), ep=64))
    report = read_report(RunFolder(path=tmp_path))
    html = page_html(report)
    assert len(html.encode()) < 10e6 and 20 <= len(report.load.positions) <= 40
    assert "Of 100,000 values" in report.training[0].caption
