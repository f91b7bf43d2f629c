"""Fixtures shared by all tests: a tiny random OPT with a real tokenizer, and some text."""

import functools
import gc
import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest
import torch

WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if WORKER and torch.cuda.device_count() > 1:  # asks the driver's library, so that CUDA has not yet read what it may see
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[int(WORKER.removeprefix("gw")) % len(seen.split(","))]

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # for tests of kernels, before anything imports triton

REPOSITORY = Path(__file__).resolve().parent.parent
KERNEL_TESTS = Path(__file__).resolve().parent / "kernels"
WORDS = (
    "the model reads a token and the layer keeps only those rows that matter for it so that memory traffic falls "
    "while quality holds because most neurons of a rectified network stay silent on any one word of the text"
).split()


@pytest.fixture(scope="session", autouse=True)
def _a_faster_interpreter(request):
    from dejavu_train.kernels.common.checks import INTERPRET

    if INTERPRET:
        from interpreter import spare_wasted_work
        from products import take_ordered_products

        spare_wasted_work()
        take_ordered_products()
    if request.config.option.product == "by-place":
        from products import sum_by_place

        sum_by_place()


@pytest.fixture(scope="session", autouse=True)
def _no_wait_for_the_disk():
    """Tests kill processes, and no machine: what a process has written is there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def no_pictures(monkeypatch):
    """As without matplotlib, for commands whose pictures a test does not look at: they take half a second."""
    import torchmetrics  # noqa: F401  # looks for matplotlib when it is first imported

    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.fixture
def quick_bandwidth(monkeypatch):
    """Memory is read for a moment alone, for commands whose times a test does not look at."""
    from dejavu_train.engine.cpu import bandwidth

    read = functools.partial(bandwidth.read_bandwidth, megabytes=32, seconds=0.02)
    monkeypatch.setattr(bandwidth, "read_bandwidth", read)


@pytest.fixture(autouse=True)
def _few_threads_and_a_seed(request):
    torch.set_num_threads(request.config.option.threads)  # shared cores: spinning threads cost more than they bring
    torch.manual_seed(0)


def make_text(n_words: int, seed: int = 0) -> str:
    """Paragraphs of pseudo-random words, cut at blank lines, ``n_words`` long."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(WORDS), (n_words,), generator=generator).tolist()
    words = [WORDS[pick] for pick in picks]
    sentences = [" ".join(words[i : i + 11]) + "." for i in range(0, n_words, 11)]
    return "\n\n".join(" ".join(sentences[i : i + 6]) for i in range(0, len(sentences), 6)) + "\n"


def save_tiny_tokenizer(folder: Path) -> int:
    """A byte-level BPE with OPT's special ids, trained on the fixture's text. Returns its vocabulary size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made, special = Tokenizer(models.BPE()), ["<s>", "<pad>", "</s>", "<unk>"]
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    made.train_from_iterator([make_text(2000)], trainers.BpeTrainer(vocab_size=320, **how))
    made.post_processor = processors.TemplateProcessing(
        single="</s> $A", pair="</s> $A $B", special_tokens=[("</s>", 2)]
    )
    names = {"bos_token": "</s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, **names)
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def save_tiny_opt(folder: Path, **overrides) -> Path:
    """A random pre-norm OPT in Hugging Face format, with a tokenizer."""
    from transformers import OPTConfig, OPTForCausalLM

    vocab_size = save_tiny_tokenizer(folder)
    values = {
        "vocab_size": vocab_size,
        "hidden_size": 48,
        "word_embed_proj_dim": 48,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "do_layer_norm_before": True,
        "dropout": 0.0,
        "init_std": 0.15,
    } | overrides
    torch.manual_seed(0)
    model = OPTForCausalLM(OPTConfig(**values))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name:
                parameter.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_opt(tmp_path_factory) -> Path:
    """Folder of a random OPT of the sizes that `save_tiny_opt` gives it."""
    return save_tiny_opt(tmp_path_factory.mktemp("tiny-opt"))


@pytest.fixture(scope="module")
def dense(tiny_opt):
    """The random OPT itself, for tests of a file whose fixtures name no other."""
    from dejavu_train.models.load import load_model

    return load_model(str(tiny_opt))


@pytest.fixture(scope="module")
def model(dense):
    """The same by another name."""
    return dense


@pytest.fixture(scope="module")
def bundle(tiny_opt):
    """Predictors for it, likewise."""
    from bundles import make_bundle

    return make_bundle(tiny_opt).at(mlp_density=0.3, head_density=0.5)


@pytest.fixture(scope="module")
def bundle_folder(bundle, tmp_path_factory) -> Path:
    """The folder of the bundle."""
    folder = tmp_path_factory.mktemp("bundle-folder") / "bundle"
    bundle.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """About 300 KB of plain text: some 70 documents, so that none of the four sets is empty."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(make_text(60000, seed=1), encoding="utf-8")
    return path


@pytest.fixture
def run(tiny_opt, text_file, tmp_path):
    """Makes the flags of a small run of train.py in a folder of the test's own."""
    from small_runs import flags

    return lambda *more: flags(tiny_opt, text_file, tmp_path / "run", *more)


LONG = (  # files that take some ten seconds and more
    "cpu_engine decode decode_engine decode_families family_engine hub imports installed int4_batch int4_qkv "
    "lossless modules one_model_for_many pipeline programs quantize_families reported run signatures "
    "slot_products whole_job"
).split()


def pytest_addoption(parser):
    parser.addoption("--product", choices=["numpy", "by-place"], default="numpy", help="see tests/products.py")
    parser.addoption("--threads", type=int, default=1, help="of torch and of the CPU engine")


def pytest_configure(config):
    config.option.loadscopereorder = False  # pytest-xdist would begin files of few tests last, however long they take


def pytest_collection_modifyitems(config, items):
    for item in items if "long" not in config.option.markexpr else ():
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes: make test-long"))
    # So that none of two workers ends long after the other.
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        elif item.path.is_relative_to(KERNEL_TESTS):
            from dejavu_train.kernels.common.checks import INTERPRET

            if not INTERPRET:
                raise pytest.UsageError("triton was imported before conftest.py: run with TRITON_INTERPRET=1")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What modules and tests are made of stays to the end, and looking through it takes seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture
def queues_in_assembly(device, monkeypatch):
    """Whole kernels with the assembly of their queues, on a CPU as well, by what is returned (tests/assembly.py)."""
    if device == "cuda":
        return None
    from assembly import queues_carried_out

    return queues_carried_out(monkeypatch)


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"
