"""The real llama.cpp with recurrent layers: a small random LFM2 of convolutions and attention against transformers."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Lfm2Config, Lfm2ForCausalLM

import spec_lab
from spec_lab.core.draft import Draft, Shape, empty
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.engine import llama_recurrent
from spec_lab.engine.engine import Engine
from spec_lab.engine.llama_context import LlamaSettings
from spec_lab.engine.llama_library import Model, load_library
from spec_lab.engine.llama_recurrent import LlamaRecurrent, RecurrentSequence
from spec_lab.engine.request import Request
from spec_lab.models import gguf
from spec_lab.models.gguf_tokenizer import write_tokenizer
from spec_lab.models.support import Unsupported
from spec_lab.models.target import Target
from spec_lab.propose import Null
from spec_lab.propose.ngram import Ngram
from spec_lab.verify import Token

pytest.importorskip(
    "llama_cpp", reason="NOT TESTED: llama-cpp-python is not installed (pip install 'spec-lab[llamacpp]')"
)
pytestmark = pytest.mark.nightly

ZOO = Path(spec_lab.__file__).parent / "zoo/target"
V, SNAPSHOTS = 4096, 5
PARTS = {
    "operator_norm": "attn_norm", "ffn_norm": "ffn_norm", "feed_forward.w1": "ffn_gate", "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.out_proj": "attn_output", "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm", "conv.conv": "shortconv.conv", "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
}  # fmt: skip
"""Tensors of a layer: transformers' names, and llama.cpp's."""


def lfm2(attention=1.0):
    """A random model of four layers, two with a convolution over four tokens, with large weights.

    With less ``attention`` the next token depends on the last seven alone.
    """
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, conv_L_cache=4, block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention", "conv", "full_attention"], initializer_range=0.3,
        eos_token_id=0, bos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    model = Lfm2ForCausalLM(config).eval()
    for name, one in model.named_parameters():
        if one.dim() == 1:
            one.data += torch.rand(one.shape)
        if "conv.conv" in name:
            one.data = torch.randn(one.shape)
        if "self_attn.out_proj" in name:
            one.data *= attention
    return model


def write(model, file):
    """Write the model with the tokenizer of the bundled target."""
    from gguf import GGUFWriter

    config, writer = model.config, GGUFWriter(file, "lfm2")
    for add, value in (
        (writer.add_vocab_size, V), (writer.add_context_length, config.max_position_embeddings),
        (writer.add_embedding_length, config.hidden_size), (writer.add_block_count, config.num_hidden_layers),
        (writer.add_feed_forward_length, config.intermediate_size),
        (writer.add_head_count, config.num_attention_heads), (writer.add_layer_norm_rms_eps, config.norm_eps),
        (writer.add_rope_freq_base, float(config.rope_parameters["rope_theta"])),
        (writer.add_shortconv_l_cache, config.conv_L_cache),
        (writer.add_head_count_kv, [2 * (kind == "full_attention") for kind in config.layer_types]),
    ):  # fmt: skip
        add(value)
    write_tokenizer(writer, AutoTokenizer.from_pretrained(ZOO), V, [0])
    names = {"model.embed_tokens": "token_embd", "model.embedding_norm": "token_embd_norm"}
    names |= {
        f"model.layers.{n}.{a}": f"blk.{n}.{b}" for n in range(config.num_hidden_layers) for a, b in PARTS.items()
    }
    for name, one in model.state_dict().items():
        if name != "lm_head.weight":
            values = one.squeeze(1) if "conv.conv" in name else one
            writer.add_tensor(names[name.removesuffix(".weight")] + ".weight", values.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model():
    return lfm2()


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("lfm2") / "lfm2.gguf"
    write(model, path)
    return path


@pytest.fixture(scope="module")
def library():
    return load_library()


def runner(file, library, **more):
    settings = LlamaSettings(**{"threads": 1, "kv_dtype": "f32", "batch": 64, "snapshots": SNAPSHOTS, **more})
    return LlamaRecurrent(Model(library, str(file)), settings)


def worst(found, expected):
    """Largest error of a logit, in standard deviations."""
    return float(((found.double() - expected.double()).abs().amax(-1) / expected.double().std(-1)).max())


@torch.inference_mode()
def of_transformers(model, text, rows):
    """Logits after the last tokens of a text."""
    return model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -rows:]


def chains(counts, generator):
    """A draft with so many nodes below each root."""
    order = generator.permutation(np.repeat(np.arange(len(counts)), counts))
    last, parents = [*range(len(counts))], []
    for node, root in enumerate(order.tolist()):
        parents.append(last[root])
        last[root] = len(counts) + node
    shape = Shape(len(counts), np.array(parents, dtype=np.int64))
    return Draft(shape, torch.from_numpy(generator.integers(0, V, len(order))))


def forward(lm, sequences, pending, draft):
    return lm.run(lm.prepare(sequences, pending, draft)).logits.clone()


def test_logits_are_those_of_transformers(model, file, library):
    text = np.random.default_rng(0).integers(0, V, 150).tolist()
    lm = runner(file, library)
    sequence, found = lm.open(), []
    for pending in (text[:100], *([token] for token in text[100:])):
        found.append(forward(lm, [sequence], [pending], empty(1))[0])
    assert worst(torch.stack(found), of_transformers(model, text, 51)) < 1e-3


def history(model, lm, seed, steps=25):
    """Decode at random; return the largest error of a logit, and how often a sequence was computed again."""
    generator, error, again = np.random.default_rng(seed), 0.0, 0
    open_, tokens = [lm.open() for _ in range(3)], [[] for _ in range(3)]
    for step in range(steps):
        chosen = generator.permutation(len(open_))[: int(generator.integers(1, len(open_) + 1))].tolist()
        size = [1, 1, 1, 2, 40] if step else [100]
        pending = [generator.integers(0, V, generator.choice(size)).tolist() for _ in chosen]
        counts = generator.integers(0, SNAPSHOTS + 2, len(chosen)) * generator.integers(0, 2)
        if generator.random() < 0.4:
            counts[:] = counts[0]
        draft, before = chains(counts, generator), lm.forwards
        found = forward(lm, [open_[place] for place in chosen], pending, draft)
        again += lm.forwards - before - 1
        for root, place in enumerate(chosen):
            tokens[place] = tokens[place] + pending[root]
            rows, count = draft.shape.trees[root], int(counts[root])
            nodes = draft.token[rows[1:] - len(chosen)].tolist()
            error = max(error, worst(found[rows], of_transformers(model, tokens[place] + nodes, 1 + count)))
            accepted = int(generator.integers(0, count + 1))
            open_[place].accept(range(accepted))
            tokens[place] = tokens[place] + nodes[:accepted]
            length = max(0, len(tokens[place]) - int(generator.integers(0, 4)))
            if generator.random() < 0.15 or len(tokens[place]) > 400:
                length = length if len(tokens[place]) <= 400 else 20
                open_[place].truncate(length)
                tokens[place] = tokens[place][:length]
        if generator.random() < 0.2 and len(open_) < 6:
            place = int(generator.integers(0, len(open_)))
            open_.append(open_[place].fork())
            tokens.append(list(tokens[place]))
        if len(open_) > 2 and generator.random() < 0.25:
            place = int(generator.integers(0, len(open_)))
            open_.pop(place).close()
            del tokens[place]
        if len(open_) < 5 and generator.random() < 0.25:
            open_.append(lm.open())
            tokens.append([])
    return error, again


@pytest.mark.parametrize("batch", [7, 64, 512])
@pytest.mark.parametrize("seed", range(6))
def test_chains_have_the_logits_of_transformers_after_any_acceptance_rewind_and_fork(model, file, library, seed, batch):
    """Of sequences of different lengths, some of which are left out of a forward, in a KV cache that grows."""
    error, again = history(model, runner(file, library, batch=batch), seed)
    assert error < 1e-3 and again


@pytest.mark.parametrize("together", [False, True])
def test_chains_of_different_lengths_in_one_call_lose_snapshots_of_llama_cpp(
    model, file, library, monkeypatch, together
):
    """It splits the call and moves states without their snapshots. Where it no longer does, one call suffices."""
    if together:
        monkeypatch.setattr(llama_recurrent, "calls_of", lambda counts, most: [[*range(len(counts))]])
    lm = runner(file, library)
    sequences = [lm.open(50) for _ in range(3)]
    for number in (1, 0, 2):
        forward(lm, [sequences[number]], [[11 + number]], empty(1))
    draft = Draft(Shape(3, np.array([0, 3, 4, 5, 1, 7, 2, 9])), torch.arange(100, 108))
    forward(lm, sequences, [[21], [22], [23]], draft)
    sequences[0].accept([0])
    found = forward(lm, sequences[:1], [[31]], empty(1))
    assert (worst(found, of_transformers(model, [11, 21, 100, 31], 1)) < 1e-3) != together


def test_a_runner_that_trusts_snapshots_of_earlier_calls_has_wrong_logits(model, file, library, monkeypatch):
    own = RecurrentSequence.append
    monkeypatch.setattr(RecurrentSequence, "append", lambda self, new, nodes, back: own(self, new, nodes, SNAPSHOTS))
    assert max(history(model, runner(file, library), seed)[0] for seed in range(6)) > 1e-2


def test_steps_that_reject_compute_nothing_again(file, library):
    lm, generator = runner(file, library), np.random.default_rng(0)
    sequences = [lm.open(200) for _ in range(4)]
    forward(lm, sequences, [[1], [2], [3], [4]], empty(4))
    for _ in range(20):
        forward(lm, sequences, [[5]] * 4, chains(generator.integers(0, SNAPSHOTS + 1, 4), generator))
        for sequence in sequences:
            sequence.accept(range(int(generator.integers(0, len(sequence.nodes) + 1))))
    assert lm.forwards == 21


def decoded(target, proposer, prompts):
    engine = Engine(target, proposer, Token(), CounterDraws(0))
    for number, prompt in enumerate(prompts):
        engine.add(Request(number, f"p{number}", tuple(prompt), Sampling(0.0), 60))
    accepted = sum(len(done.path) for info in engine for done in info.committed)
    assert not engine.errors
    return {one.request.id: one.emitted for one in engine.sequences}, accepted


def test_greedy_decoding_with_ngram_chains_emits_what_plain_decoding_emits(tmp_path):
    """Of texts that the model mostly repeats."""
    write(lfm2(0.02), tmp_path / "repeats.gguf")
    target = gguf.load(str(tmp_path / "repeats.gguf"), dtype="float32", threads=1)
    assert isinstance(target.lm, LlamaRecurrent) and target.self_check < 1e-3 and target.lm.settings.snapshots == 10
    generator = np.random.default_rng(0)
    starts = [generator.integers(1, V, 8 + number).tolist() for number in range(6)]
    first, _ = decoded(target, Null(), starts)
    prompts = [start + first[number][:40] + start for number, start in enumerate(starts)]
    plain, _ = decoded(target, Null(), prompts)
    found, accepted = decoded(target, Ngram(6, 3, 1), prompts)
    assert found == plain and accepted > 60
    alone = [decoded(target, Ngram(6, 3, 1), [prompt])[0][0] for prompt in prompts]
    assert alone == [plain[number] for number in range(6)]


def test_a_recurrent_draft_model_is_refused_by_name(file):
    with pytest.raises(Unsupported, match=r"proposer\.path=.* recurrent"):
        gguf.load_draft(str(file), Target.load(str(ZOO)))


def run(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "spec_lab", *arguments, "prompts.limit=3", "max_new_tokens=16", "warmup=1"],
        cwd=cwd, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def test_a_run_from_the_command_line(file, tmp_path):
    done = run("target=gguf", f"target.path={file}", "proposer=ngram", "batch_size=2", "output_dir=out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    arms = json.loads((tmp_path / "out/summary.json").read_text())["arms"]
    assert "speculative" in arms and all(np.isfinite(one["tokens_per_second"]) for one in arms.values())


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["proposer=ngram_tree"], "drafts trees"), (["proposer=ngram", "target.snapshots=4"], "target.snapshots to 10"),
        (["proposer=ngram", "target.snapshots=0"], "target.snapshots"),
    ],
    ids=lambda one: "",
)  # fmt: skip
def test_what_cannot_be_verified_is_refused_in_one_line(file, tmp_path, options, named):
    done = run("target=gguf", f"target.path={file}", *options, "output_dir=out", cwd=tmp_path)
    assert done.returncode and "Traceback" not in done.stderr and named in done.stderr + done.stdout
