"""What becomes of every parameter of transformers' calls, a row each: for tests and docs/reference/signatures.md.

A row has a letter for each backend, of mask, gather, cpu and triton in this order:

- ``t``: taken. At density 1 the result is that of ``OPTForCausalLM``.
- ``g``: the engine refuses it in a line, and with ``backend="auto"`` gather runs instead.
- ``i``: without effect, as in ``OPTForCausalLM``. A line says so once.
- ``r``: refused in a line.
- ``x``: transformers itself refuses it for an OPT.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    TextGenerationPipeline,
)
from transformers.cache_utils import DynamicCache
from transformers.generation import NoBadWordsLogitsProcessor
from transformers.generation.configuration_utils import CompileConfig
from transformers.pipelines.text_generation import ReturnType

from dejavu_train.families.opt import OPTFamily
from dejavu_train.sparse import keywords

WORDS = {"t": "taken", "g": "gather", "i": "ignored", "r": "refused", "x": "transformers refuses it"}
BACKENDS = ("mask", "gather", "cpu", "triton")

IDS = torch.tensor([[2, 30, 31, 32, 33]])
LABELS = torch.tensor([[2, -100, 31, 32, 33]])


@dataclass(frozen=True)
class Case:
    """What a value is made for: the model that is called, the dense one, their tokenizer."""

    model: Any
    dense: Any
    tokenizer: Any


@dataclass(frozen=True)
class Row:
    """A parameter: its letters, the keywords that exercise it, and what there is to know."""

    name: str
    letters: str
    value: dict[str, Any] | Callable[[Case], dict[str, Any]]
    note: str = ""


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append(value.tolist())

    def end(self) -> None:
        self.seen.append("end")


def one_more(model, input_ids, logits_processor=None, stopping_criteria=None, generation_config=None, **kwargs):
    """A decoding loop of your own."""
    return torch.cat([input_ids, model(input_ids).logits[:, -1:].argmax(-1)], dim=1)


def assisted(**more: Any) -> Callable[[Case], dict[str, Any]]:
    return lambda case: {"assistant_model": case.dense, **more}


SAMPLE = {"do_sample": True}
TUPLES = {"return_dict_in_generate": True}
BEAMS = {"num_beams": 3}
HUB = "needs code from the hub"

GENERATE = [
    Row("inputs", "tttt", {"inputs": IDS}, "int64 or int32, (batch, tokens)"),
    Row("generation_config", "tttt", {"generation_config": GenerationConfig(max_new_tokens=4), "max_new_tokens": 4}),
    Row("logits_processor", "ttgg", {"logits_processor": LogitsProcessorList([NoBadWordsLogitsProcessor([[283]])])}),
    Row("stopping_criteria", "ttgg", {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(7)])}),
    Row("prefix_allowed_tokens_fn", "ttgg", {"prefix_allowed_tokens_fn": lambda row, ids: [50, 60, 70]}),
    Row("synced_gpus", "xxgg", {"synced_gpus": True}, "for sharded models in several processes"),
    Row("assistant_model", "ttgg", assisted()),
    Row("streamer", "tttt", lambda case: {"streamer": Recorder()}),
    Row("negative_prompt_ids", "ttgg", {"negative_prompt_ids": IDS + 5, "guidance_scale": 2.0}),
    Row(
        "negative_prompt_attention_mask",
        "ttgg",
        {"negative_prompt_ids": IDS, "negative_prompt_attention_mask": (IDS != 2).long(), "guidance_scale": 2.0},
    ),
    Row("custom_generate", "ttgg", {"custom_generate": one_more}),
    Row("trust_remote_code", "ttgg", {"trust_remote_code": True}, "nothing is fetched for what is taken"),
    Row("tokenizer", "tttt", lambda case: {"tokenizer": case.tokenizer}),
    Row(
        "assistant_tokenizer",
        "xxgg",
        lambda case: {**assisted()(case), "tokenizer": case.tokenizer, "assistant_tokenizer": case.tokenizer},
        "an assistant has the same tokenizer",
    ),
    # What the forward pass takes.
    Row("input_ids", "tttt", {"inputs": None, "input_ids": IDS.int()}),
    Row("attention_mask", "tttt", {"attention_mask": (IDS != 2).long()}, "gather wants padding on the left"),
    Row("past_key_values", "trgg", lambda case: {"past_key_values": DynamicCache(config=case.model.config)},
        "gather takes that of model.new_cache()"),
    Row("inputs_embeds", "ttgg", lambda case: {
        "inputs": None, "inputs_embeds": case.model.get_input_embeddings()(IDS),
        "attention_mask": torch.ones_like(IDS),
    }),
    Row("position_ids", "ttgg", {"position_ids": torch.arange(5)[None] + 3}),
    Row("logits_to_keep", "ttgg", {"logits_to_keep": 1}),
    Row("labels", "ttgg", {"labels": IDS}, "without effect in transformers too"),
    # The settings of GenerationConfig.
    Row("assistant_confidence_threshold", "ttgg", assisted(assistant_confidence_threshold=0.5)),
    Row("assistant_early_exit", "rrrr", {"assistant_early_exit": 1}, "a bundle is for all layers"),
    Row("assistant_ensemble_weight", "ttgg", assisted(assistant_ensemble_weight=0.5)),
    Row("assistant_lookbehind", "ttgg", assisted(assistant_lookbehind=5)),
    Row("bad_words_ids", "ttgg", {"bad_words_ids": [[283], [31, 40]]}),
    Row("begin_suppress_tokens", "ttgg", {"begin_suppress_tokens": [283, 45]}),
    Row("bos_token_id", "tttt", {"inputs": None, "bos_token_id": 3}, "the prompt, where none is given"),
    Row("cache_config", "ttgg", {"cache_config": {"backend": "quanto"}}, "read for cache_implementation alone"),
    Row("cache_implementation", "trgg", {"cache_implementation": "static"}, "paged is refused everywhere"),
    Row("compile_config", "ttgg", {"compile_config": CompileConfig()}),
    Row("constraints", "xxgg", {"constraints": [1], "num_beams": 2}, HUB),
    Row("continuous_batching_config", "ttgg", {"continuous_batching_config": {"block_size": 8}}, "not read here"),
    Row("decoder_start_token_id", "ttgg", {"decoder_start_token_id": 2}),
    Row("disable_compile", "ttgg", {"disable_compile": True}),
    Row("diversity_penalty", "xxgg", {"diversity_penalty": 0.5, "num_beams": 4, "num_beam_groups": 2}, HUB),
    Row("do_sample", "tttt", {"do_sample": True, "top_k": 0, "top_p": 1e-6}, "the engines draw other numbers"),
    Row("dola_layers", "xxgg", {"dola_layers": "low"}, HUB),
    Row("early_stopping", "ttgg", {"early_stopping": True, **BEAMS}),
    Row("encoder_no_repeat_ngram_size", "ttgg", {"encoder_no_repeat_ngram_size": 2}),
    Row("encoder_repetition_penalty", "ttgg", {"encoder_repetition_penalty": 1.3}),
    Row("eos_token_id", "tttt", {"eos_token_id": torch.tensor([196, 44])}, "the engines know at most 8"),
    Row("epsilon_cutoff", "ttgg", {"epsilon_cutoff": 3e-4, **SAMPLE}),
    Row("eta_cutoff", "ttgg", {"eta_cutoff": 3e-4, **SAMPLE}),
    Row("exponential_decay_length_penalty", "ttgg", {"exponential_decay_length_penalty": (3, 1.5)}),
    Row("force_words_ids", "xxgg", {"force_words_ids": [[60]], "num_beams": 2}, HUB),
    Row("forced_bos_token_id", "ttgg", {"inputs": IDS[:, :1], "forced_bos_token_id": 60}),
    Row("forced_eos_token_id", "ttgg", {"forced_eos_token_id": 2}),
    Row("guidance_scale", "ttgg", {"guidance_scale": 1.5}),
    Row("is_assistant", "xxgg", {"is_assistant": True}, "set by assisted generation"),
    Row("length_penalty", "ttgg", {"length_penalty": 2.0, **BEAMS}),
    Row("low_memory", "ttgg", {"low_memory": True}),
    Row("max_cache_len", "ttgg", {"max_cache_len": 64}),
    Row("max_length", "tttt", {"max_length": 9, "max_new_tokens": None}),
    Row("max_matching_ngram_size", "ttgg", {"max_matching_ngram_size": 2, "prompt_lookup_num_tokens": 3}),
    Row("max_new_tokens", "tttt", {"max_new_tokens": 3}),
    Row("max_time", "ttgg", {"max_time": 60.0}),
    Row("min_length", "tttt", {"min_length": 10, "eos_token_id": 283}),
    Row("min_new_tokens", "tttt", {"min_new_tokens": 4, "eos_token_id": 283}),
    Row("min_p", "tttt", {"min_p": 0.999999, **SAMPLE}),
    Row("no_repeat_ngram_size", "ttgg", {"no_repeat_ngram_size": 1}),
    Row("num_assistant_tokens", "ttgg", assisted(num_assistant_tokens=3)),
    Row("num_assistant_tokens_schedule", "ttgg", assisted(num_assistant_tokens_schedule="heuristic")),
    Row("num_beam_groups", "xxgg", {"num_beam_groups": 2, "num_beams": 4}, HUB),
    Row("num_beams", "ttgg", BEAMS),
    Row("num_return_sequences", "tttt", {"num_return_sequences": 2, "top_k": 0, "top_p": 1e-6, **SAMPLE}),
    Row("output_attentions", "trgg", {"output_attentions": True, **TUPLES}, "with attn_implementation='eager'"),
    Row("output_hidden_states", "trgg", {"output_hidden_states": True, **TUPLES}),
    Row("output_logits", "ttgg", {"output_logits": True, **TUPLES}),
    Row("output_scores", "ttgg", {"output_scores": True, **TUPLES}),
    Row("pad_token_id", "tttt", {"inputs": torch.tensor([[1, 1, 30], [2, 31, 32]]), "pad_token_id": 1}),
    Row("penalty_alpha", "xxgg", {"penalty_alpha": 0.6, "top_k": 4}, HUB),
    Row("prefill_chunk_size", "ttgg", {"prefill_chunk_size": 2}),
    Row("prompt_lookup_num_tokens", "ttgg", {"prompt_lookup_num_tokens": 3}),
    Row("remove_invalid_values", "ttgg", {"remove_invalid_values": True}),
    Row("renormalize_logits", "ttgg", {"renormalize_logits": True, **SAMPLE}),
    Row("repetition_penalty", "tttt", {"repetition_penalty": 1.3}),
    Row("return_dict_in_generate", "tttt", TUPLES, "the engines return sequences only"),
    Row("sequence_bias", "ttgg", {"sequence_bias": [[[50], 5.0]]}),
    Row("speculation_type", "ttgg", {"speculation_type": "none"}, "without effect on an OPT"),
    Row("stop_strings", "tttt", lambda case: {"stop_strings": ["a"], "tokenizer": case.tokenizer}),
    Row("suppress_tokens", "ttgg", {"suppress_tokens": [283, 45]}),
    Row("target_lookbehind", "ttgg", assisted(target_lookbehind=5)),
    Row("temperature", "tttt", {"temperature": 1e-3, "top_k": 0, **SAMPLE}),
    Row("token_healing", "ttgg", lambda case: {"token_healing": True, "tokenizer": case.tokenizer}),
    Row("top_h", "ttgg", {"top_h": 0.5, **SAMPLE}),
    Row("top_k", "tttt", {"top_k": 1, **SAMPLE}),
    Row("top_p", "tttt", {"top_p": 1e-6, "top_k": 0, **SAMPLE}, "0 goes to gather"),
    Row("transformers_version", "tttt", {"transformers_version": "4.0"}),
    Row("typical_p", "ttgg", {"typical_p": 0.9, **SAMPLE}),
    Row("use_cache", "tttt", {"use_cache": False}, "the engines keep their cache"),
    Row("use_mtp", "xxgg", {"use_mtp": True}),
    Row("watermarking_config", "ttgg", {"watermarking_config": {"bias": 2.5}}),
]  # fmt: skip

SHIFTED = torch.tensor([[30, 31, -100, 33, -100]])
GIVEN = {"input_ids": IDS}

FORWARD = [
    Row("input_ids", "ttgt", GIVEN, "int64 or int32"),
    Row("attention_mask", "ttgt", {**GIVEN, "attention_mask": (IDS != 2).long()}, "(batch, past and new tokens)"),
    Row("past_key_values", "trgg", lambda case: {**GIVEN, "past_key_values": DynamicCache(config=case.model.config)},
        "gather takes that of model.new_cache()"),
    Row("inputs_embeds", "ttgg", lambda case: {"inputs_embeds": case.model.get_input_embeddings()(IDS)}),
    Row("labels", "ttgt", {**GIVEN, "labels": LABELS}),
    Row("use_cache", "ttgg", {**GIVEN, "use_cache": True}, "without it gather returns one, triton none"),
    Row("position_ids", "ttgg", {**GIVEN, "position_ids": torch.arange(5)[None] + 3}),
    Row("logits_to_keep", "ttgt", {**GIVEN, "logits_to_keep": torch.tensor([1, 3])},
        "in transformers 5.17 mask takes no columns for each row"),
    Row("return_dict", "ttgt", {**GIVEN, "return_dict": False, "use_cache": False}),
    Row("num_items_in_batch", "ttgt", {**GIVEN, "labels": LABELS, "num_items_in_batch": 3}),
    Row("ignore_index", "ttgt", {**GIVEN, "labels": IDS, "ignore_index": 31}),
    Row("shift_labels", "ttgt", {**GIVEN, "labels": LABELS, "shift_labels": SHIFTED}),
    Row("output_hidden_states", "trrr", {**GIVEN, "output_hidden_states": True}, "also where the config asks"),
    Row("output_attentions", "trrr", {**GIVEN, "output_attentions": True}, "with attn_implementation='eager'"),
    Row("is_causal", "trrr", {**GIVEN, "is_causal": False}),
    Row("output_router_logits", "tigi", {**GIVEN, "output_router_logits": True}),
    Row("cu_seq_lens_q", "tigi", {**GIVEN, "cu_seq_lens_q": torch.tensor([0, 5])}, "gather packs no texts"),
    Row("cu_seq_lens_k", "tigi", {**GIVEN, "cu_seq_lens_k": torch.tensor([0, 5])}, "gather packs no texts"),
    Row("max_length_q", "tigi", {**GIVEN, "max_length_q": 5}),
    Row("max_length_k", "tigi", {**GIVEN, "max_length_k": 5}),
    Row("seq_idx", "tigi", {**GIVEN, "seq_idx": torch.zeros(1, 5)}),
    Row("any other keyword", "tigi", {**GIVEN, "token_type_ids": 0 * IDS}, "the loss is given all of them"),
]  # fmt: skip

# Of pipeline("text-generation"): what it is made with, and what a call takes. The model is one in memory.
CHAT = [{"role": "user", "content": "the model reads"}]

MADE = [
    Row("task", "tttt", {"task": "text-generation"}),
    Row("model", "tttt", {}, "or a folder of save_pretrained, see from_pretrained"),
    Row("config", "tttt", lambda case: {"config": case.dense.config}),
    Row("tokenizer", "tttt", lambda case: {"tokenizer": case.tokenizer}),
    Row("feature_extractor", "tttt", {"feature_extractor": None}),
    Row("image_processor", "tttt", {"image_processor": None}),
    Row("video_processor", "tttt", {"video_processor": None}),
    Row("processor", "tttt", {"processor": None}),
    Row("revision", "tttt", {"revision": "main"}, "of a model on the hub"),
    Row("code_revision", "tttt", {"code_revision": "main"}, "no code is fetched"),
    Row("use_fast", "tttt", {"use_fast": True}),
    Row("token", "tttt", {"token": False}),
    Row("local_files_only", "xxgg", {"local_files_only": True}, "of a folder"),
    Row("device", "tttt", {"device": "cpu"}, "cpu runs on the CPU alone"),
    Row("device_map", "tttt", {"device_map": "auto"}, "of a folder; what is spread runs on mask and gather"),
    Row("dtype", "tttt", {"dtype": torch.float32}, "of a folder; a model in memory keeps its own"),
    Row("torch_dtype", "tttt", {"torch_dtype": torch.float32}, "dtype by its earlier name"),
    Row("trust_remote_code", "tttt", {"trust_remote_code": True}),
    Row("model_kwargs", "tttt", {"model_kwargs": {}}, "go to from_pretrained"),
    Row("pipeline_class", "tttt", {"pipeline_class": TextGenerationPipeline}),
    Row("binary_output", "tttt", {"binary_output": True}),
    Row("batch_size", "tttt", {"batch_size": 2}),
    Row("num_workers", "tttt", {"num_workers": 0}),
    Row("args_parser", "tttt", {"args_parser": None}),
    Row("generation_config", "tttt", {"generation_config": GenerationConfig(max_new_tokens=3, do_sample=False)}),
    Row("assistant_model", "ttgg", lambda case: {"assistant_model": case.dense}),
    Row("assistant_tokenizer", "tttt", lambda case: {"assistant_tokenizer": case.tokenizer}, "of an assistant"),
]

CALLED = [
    Row("text_inputs", "tttt", {"text_inputs": ["the model reads", CHAT[0]["content"]], "batch_size": 2}),
    Row("return_full_text", "tttt", {"return_full_text": False}),
    Row("return_tensors", "tttt", {"return_tensors": True}),
    Row("return_text", "tttt", {"return_text": True}),
    Row("return_type", "tttt", {"return_type": ReturnType.NEW_TEXT}),
    Row("clean_up_tokenization_spaces", "tttt", {"clean_up_tokenization_spaces": True}),
    Row("prefix", "tttt", {"prefix": "while "}),
    Row("handle_long_generation", "tttt", {"text_inputs": "the model " * 300, "handle_long_generation": "hole"}),
    Row("stop_sequence", "tttt", {"stop_sequence": "a"}, "in transformers 5.17 one token"),
    Row("truncation", "tttt", {"truncation": True}),
    Row("max_length", "tttt", {"max_length": 9, "max_new_tokens": None}),
    Row("padding", "tttt", {"padding": True}),
    Row("add_special_tokens", "tttt", {"add_special_tokens": False}),
    Row("continue_final_message", "tttt", {"text_inputs": CHAT, "continue_final_message": False}),
    Row("skip_special_tokens", "tttt", {"skip_special_tokens": False}),
    Row("tokenizer_encode_kwargs", "tttt", {"tokenizer_encode_kwargs": {"add_special_tokens": True}}),
    Row("tools", "tttt", {"text_inputs": CHAT, "tools": []}),
    Row("documents", "tttt", {"text_inputs": CHAT, "documents": []}),
    Row("generate_kwargs", "tttt", {"max_new_tokens": 3}, "as generate() takes them"),
]

PAGE = """# What transformers' calls take here

