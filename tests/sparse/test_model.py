"""gather does what mask does, reads only what is selected, and behaves as OPTForCausalLM does."""

import re

import pytest
import torch
from sparse_helpers import close, gather_sets, mask_sets, sparse, tokens

from dejavu_train import SparseOPTForCausalLM
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model
from dejavu_train.sparse.runtime import WITHOUT_PLAN


def test_256_decoded_tokens_agree_with_mask(dense, bundle):
    gather = sparse(dense, bundle, "gather")
    seen = gather_sets(gather)
    ids = tokens(1, 8)
    cache, logits, step = gather.new_cache(), [], ids
    with torch.no_grad():
        for _ in range(257):
            out = gather(step, past_key_values=cache)
            logits.append(out.logits)
            step = out.logits[:, -1:].topk(5).indices[..., len(ids[0]) % 5]  # greedy text of a random model repeats
            ids = torch.cat([ids, step], dim=1)
        ids = ids[:, :-1]
        expected = sparse(dense, bundle, "mask")(ids).logits
    assert ids.shape[1] == 264
    close(torch.cat(logits, dim=1), expected)
    want = mask_sets(dense, bundle, ids)
    for key, columns in seen.items():
        assert torch.equal(torch.stack(columns, dim=1), want[key]), key
    for layer in range(2):
        density = want[layer, "heads"].float().mean()
        assert 0.2 < density < 0.8, "the test must skip heads"
        assert 0.05 < want[layer, "mlp"].float().mean() < 0.7


@pytest.mark.parametrize("start", [0, 5, torch.tensor([3, 9]), 100])
def test_sparse_from(dense, bundle, start):
    ids = tokens(2, 12)
    with torch.no_grad():
        expected = sparse(dense, bundle, "mask", sparse_from=start)(ids).logits
        close(sparse(dense, bundle, "gather", sparse_from=start)(ids).logits, expected)
        plain = dense(ids).logits
    if isinstance(start, int):
        if start:
            close(expected[:, :start], plain[:, :start])
        if 0 <= start < 12:
            assert (expected[:, start:] - plain[:, start:]).abs().max() > 1e-2
    else:
        close(expected[1, :9], plain[1, :9])


def test_gradients_are_right_or_refused(tiny_opt, bundle):
    ids, own = tokens(2, 9), load_model(str(tiny_opt))
    gather = sparse(own, bundle, "gather")
    with pytest.raises(UserError, match="gather gives no gradients; use backend='mask'"):
        gather(ids, labels=ids).loss.backward()
    assert all(parameter.grad is None for parameter in own.model.parameters())
    with torch.no_grad():
        assert torch.isfinite(gather(ids, labels=ids).loss)
    masked = sparse(own, bundle, "mask")
    masked(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in own.model.parameters())
    masked.train().gradient_checkpointing_enable()
    with pytest.raises(UserError, match=r"call model.gradient_checkpointing_disable\(\)"):
        masked(ids, labels=ids)
    with torch.no_grad():
        assert torch.isfinite(masked(ids, labels=ids).loss)


@pytest.mark.parametrize("options", [{"backend": "sparse"}, {"sparse_from": "later"}, {"backend": "triton"}])
def test_unknown_options(dense, bundle, options, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    if options.get("backend") == "triton" and torch.cuda.is_available():
        pytest.skip("a GPU is there")
    with pytest.raises(UserError) as error:
        SparseOPTForCausalLM.from_model(dense, bundle, **options)
    assert "\n" not in str(error.value)


def test_every_backend_describes_what_it_runs(dense, bundle):
    """`auto` takes the engine of a CPU, or says why not."""
    assert sparse(dense, bundle, "mask").describe() == f"backend mask: {WITHOUT_PLAN['mask']}"
    assert sparse(dense, bundle, "gather").describe() == f"backend gather: {WITHOUT_PLAN['gather']}"
    of_cpus = sparse(dense, bundle, "cpu")
    assert "\n2 rows of 512 tokens" in of_cpus.describe(rows=2, tokens=300)
    assert "1 row of 256 tokens" in of_cpus.describe() and "kept as fp32" in of_cpus.describe()
    on_gpus = sparse(dense, bundle, "triton", ops="reference").describe()
    assert "memory: weights" in on_gpus
    for said in (of_cpus.describe(), on_gpus):  # what a user asks first stands first
        first, second, third = said.splitlines()[:3]
        assert re.fullmatch(r"reads 0\.\d MB of weights for a token, \d\d % of the 0\.\d MB without predictors", first)
        assert second.startswith("expected speed: up to ") and third.startswith("1 row of")
    whole = of_cpus.bundle.at(1.0, 1.0)
    of_cpus.set_bundle(whole)
    said = of_cpus.describe()
    assert "100 % of" in said and "expected speed: that of the dense model" in said
    assert "density here is 1" in said and "threshold" not in said


@pytest.mark.parametrize("backend", ["mask", "gather"])
def test_torch_compile_leaves_the_model_as_it_is_and_torch_export_is_refused(dense, bundle, backend):
    model = sparse(dense, bundle, backend)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for used in (bundle, bundle.at(1.0, 1.0)):
            model.set_bundle(used)
            close(compiled(tokens(1, 7)).logits, sparse(dense, used, backend)(tokens(1, 7)).logits)
        with pytest.raises(UserError, match="export the dense model"):
            torch.export.export(model, (tokens(1, 7),), strict=False)


@pytest.mark.parametrize("part", ["model.decoder.layers.1", "model.decoder"])
def test_a_compiled_part_runs_or_is_refused(tiny_opt, dense, bundle, part):
    """Its graph, made without hooks, would be run again with those of mask, and compute everything."""
    model, ids = load_model(str(tiny_opt)), tokens(1, 7)
    model.get_submodule(part).compile(backend="eager")
    with torch.no_grad():
        model(ids)
        for call in (lambda masked: masked(ids), lambda masked: masked.generate(ids, max_new_tokens=2)):
            with pytest.raises(UserError, match=f"{part} is compiled"):
                call(sparse(model, bundle, "mask"))
        close(sparse(model, bundle, "gather")(ids).logits, sparse(dense, bundle, "mask")(ids).logits)
