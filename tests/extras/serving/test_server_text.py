"""Text of tokens behind a prompt: whole answers, streams, stops, for tokenizers of the usual kinds."""

import random

import pytest
from tokenizers_of_tests import KINDS, WORDS

from dejavu_train.extras.serving.text import UNFINISHED, Text, Vocabulary


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request):
    return KINDS[request.param]()


def read(tokenizer, prompt, ids, size, **options):
    text = Text(tokenizer, prompt, vocabulary=Vocabulary.of(tokenizer), **options)
    parts = [text.add(ids[i : i + size], i + size >= len(ids)) for i in range(0, len(ids), size)]
    return "".join(parts), text


def drawn(tokenizer, rng):
    """A prompt, and ids behind it: words, or any tokens, special ones and parts of characters among them."""
    prompt = tokenizer(" ".join(rng.choices(WORDS, k=rng.randint(1, 12)))).input_ids
    if rng.random() < 0.3:
        prompt = prompt[:1] if rng.random() < 0.5 else [*prompt, *rng.choices(range(1, 4), k=rng.randint(1, 12))]
    ids = tokenizer(" " + " ".join(rng.choices(WORDS, k=8)), add_special_tokens=False).input_ids
    if rng.random() < 0.5:
        ids = rng.choices(range(len(tokenizer)), k=rng.randint(1, 30))
    for _ in range(rng.randint(0, 3)):
        ids.insert(rng.randint(0, len(ids)), rng.choice([1, 2, 3]))
    return prompt, ids


def test_a_text_goes_on_behind_its_prompt(tokenizer):
    """However many tokens come at once, whole or as a stream, prompt and text are what the tokenizer makes of all."""
    rng, compared = random.Random(1), 0
    for _ in range(300):
        prompt, ids = drawn(tokenizer, rng)
        before = tokenizer.decode(prompt, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        both = tokenizer.decode(prompt + ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        found = {read(tokenizer, prompt, ids, n, whole=whole)[0] for n in (1, 3, 8, 99) for whole in (False, True)}
        assert len(found) == 1, (prompt, ids, found)
        known = Vocabulary.of(tokenizer)
        spelled = [token for token in prompt if token not in known.hidden][-1:]
        if not before.endswith(UNFINISHED) and not known.bytes.intersection(spelled):
            compared += 1
            assert before + found.pop() == both, (prompt, ids)
    assert compared > 200


@pytest.mark.parametrize("name", ["</s>", "<|im_end|>"])
def test_a_stop_may_be_a_special_token(tokenizer, name):
    end = tokenizer.convert_tokens_to_ids(name)
    prompt, words = tokenizer("the model").input_ids, tokenizer("the layer keeps", add_special_tokens=False).input_ids
    ids = [*words, end, *words]
    alone = read(tokenizer, prompt, words, 99)[0]
    for size in (1, 2, 3, 99):
        for options in ({"stops": [name, "never"]}, {"ends": {end}}, {"ends": {end}, "whole": True}):
            found, text = read(tokenizer, prompt, ids, size, **options)
            assert (found, text.ended, text.tokens) == (alone, True, len(words) + 1), (size, options)
    hidden = read(tokenizer, prompt, ids, 2)[0]
    assert name not in hidden and hidden.startswith(alone) and len(hidden) > len(alone)


def test_a_stop_ends_a_text_across_tokens_and_parts(tokenizer):
    """A stop of several tokens, one that a hidden token interrupts, one that names a hidden token in its middle."""
    prompt, ids = (
        tokenizer("a token").input_ids,
        tokenizer("the layer keeps so it is", add_special_tokens=False).input_ids,
    )
    text = read(tokenizer, prompt, ids, 99)[0]
    place = text.index("keeps so")
    for size in (1, 2, 5, 99):
        found, row = read(tokenizer, prompt, ids, size, stops=["eps s", "nowhere"])
        assert found == text[: place + 2] and row.ended
        with_end = [*ids[: len(ids) // 2], 3, *ids[len(ids) // 2 :]]
        assert read(tokenizer, prompt, with_end, size, stops=["eps s"])[0] == found
        left = read(tokenizer, prompt, ids[: len(ids) // 2], 99)[0]
        stop = f"{left[-2:]}<|im_end|>"
        assert read(tokenizer, prompt, with_end, size, stops=[stop])[0] == left[:-2]
        assert read(tokenizer, prompt, ids, size, stops=[stop])[0] == text, "what looked like its beginning is text"


def test_ends_do_not_count_before_the_least_number_of_tokens(tokenizer):
    words = tokenizer("the layer keeps", add_special_tokens=False).input_ids
    ids = [2, *words, 2, *words]
    for size in (1, 3, 99):
        text = Text(tokenizer, (1,), ends={2}, vocabulary=Vocabulary.of(tokenizer), least=2)
        parts = [text.add(ids[i : i + size], i + size >= len(ids)) for i in range(0, len(ids), size)]
        assert text.tokens == len(words) + 2 and text.ended and "".join(parts)


def test_a_part_of_a_character_is_held_back_and_written_at_the_end():
    tokenizer = KINDS["over bytes"]()
    ids = tokenizer("so 🦊", add_special_tokens=False).input_ids
    assert len(ids) > 3
    text = Text(tokenizer, (), vocabulary=Vocabulary.of(tokenizer))
    parts = [text.add([token]) for token in ids[:-1]]
    assert UNFINISHED not in "".join(parts) and text.add([], last=True).endswith(UNFINISHED)
    assert read(tokenizer, ids[:-1], ids[-1:], 1)[0] == "🦊", "the prompt ends within a character"
