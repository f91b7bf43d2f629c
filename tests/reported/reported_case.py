"""What rows of tests/reported begin with: the tiny model with its bundles, and whether two models agree."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import OPTForCausalLM

from dejavu_train import Bundle, SparseOPTForCausalLM
from dejavu_train.ground.errors import UserError

IDS = torch.tensor([[2, 30, 31, 200, 33, 170, 91]])
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
ALL = ("mask", "gather", "auto")
FOUR = (*ALL, "triton")  # with the engine of a GPU, by its references
TURN = 2.0  # by what hooks and parametrisations multiply


@dataclasses.dataclass(frozen=True)
class Row:
    """What was reported: its kind in the list of kinds, in words, and the call whose value must be ``right``."""

    kind: str
    what: str
    call: Callable[["Case"], Any]
    right: Any = True


@dataclasses.dataclass
class Case:
    """What rows start from: the tiny model's folder, bundles for it, and a folder of your own."""

    folder: Path
    own: Path
    bundle: Bundle
    cascade: Bundle

    @property
    def full(self) -> Bundle:
        return self.bundle.at(mlp_density=1.0, head_density=1.0)

    def dense(self, dtype: torch.dtype = torch.float32) -> OPTForCausalLM:
        return OPTForCausalLM.from_pretrained(self.folder, dtype=dtype).eval()

    def sparse(self, backend: str, bundle: Bundle | None = None, dense: Any = None, **options: Any) -> Any:
        if backend == "triton":
            options = {"ops": "reference"} | options
        return SparseOPTForCausalLM.from_model(dense or self.dense(), bundle or self.bundle, backend, **options)


@torch.no_grad()
def results(model: Any) -> tuple[torch.Tensor, list[int]]:
    """Logits of a forward pass and a text."""
    text = model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), **GREEDY)
    return model(IDS).logits, text[0].tolist()


def agree(model: Any, other: Any) -> bool:
    """Whether two models give the same logits, within 1e-3 of the largest, and the same text."""
    (ours, text), (theirs, wanted) = results(model), results(other)
    return bool((ours - theirs).abs().max() <= 1e-3 * theirs.abs().max()) and text == wanted


def refusal(call: Callable[[], Any]) -> str | None:
    """The line of a refusal. None where there was none."""
    try:
        call()
    except UserError as error:
        return str(error)
    return None


def every(call: Callable[[str], Any], backends: Sequence[str] = ALL) -> dict[str, Any]:
    """The value for each backend."""
    return {backend: call(backend) for backend in backends}


TRUE = dict.fromkeys(ALL, True)
FOUR_TRUE = dict.fromkeys(FOUR, True)
PLAIN = dict.fromkeys(("mask", "gather"), True)
