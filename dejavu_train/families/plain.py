"""The modules that a backend reads by their weights: each one plain, merged, or refused by name.

A backend that reads rows of a weight skips whatever else the module does when it is called. So a module must be a plain
linear map. An adapter (a module with ``merge`` and ``get_base_layer``, as peft makes) is merged into a copy. Anything
else that changes what a call gives is refused: hooks, an exchanged ``forward``, another class, weights on disk.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dejavu_train.families.base import BlockParts, blocks_of
from dejavu_train.ground.errors import UserError, first_line


class NotPlain(UserError):
    """A module that only a call does justice to. ``what``: the message without its remedy."""

    def __init__(self, name: str, what: str) -> None:
        self.what = f"{name} {what}"
        super().__init__(f"{self.what}; use backend='mask', which calls every module")


LINEAR = ("q", "k", "v", "out", "gate", "up", "down")


class RowLinear(nn.Module):
    """Base of linear maps that hold their rows in another form. A call multiplies with what ``weight`` gives."""


class BlockHook:
    """Base of the hooks that this package puts on a model for one call. They are no part of the model."""


def check_calls(model: nn.Module, called: Iterable[nn.Module] = (), itself: bool = False) -> None:
    """Refuse what a backend would leave out that calls only the modules ``called`` and those inside them.

    Args:
        itself: whether the model is called too.
    Raises:
        NotPlain: a hook, an exchanged ``forward`` or a class of your own around the layers, by the module's name.
    """
    path = blocks_of(model)[0].name.split(".")[:-2]  # but for the list of layers
    for name in (".".join(path[:end]) for end in range(1, len(path) + 1)):
        around = type(model.get_submodule(name))
        if not around.__module__.startswith("transformers."):
            raise NotPlain(name, f"is a {around.__name__}, which this backend does not call")
    skipped = {id(inner) for module in called for inner in module.modules()}
    for name, module in model.named_modules():
        if id(module) in skipped or (itself and module is model):
            continue
        if any(not isinstance(hook, BlockHook) for _, hook in hooks_of(module)):
            raise NotPlain(name or "the model", "has a hook, which this backend does not call")
        if exchanged_forward(module):
            raise NotPlain(name or "the model", "has an exchanged forward, which this backend does not call")


def exchanged_forward(module: nn.Module) -> bool:
    """Whether a module has a ``forward`` of its own, not accelerate's, which moves tensors and does nothing else."""
    moves = [type(each).__name__ in ("AlignDevicesHook", "CpuOffload") for each in _hooks_of_accelerate(module)]
    return "forward" in vars(module) and not all(moves) and not hasattr(module, "_orig_mod")  # of torch.compile


def execution_device(model: nn.Module) -> torch.device | None:
    """Where accelerate's hooks move a model's offloaded parameters to. None: they say nothing."""
    hooks = (hook for module in model.modules() for hook in _hooks_of_accelerate(module))
    device = next((where for hook in hooks if (where := getattr(hook, "execution_device", None)) is not None), None)
    return None if device is None else torch.device(device)


def _hooks_of_accelerate(module: nn.Module) -> Sequence[Any]:
    """One of None where there is none."""
    hook = getattr(module, "_hf_hook", None)
    hooks: Sequence[Any] = getattr(hook, "hooks", (hook,))
    return hooks


def is_adapter(module: nn.Module) -> bool:
    """Whether a module is an adapter around another one, as peft makes them."""
    return hasattr(module, "get_base_layer") and hasattr(module, "merge")


def hooks_of(module: nn.Module) -> list[tuple[int, Any]]:
    """The hooks around a module's forward pass, each with its number."""
    return [*module._forward_hooks.items(), *module._forward_pre_hooks.items()]


def plain_blocks(model: Any) -> list[BlockParts]:
    """The parts of every layer of a model, all of whose linear maps are plain. Adapters are merged into copies.

    Raises:
        NotPlain: a module that is neither a plain linear map nor can be merged into one.
    """
    return [plain_block(block) for block in blocks_of(model)]


def plain_block(block: BlockParts) -> BlockParts:
    """The same of one layer, so that a large model is merged layer by layer."""
    for module, kind in zip((block.whole, block.attention), block.kinds, strict=True):
        if type(module) is not kind:
            raise NotPlain(block.name, f"has a {type(module).__name__} in the place of transformers' {kind.__name__}")
    for norm in filter(None, (block.norm_attn, block.norm_mlp)):
        if any(parameter.is_meta for parameter in norm.parameters()):
            raise NotPlain(block.name, "has a norm that is not in memory, device_map has put it on disk")
    if not block.targets and any(parameter.is_meta for parameter in block.whole.parameters()):
        raise NotPlain(block.name, "is not in memory, device_map has put it on disk")
    found = {part: getattr(block, part) for part in LINEAR}
    parts = {
        part: plain_linear(f"{block.name} ({part})", module) for part, module in found.items() if module is not None
    }
    return replace(block, **parts)


def plain_up(block: BlockParts) -> Any:
    """The linear map into a layer's neurons, for a second stage.

    Raises:
        UserError: one that must be called.
    """
    try:
        return plain_linear(f"{block.name} (up)", block.up)
    except NotPlain as refusal:
        remedy = "give a bundle without one (calibrate.cascade null)"
        raise UserError(f"{refusal}, and a second stage reads it; {remedy}") from None


def plain_table(name: str, module: Any, kind: type[nn.Module] = nn.Embedding) -> Tensor:
    """(rows, d), the weight of an embedding that does nothing but look rows up.

    Raises:
        NotPlain: it does more.
    """
    if type(module) is not kind or module.max_norm is not None:
        raise NotPlain(name, f"is a {type(module).__name__}, whose weight is not all that it does")
    (weight,) = module.parameters()
    return weight


def plain_linear(name: str, module: Any) -> Any:
    """The module itself if a call of it is ``x @ weight.T + bias``, else an ``nn.Linear`` of merged weights.

    Raises:
        NotPlain: neither.
    """
    module = getattr(module, "_orig_mod", module)  # of torch.compile
    if hasattr(module, "fused"):  # one of q, k and v of one map
        return module.of(plain_linear(name, module.fused))
    if is_adapter(module):
        return _merged(name, module)
    if type(module).forward is not nn.Linear.forward and not isinstance(module, RowLinear):
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
        raise NotPlain(name, f"is an adapter that cannot be merged ({first_line(error)})") from None
    base = made.get_base_layer()
    return base.requires_grad_(False).eval()


def _copy(linear: Any) -> nn.Linear:
    out_features, in_features = linear.weight.shape
    made = nn.Linear(in_features, out_features, linear.bias is not None, device="meta")
    made.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
    if linear.bias is not None:
        made.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
    return made
