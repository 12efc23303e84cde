"""The page of a plan: every position of its sliders holds a plan's numbers, and a browser shows them offline."""

import dataclasses
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from plotly import graph_objects

from lightning_moe_strategy.plan import page
from lightning_moe_strategy.plan.cluster import load_cluster
from lightning_moe_strategy.plan.errors import PlanError
from lightning_moe_strategy.plan.figures import THEMES
from lightning_moe_strategy.plan.page_template import TEMPLATE
from lightning_moe_strategy.plan.planner import PlanRequest, plan, search
from tests import chromium

REQUEST = PlanRequest(model="glm-5.2", d_rep=4, fsdp=1, cp=64, cp_inter=1, e_rep=1, e_fsdp=4, ep=64)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    page.write_page(plan(REQUEST), path)
    return path


@pytest.fixture(scope="module")
def data(file: Path) -> dict[str, Any]:
    (text,) = re.findall(r'<script type="application/json" id="plan">(.*?)</script>', file.read_text(), re.DOTALL)
    return dict(json.loads(text))


def cards(data: dict[str, Any], *position: int) -> dict[str, str]:
    state = data["states"]
    for index in position:
        state = state[index]
    return {card["id"]: card["value"] for card in data["summaries"][state["summary"]]["cards"]}


def start(data: dict[str, Any]) -> list[int]:
    return [slider["start"] for slider in data["sliders"]]


# What the page holds


def test_the_sliders_start_at_the_plan(data):
    values, shown = plan(REQUEST).to_json(), cards(data, *start(data))
    assert shown["peak"] == f"{values['memory_gb']['total']:,.1f} GB"
    assert shown["speed"] == f"{values['compute']['tokens_per_second_per_gpu']:,.0f}"
    assert shown["threshold"] == f"{values['efsdp']['min_tokens_to_hide']:,.0f}"
    summary = data["summaries"][data["states"][start(data)[0]][start(data)[1]][start(data)[2]]["summary"]]
    assert summary["verdict"] == values["verdict"] and summary["fits"] == values["fits"]
    names = [slider["steps"][slider["start"]] for slider in data["sliders"]]
    assert names == ["1M tokens", "45 GB/s", "576 TFLOP/s"]


@pytest.mark.parametrize("position", [(0, 0, 0), (-1, -1, -1), (2, -1, 0)])
def test_a_position_of_the_sliders_holds_the_plan_of_its_values(data, position, tmp_path):
    context, rdma, flops = (
        slider["steps"][index].split()[0] for slider, index in zip(data["sliders"], position, strict=True)
    )
    tokens = int(context.rstrip("kM")) * {"k": 1024, "M": 1024**2}[context[-1]]
    cluster = dataclasses.replace(load_cluster(REQUEST.cluster), rdma_bytes_per_second=float(rdma) * 1e9)
    path = tmp_path / "cluster.yaml"
    path.write_text(json.dumps(dataclasses.asdict(cluster)))  # JSON is YAML
    rate = float(flops.replace(",", ""))
    request = dataclasses.replace(REQUEST, context=tokens, cluster=str(path), achieved_tflops=rate)
    values = plan(request).to_json()
    shown = cards(data, *position)
    assert shown["peak"] == f"{values['memory_gb']['total']:,.1f} GB"
    assert shown["speed"] == f"{values['compute']['tokens_per_second_per_gpu']:,.0f}"
    assert shown["threshold"] == f"{values['efsdp']['min_tokens_to_hide']:,.0f}"
    assert shown["cp"] == f"+{values['cp']['extra_time_share']:.1%}"


def drawing(data: dict[str, Any], name: str, *position: int) -> dict[str, Any]:
    state = data["states"]
    for index in position:
        state = state[index]
    (number,) = [index for index, figure in enumerate(data["figures"]) if figure["id"] == name]
    return dict(data["figures"][number]["drawings"][state["figures"][number]])


def test_the_waterfall_ends_at_the_peak_and_shows_the_gpu(data):
    memory = plan(REQUEST).to_json()["memory_gb"]
    figure = drawing(data, "memory", *start(data))
    *steps, total = figure["data"][0]["x"]
    assert sum(steps) == pytest.approx(total) and total == pytest.approx(memory["total"])
    assert figure["layout"]["shapes"][0]["x0"] == memory["device"]


