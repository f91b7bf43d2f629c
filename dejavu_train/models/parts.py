"""The modules of an OPT that a backend reads by their weights: each one plain, merged, or refused by name.

A backend that reads rows of a weight skips whatever else the module does when it is called. So a module must be a plain
linear map. An adapter (a module with ``merge`` and ``get_base_layer``, as peft makes) is merged into a copy. Anything
else that changes what a call gives is refused: hooks, an exchanged ``forward``, another class, weights on disk.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.opt.modeling_opt import OPTAttention, OPTDecoderLayer, OPTLearnedPositionalEmbedding

from dejavu_train.models.grouped import GroupedProjection
from dejavu_train.models.int4 import CodedLinear


class NotPlain(Exception):
    """A module that only a call does justice to. Each backend says what to do instead, as a :class:`UserError`."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name} {what}")


@dataclass(frozen=True)
class BlockParts:
    """The modules of one decoder layer. q, k, v, out, up and down have a ``weight`` (out, in) and a ``bias`` or None.

    A merged adapter stands here as a new ``nn.Linear``; all others are the model's own modules.
    """

    norm_attn: Any
    q: Any
    k: Any
    v: Any
    out: Any
    norm_mlp: Any
    up: Any
    down: Any
    n_heads: int
    head_dim: int

    @property
    def scaling(self) -> float:
        """What queries are multiplied with."""
        return float(self.head_dim**-0.5)


class BlockHook:
    """Base of the hooks that this package puts on a model for one call; they are no part of the model."""


def check_calls(model: nn.Module, called: Iterable[nn.Module] = (), itself: bool = False) -> None:
    """Refuse what a backend would leave out that calls only the modules ``called`` and those inside them.

    Args:
        itself: whether the model is called too.
    Raises:
        NotPlain: a hook or an exchanged ``forward``, by the module's name.
    """
    skipped = {id(inner) for module in called for inner in module.modules()}
    for name, module in model.named_modules():
        if id(module) in skipped or (itself and module is model):
            continue
        if any(not isinstance(hook, BlockHook) for hook in hooks_of(module)):
            raise NotPlain(name or "the model", "has a hook, which this backend does not call")
        if "forward" in vars(module) and not hasattr(module, "_hf_hook"):  # accelerate's moves tensors, nothing else
            raise NotPlain(name or "the model", "has an exchanged forward, which this backend does not call")


def is_adapter(module: nn.Module) -> bool:
    """Whether a module is an adapter around another one, as peft makes them."""
    return hasattr(module, "get_base_layer") and hasattr(module, "merge")


def hooks_of(module: nn.Module) -> Iterator[Any]:
    """The hooks around a module's forward pass."""
    yield from module._forward_hooks.values()
    yield from module._forward_pre_hooks.values()


def block_parts(model: Any) -> list[BlockParts]:
    """The modules of every decoder layer of an ``OPTForCausalLM``, adapters merged into copies.

    Raises:
        NotPlain: a module that is neither a plain linear map nor can be merged into one.
    """
    return [block_part(number, layer) for number, layer in enumerate(model.model.decoder.layers)]


def block_part(number: int, layer: Any) -> BlockParts:
    """The modules of one decoder layer, as :func:`block_parts`."""
    prefix, attention = f"model.decoder.layers.{number}", layer.self_attn
    for name, module, kind in (("", layer, OPTDecoderLayer), (".self_attn", attention, OPTAttention)):
        if type(module) is not kind:
            raise NotPlain(prefix + name, f"is a {type(module).__name__}, not transformers' {kind.__name__}")
    return BlockParts(
        norm_attn=_norm(f"{prefix}.self_attn_layer_norm", layer.self_attn_layer_norm),
        **{part: plain_linear(f"{prefix}.self_attn.{part}_proj", getattr(attention, f"{part}_proj")) for part in "qkv"},
        out=plain_linear(f"{prefix}.self_attn.out_proj", attention.out_proj),
        norm_mlp=_norm(f"{prefix}.final_layer_norm", layer.final_layer_norm),
        up=plain_linear(f"{prefix}.fc1", layer.fc1),
        down=plain_linear(f"{prefix}.fc2", layer.fc2),
        n_heads=attention.num_heads,
        head_dim=attention.head_dim,
    )


def _norm(name: str, module: Any) -> Any:
    if module.weight is not None and module.weight.is_meta:
        raise NotPlain(name, "is not in memory, device_map has put it on disk")
    return module


def plain_table(name: str, module: Any) -> Tensor:
    """(rows, d), the weight of an embedding that does nothing but look rows up.

    Raises:
        NotPlain: it does more.
    """
    if type(module) not in (nn.Embedding, OPTLearnedPositionalEmbedding):
        raise NotPlain(name, f"is a {type(module).__name__}, whose weight is not all that it does")
    return module.weight


def plain_linear(name: str, module: Any) -> Any:
    """The module itself if a call of it is ``x @ weight.T + bias``, else an ``nn.Linear`` of merged weights.

    Raises:
        NotPlain: neither.
    """
    if is_adapter(module):
        return _merged(name, module)
    if type(module).forward is not nn.Linear.forward and not isinstance(module, (CodedLinear, GroupedProjection)):
        raise NotPlain(name, f"is a {type(module).__name__}, whose weight is not all that it does")
    tensors = [tensor for tensor in (*module.parameters(), *module.buffers())]
    if any(tensor.is_meta for tensor in tensors):
        raise NotPlain(name, "is not in memory, device_map has put it on disk")
    if any(type(tensor) not in (Tensor, nn.Parameter) for tensor in tensors):
        raise NotPlain(name, f"holds a {type(tensors[0]).__name__}, of which this backend can read no rows")
    return module


@torch.no_grad()
def _merged(name: str, adapter: Any) -> nn.Linear:
    """The linear map that an adapter around a linear map is, as it is switched on now."""
    inner = adapter.get_base_layer()
    memo: dict[int, Any] = {id(inner): _copy(plain_linear(name, inner))}
    made = copy.deepcopy(adapter, memo)
    try:
        if made.disable_adapters:
            if made.merged:
                made.unmerge()
        elif not made.merged:
            made.merge()
    except (NotImplementedError, ValueError, RuntimeError, AttributeError) as error:
        raise NotPlain(name, f"is an adapter that cannot be merged ({str(error).splitlines()[0]})") from None
    base = made.get_base_layer()
    return base.requires_grad_(False).eval()


def _copy(linear: Any) -> nn.Linear:
    out_features, in_features = linear.weight.shape
    made = nn.Linear(in_features, out_features, linear.bias is not None, device="meta")
    made.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
    if linear.bias is not None:
        made.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
    return made
