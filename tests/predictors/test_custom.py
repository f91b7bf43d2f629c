import json

import pytest
import torch
from torch import nn

from dejavu_train.bundle.cost_model import predictor_bytes
from dejavu_train.bundle.spec import PredictorSpec, check_spec
from dejavu_train.families import ModelDims
from dejavu_train.ground.errors import UserError
from dejavu_train.predictors.checkpoint import as_stored, build_predictor, stored_tensors
from dejavu_train.predictors.custom import build_custom, chosen_classes, describe

SHAPE = ModelDims(n_layers=2, d_model=12, n_heads=4, d_ffn=20, vocab_size=320, max_positions=64)


class Tied(nn.Module):
    """Two names for one tensor, and a counter that is no floating point number."""

    def __init__(self, d_in, n_out):
        super().__init__()
        self.first, self.norm = nn.Linear(d_in, d_in), nn.BatchNorm1d(d_in)
        self.again, self.last = self.first, nn.Linear(d_in, n_out)

    def forward(self, x):
        hidden = self.again(self.first(x)).flatten(0, -2)
        return self.last(self.norm(hidden).view(x.shape))


class Odd(nn.Module):
    def __init__(self, d_in, n_out, kind):
        super().__init__()
        self.n_out, self.kind = n_out, kind

    def forward(self, x):
        made = {
            "tuple": (x, x),
            "wide": x.new_zeros(*x.shape[:-1], self.n_out + 1),
            "bool": x.new_zeros(*x.shape[:-1], self.n_out, dtype=torch.bool),
            "rows only": x.new_zeros(len(x), self.n_out),
        }
        return made[self.kind]


def spec_of(stored, **changes):
    metadata = {"kind": "custom", "class_path": "mine.Tied", "dtype": "float16", "tensors": describe(stored)}
    return PredictorSpec(1, "mlp", "mlp_in", 1, 0, 12, 20, **(metadata | changes))


def test_the_state_is_stored_and_read_back():
    made = build_custom(Tied, {}, 12, 20, "mlp.predictor")
    made(torch.randn(8, 12))  # moves the running statistics
    stored = stored_tensors(made, "float16")
    spec = spec_of(stored)
    assert spec.tensors["predictor.norm.num_batches_tracked"] == ["int64"]
    assert predictor_bytes(spec) == sum(t.nbytes for t in made.state_dict().values()) / 2 + 4
    spec = PredictorSpec(**json.loads(json.dumps(vars(spec))))
    needed = check_spec(spec, SHAPE, "a bundle")
    for name, tensor in stored.items():
        assert needed[f"layers.1.mlp.{name}"] == (tuple(tensor.shape), tensor.dtype)
    again = as_stored(build_predictor(vars(spec), {"mine.Tied": Tied}, "here"), stored)
    for name, tensor in made.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.half().float() if tensor.is_floating_point() else tensor)


@pytest.mark.parametrize("kind", ["tuple", "wide", "bool", "rows only"])
def test_logits_of_another_form_are_named(kind):
    with pytest.raises(UserError, match=r"mlp\.predictor: test_custom\.Odd must map .* 20\)"):
        build_custom(Odd, {"init_args": {"kind": kind}}, 12, 20, "mlp.predictor")


def test_a_caller_gives_every_class():
    assert chosen_classes(set(), None, "b") == {} == chosen_classes(set(), Tied, "b")
    assert chosen_classes({"mine.Old"}, Tied, "b") == {"mine.Old": Tied}  # the name of a class that has moved
    both = {"a.Tied": Tied, "b.Odd": Odd}
    assert chosen_classes(set(both), both, "b") == both
    for given in (None, Tied, {"a.Tied": Tied}):
        with pytest.raises(UserError, match=r"b\.Odd|--predictor\.class_path=a\.Tied,b\.Odd"):
            chosen_classes(set(both), given, "b")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"class_path": None}, "only a custom one has a class"),
        ({"kind": "low_rank"}, "only a custom one has a class"),
        ({"dtype": "int4"}, "int4"),
        ({"tensors": {"predictor.w": ["nn", 3]}}, r"\[dtype, \*shape\]"),
        ({"tensors": {"predictor.w": []}}, r"\[dtype, \*shape\]"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(changes, words):
    with pytest.raises(UserError, match=words):
        check_spec(spec_of({}, **changes), SHAPE, "a bundle")
