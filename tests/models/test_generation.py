"""The sampling that a checkpoint recommends."""

import json
from dataclasses import replace

import pytest

from spec_lab.core.probabilities import Sampling
from spec_lab.models.generation import CheckpointSampling


def recommended(tmp_path, **fields):
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    return tmp_path


def test_the_files_parameters_are_used(tmp_path):
    folder = recommended(
        tmp_path, do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.1,
        presence_penalty=1.5, frequency_penalty=-0.5, bad_words_ids=[[7], [8, 9], [2]],
        eos_token_id=[1, 2], max_length=2048, transformers_version="5", no_repeat_ngram_size=0, suppress_tokens=[],
    )  # fmt: skip
    penalties = (1.1, 1.5, -0.5, {5: -3.0}, ((7,), (8, 9)))  # a stop token is not banned, as in transformers
    given = CheckpointSampling(logit_bias={"5": -3})
    assert given.resolved(folder) == Sampling(0.6, 20, 0.95, 0.01, *penalties)
    assert replace(given, temperature=0.0, top_k=0).resolved(folder) == Sampling(0.0, 0, 0.95, 0.01, *penalties)
    assert replace(given, bad_words_ids=[]).resolved(folder).bad_words_ids == ()


def test_without_do_sample_a_checkpoint_is_greedy_as_in_transformers(tmp_path):
    assert CheckpointSampling().resolved(recommended(tmp_path, temperature=0.6, top_p=0.9)) == Sampling()
    assert CheckpointSampling().resolved(recommended(tmp_path, repetition_penalty=1.2)).repetition_penalty == 1.2
    greedy = CheckpointSampling().resolved(recommended(tmp_path, presence_penalty=1.2, bad_words_ids=[[4]]))
    assert greedy == Sampling(presence_penalty=1.2, bad_words_ids=[[4]])
    assert CheckpointSampling().resolved(recommended(tmp_path, do_sample=True, top_k=None)) == Sampling(1.0)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"no_repeat_ngram_size": 3}, "sets no_repeat_ngram_size=3, which sampling=checkpoint does not support"),
        ({"num_beams": 4}, "sets num_beams=4"),
        ({"suppress_tokens": [1]}, r"sets suppress_tokens=\[1\]"),
        ({"bad_words_ids": [4]}, r"bad_words_ids\[0\] must be a list"),
        ({"do_sample": True, "temperature": -1}, "generation_config.json: temperature must be a number from 0"),
        ({"do_sample": True, "top_k": "many"}, "top_k must be a whole number"),
    ],
)
def test_what_cannot_be_respected_is_refused(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        CheckpointSampling().resolved(recommended(tmp_path, **fields))
