"""Two processes over gloo: they load their rows, write the same text as one, and end together."""

import json
import os
import signal

import pytest
import torch
from bundles import make_bundle
from conftest import save_tiny_opt
from rank_helpers import processes

from dejavu_train.bundle.artifact import Bundle
from dejavu_train.engine.draft_weights import draft_weights
from dejavu_train.engine.ranks import group as groups
from dejavu_train.engine.ranks import watch
from dejavu_train.ground.errors import UserError
from dejavu_train.models.load import load_model
from dejavu_train.quantize.config import QuantizeConfig
from dejavu_train.quantize.run import quantise
from dejavu_train.sparse.model import SparseOPTForCausalLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = save_tiny_opt(tmp_path_factory.mktemp("ranks") / "model")
    make_bundle(made, means=True).at(mlp_density=0.3, head_density=0.5).save_pretrained(made / "predictors")
    return made


def load(folder):
    return SparseOPTForCausalLM.from_pretrained(folder, sparse_from="prompt")


def test_generate_writes_what_one_process_writes(folder, tmp_path):
    ids, settings = torch.tensor([[2, 17, 30, 8, 99]]), {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 1}
    expected = SparseOPTForCausalLM.from_pretrained(folder, sparse_from="prompt", backend="gather")
    wanted = expected.generate(ids, **settings)[0].tolist()

    def run(rank):
        with pytest.raises(UserError, match="rank 1 was asked .* the same model, bundle and dtype"):
            bundle = Bundle.from_pretrained(folder / "predictors").at(mlp_density=0.3 + 0.1 * rank)
            SparseOPTForCausalLM.from_pretrained(folder, bundle)
        model = load(folder)
        greedy = model.generate(ids, **settings)[0].tolist()
        torch.manual_seed(5 + rank)  # rank 0's counts
        sampled = model.generate(ids.repeat(2, 1), **settings | {"do_sample": True}).tolist()
        with pytest.raises(UserError, match="save it from one process"):
            model.save_pretrained(tmp_path / "part")
        with pytest.raises(UserError, match="triton alone, got gather"):
            SparseOPTForCausalLM.from_pretrained(folder, backend="gather")
        with pytest.raises(UserError, match="asked for something else"):
            model.generate(ids, **settings | {"max_new_tokens": 3 + rank})
        with pytest.raises(UserError, match="pass num_beams=1 to stay on it; or start one process, without torchrun"):
            model.generate(ids, **settings, num_beams=2)
        logits = model(input_ids=ids).logits
        told = {"greedy": greedy, "sampled": sampled, "logits": logits.tolist(), "says": model.describe()}
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(told))

    codes, said = processes(tmp_path, run)
    assert codes == [0, 0], said
    one, other = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert one == other and one["greedy"] == wanted
    assert "one of 2 GPUs: 2 groups of heads and 48 neurons" in one["says"]
    torch.testing.assert_close(torch.tensor(one["logits"]), expected(input_ids=ids).logits, atol=2e-4, rtol=1e-4)