`SparseOPTForCausalLM` is called as `OPTForCausalLM` is. Each parameter of transformers has a row, and a test fails
where transformers adds one.
This page is written from the rows that the tests run: `python tests/signature_rows.py > docs/reference/signatures.md`.

- **taken**: at density 1 the result is that of the dense model.
- **gather**: the engine refuses it in one line that names it. With `backend="auto"` the backend `gather` runs instead,
  and a line says so.
- **ignored**: without effect, as for a dense OPT. One line says so.
- **refused**: in one line, before anything runs.
- **transformers refuses it**: for every OPT, and so for ours.

A setting that is left out, None or at its default is taken everywhere.
"""

FROM_PRETRAINED = """
## from_pretrained()

Beside its own keywords (`predictors`, `backend`, `sparse_from`, `dtype`, `device`, `device_map`,
`predictor_class`, `guard`) and values of the config, on every backend:

"""


def table(rows: list[Row]) -> str:
    lines = ["| parameter | mask | gather | cpu | triton | |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        name = f"`{row.name}`" if row.name.isidentifier() else row.name
        lines.append(f"| {name} | {' | '.join(WORDS[letter] for letter in row.letters)} | {row.note} |")
    return "\n".join(lines) + "\n"


def loading() -> str:
    """What becomes of the keywords of from_pretrained, on every backend alike: the tables that it reads itself."""
    lines = ["| keyword | | |", "| --- | --- | --- |"]
    lines += [f"| `{name}` | taken | |" for name in (*keywords.HUB, *keywords.WITHIN, *keywords.TAKEN)]
    lines += [f"| `{name}` | ignored | {why} |" for name, why in keywords.IGNORED.items()]
    for name, remedy in keywords.REFUSED.items():
        lines.append(f"| `{name}` | refused | {remedy.format(name='SparseOPTForCausalLM')} |")
    structure = (*OPTFamily.structure, *keywords.STRUCTURE)
    lines += [f"| `{name}` | refused | it is that of the weights |" for name in structure]
    return "\n".join(lines) + "\n"


def page() -> str:
    """The whole of docs/reference/signatures.md."""
    parts = [
        ("generate()", "`cpu` is the engine for `generate()` of up to 8 rows, `triton` that of up to 32.", GENERATE),
        (
            "forward()",
            "The engine `cpu` has no forward pass of its own. `triton` scores whole rows and returns no cache.",
            FORWARD,
        ),
        ('pipeline("text-generation")', "What it is made with, around a model in memory:", MADE),
        (None, "What a call of it takes:", CALLED),
    ]
    text = PAGE
    for title, note, rows in parts:
        text += ("" if title is None else f"\n## {title}\n") + f"\n{note}\n\n{table(rows)}"
    return text + FROM_PRETRAINED + loading()


if __name__ == "__main__":
    print(page(), end="")
