"""The shipped files of the zoo: complete, small; prompts held out from training."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from scripts.zoo import corpus, prompts, records, words

ZOO = Path(__file__).parents[1] / "spec_lab" / "zoo"
WORKLOADS = ("code", "json", "prose")


@pytest.fixture(scope="module")
def holdout():
    return corpus.load_holdout(ZOO / "holdout.json")


@pytest.fixture(scope="module")
def shipped():
    return prompts.read(ZOO / "prompts")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(ZOO / "target")


@pytest.fixture(scope="module")
def training(holdout, shipped):
    """Training text as rebuilt here from the standard library, which most held-out modules and topics come from."""
    return list(corpus.training(holdout, shipped, {"stdlib": 4_000_000}, record_count=600))


def windows(texts, size):
    return {t[i : i + size] for t in texts for i in range(len(t) - size + 1)}


@pytest.mark.nightly
def test_no_training_document_holds_a_window_of_a_held_out_prompt(training, shipped):
    held = windows([p["prompt"] for p in shipped if p["workload"] != "json"], 64)
    for document in training:
        if document.workload != "json":
            text = document.text
            assert not any(text[i : i + 64] in held for i in range(len(text) - 63)), document.source


@pytest.mark.nightly
def test_no_training_record_resembles_a_held_out_prompt(training, shipped):
    held = windows([p["prompt"] for p in shipped if p["workload"] == "json"], 160)
    names = words.FIRST_HELD_OUT + words.LAST_HELD_OUT
    for document in training:
        if document.workload == "json":
            assert not windows([document.text], 160) & held
            assert not any(f'"{name}"' in document.text or f' {name}"' in document.text for name in names)


@pytest.mark.nightly
def test_held_out_modules_and_topics_are_not_trained_on(training, holdout):
    sources = {d.source for d in training}
    assert not sources & set(holdout["modules"])
    assert not sources & {f"topic:{t}" for t in holdout["topics"]}
    assert len(sources) > 200  # the builder did find text


@pytest.mark.nightly
def test_hashes_of_the_held_out_list_match_what_is_installed(holdout):
    """Most of this interpreter's modules are those that were hashed (text varies with versions)."""
    installed = dict(corpus.modules("stdlib", only=holdout["modules"]))
    same = [s for s, text in installed.items() if corpus.sha256(text) == holdout["modules"][s]]
    assert len(same) >= len(installed) // 2


def test_a_copy_of_a_held_out_module_under_another_name_is_left_out(holdout, monkeypatch):
    source, text = next(iter(corpus.modules("stdlib", only=holdout["modules"])))
    listed = {"modules": {source: corpus.sha256(text)}, "topics": {}}
    edited = text.replace("self", "this", 3) + "\n# a later version\n"
    assert corpus.sha256(edited) != corpus.sha256(text)

    def two_copies(package, only=None):
        documents = {source: text, "stdlib:copy.py": text, "stdlib:edited.py": edited}
        return [(s, t) for s, t in documents.items() if only is None or s in only]

    monkeypatch.setattr(corpus, "modules", two_copies)
    assert not [d for d in corpus.training(listed, [], {"stdlib": 10**9}, 0) if not d.source.startswith("topic")]


def test_a_document_that_holds_a_prompt_is_left_out(holdout):
    wanted = next(d for d in corpus.training(holdout, [], {}, 5) if d.workload == "json")
    prompt = {"prompt": wanted.text[10:190], "workload": "json"}
    assert len(prompt["prompt"]) == 180
    assert wanted.text not in {d.text for d in corpus.training(holdout, [prompt], {}, 5)}


def test_prompts_are_complete_and_varied(shipped, tokenizer, holdout):
    counts = Counter(p["workload"] for p in shipped)
    assert all(counts[w] >= 40 for w in WORKLOADS)
    assert len({p["id"] for p in shipped}) == len({p["prompt"] for p in shipped}) == len(shipped)
    for prompt in shipped:
        assert set(prompt) == {"id", "prompt", "workload", "source"}
        assert 64 <= len(tokenizer(prompt["prompt"]).input_ids) <= 200
        kind, name = prompt["source"].split(":", 1)
        if kind == "record":
            assert int(name.split(":")[0]) >= records.HELD_OUT_SEED
        else:
            assert name in holdout["topics"] if kind == "topic" else prompt["source"] in holdout["modules"]
    assert max(Counter(p["source"] for p in shipped if p["workload"] == "code").values()) <= 3


