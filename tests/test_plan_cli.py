"""``lightning-moe plan``: what it prints, how fast it starts, and one line for whatever a user gets wrong."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_moe_strategy import __main__
from lightning_moe_strategy.cli.plan import run_plan
from lightning_moe_strategy.plan.planner import PlanRequest, plan, search
from lightning_moe_strategy.plan.table import BAR_WIDTH

SEED = "--model glm-5.2 --cluster gb200-nvl72 --gpus 256 --context 1M --assumptions seed"
LAYOUT = "--d_rep 4 --fsdp 1 --cp 64 --e_fsdp 4 --ep 64"
TINY = "--model qwen3-30b-a3b --cluster h200-nvl8 --gpus 16 --context 32k"
COMMAND = str(Path(sys.executable).parent / "lightning-moe")


def run(command: str, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of ``lightning-moe plan``."""
    try:
        status = run_plan([*command.split(), *more])
    except SystemExit as ended:
        status = int(ended.code or 0)
    written = capsys.readouterr()
    return status, written.out, written.err


@pytest.mark.parametrize("arguments", ["--help", f"{SEED} {LAYOUT} --json", SEED])
def test_a_plan_starts_in_half_a_second(arguments):
    seconds = []
    for _ in range(5):
        start = _seconds_of_children()
        subprocess.run([COMMAND, "plan", *arguments.split()], check=True, capture_output=True)
        seconds.append(_seconds_of_children() - start)
    # Of the processor, and the fastest: other processes of the machine only ever add to it.
    assert min(seconds) < 0.5, seconds


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_plan_imports_neither_torch_nor_lightning_and_rich_for_tables_alone(tmp_path):
    code = (
        "import sys\n"
        "from lightning_moe_strategy.cli.plan import run_plan\n"
        f"assert run_plan({[*TINY.split(), '--json']}) == 0\n"
        "heavy = {'torch', 'lightning', 'pytorch_lightning', 'numpy', 'rich', 'plotly'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)


def test_the_command_is_in_the_help_and_is_dispatched(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lightning-moe", "--help"])
    assert __main__.main() == 0 and "\n  plan " in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["lightning-moe", "plan", *TINY.split(), "--json"])
    assert __main__.main() == 0
    assert json.loads(capsys.readouterr().out)["world"] == 16


def test_every_field_of_a_request_is_an_option(capsys):
    _, shown, _ = run("--help", capsys)
    assert {name for name in PlanRequest.__dataclass_fields__ if f"--{name} " not in shown} == set()


def test_json_is_the_plan_and_nothing_else(capsys):
    status, out, err = run(f"{SEED} {LAYOUT} --json", capsys)
    request = PlanRequest(
        model="glm-5.2", assumptions="seed", d_rep=4, fsdp=1, cp=64, e_fsdp=4, ep=64, context=2**20, gpus=256
    )
    assert (status, err) == (0, "") and json.loads(out) == plan(request).to_json()


def test_options_reach_the_plan(capsys):
    _, out, _ = run(f"{TINY} --optimizer muon --micro_batch 2 --recompute none --balance worst --json", capsys)
    request = PlanRequest(
        model="qwen3-30b-a3b",
        cluster="h200-nvl8",
        gpus=16,
        context=32768,
        optimizer="muon",
        micro_batch=2,
        recompute="none",
        balance="worst",
    )
    assert json.loads(out) == plan(request).to_json()


def test_a_token_chunk_reaches_the_plan(capsys):
    _, out, _ = run(f"--model glm-5.2 {LAYOUT} --fa4_token_chunk 2048 --json", capsys)
    request = PlanRequest(model="glm-5.2", d_rep=4, fsdp=1, cp=64, e_fsdp=4, ep=64, fa4_token_chunk=2048)
    assert json.loads(out) == plan(request).to_json()


def test_search_is_the_ranking_as_a_list(capsys):
    _, out, _ = run(f"{TINY} --search --json", capsys)
    found = search(PlanRequest(model="qwen3-30b-a3b", cluster="h200-nvl8", gpus=16, context=32768), limit=20)
    assert len(found) > 1 and json.loads(out) == [each.to_json() for each in found]


def test_compare_holds_both_plans_and_their_ratios(capsys):
    _, out, _ = run(f"{SEED} --json --compare 4,1,64/4,64 8,1,32/4,64", capsys)
    compared = json.loads(out)
    assert compared["first"]["layout"]["cp"] == 64 and compared["second"]["layout"]["cp"] == 32
    assert any(row["ratio"] and row["ratio"] == row["second"] / row["first"] for row in compared["rows"])


# Tables


@pytest.mark.parametrize("columns", [100, 80])
def test_the_tables_hold_the_plan_in_columns_of_a_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    status, out, err = run(f"{SEED} {LAYOUT}", capsys)
    values = plan(PlanRequest(model="glm-5.2", assumptions="seed", d_rep=4, fsdp=1, cp=64, e_fsdp=4, ep=64)).to_json()
    assert (status, err) == (0, "") and max(map(len, out.splitlines())) <= columns
    memory = values["memory_gb"]
    for gb in (memory["total"], memory["headroom"], *memory["buckets"].values()):
        assert f"{gb:,.2f}" in out
    for text in ("d_rep 4, fsdp 1, cp 64", "e_fsdp 4, ep 64", f"{values['efsdp']['min_tokens_to_hide']:,.0f}"):
        assert text in out
    assert values["verdict"] in " ".join(out.split())
    bars = {line.split("  ")[1].strip(): line.count("█") for line in out.splitlines() if "█" in line}
    assert bars["peak"] == pytest.approx(BAR_WIDTH * memory["total"] / memory["device"], abs=1)


def test_a_plan_that_does_not_fit_says_so_and_its_bar_runs_over(capsys):
    status, out, _ = run("--model glm-5.2 --cluster h100-nvl8 --gpus 64 --context 1M", capsys)
    assert status == 0
    assert "▶" in next(line for line in out.splitlines() if line.strip().startswith("peak"))


def test_ranking_and_comparison_fit_100_columns(capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    _, ranking, _ = run(f"{SEED} --search", capsys)
    best = search(PlanRequest(model="glm-5.2", assumptions="seed"), limit=1)[0].to_json()["layout"]
    first = next(line for line in ranking.splitlines() if line.strip().startswith(tuple("0123456789")))
    assert first.split()[0] == (
        f"{best['d_rep']},{best['fsdp']},{best['cp']}/{best['e_rep']},{best['e_fsdp']},{best['ep']}"
    )
    _, comparison, _ = run(f"{SEED} --compare 4,1,64/4,64 8,1,32/4,64", capsys)
    assert "8,1,32/4,64" in comparison and "B / A" in comparison
    assert max(len(line) for text in (ranking, comparison) for line in text.splitlines()) <= 100


# Bad input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--model glm-5.3", ["model('glm-5.3')", "glm-5.2"]),
        ("--model glm-5.2 --cluster gb200", ["cluster('gb200')", "gb200-nvl72"]),
        (f"{SEED} --d_rep 3 --fsdp 1 --cp 64", ["256"]),
        (f"{SEED} {LAYOUT} --context 1000001", ["context(1000001)"]),
        (f"{SEED} --gpus 0", ["gpus(0)"]),
        (f"{SEED} --gpus -8", ["gpus(-8)"]),
        (f"{SEED} --context 0", ["context(0)"]),
        (f"{SEED} --context -1", ["context(-1)"]),
        (f"{SEED} --cp 0", ["cp(0)"]),
        (f"{SEED} --cp -2", ["cp(-2)"]),
        (f"{SEED} --micro_batch 0", ["micro_batch(0)"]),
        (f"{SEED} --fa4_token_chunk 64", ["fa4_token_chunk(64)", "fa4_pr_2816"]),
        (f"{SEED} --achieved_tflops 0", ["achieved_tflops(0"]),
        (f"{SEED} --achieved_tflops nan", ["achieved_tflops(nan)"]),
        (f"{SEED} --tokens -1", ["tokens(-1"]),
        (f"{SEED} --context 1.5k5", ["--context", "'1.5k5'"]),
        (f"{SEED} --context 0.3", ["--context", "'0.3'"]),
        (f"{SEED} --tokens inf", ["--tokens", "'inf'"]),
        (f"{SEED} --gpus many", ["--gpus", "'many'"]),
        (f"{SEED} --optimizer sgd", ["--optimizer", "'sgd'", "muon"]),
        (f"{SEED} --cpp 4", ["--cpp"]),
        (f"{SEED} --compare 4,1,64 4,1,64/4,64", ["4,1,64"]),
        (f"{SEED} --compare 4,1,64/4,64 a,b,c/d,e", ["a,b,c/d,e"]),
        (f"{SEED} --compare 4,1,64/4,64", ["--compare"]),
        (f"{SEED} --search --compare 4,1,64/4,64 4,1,64/4,64", ["--compare", "--search"]),
        (f"{SEED} --compare 4,1,64/4,64 4,1,64/4,64 --html x.html", ["--html"]),
        ("--gpus 8", ["--model"]),
    ],
)
@pytest.mark.parametrize("output", ["", " --json"])
def test_bad_input_is_one_line_and_status_2(arguments, said, output, capsys):
    status, out, err = run(arguments + output, capsys)
    assert (status, out) == (2, "")
    assert err.startswith("lightning-moe plan: ") and err.count("\n") == 1 and err.endswith("\n"), err
    assert all(word in err for word in said), err


