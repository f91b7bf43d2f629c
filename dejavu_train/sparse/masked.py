"""The backend ``mask``: computes everything, then takes out what was not selected. The reference for quality.

Hooks on the Hugging Face model. The maps out of neurons and heads see zeros in place of what is skipped. Where the
bundle holds a head's mean output, they see that. A hook acts in the thread or task that has put it there alone. Whole
sequences are computed at once, with any attention implementation and any cache. K and V are computed for all heads,
which is what the back-fill of the other backends reproduces.

Letters: B batch, T positions, n units.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dejavu_train.bundle.selector import Sites
from dejavu_train.families import BlockParts, LayerInput, Site, Target, blocks_of, family_of
from dejavu_train.families.plain import BlockHook
from dejavu_train.ground.errors import UserError
from dejavu_train.models.hooks import Act, at_module, at_place, first_place, has_place, hooked


class Select(Protocol):
    """Choice for ``masking``: which sites to keep, a selection (B, T, n) for them, and a replacement for ``up``.

    None is a dense layer, and ``up`` as it is.
    """

    @property
    def sites(self) -> Any: ...

    def __call__(self, layer: int, target: Target, sites: Sites) -> Tensor | None: ...

    def up(self, layer: int) -> tuple[Tensor, Tensor] | None: ...


Observe = Callable[[int, Target, Tensor | None, Tensor], None]

_ACTIVE: ContextVar[tuple[object, ...]] = ContextVar("dejavu_train_masks", default=())


class _Call:
    """One call of ``masking``. ``layer``: the number of the layer that runs."""

    layer = -1


class _Hook(BlockHook):
    """Acts where the caller stands within the call of ``masking`` that made it, in its layer, else does nothing.

    Layers may share modules.
    """

    def __init__(self, call: _Call, layer: int, act: Callable[..., Any]) -> None:
        self.call, self.layer, self.act = call, layer, act

    def __call__(self, *seen: Any) -> Any:
        return self.act(*seen) if self.call in _ACTIVE.get() and self.call.layer == self.layer else None


class _Enter(BlockHook):
    """Notes that a layer begins."""

    def __init__(self, call: _Call, layer: int) -> None:
        self.call, self.layer = call, layer

    def __call__(self, *_: Any) -> None:
        if self.call in _ACTIVE.get():
            self.call.layer = self.layer


@contextmanager
def masking(
    model: nn.Module,
    selector: Select,
    sparse: Tensor | None = None,
    observe: Observe | None = None,
    means: Mapping[int, Tensor] | None = None,
    finite: list[Tensor] | None = None,
    checked: bool = False,
) -> Iterator[None]:
    """Within the context every forward pass of ``model`` is sparse, in this thread or task.

    Args:
        model: a dense model of a registered family.
        selector: gives the selection of every layer and target.
        sparse: (B, T) bool, false where everything is selected (before ``sparse_from``, padding). None: all true.
        observe: called as ``observe(layer, target, keep, values)`` before anything is taken out. ``keep`` (B, T, n)
            bool or None for dense, ``values`` the activations (B, T, d_ffn) or head outputs (B, T, n_heads, head_dim).
        means: by layer the (n_heads, head_dim) that stands in for skipped heads. Zero where a layer is not there.
        finite: takes for every layer and the final norm (B, T) bool, where its input is a finite number.
        checked: whether the caller has called :func:`refuse_compiled`, once for many passes.
    Raises:
        UserError: a part of the model that was compiled by itself.
    """
    if not checked:
        refuse_compiled(model)
    sites: dict[Site, Tensor] = {}
    needed = set(selector.sites)
    handles: list[Any] = []
    call = _Call()
    blocks = blocks_of(model)
    first = next(layer for layer, block in enumerate(blocks) if block.targets)

    def keep_finite(values: Tensor) -> None:
        if finite is not None:
            finite.append(values.detach().sum(-1).isfinite())

    for layer, block in enumerate(blocks):
        mean = (means or {}).get(layer)
        clears = layer == first
        handles += _hook_layer(layer, block, call, selector, needed, sites, sparse, observe, mean, clears)
        if finite is not None:
            handles.append(at_place(block, first_place(block), keep_finite, partial(_Hook, call, layer)))
    final = family_of(model).final_norm(model)
    if finite is not None and final is not None:
        handles.append(at_module(final, "input", keep_finite, partial(_Hook, call, len(blocks) - 1)))
    token = _ACTIVE.set((*_ACTIVE.get(), call))
    try:
        with hooked(handles):
            yield
    finally:
        _ACTIVE.reset(token)


def refuse_compiled(model: nn.Module) -> None:
    """Raise :class:`UserError` for a part that was compiled by itself. Its graph would run without hooks that came
    later."""
    for name, module in model.named_modules():
        compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
        if compiled and module is not model and any(True for _ in getattr(module, "_orig_mod", module).children()):
            raise UserError(
                f"{name} is compiled, and its graph may leave out what the backend mask puts there; load the model"
                " anew, without torch.compile of its parts"
            )


def _hook_layer(
    layer: int,
    block: BlockParts,
    call: _Call,
    selector: Select,
    needed: set[Site],
    sites: dict[Site, Tensor],
    sparse: Tensor | None,
    observe: Observe | None,
    mean: Tensor | None,
    clears: bool,
) -> list[Any]:
    """Hooks of a layer. clears: it is the first to have sites, so that those of an earlier pass go."""
    rows: list[tuple[int, int]] = [(0, 0)]  # (B, T): the MLP half of a block may see (B*T, d)

    def begin(hidden: Tensor) -> None:
        rows[0] = (hidden.shape[0], hidden.shape[1])
        if clears:
            sites.clear()

    def keep_site(name: LayerInput, output: Tensor) -> None:
        site = Site(layer, name)
        if site in needed:
            sites[site] = output.reshape(*rows[0], -1)

    def zero_skipped(target: Target, given: Tensor) -> Tensor | None:
        keep = selector(layer, target, sites)
        units = given.shape[-1] if target == Target.MLP else block.n_groups
        values = given.view(*rows[0], units, -1)  # (B, T, n, width of a unit)
        if keep is not None and sparse is not None:
            keep = keep | ~sparse.to(keep.device)[..., None]
        if observe is not None:
            observe(layer, target, keep, values.squeeze(-1) if target == Target.MLP else values)
        if keep is None:
            return None
        instead = 0.0 if mean is None or target == Target.MLP else mean.to(values)
        return torch.where(keep.to(values.device)[..., None], values, instead).reshape(given.shape)

    own = partial(_Hook, call, layer)
    acts: dict[str, Act] = {
        **{name: partial(keep_site, name) for name in LayerInput},
        "head_out": partial(zero_skipped, Target.HEADS),
        "activation": partial(zero_skipped, Target.MLP),
    }
    handles = [block.whole.register_forward_pre_hook(_Enter(call, layer))]
    handles.append(at_place(block, first_place(block), begin, own))
    handles += [at_place(block, place, act, own) for place, act in acts.items() if has_place(block, place)]
    instead = selector.up(layer)
    return handles if instead is None else handles + _multiply_with(block.up, own, *instead)


def _multiply_with(up: nn.Module, own: Callable[..., Any], weight: Tensor, bias: Tensor) -> list[Any]:
    """Have ``up`` give x @ weight.T + bias: weight (n, d), bias (n). Its own parameters get the gradient of that.

    Where nothing needs a gradient the module itself is handed no rows, so that nothing is multiplied twice.
    """
    given: list[Tensor] = []

    def take(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        given.append(args[0])
        return None if torch.is_grad_enabled() else (args[0][:0], *args[1:])

    def put(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        x = given.pop()
        made = F.linear(x, weight.to(x), bias.to(x))
        return output + (made - output).detach() if torch.is_grad_enabled() else made

    # Others' hooks see what the model computes: the whole input before this one, its output behind it.
    return [
        up.register_forward_pre_hook(own(take)),
        up.register_forward_hook(own(put), prepend=True),
    ]