def test_compute_and_traffic_cross_at_the_threshold(data):
    values = plan(REQUEST).to_json()
    figure = drawing(data, "overlap", *start(data))
    lines = {trace["name"]: trace for trace in figure["data"]}
    crossings = []
    for direction in ("forward", "backward"):
        compute, traffic = lines[f"compute, {direction}"], lines[f"eFSDP, {direction}"]
        slope = compute["y"][1] / compute["x"][1]
        assert slope == pytest.approx(compute["y"][0] / compute["x"][0])
        crossings.append(traffic["y"][0] / slope)
    threshold = values["efsdp"]["min_tokens_to_hide"]
    assert max(crossings) == pytest.approx(threshold) and figure["layout"]["shapes"][0]["x0"] == threshold
    here = lines["this plan"]
    assert here["x"] == [values["efsdp"]["tokens_per_gpu"]] * 2
    assert sum(here["y"]) == pytest.approx(1e3 * values["compute"]["layer_seconds"])


def test_the_curves_begin_with_the_plan_and_say_how_far_it_fits(data):
    first = drawing(data, "reach", *start(data))["data"][0]
    totals = dict(zip(first["x"], first["y"], strict=True))
    values = {tokens: plan(dataclasses.replace(REQUEST, context=tokens)).to_json() for tokens in totals}
    assert totals == pytest.approx({tokens: each["memory_gb"]["total"] for tokens, each in values.items()})
    longest = max(tokens for tokens, each in values.items() if each["fits"])
    assert first["name"] == f"4,1,64/1,4,64, fits to {longest // 1024**2}M"


@pytest.mark.parametrize("context", [2**19, 2**20, 2**22])
def test_layouts_stand_in_the_order_of_the_search_and_all_fit(data, context):
    contexts = drawing(data, "reach", *start(data))["data"][0]["x"]
    bars = drawing(data, "ranking", contexts.index(context), *start(data)[1:])["data"][0]
    open_degrees = PlanRequest(model="glm-5.2", context=context)
    found = [each for each in search(open_degrees, limit=page.NUM_RANKED) if each.fits]
    speeds = [each.tokens_per_second_per_gpu for each in found]
    assert len(found) > 1 and bars["x"][: len(found)] == pytest.approx(speeds)
    bold = [name for name in bars["y"] if name.startswith("<b>")]
    assert bold == (["<b>4,1,64/1,4,64</b>"] if plan(dataclasses.replace(REQUEST, context=context)).fits else [])


@pytest.mark.parametrize("theme", list(THEMES))
def test_plotly_knows_every_property_of_every_figure(data, theme):
    for figure in data["figures"]:
        for drawn in (figure["drawings"][0], figure["drawings"][-1]):
            text = re.sub(r'"@([a-z]+)"', lambda match: json.dumps(THEMES[theme][match[1]]), json.dumps(drawn))
            graph_objects.Figure(json.loads(text))  # raises on a name or a value that plotly.js would ignore


def test_the_script_computes_nothing():
    script = TEMPLATE.rsplit("<script>", 1)[1]
    assert not re.search(r" [*/%-] |\*\*|Math\.|toFixed|toLocale|Intl|parseFloat", script)


def test_words_of_a_user_cannot_break_the_page(tmp_path):
    cluster = tmp_path / "c.yaml"
    cluster.write_text("base: gb200-nvl72\ngpu: </script><script>alert(1)</script>\n")
    html = page.page_html(plan(PlanRequest(model="qwen3-30b-a3b", gpus=8, context=32768, cluster=str(cluster))))
    assert "&lt;/script&gt;" in html and "<script>alert" not in html


def test_what_a_verdict_rests_on_and_where_the_seed_differs_are_on_the_page(data):
    values = plan(REQUEST).to_json()
    facts = dict(data["facts"])
    assert (
        facts["Expert mesh"] == "e_rep 1, e_fsdp 4, ep 64" and values["compute"]["achieved_source"] in facts["FLOP/s"]
    )
    assert [row[-1] for row in data["differences"]] == [each["why"] for each in values["differences"]] != []


