"""Reads of an engine besides the matrices of layers: norms, rotations, and what stands at both ends.

An engine states what it runs as `Runs`. `check_read` refuses the rest, and modules that only a call does justice to.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dejavu_train.families.base import BlockParts, blocks_of, dims_of, family_of
from dejavu_train.families.dims import Activation, ModelDims, Norm, Positions, Runs, engine_refusal
from dejavu_train.families.plain import NotPlain, check_calls, plain_linear, plain_table
from dejavu_train.families.scaled import ScaledEmbedding, ScaledRMSNorm

_ACTIVATIONS = {  # the classes that compute them and nothing else
    Activation.RELU: ("ReLU",),
    Activation.RELU2: ("WideSquare",),
    Activation.FATRELU: ("FATReLU",),
    Activation.DRELU: ("ReLU",),
    Activation.GELU: ("GELUActivation",),
    Activation.GELU_TANH: ("BloomGelu", "GELUTanh", "NewGELUActivation"),
}
_NORMS = {Norm.LAYER_NORM_1P: "LayerNorm1P", Norm.RMS_NORM: "RMSNorm", Norm.RMS_NORM_PLAIN: "RMSNorm"}


@dataclass(frozen=True)
class ReadNorm:
    """(x - mean) / deviation * weight + bias, over d columns. ``rms``: the mean counts as zero.

    weight, bias: (d,) of the model's dtype, or None for one and zero. A LayerNorm1P's weight has its 1 already.
    """

    weight: Tensor | None
    bias: Tensor | None
    eps: float
    rms: bool = False


@dataclass(frozen=True)
class Ends:
    """Modules before the first layer and behind the last.

    Attributes:
        tokens: (V, e). positions: (P, d), learned ones, of the first position first.
        project_in, project_out: linear maps between e and d.
        embedding_norm: behind the embedding. head: the linear map to logits.
    """

    tokens: Tensor
    positions: Tensor | None
    project_in: Any | None
    embedding_norm: ReadNorm | None
    final_norm: ReadNorm | None
    project_out: Any | None
    head: Any


def check_read(model: Any, runs: Runs) -> ModelDims:
    """The sizes of a model whose numbers and functions are all that an engine needs.

    Args:
        runs: what the engine runs.
    Raises:
        NotPlain: what it does not run, or as :func:`check_calls`. An activation, a scaling of queries or an LM head
            that is not the family's.
    """
    dims = dims_of(model.config)
    if (why := engine_refusal(dims, runs)) is not None:
        raise NotPlain(f"a {type(model).__name__}", f"is not what an engine runs, which has {why}")
    check_calls(model)
    for block in blocks_of(model):
        kinds = _ACTIVATIONS[dims.activation]
        if all(each.__name__ not in kinds for each in type(block.activate).__mro__):
            given = type(block.activate).__name__
            raise NotPlain(f"{block.name} (activate)", f"is a {given}, not a {' or '.join(kinds)}")
        if not math.isclose(block.scaling, block.head_dim**-0.5):
            raise NotPlain(block.name, f"scales queries by {block.scaling}, not by head_dim**-0.5")
        read_norm(f"{block.name} (norm_attn)", block.norm_attn, dims.norm)
        read_norm(f"{block.name} (norm_mlp)", block.norm_mlp, dims.norm)
    read_ends(model)
    return dims


def read_norm(name: str, module: Any, kind: Norm) -> ReadNorm:
    """Read what a norm computes.

    Raises:
        NotPlain: a module of another class.
    """
    given = type(module)
    if type(module) is ScaledRMSNorm and kind is Norm.RMS_NORM:
        return ReadNorm(module.weight * module.factor, None, module.variance_epsilon, True)
    ours = given.__module__.startswith("transformers.") and given.__name__.endswith(_NORMS.get(kind, "\0"))
    if not (given is nn.LayerNorm or ours):
        raise NotPlain(name, f"is a {given.__name__}, whose weight is not all that it does")
    weight, bias = (getattr(module, each, None) for each in ("weight", "bias"))
    if weight is not None and "1P" in given.__name__:
        weight = weight + 1  # in its own dtype, as transformers does
    eps = module.variance_epsilon if hasattr(module, "variance_epsilon") else module.eps
    return ReadNorm(weight, bias, float(eps), given is not nn.LayerNorm and kind is not Norm.LAYER_NORM_1P)


def read_ends(model: Any) -> Ends:
    """Read what stands before the first layer and behind the last.

    Raises:
        NotPlain: a module whose weight is not all that it does, a bias of the LM head.
    """
    from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding

    family, dims = family_of(model), dims_of(model.config)
    norm = dims.norm
    first, *others = family.embeddings(model)
    positions = project_in = embedding_norm = None
    for module in others:
        if isinstance(module, nn.Embedding):  # a family's own class may begin at a later row
            kind = nn.Embedding if type(module) is nn.Embedding else OPTLearnedPositionalEmbedding
            positions = plain_table("embed_positions", module, kind)[getattr(module, "offset", 0) :]
            if len(positions) != dims.max_positions:
                found = f"holds {len(positions)} positions behind its first row, not {dims.max_positions}"
                raise NotPlain("embed_positions", found)
        elif isinstance(module, nn.Linear):
            project_in = plain_linear("project_in", module)
        else:
            embedding_norm = read_norm("the norm behind the embedding", module, norm)
    behind = family.final_norm(model)
    final_norm = project_out = None
    for module in behind if isinstance(behind, nn.Sequential) else () if behind is None else (behind,):
        if isinstance(module, nn.Linear):
            project_out = plain_linear("project_out", module)
        else:
            final_norm = read_norm("the final norm", module, norm)
    if final_norm is None and not dims.post_norm:
        raise NotPlain("the final norm", "is missing")
    head = plain_linear("lm_head", model.get_output_embeddings())
    if head.bias is not None:
        raise NotPlain("lm_head", "has a bias, which no family's has")
    tokens = plain_table("embed_tokens", first, ScaledEmbedding if type(first) is ScaledEmbedding else nn.Embedding)
    if type(first) is ScaledEmbedding:
        tokens = tokens * first.factor
    return Ends(tokens, positions, project_in, embedding_norm, final_norm, project_out, head)


@torch.no_grad()
def read_turns(block: BlockParts, dims: ModelDims, n: int) -> Tensor | None:
    """Turns of queries and keys at the positions 0 .. n - 1: cosines and sines (n, 2, r / 2) fp32, or None.

    Dimension i of a head and i + r / 2 become ``x cos - y sin`` and ``y cos + x sin``. r: how many turn. They are those
    of the layer's own function, with the factor that YaRN has and the sign that NanoChat has.
    """
    if dims.positions is not Positions.ROTARY or block.rotate is None:
        return None
    half = int(dims.head_dim * dims.rotary_share) // 2
    x = torch.zeros(1, 1, n, dims.head_dim, device=block.device, dtype=torch.float32)
    x[..., :half] = 1  # becomes its cosine, and its sine where the other of its pair stands
    turned = block.rotate(x, torch.arange(n, device=block.device)[None])[0, 0]
    return turned[:, : 2 * half].unflatten(1, (2, half))