def test_lossless_text_is_the_dense_models(tmp_path):
    """By the sparse step of the model's own weights, of rounded ones, and of a folder in 4 bits."""
    wide, coded = save_tiny_opt(tmp_path / "model", hidden_size=128, word_embed_proj_dim=128), str(tmp_path / "4")
    make_bundle(wide, means=True).at(mlp_density=0.9, head_density=1.0).save_pretrained(wide / "predictors")
    quantise(QuantizeConfig(model=str(wide), output=coded, quantizer="rtn", device="cpu"))
    ids, settings = torch.tensor([[2, 17, 30, 8, 99]]), {"max_new_tokens": 12, "pad_token_id": 1}
    dense = load_model(str(wide)).generate(ids, **settings, do_sample=False)[0].tolist()
    drafts = ((0, None), (3, None), (3, "int4"), (3, coded), (None, None))

    def run(rank):
        model, told = load(wide), []
        for sample in (False, True):
            for length, weights in drafts:
                torch.manual_seed(5 + rank)  # rank 0's counts
                text = model.generate(
                    ids, **settings, do_sample=sample, lossless=True, draft_length=length, draft_weights=weights
                )
                told.append((text[0].tolist(), model.lossless_report()["accepted"]))
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(told))
        engine = model.engine_pool().engine(1, 64)
        made, read = (draft_weights(engine.weights, asked, engine.ranks.shard) for asked in ("int4", coded))
        assert made.packed and all(torch.equal(*pair) for pair in zip(made.tensors(), read.tensors(), strict=True))

    codes, said = processes(tmp_path, run)
    assert codes == [0, 0], said
    one, other = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2))
    assert one == other
    greedy, sampled = ([text for text, _ in one[start : start + 5]] for start in (0, 5))
    assert greedy == [dense] * 5 and sampled == sampled[:1] * 5 != greedy
    accepted = [count for _, count in one]
    assert accepted[0] == 0 < accepted[1] and accepted[2::5] == accepted[3::5], accepted


def test_a_rank_that_is_killed_in_a_step_ends_all(folder, tmp_path):
    def run(rank):
        engine = load(folder).engine_pool().engine(1, 64)

        def die(row, token, heard=[]):  # noqa: B006  counts
            heard.append(token)
            if rank == 1 and len(heard) == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        engine.generate([[2, 17, 30]], 40, stop_tokens=(), callback=die)

    codes, said = processes(tmp_path, run)
    assert codes == [3, -signal.SIGKILL] and not said[1]
    assert said[0] == ["error: rank 1 of 2 has ended (it was killed, or has crashed); all ranks end"]


def test_the_first_rank_that_is_killed_ends_all(folder, tmp_path):
    def run(rank):
        engine = load(folder).engine_pool().engine(1, 64)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.generate([[2, 17, 30]], 40, stop_tokens=())

    codes, said = processes(tmp_path, run)
    assert codes == [-signal.SIGKILL, 3]
    assert said[1] == ["error: rank 0 of 2 has ended (it was killed, or has crashed); all ranks end"]


def test_a_step_that_one_rank_makes_alone_ends_it(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.2)

    def run(rank):
        engine = load(folder).engine_pool().engine(1, 64)
        engine.generate([[2, 17, 30]], 4, stop_tokens=())
        if rank == 1:
            engine.steps(1, "greedy")

    codes, said = processes(tmp_path, run)
    assert codes == [0, 3] and len(said[1]) == 1 and "all ranks end" in said[1][0]


def test_a_rank_that_cannot_load_ends_all_with_its_reason(folder, tmp_path):
    def run(rank):
        group = groups.group_of_launcher()
        try:
            if rank == 1:
                raise UserError("the weights file is damaged; fetch it again")
            load(folder).generate(torch.tensor([[2, 5]]), max_new_tokens=4)
        except UserError as error:
            group.fail(error)
            raise

    codes, said = processes(tmp_path, run)
    assert codes[0] == 3 and codes[1] == 2
    reason = "the weights file is damaged; fetch it again"
    assert said[0] == [f"error: rank 1 of 2 has ended ({reason}); all ranks end"]


def test_a_rank_that_never_comes_is_told_of(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "RENDEZVOUS_SECONDS", 1)
    codes, said = processes(tmp_path, lambda _: load(folder), ranks=[0])
    assert codes == [2] and said[0][-1].startswith("error: rank 0 of 2 did not meet the others within 1 s")


@pytest.mark.parametrize(
    "gpus, said", [(0, "there are 0; leave the device cuda out"), (1, "1; give --nproc-per-node 1")]
)
def test_more_processes_than_gpus_are_told_the_number(monkeypatch, gpus, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(UserError, match=f"process 1 of this host needs a GPU .* {said}"):
        groups._device_of(1, "cuda")
