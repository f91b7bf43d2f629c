"""Tables of steps that several GPUs make together: goals with their values, every step, and transformers beside it."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.decode_problem import SHAPES
from benchmarks.tables_decode import timed_rows
from benchmarks.tables_format import NoRows, Row, card, devices, markdown, provenance, read_csv, verdict
from benchmarks.tensor_parallel import GOALS

RANKS_ROWS = "benchmarks/results/tensor_parallel.csv"
ASKED = {"mlp_density": "0.1", "head_density": "0.5"}  # where the options of a row say nothing
GOAL_CARD = "H200"
PROMPTS_GOAL, PAPER_GOAL = 0.08, 2.2  # a longer prompt costs so much more; a quarter of all units is so much faster
RIVALS = {"hf-device-map": "device map", "hf-tp-plan": 'tp_plan="auto"'}


class Step(NamedTuple):
    """What was timed. gpus: of which a card is named. neurons, heads: the share that is selected, 1 = dense."""

    model: str
    gpus: int
    card: str
    weights: str
    neurons: float
    heads: float
    batch: int
    prompt: int
    sums: str
    reckoned: bool

    @property
    def shown(self) -> str:
        """In a cell: what is selected."""
        if self.neurons == 1:
            return "dense"
        return f"{100 * self.neurons:g} %, heads {100 * self.heads:g} %"

    @property
    def place(self) -> str:
        kind = self.sums.partition(" ")[0]
        other = f", {kind}" if kind not in ("", "pushed") else ""
        return f"{self.model.upper()}, {self.gpus} {self.card}{other}{', reckoned' * self.reckoned}"

    def dense(self) -> "Step":
        return self._replace(neurons=1.0, heads=1.0)


def step_of(row: Row) -> Step:
    words = dict(word.split("=") for word in row["options"].split())
    asked = [float(words.get(name, default)) for name, default in ASKED.items()]
    neurons, heads = asked if row["engine"] == "sparse" else (1.0, 1.0)
    numbers = int(row["gpus"]), int(row["batch"]), int(row["prompt"])
    weights = "4 bits" if row["weights"] == "int4" else "fp16"
    return Step(row["model"], numbers[0], card(row), weights, neurons, heads, *numbers[1:], row["sums"],
                row["note"].startswith("reckoned"))  # fmt: skip


def _rows(root: Path) -> list[Row]:
    """On GPUs, oldest first."""
    return [row for row in read_csv(root / RANKS_ROWS) if row["gpu"] != "cpu"]


def steps_of(root: Path) -> dict[Step, Row]:
    """The newest row of each step of our engine. One with torch's one-shot sum stands where no other was timed."""
    rows = [row for row in _rows(root) if row["engine"] in ("dense", "sparse") and row["slowest_ms"]]
    rows.sort(key=lambda row: not row["sums"].startswith("one-shot"))
    newest = {step_of(row)._replace(sums=""): row for row in rows}
    return dict(sorted(((step_of(row), row) for row in newest.values()), key=lambda item: _order(item[0])))


def _order(step: Step) -> tuple[object, ...]:
    """By size, fp16 before 4 bits, dense steps before others."""
    shape = list(SHAPES).index(step.model)
    return shape, step.gpus, step.card, step.weights != "fp16", step.batch, step.prompt, -step.neurons, step[5:]


def ms_of(row: Row) -> float:
    """Of the rank that took longest."""
    return float(row["slowest_ms"])


def alone(root: Path, step: Step) -> Row | None:
    """One GPU's newest row of a step. Of 4 bits the LM head is in 4 bits, where that was timed."""
    heads = f"head_density={step.heads:g}" if step.heads != float(ASKED["head_density"]) else ""
    neurons = f"mlp_density={step.neurons:g}" if step.neurons != float(ASKED["mlp_density"]) else ""
    chosen = [neurons, heads] if step.neurons != 1 else []
    for head in ("lm_head=int4", ""):
        packed = ["weights=int4", head] if step.weights == "4 bits" else []
        ahead = ["predictors=int4", "site=1"] if packed and chosen else []
        wanted = {word for word in (*chosen, *packed, *ahead) if word}
        same = (
            row
            for row in timed_rows(root)
            if (row["model"], row["engine"] == "dense") == (step.model, step.neurons == 1)
            and (int(row["batch"]), int(row["prompt"])) == (step.batch, step.prompt)
            and set(row["options"].split()) == wanted
            and step.card in row["gpu"]
        )
        found = max(same, key=lambda row: row["date"], default=None)
        if found is not None:
            return found
    return None


def _ratio(row: Row | None, ms: float, field: str) -> str:
    return f"{float(row[field]) / ms:.2f}x" if row is not None else ""


def steps_table(root: Path) -> str:
    """Every step: its time, of its floor, against the dense step of the same GPUs, and against one GPU."""
    steps, table = steps_of(root), []
    for step, row in steps.items():
        ms, one = ms_of(row), alone(root, step)
        dense = steps.get(step.dense()) if step.neurons != 1 else None
        cells = [step.place, step.weights, step.shown, f"{step.batch}, {step.prompt}", f"{ms:.3g}"]
        cells += [f"{100 * float(row['share_of_floor']):.0f} %", _ratio(dense, ms, "slowest_ms")]
        table.append([*cells, _ratio(one, ms, "p50_ms"), f"{float(row['sum_us']):.2g}"])
    headings = ["shapes, GPUs", "weights", "selected", "rows, prompt", "ms a step", "of its floor", "against dense"]
    headings += ["against one GPU", "a sum, us"]
    return f"{markdown(headings, table)}\nRows: [tensor_parallel.csv]({RANKS_ROWS}). {_where(list(steps.values()))}.\n"


