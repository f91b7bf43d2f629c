"""A bundle comes back as it was written, moves to any density, and names every part that is not as it should be."""

import dataclasses
import json
import pickle
import shutil

import pytest
import torch
from bundles import make_bundle
from safetensors.torch import load_file, save_file

from dejavu_train.bundle import FACTS, TENSORS, Bundle, _digest
from dejavu_train.errors import UserError
from dejavu_train.files import sha256_file
from dejavu_train.quantise import quantise_rows, stored_rows


@pytest.fixture(scope="module")
def bundle(tiny_opt):
    return make_bundle(tiny_opt).at(mlp_density=0.2, head_density=0.85)


@pytest.fixture
def folder(bundle, tmp_path):
    bundle.save_pretrained(tmp_path / "bundle")
    return tmp_path / "bundle"


def rewrite(folder, change_facts=None, change_tensors=None):
    """Change a bundle and make its checksums right again, so that the deeper checks are reached."""
    facts = json.loads((folder / FACTS).read_text())
    facts.pop("sha256")
    if change_tensors:
        tensors = load_file(folder / TENSORS)
        change_tensors(tensors)
        save_file(tensors, folder / TENSORS)
        facts["tensors_sha256"] = sha256_file(folder / TENSORS)
    if change_facts:
        change_facts(facts)
    (folder / FACTS).write_text(json.dumps(facts | {"sha256": _digest(facts)}))


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_roundtrip(bundle, folder):
    again = Bundle.from_pretrained(folder)
    assert again.entries == bundle.entries
    assert again.facts == {"text": "made up"}
    assert again.targets == ["mlp", "heads"]
    assert sorted(path.name for path in folder.iterdir()) == [FACTS, TENSORS]
    for name, tensor in bundle.tensors.items():
        torch.testing.assert_close(again.tensors[name], tensor, rtol=0, atol=0)
    again.save_pretrained(folder)  # over an existing one
    assert Bundle.from_pretrained(folder).entries == bundle.entries


def test_means_travel_with_the_bundle(tiny_opt, tmp_path):
    made = make_bundle(tiny_opt, means=True)
    made.save_pretrained(tmp_path / "bundle")
    again = Bundle.from_pretrained(tmp_path / "bundle").head_means()
    assert sorted(again) == [0, 1] and again[0].shape == (4, 12) and again[0].dtype == torch.float32
    torch.testing.assert_close(again[1], made.tensors["layers.1.heads.mean"].float())


def rounded(bundle, dtype):
    """The same bundle with its predictors in int8 or int4."""
    tensors = {name: tensor for name, tensor in bundle.tensors.items() if name.split(".")[-1] not in ("down", "up")}
    for name in bundle.tensors.keys() - tensors.keys():
        tensors[name], tensors[name + "_scale"] = stored_rows(bundle.tensors[name], dtype)
    entries = {key: dataclasses.replace(entry, dtype=dtype) for key, entry in bundle.entries.items()}
    return dataclasses.replace(bundle, entries=entries, tensors=tensors)


@pytest.mark.parametrize(("dtype", "stored", "levels"), [("int8", torch.int8, 254), ("int4", torch.uint8, 2)])
def test_predictors_in_few_bits(bundle, tmp_path, dtype, stored, levels):
    rounded(bundle, dtype).save_pretrained(tmp_path / "bundle")
    again = Bundle.from_pretrained(tmp_path / "bundle")
    assert again.tensors["layers.1.mlp.up"].dtype == stored
    for key in bundle.entries:
        exact, quantised = bundle.predictor(*key), again.predictor(*key)
        for name, parameter in quantised.named_parameters():
            limit = 0 if name == "bias" else dict(exact.named_parameters())[name].abs().amax(1, keepdim=True) / levels
            assert ((parameter - dict(exact.named_parameters())[name]).abs() <= limit + 1e-6).all()
    rewrite(tmp_path / "bundle", change_tensors=lambda tensors: tensors.pop("layers.0.mlp.up_scale"))
    with pytest.raises(UserError, match="layers.0.mlp.up_scale is missing"):
        Bundle.from_pretrained(tmp_path / "bundle")


