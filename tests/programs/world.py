"""What a random program acts on: the model under test, and the truth that says which weights it should have."""

import contextlib
import copy
import dataclasses
import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from bundles import make_bundle
from conftest import save_tiny_opt
from torch import Tensor, nn
from transformers import OPTForCausalLM

from dejavu_train import Bundle, SparseOPTForCausalLM
from dejavu_train.models.load import load_model
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.run import quantise

from .oracle import oracle_of

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SIZES = {"hidden_size": 64, "word_embed_proj_dim": 64, "max_position_embeddings": 128}  # heads 16 wide: codes of 4 bits
LINEAR = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "fc1", "fc2")
PATHS = [f"layers.{i}.{name}" for i in range(2) for name in (*LINEAR, "self_attn_layer_norm", "final_layer_norm")]


class Base:
    """The tiny model's folder, and bundles for it by what they hold, made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = save_tiny_opt(folder / "opt", **SIZES)
        self.bundles: dict[tuple, Bundle] = {}

    def bundle(self, **options: Any) -> Bundle:
        key = tuple(sorted(options.items()))
        if key not in self.bundles:
            self.bundles[key] = make_bundle(self.folder, **options)
        return self.bundles[key]

    def dense(self, dtype: str = "float32") -> OPTForCausalLM:
        return OPTForCausalLM.from_pretrained(self.folder, dtype=DTYPES[dtype]).eval()


@dataclasses.dataclass
class World:
    """State of a running program.

    Attributes:
        exact: density 1, compared with transformers' OPTForCausalLM.
        made: of the bundle: options of ``make_bundle``. density: (mlp, heads, top_k).
        truth: holds the weights, adapters and hooks that the model should have, in its dtype. Shares no tensor with it.
        model: under test. called: that, or an adapter around it. given: the dense model that it was made around.
    """

    base: Base
    scratch: Path
    exact: bool
    backend: str
    made: dict[str, Any]
    density: tuple[float, float, bool]
    truth: OPTForCausalLM | None = None
    model: Any = None
    called: Any = None
    given: Any = None
    bundle: Bundle | None = None
    start: int | str = 0
    coded: bool = False
    lora: bool = False
    drifts: bool = False
    """Trained: weights of model and truth differ by rounding."""

    @property
    def dtype(self) -> torch.dtype:
        return self.truth.dtype

    @property
    def sparse(self) -> bool:
        return any(not spec.dense for spec in self.bundle.specs.values())

    @property
    def rounds(self) -> bool:
        """Whether texts may come from an engine that rounds more than the model's codes do."""
        return self.coded and self.backend in ("auto", "cpu")

    def target_bundle(self) -> Bundle:
        """The base's bundle at this program's densities."""
        made = self.base.bundle(**self.made)
        if self.exact:
            return made.at(mlp_density=1.0, head_density=1.0)
        mlp, heads, top_k = self.density
        return made.at(mlp_density=mlp, head_density=heads, top_k=top_k)

    def options(self) -> dict[str, Any]:
        """How ``from_model`` is called for this program's backend."""
        if self.backend == "reference":
            return {"backend": "triton", "ops": "reference", "sparse_from": self.start}
        return {"backend": self.backend, "sparse_from": self.start}

    def wrap(self, dense: OPTForCausalLM) -> Any:
        return SparseOPTForCausalLM.from_model(dense, self.bundle, **self.options())

    def loaded(self, folder: Path, bundle: Any, dtype: str) -> Any:
        """Through ``from_pretrained``, but for the engine's reference operations, which it does not take."""
        if self.backend == "reference":
            found = bundle if isinstance(bundle, Bundle) else Bundle.from_pretrained(bundle or folder / "predictors")
            found.check_model(str(folder))
            return SparseOPTForCausalLM.from_model(load_model(str(folder), dtype), found, **self.options())
        return SparseOPTForCausalLM.from_pretrained(folder, bundle, dtype=dtype, **self.options())

    def take(self, model: Any, given: Any = None) -> None:
        """The model under test is another one now."""
        self.model, self.called, self.given = model, model, given

    def oracle(self, prompt_lengths: Tensor | None = None, truth: Any = None) -> Any:
        """For the weights that hold now. prompt_lengths (B,): where rows become sparse with sparse_from='prompt'."""
        start = self.start
        if isinstance(start, str):
            start = prompt_lengths if prompt_lengths is not None else 1 << 30
        bundle = self.bundle.one_stage() if self.backend == "reference" else self.bundle
        return oracle_of(truth if truth is not None else self.truth, bundle, start)

    def folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.scratch))

    def tokens(self, generator: torch.Generator, rows: int, columns: int) -> Tensor:
        ids = torch.randint(4, 300, (rows, columns), generator=generator)
        ids[:, 0] = 2
        return ids

    def padded(self, generator: torch.Generator, rows: int, longest: int, left: bool = True) -> tuple[Tensor, Tensor]:
        """ids and mask (rows, longest) of rows of drawn lengths, padding on one side."""
        ids, mask = self.tokens(generator, rows, longest), torch.ones(rows, longest, dtype=torch.long)
        for row in range(rows if rows > 1 else 0):
            gap = int(torch.randint(0, longest - 2, (), generator=generator)) if row else 0
            if gap:
                kept = ids[row, : longest - gap].clone()
                ids[row], mask[row] = 1, 0
                ids[row, slice(gap, None) if left else slice(longest - gap)] = kept
                mask[row, slice(gap, None) if left else slice(longest - gap)] = 1
        return ids, mask


