"""Things derived from a model's weights, and whether the weights still are what they were derived from."""

import contextlib
import math
import operator
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from dejavu_train.families.plain import BlockHook, hooks_of, is_adapter

COMPARED = 2**22
"""Elements of all tensors together up to which every element is looked at."""

T = TypeVar("T")


class DerivedCell(Generic[T]):
    """A place for something derived. A copy and a pickle of it are empty: they belong to other tensors.

    lock: held by whoever makes or exchanges the value.
    """

    def __init__(self) -> None:
        self.value: T | None = None
        self.lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "DerivedCell[T]":
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


@contextmanager
def no_mode(device: torch.device) -> Iterator[None]:
    """Context to derive in no mode of the caller: inference mode, autocast, gradients."""
    with contextlib.ExitStack() as modes:
        modes.enter_context(torch.inference_mode(False))
        modes.enter_context(torch.no_grad())
        if torch.amp.is_autocast_available(device.type):
            modes.enter_context(torch.autocast(device.type, enabled=False))
        yield


class Sources:
    """Sources of something derived, as they are when this is made. Compare them with what they are later.

    An edit is seen by the version that autograd counts. An edit through ``.data`` counts none. It is seen by the
    values: of all elements in a small model, else of one in every row and every column.

    Args:
        model: whose own hooks must stay what they are.
        modules: their hooks, classes, numbers, adapters and tensors must stay what they are.
        copied: those of the tensors that were copied or folded, so that an edit must not go unseen.
    """

    def __init__(self, model: nn.Module, modules: Iterable[nn.Module], copied: Iterable[Tensor]) -> None:
        roots = list(modules)
        tensors = [tensor for root in roots for tensor in (*root.parameters(), *root.buffers())]
        self._modules = [module for root in roots for module in root.modules()]
        self._tensors = [weakref.ref(tensor) for tensor in tensors]  # a new tensor may lie where an old one lay
        self._stamps = [_hooks(model), *map(_kind, self._modules), *map(_place, tensors)]
        self._values = _bytes(copied)

    def same(self, other: "Sources") -> bool:
        """Whether what was derived of this is right for the other."""
        return (
            self._stamps == other._stamps
            and all(map(operator.is_, self._modules, other._modules))
            and all(ours() is theirs() for ours, theirs in zip(self._tensors, other._tensors, strict=True))
            and all(map(torch.equal, self._values, other._values))
        )


def _kind(module: nn.Module) -> tuple[Any, ...]:
    numbers = [(name, value) for name, value in vars(module).items() if isinstance(value, (int, float, str))]
    adapter: Any = ()
    if is_adapter(module):
        names = ("disable_adapters", "active_adapters", "merged_adapters", "scaling")
        adapter = tuple(repr(getattr(module, name, None)) for name in names)
    numbers = [(name, value) for name, value in numbers if name != "training" and name[0] != "_"]
    return type(module), "forward" in vars(module), numbers, _hooks(module), adapter


def _hooks(module: nn.Module) -> list[int]:
    """Numbers of hooks. torch gives none twice."""
    return [number for number, hook in hooks_of(module) if not isinstance(hook, BlockHook)]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    version = None if tensor.is_inference() else tensor._version  # no edits are counted in inference mode
    return tensor.data_ptr(), version, tensor.shape, tensor.dtype, tensor.device


def _bytes(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The bytes of what is compared, one tensor for each device."""
    compared = [tensor.detach() for tensor in tensors]
    whole = sum(tensor.numel() for tensor in compared) <= COMPARED
    parts: dict[torch.device, list[Tensor]] = {}
    for tensor in compared:
        part = tensor if whole else sample(tensor)
        parts.setdefault(tensor.device, []).append(part.reshape(-1).contiguous().view(torch.uint8))
    return [torch.cat(each) for each in parts.values()]


def sample(tensor: Tensor) -> Tensor:
    """Elements of tensor: at least one of every row and every column. Of a small tensor all.

    >>> sample(torch.arange(6.0).view(2, 3)).numel()
    6
    """
    if tensor.dim() != 2 or tensor.numel() <= 4096:
        return tensor
    rows, columns = tensor.shape
    if not tensor.is_contiguous() and tensor.T.is_contiguous():
        tensor, columns = tensor.T, rows
    if not tensor.is_contiguous():
        return tensor.sum(0)
    stride = min(tensor.shape)
    while math.gcd(stride, columns) != 1:  # then any `columns` samples in a row are of all columns
        stride -= 1
    return tensor.view(-1)[::stride]
