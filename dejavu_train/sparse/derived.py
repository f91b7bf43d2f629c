"""What was derived from a model's weights, and whether the weights still are what it was derived from."""

import math
import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from dejavu_train.families.plain import BlockHook, hooks_of, is_adapter

COMPARED = 2**22
"""Elements of all tensors together up to which every element is looked at."""

T = TypeVar("T")


class Held(Generic[T]):
    """A place for something derived. A copy and a pickle of it are empty: they belong to other tensors.

    lock: held by whoever makes or exchanges the value.
    """

    def __init__(self) -> None:
        self.value: T | None = None
        self.lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Held[T]":
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class Sources:
    """The modules that something was derived from, as they were then.

    An edit is seen by the version that autograd counts. An edit through ``.data`` counts none. It is seen by the
    values: of all elements in a small model, else of one in every row and every column.

    Args:
        modules: their hooks, classes, adapters and tensors must stay what they are.
        copied: gives those of the tensors that were copied or folded, so that an edit must not go unseen.
    """

    def __init__(self, modules: Iterable[nn.Module], copied: Callable[[], Iterable[Tensor]]) -> None:
        self._modules, self._copied = list(modules), copied
        self._stamps, self._values = self._look(), self._sample()

    def unchanged(self) -> bool:
        """Whether what was derived is still right."""
        return self._look() == self._stamps and all(map(torch.equal, self._sample(), self._values))

    def _look(self) -> list[Any]:
        found: list[Any] = []
        for root in self._modules:
            found += [_kind(module) for module in root.modules()]
            tensors = (*root.parameters(), *root.buffers())
            found += [(t.data_ptr(), version_of(t), t.shape, t.dtype, t.device) for t in tensors]
        return found

    def _sample(self) -> list[Tensor]:
        """The bytes of what is compared, one tensor for each device."""
        tensors = [tensor.detach() for tensor in self._copied()]
        whole = sum(tensor.numel() for tensor in tensors) <= COMPARED
        parts: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            part = tensor if whole else sample(tensor)
            parts.setdefault(tensor.device, []).append(part.reshape(-1).contiguous().view(torch.uint8))
        return [torch.cat(each) for each in parts.values()]


def version_of(tensor: Tensor) -> int | None:
    """Edits in place so far, as autograd counts them; None for a tensor of inference mode, which has no count."""
    return None if tensor.is_inference() else tensor._version


def _kind(module: nn.Module) -> tuple[Any, ...]:
    hooks = tuple(id(hook) for hook in hooks_of(module) if not isinstance(hook, BlockHook))
    adapter: Any = ()
    if is_adapter(module):
        names = ("disable_adapters", "active_adapters", "merged_adapters", "scaling")
        adapter = tuple(repr(getattr(module, name, None)) for name in names)
    return id(module), type(module), "forward" in vars(module), hooks, adapter


def sample(tensor: Tensor) -> Tensor:
    """Elements of tensor: at least one of every row and every column; of a small tensor all.

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