def _where(rows: list[Row]) -> str:
    return f"{provenance(rows)}. Sums: {', '.join(sorted({row['sums'] for row in rows}))}"


def goals_table(root: Path) -> str:
    """Each goal of the paper's sizes with what was measured. On another card a goal is moved by what it reads."""
    steps, table = steps_of(root), []
    for (model, gpus, _, weights, heads), goal in GOALS.items():
        same = {
            step: row
            for step, row in steps.items()
            if (step.model, step.gpus, step.heads, step.batch, step.prompt) == (model, gpus, heads, 1, 128)
            and (step.weights == "4 bits") == (weights == "int4")
            and step.neurons in (0.1, 1.0)
        }
        kind = f"{'4 bits' if weights == 'int4' else 'fp16'}, {'dense' if heads == 1 else f'heads {100 * heads:g} %'}"
        for step, row in same.items():
            asked = goal if step.card == GOAL_CARD else float(row["goal_here_ms"])
            table.append([f"{step.place}: {kind}", f"<= {asked:.3g} ms", f"{ms_of(row):.3g} ms",
                          verdict(ms_of(row) / asked)])  # fmt: skip
        if not same:
            table.append([f"{model.upper()}, {gpus} {GOAL_CARD}: {kind}", f"<= {goal:.3g} ms", "", "not measured"])
    for step, row in steps.items():
        first = steps.get(step._replace(prompt=128))
        if step.prompt > 128 and first is not None:
            share = ms_of(row) / ms_of(first) - 1
            table.append([f"{step.place}: {step.weights}, {step.shown}, prompt {step.prompt} over 128",
                          f"<= {100 * PROMPTS_GOAL:+.0f} %", f"{100 * share:+.1f} %",
                          verdict((1 + share) / (1 + PROMPTS_GOAL))])  # fmt: skip
        dense = steps.get(step.dense())
        if (step.neurons, step.heads) == (0.25, 0.25) and dense is not None:
            times = ms_of(dense) / ms_of(row)
            table.append([f"{step.place}: {step.weights}, a quarter of all units against dense", f">= {PAPER_GOAL}x",
                          f"{times:.2f}x", verdict(PAPER_GOAL / times)])  # fmt: skip
    made = markdown(["what", "goal", "measured", ""], table)
    return f"{made}\nRows: tensor_parallel.csv. {_where(list(steps.values()))}.\n"


def rivals_table(root: Path) -> str:
    """transformers on the same GPUs, and our steps of one row behind the same prompt."""
    newest = {
        (row["model"], row["gpus"], row["gpu"], row["engine"]): row for row in _rows(root) if row["engine"] in RIVALS
    }
    if not newest:
        raise NoRows(f"{RANKS_ROWS} has no row of transformers")
    steps, table, rows = steps_of(root), [], list(newest.values())
    for row in rows:
        place = step_of(row | {"sums": ""})
        ours = {
            step: each
            for step, each in steps.items()
            if step[:4] == place[:4] and (step.batch, step.prompt) == (place.batch, place.prompt)
        }
        ms = (
            [ms_of(each) for step, each in ours.items() if step.neurons == 1],
            [ms_of(each) for step, each in ours.items() if step.neurons == 0.1],
        )
        cells = [place.place, RIVALS[row["engine"]], f"{float(row['p50_ms']):.3g}" if row["p50_ms"] else "failed"]
        cells += [f"{min(found):.3g}" if found else "" for found in ms]
        table.append([*cells, row["note"].replace("|", "/")])
    headings = ["shapes, GPUs", "transformers by", "ms a token", "our dense, ms", "our sparse, ms", "note"]
    return f"{markdown(headings, table)}\nRows: tensor_parallel.csv. {devices(rows)}.\n"


def callback_table(root: Path) -> str:
    """A token of generate(), without a callback and with one that does nothing."""
    rows = [row for row in _rows(root) if row["engine"] == "generate"]
    if not rows:
        raise NoRows(f"{RANKS_ROWS} has no row of a callback")
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(step_of(row | {"options": ""}).place, {})[row["options"]] = row
    table = [
        [place, *(f"{ms_of(ways[f'callback={way}']):.3g}" for way in ("none", "idle")),
         ways["callback=idle"]["note"].partition("agree in ")[2].removesuffix(" us")]
        for place, ways in found.items()
    ]  # fmt: skip
    headings = ["shapes, GPUs", "ms a token", "with a callback", "of which hosts agree, us"]
    return f"{markdown(headings, table)}\nRows: tensor_parallel.csv. {devices(rows)}.\n"


RANKS_TABLES: dict[str, Callable[[Path], str]] = {
    "several-gpus-goals": goals_table,
    "several-gpus": steps_table,
    "several-gpus-rivals": rivals_table,
    "several-gpus-callback": callback_table,
}