def test_int8_rows_are_those_of_the_kernels():
    from kernels.select import quantize_rows

    weight = torch.randn(7, 5)
    weight[3] = 0
    for mine, theirs in zip(quantise_rows(weight), quantize_rows(weight, torch.int8), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_predictor_has_the_deployed_weights_in_fp32(bundle):
    predictor = bundle.predictor(1, "mlp")
    stored = bundle.tensors["layers.1.mlp.up"]
    assert stored.dtype == torch.float16 and predictor.up.dtype == torch.float32
    torch.testing.assert_close(predictor.up, stored.float(), rtol=0, atol=0)


def test_at_moves_thresholds_to_the_mean_density(bundle):
    for density in (0.05, 0.2, 0.5):
        moved = bundle.at(mlp_density=density)
        assert moved.mean_density("mlp") == pytest.approx(density, rel=1e-3)
        shares = [moved.entries[layer, "mlp"].density for layer in range(2)]
        assert shares[1] == pytest.approx(2 * shares[0], rel=1e-3)  # in proportion to the true densities 0.1 and 0.2
        assert moved.entries[0, "heads"] == bundle.entries[0, "heads"]
    assert all(moved.entries[layer, "mlp"].dense for layer in range(2)) is False
    dense = bundle.at(mlp_density=1.0, head_density=1.0)
    assert all(entry.dense and entry.density == 1 for entry in dense.entries.values())
    assert dense.at(mlp_density=0.2).entries[0, "mlp"].threshold == bundle.entries[0, "mlp"].threshold


def test_at_top_k_and_layers_kept_dense(bundle):
    top = bundle.at(mlp_density=0.25, top_k=True)
    assert [top.entries[layer, "mlp"].top_k for layer in range(2)] == [16, 32]
    assert top.entries[0, "mlp"].threshold is None
    kept = dataclasses.replace(bundle.entries[0, "mlp"], keep_dense=True, threshold=None)
    moved = dataclasses.replace(bundle, entries=bundle.entries | {(0, "mlp"): kept}).at(mlp_density=0.6)
    assert moved.entries[0, "mlp"].dense
    assert moved.entries[1, "mlp"].density == pytest.approx(0.2, rel=1e-3)


def test_densities_that_cannot_be(bundle):
    for density in (0.0, -1.0, 1.5):
        with pytest.raises(UserError, match="density"):
            bundle.at(mlp_density=density)
    only_mlp = {key: entry for key, entry in bundle.entries.items() if key[1] == "mlp"}
    with pytest.raises(UserError, match="no predictors for heads"):
        dataclasses.replace(bundle, entries=only_mlp).at(head_density=0.5)
    assert dataclasses.replace(bundle, entries=only_mlp).at(0.2, 1.0).mean_density("heads") == 1.0
    bare = {key: dataclasses.replace(entry, curve={}) for key, entry in bundle.entries.items()}
    with pytest.raises(UserError, match="layer 0 has no calibration curve"):
        dataclasses.replace(bundle, entries=bare).at(mlp_density=0.2)
    with pytest.raises(UserError, match="mlp of layer 7"):
        bundle.with_densities({(7, "mlp"): 0.5})


def test_model_must_be_the_one(bundle, tiny_opt, tmp_path):
    bundle.check_model(str(tiny_opt))
    bundle.check_model(bundle.weight_hash)
    with pytest.raises(UserError, match="other weights"):
        bundle.check_model("0" * 64)
    from conftest import save_tiny_opt

    wider = save_tiny_opt(tmp_path / "wider", ffn_dim=128)
    with pytest.raises(UserError, match="another model.*d_ffn 96.*128"):
        bundle.check_model(str(wider))
    revised = shutil.copytree(tiny_opt, tmp_path / "revised")
    tensors = load_file(revised / "model.safetensors")
    tensors["model.decoder.layers.0.fc1.weight"][3, 3] += 1
    save_file(tensors, revised / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="other weights.*revision") as error:
        bundle.check_model(str(revised))
    one_line(error)


def flip_byte(folder, name, place):
    raw = bytearray((folder / name).read_bytes())
    raw[place] ^= 1
    (folder / name).write_bytes(raw)


def test_flipped_byte(folder):
    flip_byte(folder, TENSORS, -5)
    with pytest.raises(UserError, match=f"{TENSORS}.*SHA-256") as error:
        Bundle.from_pretrained(folder)
    one_line(error)


def test_flipped_digit_of_a_threshold(folder):
    text = (folder / FACTS).read_text()
    start = text.index('"threshold": ') + len('"threshold": ') + 4
    (folder / FACTS).write_text(text[:start] + ("1" if text[start] != "1" else "2") + text[start + 1 :])
    with pytest.raises(UserError, match=f"{FACTS} was changed"):
        Bundle.from_pretrained(folder)


@pytest.mark.parametrize("name", [FACTS, TENSORS])
def test_truncated_or_missing_file(folder, name):
    raw = (folder / name).read_bytes()
    (folder / name).write_bytes(raw[: len(raw) // 2])
    with pytest.raises(UserError, match=name) as error:
        Bundle.from_pretrained(folder)
    one_line(error)
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"{name}.*(missing|no file)"):
        Bundle.from_pretrained(folder)


def test_pickle_is_never_read(folder):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was opened",))

    (folder / TENSORS).write_bytes(pickle.dumps(Trap()))
    with pytest.raises(UserError, match=TENSORS):
        Bundle.from_pretrained(folder)
    facts = json.loads((folder / FACTS).read_text())
    facts.pop("sha256")
    facts["tensors_sha256"] = sha256_file(folder / TENSORS)  # even when somebody vouches for it
    (folder / FACTS).write_text(json.dumps(facts | {"sha256": _digest(facts)}))
    with pytest.raises(UserError, match="not readable safetensors") as error:
        Bundle.from_pretrained(folder)
    one_line(error)
    (folder / TENSORS).rename(folder / "predictors.bin")
    with pytest.raises(UserError, match="missing"):
        Bundle.from_pretrained(folder)


def set_entry(**values):
    return lambda facts: facts["entries"][0].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda facts: facts["entries"].pop(1), "lacks the mlp predictor of layer 0"),
        (lambda facts: facts["entries"].append(facts["entries"][0]), "twice"),
        (lambda facts: facts.update(schema=2), "schema 2"),
        (lambda facts: facts.pop("entries"), "entries"),
        (lambda facts: facts.update(targets=["mlp"]), "targets"),
        (lambda facts: facts["entries"].append(facts["entries"][0] | {"layer": 9}), "layer 9"),
        (set_entry(kind="mlp"), "kind mlp"),
        (set_entry(site="mlp_in"), "no site before"),
        (set_entry(rank=5), "must be"),
        (set_entry(n_out=3), "maps 48 -> 3"),
        (set_entry(threshold=1.0, top_k=2), "one finite threshold or one top_k"),
        (set_entry(surprise=1), "surprise"),
        (set_entry(replacement="median"), "unknown replacement median"),
        (set_entry(replacement="mean"), "layers.0.heads.mean is missing"),
        (lambda facts: facts["entries"][1].update(replacement="mean"), "unknown replacement mean"),
        (set_entry(curve={"density": [0.5, 0.1]}), "curve"),
    ],
)
def test_facts_that_do_not_fit(folder, change, message):
    rewrite(folder, change_facts=change)
    with pytest.raises(UserError, match=message) as error:
        Bundle.from_pretrained(folder)
    one_line(error)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("layers.1.heads.up"), "layers.1.heads.up is missing"),
        (lambda tensors: tensors.update({"layers.2.mlp.up": torch.ones(2)}), "layers.2.mlp.up belongs to no predictor"),
        (lambda tensors: tensors.update({"layers.0.mlp.up": torch.ones(2)}), r"layers.0.mlp.up must be \(96, 8\)"),
        (lambda tensors: tensors["layers.0.mlp.bias"].fill_(float("nan")), "layers.0.mlp.bias holds a value"),
    ],
)
def test_tensors_that_do_not_fit(folder, change, message):
    rewrite(folder, change_tensors=change)
    with pytest.raises(UserError, match=message) as error:
        Bundle.from_pretrained(folder)
    one_line(error)


def test_no_such_bundle():
    with pytest.raises(UserError, match="no bundle folder"):
        Bundle.from_pretrained("./nowhere")


def test_push_to_hub_uploads_both_files(bundle, monkeypatch):
    calls = []

    class Api:
        def __init__(self, token=None):
            pass

        def create_repo(self, repo_id, **options):
            calls.append((repo_id, options["private"]))

        def upload_folder(self, repo_id, folder_path, **options):
            calls.append(Bundle.from_pretrained(folder_path).entries == bundle.entries)
            return "https://example.org/commit"

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert bundle.push_to_hub("someone/bundle") == "https://example.org/commit"
    assert calls == [("someone/bundle", True), True]