def test_json_prompts_continue_as_their_records_do(shipped):
    for prompt in (p for p in shipped if p["workload"] == "json"):
        _, seed, family = prompt["source"].split(":")
        assert records.record(int(seed))[0] == family
        assert records.record(int(seed))[1].startswith(prompt["prompt"])


def test_the_tokenizer_is_shared_and_round_trips_any_text(tokenizer):
    files = {hashlib.sha256((ZOO / m / "tokenizer.json").read_bytes()).hexdigest() for m in ("target", "draft")}
    assert len(files) == 1
    assert len(tokenizer) == 4096 and tokenizer.eos_token == "<|endoftext|>" and tokenizer.bos_token is None
    for text in ("def f(x):\n        return x\n\n\n", "naïve 日本 \t\r\n  \n", " a", ""):
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text and tokenizer.eos_token_id not in ids
    assert len(tokenizer(" " * 11 + " return").input_ids) == 2  # indentation is one token


def test_weights_are_small_and_of_one_family():
    files = [p for p in ZOO.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert max(p.stat().st_size for p in files) < 50e6 and sum(p.stat().st_size for p in files) < 72e6
    from transformers import AutoModelForCausalLM

    target, draft = (AutoModelForCausalLM.from_pretrained(ZOO / m) for m in ("target", "draft"))
    assert 20e6 <= sum(p.numel() for p in target.parameters()) <= 25e6
    assert target.dtype == draft.dtype == torch.bfloat16
    config = json.loads((ZOO / "medusa" / "config.json").read_text())
    assert config["hidden_size"] == target.config.hidden_size and config["vocab_size"] == target.config.vocab_size
    assert config["num_heads"] >= 4 and config["shared_lm_head"] is True
    digest = hashlib.sha256((ZOO / "target" / "model.safetensors").read_bytes()).hexdigest()
    assert config["target_sha256"] == digest
    for name, most in (("eagle3", 11e6), ("hydra", 8e6)):
        assert (ZOO / name / "model.safetensors").stat().st_size < most
        assert '"/' not in (ZOO / name / "config.json").read_text()  # no path of the machine that trained it
        with safe_open(ZOO / name / "model.safetensors", "pt") as file:
            assert file.metadata()["target_sha256"] == digest


def test_taps_of_the_eagle3_head_in_another_order_change_nothing(tmp_path, shipped):
    """Accepted tokens by step fell where they were concatenated as listed."""
    from spec_lab.drafters.eagle import propose as eagle
    from spec_lab.models.target import Target
    from tests.propose.lab import decode, emitted, requests

    config = json.loads((ZOO / "eagle3" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 3, 5]
    (tmp_path / "model.safetensors").symlink_to(ZOO / "eagle3" / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [5, 1, 3]}))
    target = Target.load(str(ZOO / "target"), dtype="float32")
    text = target.tokenizer.encode(next(prompt["prompt"] for prompt in shipped if prompt["workload"] == "code"))[:96]
    runs = []
    for folder in (ZOO / "eagle3", tmp_path):
        proposer = eagle.load(target, str(folder), depth=4)
        assert proposer.requires.hidden == (1, 3, 5)
        group, steps = decode(target, proposer, requests(prompts=[text], new=24))
        runs.append((emitted(group), [len(done.path) for info in steps for done in info.committed]))
    assert runs[0] == runs[1] and sum(runs[0][1]) > 8


def test_the_card_names_the_weights_of_its_folder():
    card = (ZOO / "README.md").read_text()
    for model in ("target", "draft", "medusa", "eagle3", "hydra"):
        assert hashlib.sha256((ZOO / model / "model.safetensors").read_bytes()).hexdigest() in card


@pytest.mark.nightly
def test_the_target_has_low_loss_on_its_workloads(tokenizer, shipped):
    """A loss far below that of unigrams, on the prompts themselves."""
    from transformers import AutoModelForCausalLM

    from scripts.zoo.pretrain import token_loss

    target = AutoModelForCausalLM.from_pretrained(ZOO / "target")
    for workload in WORKLOADS:
        chosen = [p["prompt"] for p in shipped if p["workload"] == workload][:4]
        with torch.inference_mode():
            losses = [float(token_loss(target, tokenizer(p, return_tensors="pt").input_ids)) for p in chosen]
        assert sum(losses) / len(losses) < 4.5
