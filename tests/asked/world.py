"""A server of the tiny model with a chat template, and the oracle beside it."""

from pathlib import Path
from typing import Any

from bundles import make_bundle
from serving_helpers import NAME, Running
from transformers import AutoTokenizer

from dejavu_train.engine.cpu.engine import CpuEngine
from dejavu_train.models.load import load_model
from dejavu_train.sparse.model import SparseOPTForCausalLM

from .judge import Oracle, Outcome, judge

CONTEXT = 120
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


class World:
    """Serves a folder of the tiny model, which gets the template."""

    def __init__(self, folder: Path) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(folder)
        bundle = make_bundle(folder).at(0.3, 0.75)
        bundle.save_pretrained(folder / "predictors")
        self.server = Running(folder, folder / "predictors", rows=4, queue=60, context=CONTEXT)
        model: Any = SparseOPTForCausalLM.from_model(load_model(str(folder)), bundle, "mask")
        self.oracle = Oracle(model, CpuEngine(load_model(str(folder)), bundle, batch=1, context=CONTEXT), tokenizer)

    def ask(self, seed: int) -> Outcome:
        """The request of a seed."""
        return judge(seed, self.server.url, NAME, self.oracle, CONTEXT)

    @property
    def alive(self) -> bool:
        """Whether the server goes on, with all rows free."""
        self.server.wait_for("rows_active", 0)
        line = self.server.served.line
        return line.failure is None and line.rows.free == 4 and not line._served