# The file


def test_a_page_that_fails_half_way_leaves_the_old_one_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "plan.html"
    path.write_text("the page of before")

    def fail(shown: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(page, "page_html", fail)
    with pytest.raises(KeyboardInterrupt):
        page.write_page(plan(REQUEST), path)
    assert path.read_text() == "the page of before" and [each.name for each in tmp_path.iterdir()] == ["plan.html"]


def test_a_full_disk_is_said_and_leaves_the_old_page(tmp_path, monkeypatch):
    path = tmp_path / "plan.html"
    path.write_text("the page of before")

    def write_half(self: Path, text: str, encoding: str) -> int:
        self.write_bytes(text[:10].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(page, "page_html", lambda shown: "x" * 100)
    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(PlanError, match=r"html\('.*plan.html'\) cannot be written: No space left on device"):
        page.write_page(plan(REQUEST), path)
    assert path.read_bytes() == b"the page of before" and [each.name for each in tmp_path.iterdir()] == ["plan.html"]


def test_what_is_not_a_plain_file_is_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(PlanError, match="not a plain file"):
        page.write_page(plan(REQUEST), pipe)
    assert pipe.is_fifo() and [each.name for each in tmp_path.iterdir()] == ["pipe"]


# A browser


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory):
    if chromium.executable() is None:
        pytest.skip("No Chromium here: `make browser` installs it.")
    profile = tmp_path_factory.mktemp("chromium")
    with chromium.open_page(profile) as opened:
        yield opened
    shutil.rmtree(profile, ignore_errors=True)


def move(tab: chromium.Page, slider: str, position: int) -> None:
    tab.evaluate(
        f"var input = document.getElementById('{slider}');"
        f"input.value = {position}; input.dispatchEvent(new Event('input'));"
    )


def text(tab: chromium.Page, element: str) -> str:
    return str(tab.evaluate(f"document.getElementById('{element}').textContent"))


@pytest.mark.slow
def test_a_browser_shows_the_plan_offline_and_follows_the_sliders(tab, file, data):
    tab.open(file.as_uri())
    values = plan(REQUEST).to_json()
    assert text(tab, "peak") == f"{values['memory_gb']['total']:,.1f} GB"
    assert text(tab, "verdict") == values["verdict"]
    assert tab.evaluate("document.querySelectorAll('.plot .main-svg').length") >= 4

    longer = dataclasses.replace(REQUEST, context=2 * REQUEST.context)
    move(tab, "context", data["sliders"][0]["start"] + 1)
    assert text(tab, "context-value") == "2M tokens"
    assert text(tab, "peak") == f"{plan(longer).to_json()['memory_gb']['total']:,.1f} GB"
    assert text(tab, "verdict") == plan(longer).verdict
    drawn = tab.evaluate("document.getElementById('memory').data[0].x.at(-1)")
    assert drawn == pytest.approx(plan(longer).to_json()["memory_gb"]["total"])

    tab.evaluate("document.querySelector('button').click()")
    position = start(data)
    for slider, card in (("rdma", "threshold"), ("flops", "speed")):
        before = text(tab, card)
        index = ("context", "rdma", "flops").index(slider)
        moved = [step + (number == index) for number, step in enumerate(position)]
        move(tab, slider, moved[index])
        assert text(tab, card) == cards(data, *moved)[card] != before
        tab.evaluate("document.querySelector('button').click()")
        assert text(tab, card) == before

    assert tab.problems == []
    assert {url for url in tab.requests if not url.startswith(("data:", "about:"))} == {file.as_uri()}


@pytest.mark.slow
def test_figures_take_the_colours_of_the_readers_theme(tab, file):
    for dark, theme in ((False, "light"), (True, "dark")):
        tab.open(file.as_uri(), dark=dark)
        assert tab.evaluate("document.getElementById('memory').layout.font.color") == THEMES[theme]["ink"]
    assert tab.problems == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [380, 800, 1280])
def test_the_page_needs_no_sideways_scrolling(tab, file, width):
    tab.open(file.as_uri(), width=width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
