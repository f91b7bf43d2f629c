"""What engines read of every family, computed with by hand, against the modules themselves."""

import pytest
import torch
from family_models import CASES, save_family

from dejavu_train.families import blocks_of, dims_of, family_of
from dejavu_train.families.block import turn
from dejavu_train.families.dims import Positions
from dejavu_train.families.plain import NotPlain
from dejavu_train.families.read import check_read, read_ends, read_norm, read_turns
from dejavu_train.models.load import load_model

EVERY = dict.fromkeys(
    ("norm", "positions", "activation", "gated", "rotary_share", "threshold", "embedding_norm", "qk_norm", "logit_cap",
     "post_norm", "embedding_dim", "n_kv_heads")
)  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def model(request, tmp_path_factory):
    return load_model(str(save_family(request.param, tmp_path_factory.mktemp("read") / request.param)))


def normed(read, x):
    centred = x if read.rms else x - x.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + read.eps)
    return y * (1 if read.weight is None else read.weight) + (0 if read.bias is None else read.bias)


def test_norms_are_numbers(model):
    block, dims = blocks_of(model)[1], dims_of(model.config)
    x = 3 * torch.randn(4, dims.d_model) + 1
    for module in (block.norm_attn, block.norm_mlp):
        torch.testing.assert_close(normed(read_norm("one", module, dims.norm), x), module(x))
    with pytest.raises(NotPlain, match="one is a Linear, whose weight is not all that it does"):
        read_norm("one", torch.nn.Linear(2, 2), dims.norm)


def test_rotations_are_a_table(model):
    block, dims = blocks_of(model)[0], dims_of(model.config)
    table = read_turns(block, dims, 70)
    assert (table is None) == (dims.positions is not Positions.ROTARY)
    if table is not None:
        x = torch.randn(1, 2, 70, dims.head_dim)
        positions = torch.arange(70)[None]
        both = torch.cat([table, table], -1)[None]
        torch.testing.assert_close(turn(x, both[:, :, 0], both[:, :, 1]), block.rotate(x, positions))


def test_both_ends_are_numbers(model):
    family, ends, dims = family_of(model), read_ends(model), check_read(model, EVERY)
    ids = torch.tensor([[5, 9, 11]])
    x = ends.tokens[ids]
    x = x if ends.project_in is None else ends.project_in(x)
    x = x if ends.positions is None else x + ends.positions[:3]
    x = x if ends.embedding_norm is None else normed(ends.embedding_norm, x)
    torch.testing.assert_close(x, family.embed(model, ids, torch.arange(3)[None]))
    last = x if ends.final_norm is None else normed(ends.final_norm, x)
    last = last if ends.project_out is None else ends.project_out(last)
    behind = family.final_norm(model)
    torch.testing.assert_close(last, x if behind is None else behind(x))
    assert (ends.final_norm is None) == dims.post_norm


def test_what_is_exchanged_is_refused(model):
    block = blocks_of(model)[0]
    hook = block.norm_mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(NotPlain, match="has a hook"):
        check_read(model, EVERY)
    hook.remove()
    if dims_of(model.config).norm != "layer_norm" or dims_of(model.config).positions != "learned":
        with pytest.raises(NotPlain, match="is not what an engine runs, which has no kernels for"):
            check_read(model, {})
