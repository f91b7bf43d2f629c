"""report.html: made of files alone, whole without a network, and looked at in a real browser."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from dejavu_train.evaluation.html_report import main, write_report
from dejavu_train.evaluation.picture import plot_curves
from dejavu_train.evaluation.rows import write_csv
from dejavu_train.ground.errors import exit_on_user_error
from dejavu_train.ground.files import write_json
from papers.deja_vu.observe.attention import UniformityRow
from papers.deja_vu.observe.residual import CosineRow
from papers.deja_vu.observe.run import draw
from papers.deja_vu.observe.titles import TITLES

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
NASTY = '<script>alert("&")</script>'


def quality(selection, density, increase):
    return {
        "text": NASTY, "selection": selection, "asked_mlp_density": density, "asked_head_density": 1.0,
        "mlp_candidates": density, "mlp_selected": density, "head_selected": 1.0, "sparse_from": 0,
        "perplexity": 12 * (1 + increase), "increase": increase, "increase_error": 0.001, "bits_per_byte": 1.1,
        "mlp_recall": 0.9, "mlp_retained_mass": 0.95, "head_recall": None, "head_retained_mass": None, "mlp_bytes": 0.1,
        "tokens": 9000,
    }  # fmt: skip


def results():
    text = {
        "name": NASTY, "source": "a.txt", "sha256": "ab" * 32, "set": None, "whole": True, "domain": "unseen",
        "documents": 3, "tokens": 9000, "bytes": 40000, "window": 64, "pretrained_paragraphs": 0,
    }  # fmt: skip
    recalls = (0.7, 0.9, 0.8, 0.75, 0.95, 0.6, 0.5, 0.55, 0.65, 0.85, 0.45)
    layer = {"text": NASTY, "target": "mlp", "selected": 0.1, "precision": 0.5, "retained_mass": 0.9}
    layers = [layer | {"layer": number, "recall": recall} for number, recall in enumerate(recalls)]
    timing = {
        "backend": "dense",
        "device": "cpu",
        "batch": 1,
        "prompt": 32,
        "new_tokens": 8,
        "megabytes_per_token": None,
    }
    return {
        "schema": 2, "model": "checkpoints/opt-mini", "bundle": "b", "versions": {"torch": "2"}, "texts": [text],
        "quality": [quality("dense", 1.0, 0.0), quality("predicted", 0.1, 0.03), quality("predicted", 0.2, 0.01)],
        "layers": layers, "timing": [timing | {"ms_per_token": {"p20": 1.0, "p50": 1.1, "p80": 1.2}}],
        "read_gb_s": 9.5, "config": {"model": "checkpoints/opt-mini", "seed": 0}, "hashes": {"model": "cd" * 32},
        "not_measured": [{"what": "timing of triton", "why": "there is no GPU <here>"}],
    }  # fmt: skip


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Results, observations of two kinds, one of which is a picture, and tasks."""
    folder = tmp_path_factory.mktemp("written")
    write_json(folder / "results.json", results())
    assert plot_curves(results(), folder / "curve.png")
    stored = folder / "observations"
    cosines = [
        CosineRow(layer, n, 0.9 / n, 0.8 / n, 0.85 / n, 0.95 / n, 1 / n, 0.9 / n, 10)
        for layer in range(3)
        for n in (1, 2)
    ]
    rows = {"cosine": cosines, "uniformity": [UniformityRow(0, 0.1, 0.2, 0.3)]}
    for name, own in rows.items():
        write_csv(stored / f"{name}.csv", own)
    drawn = draw(rows, stored)
    observed = [
        {"name": name, "title": TITLES[name].title, "paper": TITLES[name].paper, "caption": TITLES[name].caption}
        | {"picture": name in drawn}
        for name in rows
    ]
    about = {
        "versions": {}, "hashes": {}, "config": {"parts": ["residual"]}, "device": "cpu", "observed": observed,
        "text": {"tokens": 10, "documents": 2, "name": "t", "set_name": None, "window": 8},
        "not_measured": [{"what": "graphs", "why": "hnswlib is not installed"}],
    }  # fmt: skip
    write_json(stored / "observations.json", about)
    rows = [{"task": "copa", "shots": 0, "value": 0.553, "error": 0.02, "flips": None}]
    write_json(folder / "tasks/results.json", {"rows": rows})
    return folder


@pytest.fixture
def folder(written, tmp_path):
    """The same, to be changed."""
    return shutil.copytree(written, tmp_path, dirs_exist_ok=True)


