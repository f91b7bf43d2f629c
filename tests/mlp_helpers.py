"""What tests of MLPs share."""

from dataclasses import replace

from dejavu_train.kernels.formats.matrix import Linear, Rows

NAN = float("nan")


def poisoned(weights, unread, names=("up", "down", "gate")):
    """The same with NaN in rows that must not be read."""

    def linear(one, name):
        if one is None or name not in names:
            return one
        bias = one.bias.clone()
        if name != "down":
            bias[unread] = NAN
        if isinstance(one.weight, Rows):
            numbers = one.weight.numbers.clone()
            numbers[unread] = NAN
            return Linear(Rows(numbers), bias)
        scales = one.weight.scales.clone()
        scales[unread] = NAN
        return Linear(replace(one.weight, scales=scales), bias)

    return replace(weights, **{name: linear(getattr(weights, name), name) for name in ("up", "down", "gate")})
