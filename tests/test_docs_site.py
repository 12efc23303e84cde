"""The documentation builds as a site, strictly, and the site is whole and asks nothing of the network."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chromium import executable, open_page
from tests.code_blocks import DOCS, ROOT, public_objects


def build(site: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=root,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = build(folder)
    assert result.returncode == 0, result.stderr[-4000:]
    return folder


@pytest.mark.slow
def test_the_site_has_every_page_no_script_and_nothing_from_elsewhere(site: Path):
    pages = {path.stem for path in site.glob("*.html")}
    assert {path.stem for path in DOCS.glob("*.md")} <= pages
    assert not list(site.rglob("*.py")) and not list(site.rglob("__pycache__"))
    assert (site / "repository/tests/test_layering.py.txt").read_text() == (ROOT / "tests/test_layering.py").read_text()
    assert "expert_mlp.py.txt" in (site / "repository/kernels/index.html").read_text()
    for path in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img|iframe)\b[^>]*(?:src|href)="(https?:[^"]+)"', path.read_text())
        assert loaded == [], path


@pytest.mark.slow
def test_the_reference_shows_arguments_of_every_public_name(site: Path):
    text = (site / "reference.html").read_text()
    for name, found in public_objects().items():
        assert f'id="lightning_moe_strategy.{name}"' in text, name
        for parameter in inspect.signature(found).parameters:
            assert re.search(rf"\b{parameter}\b", text), f"{name}({parameter})"


@pytest.mark.slow
@pytest.mark.skipif(executable() is None, reason="no Chromium")
def test_a_browser_shows_the_site_and_asks_for_nothing_elsewhere(site: Path, tmp_path: Path):
    with open_page(tmp_path) as page:
        for name in ("index", "two_meshes", "design", "reference"):
            for width, dark in ((1280, False), (400, True)):
                page.open((site / f"{name}.html").as_uri(), width=width, dark=dark)
                drawn = "[...document.images].every(image => image.complete && image.naturalWidth > 0)"
                assert page.evaluate(drawn), name
                assert page.evaluate("document.body.scrollWidth <= innerWidth"), (name, width)
        assert page.problems == []
        assert {url.split(":")[0] for url in page.requests} <= {"file", "data"}


LINKS = {
    "data.md": ("[x](no.md)", "contains a link 'no.md'"),
    "experts.md": ("[x](data.md#no)", "contains a link 'data.md#no'"),
    "models.md": ("[x](../tests/no.py)", "contains a link '../tests/no.py'"),
    "unlisted.md": ("Some words.", 'not included in the "nav"'),
}
NAMES = {"data.md": ("::: lightning_moe_strategy.No", "lightning_moe_strategy.No")}


@pytest.mark.slow
@pytest.mark.parametrize("faults", [LINKS, NAMES], ids=["links", "names"])
def test_a_broken_link_anchor_or_name_fails_the_build(faults: dict[str, tuple[str, str]], tmp_path: Path):
    for name in ("mkdocs.yml", "lightning_moe_strategy"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/site_links.py").symlink_to(DOCS / "site_links.py")
    for name, (fault, _) in faults.items():
        (tmp_path / "docs" / name).write_text(f"# A page\n\n{fault}\n")
    result = build(tmp_path / "site", root=tmp_path)
    assert result.returncode != 0
    assert [words for _, words in faults.values() if words not in result.stderr] == []