def submodule(model: Any, path: str) -> nn.Module:
    """``layers.N.fc1`` and the like, below adapters."""
    module = model.model.decoder.get_submodule(path)
    return getattr(module, "base_layer", module)


def decoded_codes(module: Any, out: int, inputs: int, turned: str | None, head_dim: int) -> Tensor:
    """(out, inputs) float32 of a matrix in 4 bits, by the layout of docs/reference/four-bit-format.md."""
    words = module.words.reshape(-1, module.words.shape[-1]).long() & 0xFFFFFFFF
    rows = torch.empty(len(words), words.shape[1], 8)
    for pair in range(4):
        for half in range(2):
            rows[:, :, 2 * pair + half] = ((words >> (4 * pair + 16 * half)) & 15).float() - 8
    rows = rows.flatten(1)
    scales = module.scales.reshape(len(rows), -1).float()
    values = (rows.unflatten(1, (scales.shape[1], -1)) * scales[..., None]).flatten(1)
    if turned == "fc2":
        return values.T
    if turned == "out_proj":  # row k d + i is output i of head k
        return values.view(inputs // head_dim, out, head_dim).transpose(0, 1).reshape(out, inputs)
    return values


def rounded(world: World, dense: OPTForCausalLM) -> tuple[OPTForCausalLM, OPTForCausalLM]:
    """(a model in 4 bits, through the command that writes one, a truth with its numbers)."""
    folder, truth = world.folder(), copy.deepcopy(dense)
    shutil.copytree(world.base.folder, folder / "dense")
    dense.save_pretrained(folder / "dense")
    config = {"model": str(folder / "dense"), "output": str(folder / "coded")}
    with contextlib.redirect_stdout(io.StringIO()):
        quantise(QuantizeConfig(**config, quantizer="rtn", device="cpu"))
    coded = load_model(str(folder / "coded"))
    for layer, block in enumerate(truth.model.decoder.layers):
        for path in LINEAR:
            own, name = block.get_submodule(path), path.split(".")[-1]
            found = coded.model.decoder.layers[layer].get_submodule(path)
            turned = name if name in ("fc2", "out_proj") else None
            values = decoded_codes(found, own.out_features, own.in_features, turned, block.self_attn.head_dim)
            own.weight.data.copy_(values)
    return coded, truth


def shares_storage(model: Any, truth: Any) -> bool:
    """Whether the oracle could be changed by what the model does. A fault of the program, not a finding."""
    ours = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return any(p.untyped_storage().data_ptr() in ours for p in truth.parameters())


def check_apart(world: World) -> None:
    if shares_storage(world.model, world.truth):
        raise AssertionError("the oracle shares tensors with the model under test")


__all__ = ["DTYPES", "LINEAR", "PATHS", "Base", "World", "check_apart", "rounded", "submodule"]