def test_a_dense_model_is_refused(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100}))
    status, out, err = run("--gpus 8 --context 8k", capsys, "--model", str(config))
    assert (status, out, err.count("\n")) == (2, "", 1) and "no experts" in err


@pytest.mark.parametrize("words", [["--model", "no\nsuch.json"], ["--model", "glm-5.2", "--c\npp"]])
def test_a_line_break_in_what_a_user_typed_stays_one_line(words, capsys):
    status, _, err = run("--gpus 8", capsys, *words)
    assert status == 2 and err.count("\n") == 1


@pytest.mark.parametrize("name", ["missing/plan.html", "", "folder", "file/plan.html"])
def test_a_page_that_cannot_be_written_leaves_nothing(name, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("kept")
    status, out, err = run(TINY, capsys, "--json", "--html", f"{tmp_path}/{name}")
    assert (status, out, err.count("\n")) == (2, "", 1) and "html(" in err and "cannot be written" in err
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused(tmp_path, capsys):
    tmp_path.chmod(0o500)
    status, _, err = run(TINY, capsys, "--html", str(tmp_path / "plan.html"))
    assert status == 2 and "Permission denied" in err


def test_a_refusal_leaves_the_page_of_before(tmp_path, capsys):
    page = tmp_path / "plan.html"
    page.write_text("the page of before")
    status, _, _ = run(f"{TINY} --cp 3", capsys, "--html", str(page))
    assert status == 2 and page.read_text() == "the page of before"


def test_a_reader_that_leaves_early_gets_no_traceback():
    ran = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {COMMAND} plan {TINY} --json | true"], capture_output=True, text=True
    )
    assert "Traceback" not in ran.stderr