class Page(HTMLParser):
    """Checks that tags close in order, and collects what a browser would fetch."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.ids, self.text = [], [], [], text
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href", "xlink:href", "data", "action")]
        self.ids += [value for name, value in attributes if name == "id"]
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in ("meta", "link", "img", "br"):
            self.open.pop()


def test_the_page_is_whole_and_asks_for_nothing(folder):
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    inside = [link for link in page.links if link.startswith("#")]
    assert all(link.startswith("data:image/png;base64,") for link in page.links if link not in inside)
    assert not re.search(r"@import|url\(|<script", page.text) and {link[1:] for link in inside} <= set(page.ids)
    assert NASTY not in page.text and "&lt;script&gt;alert" in page.text
    for told in (
        "cdcd",
        "abab",
        "3.00%",
        "9.5 GB/s",
        "copa",
        "0.553",
        "hnswlib is not installed",
        "no GPU &lt;here&gt;",
    ):
        assert told in page.text, told
    assert page.text.count("<img") == 2 and "there is no paper/paper.json" in page.text
    first = page.text
    assert write_report(folder).read_text(encoding="utf-8") == first  # from the same files, the same page


def test_results_alone_say_what_is_missing(tmp_path):
    found = results() | {"quality": [], "layers": [], "timing": []}
    for name in ("config", "hashes", "not_measured"):  # of an earlier version
        del found[name]
    write_json(tmp_path / "results.json", found)
    assert exit_on_user_error(main, [str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    for told in ("no token was scored", "nothing was timed", "observe makes them", "there is no tasks/results.json"):
        assert told in text


@pytest.mark.parametrize(
    "spoil, told",
    [
        (lambda folder: (folder / "results.json").unlink(), "results.json (python infer.py writes it) is missing"),
        (lambda folder: (folder / "results.json").write_text("{"), "is not readable JSON"),
        (lambda folder: write_json(folder / "results.json", {"schema": 1}), "is not of schema 2 or 3"),
        (lambda folder: write_json(folder / "results.json", {"schema": 3}), "lacks 'quality'"),
        (lambda folder: (folder / "observations/cosine.csv").unlink(), "is not as it was written"),
        (lambda folder: write_json(folder / "tasks/results.json", {}), "lacks 'rows'"),
        (lambda folder: write_json(folder / "tasks/results.json", {"rows": 3}), "is not as it was written"),
        (lambda folder: (folder / "observations/cosine.png").write_text("x"), "cosine.png is no PNG"),
    ],
)
def test_damaged_folders_are_one_line(folder, capfd, spoil, told):
    spoil(folder)
    assert exit_on_user_error(main, [str(folder)]) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert told in line and not (folder / "report.html").exists()
    assert exit_on_user_error(main, [str(folder), "--unheard"]) == 2


def test_wandb_gets_tables_and_pictures_offline(folder, monkeypatch):
    wandb = pytest.importorskip("wandb")
    logged = {}

    class Run:
        def log(self, values):
            logged.update(values)

        def finish(self):
            logged["finished"] = True

    monkeypatch.setattr(wandb, "init", lambda **options: logged.update(options) or Run())
    assert exit_on_user_error(main, [str(folder), "--wandb", "mine"]) == 0
    assert logged["project"] == "mine" and logged["finished"]
    assert logged["increase of perplexity"].data[0][0] == NASTY and "picture cosine" in logged
    assert logged["cosine"].columns[0] == "layer" and len(logged["cosine"].data) == 6


def test_wandb_without_a_key_is_one_line(folder, monkeypatch, capfd):
    wandb = pytest.importorskip("wandb")

    def refuse(**_):
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    assert exit_on_user_error(main, [str(folder), "--wandb", "mine"]) == 2
    assert "WANDB_MODE=offline" in capfd.readouterr().err.splitlines()[-1]


PROBE = """<script>
const told = {};
document.querySelectorAll("details").forEach((folded) => { folded.open = true; });
told.pictures = [...document.querySelectorAll("figure img")].map((drawn) => drawn.naturalWidth);
told.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
document.documentElement.dataset.told = JSON.stringify(told);
</script></body>"""


def test_a_browser_shows_it(folder, tmp_path):
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no headless Chromium on PATH (Debian: apt-get install chromium-headless-shell)")
    page = write_report(folder).read_text(encoding="utf-8")
    probed = tmp_path / "probed.html"
    probed.write_text(page.replace("</body>", PROBE), encoding="utf-8")
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={tmp_path}/profile",
    ]
    command = [browser, *flags, "--window-size=1200,900", "--enable-logging=stderr", "--dump-dom", probed.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    told = json.loads(Page(done.stdout).text.split('data-told="')[1].split('"')[0].replace("&quot;", '"'))
    assert len(told["pictures"]) == 2 and min(told["pictures"]) > 300 and told["wide"] <= 0
