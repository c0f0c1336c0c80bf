"""The real llama.cpp with recurrent layers: a small random LFM2 (convolutions and attention) against transformers.

Other kinds of recurrent layers, delta nets (Qwen3.5) and Mamba 2 (Nemotron-H), are compared with plain decoding by the
library.
"""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Lfm2Config, Lfm2ForCausalLM

import spec_lab
from spec_lab.core.draft import Draft, empty
from spec_lab.core.probabilities import Sampling
from spec_lab.core.randomness import CounterDraws
from spec_lab.core.request import Request
from spec_lab.core.shape import Shape
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import Engine
from spec_lab.models import gguf
from spec_lab.models.gguf_tokenizer import write_tokenizer
from spec_lab.propose import Null
from spec_lab.propose.ngram import Ngram
from spec_lab.runners import llama_recurrent
from spec_lab.runners.llama_context import LlamaSettings
from spec_lab.runners.llama_library import Model, load_library
from spec_lab.runners.llama_recurrent import LlamaRecurrent, RecurrentSequence
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
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data += torch.rand(parameter.shape)
        if "conv.conv" in name:
            parameter.data = torch.randn(parameter.shape)
        if "self_attn.out_proj" in name:
            parameter.data *= attention
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
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":
            values = tensor.squeeze(1) if "conv.conv" in name else tensor
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


def worst(logits, expected):
    """Largest error of a logit, in standard deviations."""
    return float(((logits.double() - expected.double()).abs().amax(-1) / expected.double().std(-1)).max())


@torch.inference_mode()
def of_transformers(model, text, rows):
    """Logits after the last tokens of a text."""
    return model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -rows:]


def chains(counts, generator, vocabulary=V):
    """A draft with so many nodes below each root."""
    order = generator.permutation(np.repeat(np.arange(len(counts)), counts))
    last, parents = [*range(len(counts))], []
    for node, root in enumerate(order.tolist()):
        parents.append(last[root])
        last[root] = len(counts) + node
    shape = Shape(len(counts), np.array(parents, dtype=np.int64))
    return Draft(shape, torch.from_numpy(generator.integers(0, vocabulary, len(order))))


def forward(lm, sequences, pending, draft):
    return lm.run(lm.prepare(sequences, pending, draft)).logits.clone()


def test_logits_are_those_of_transformers(model, file, library):
    text = np.random.default_rng(0).integers(0, V, 150).tolist()
    lm = runner(file, library)
    sequence, rows = lm.open(), []
    for pending in (text[:100], *([token] for token in text[100:])):
        rows.append(forward(lm, [sequence], [pending], empty(1))[0])
    assert worst(torch.stack(rows), of_transformers(model, text, 51)) < 1e-3


def history(plain, lm, seed, steps=25):
    """Decode at random.

    Args:
        plain: returns the logits after the last tokens of a text.

    Returns:
        The largest error of a logit, and how often sequences were computed again.
    """
    vocabulary = lm.vocabulary
    generator, error, again = np.random.default_rng(seed), 0.0, 0
    open_, tokens = [lm.open() for _ in range(3)], [[] for _ in range(3)]
    for step in range(steps):
        chosen = generator.permutation(len(open_))[: int(generator.integers(1, len(open_) + 1))].tolist()
        size = [1, 1, 1, 2, 40] if step else [100]
        pending = [generator.integers(0, vocabulary, generator.choice(size)).tolist() for _ in chosen]
        counts = generator.integers(0, SNAPSHOTS + 2, len(chosen)) * generator.integers(0, 2)
        if generator.random() < 0.4:
            counts[:] = counts[0]
        draft, before = chains(counts, generator, vocabulary), lm.forwards
        output = forward(lm, [open_[index] for index in chosen], pending, draft)
        again += lm.forwards - before - 1
        for root, index in enumerate(chosen):
            tokens[index] = tokens[index] + pending[root]
            rows, count = draft.shape.trees[root], int(counts[root])
            nodes = draft.token[rows[1:] - len(chosen)].tolist()
            error = max(error, worst(output[rows], plain(tokens[index] + nodes, 1 + count)))
            accepted = int(generator.integers(0, count + 1))
            open_[index].accept(range(accepted))
            tokens[index] = tokens[index] + nodes[:accepted]
            length = max(0, len(tokens[index]) - int(generator.integers(0, 4)))
            if generator.random() < 0.15 or len(tokens[index]) > 400:
                length = length if len(tokens[index]) <= 400 else 20
                open_[index].truncate(length)
                tokens[index] = tokens[index][:length]
        if generator.random() < 0.2 and len(open_) < 6:
            index = int(generator.integers(0, len(open_)))
            open_.append(open_[index].fork())
            tokens.append(list(tokens[index]))
        if len(open_) > 2 and generator.random() < 0.25:
            index = int(generator.integers(0, len(open_)))
            open_.pop(index).close()
            del tokens[index]
        if len(open_) < 5 and generator.random() < 0.25:
            open_.append(lm.open())
            tokens.append([])
    return error, again


@pytest.mark.parametrize("batch", [7, 64, 512])
@pytest.mark.parametrize("seed", range(6))
def test_chains_have_the_logits_of_transformers_after_any_acceptance_rewind_and_fork(model, file, library, seed, batch):
    """Sequences have different lengths; a forward leaves some of them out; the KV cache grows."""
    error, again = history(partial(of_transformers, model), runner(file, library, batch=batch), seed)
    assert error < 1e-3 and again


def random_model(file, kind):
    """Write a small random model of one of ``KINDS``."""
    from gguf import GGUFWriter

    fields, shapes = KINDS[kind]
    generator, writer = np.random.default_rng(0), GGUFWriter(file, kind)
    writer.add_vocab_size(256)
    writer.add_tokenizer_model("no_vocab")
    common = {"context_length": 512, "embedding_length": 64, "block_count": 4, "attention.head_count": 2}
    for name, value in (common | fields).items():
        add = writer.add_array if isinstance(value, list) else writer.add_uint32
        (writer.add_float32 if isinstance(value, float) else add)(f"{kind}.{name}", value)
    shapes = {"token_embd.weight": (256, 64), "output_norm.weight": (64,), **shapes}
    for name, shape in shapes.items():
        values = generator.standard_normal(shape) / (shape[-1] ** 0.5 if min(shape) > 1 else 1)
        values = np.abs(values) + 0.5 if "norm" in name else -np.abs(values) if "ssm_a" in name.split(".") else values
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def layers(*each):
    return {f"blk.{layer}.{name}": shape for layer, shapes in enumerate(each) for name, shape in shapes.items()}


MLP = {"ffn_gate.weight": (96, 64), "ffn_up.weight": (96, 64), "ffn_down.weight": (64, 96)}
NORMS = {"attn_norm.weight": (64,), "post_attention_norm.weight": (64,)}
ATTENTION = {"attn_k.weight": (64, 64), "attn_v.weight": (64, 64), "attn_output.weight": (64, 64)}
DELTA_NET = {
    "attn_qkv.weight": (192, 64), "attn_gate.weight": (64, 64), "ssm_conv1d.weight": (192, 4), "ssm_dt.bias": (2,),
    "ssm_a": (2,), "ssm_beta.weight": (2, 64), "ssm_alpha.weight": (2, 64), "ssm_norm.weight": (32,),
    "ssm_out.weight": (64, 64),
}  # fmt: skip
GATED = {"attn_q.weight": (128, 64), **ATTENTION, "attn_q_norm.weight": (32,), "attn_k_norm.weight": (32,)}
MAMBA = {
    "attn_norm.weight": (64,), "ssm_in.weight": (196, 64), "ssm_conv1d.weight": (128, 4), "ssm_conv1d.bias": (128,),
    "ssm_dt.bias": (4,), "ssm_a": (4, 1), "ssm_d": (4, 1), "ssm_norm.weight": (2, 32), "ssm_out.weight": (64, 64),
}  # fmt: skip
KINDS = {
    "qwen35": (
        {"feed_forward_length": 96, "attention.head_count_kv": 2, "attention.key_length": 32,
         "attention.value_length": 32, "attention.layer_norm_rms_epsilon": 1e-6,
         "rope.dimension_sections": [8, 4, 4, 0], "ssm.conv_kernel": 4, "ssm.inner_size": 64, "ssm.state_size": 32,
         "ssm.time_step_rank": 2, "ssm.group_count": 2, "full_attention_interval": 2},
        layers(*({**NORMS, **MLP, **shapes} for shapes in (DELTA_NET, GATED, DELTA_NET, GATED))),
    ),
    "nemotron_h": (
        {"feed_forward_length": [0, 0, 0, 96], "attention.head_count_kv": [0, 2, 0, 0],
         "attention.layer_norm_epsilon": 1e-6, "attention.layer_norm_rms_epsilon": 1e-6, "ssm.conv_kernel": 4,
         "ssm.inner_size": 64, "ssm.state_size": 16, "ssm.time_step_rank": 4, "ssm.group_count": 2},
        layers(
            MAMBA, {"attn_norm.weight": (64,), "attn_q.weight": (64, 64), **ATTENTION}, MAMBA,
            {"attn_norm.weight": (64,), "ffn_up.weight": (96, 64), "ffn_down.weight": (64, 96)},
        ),
    ),
}  # fmt: skip
"""Metadata and tensors of other kinds of models with recurrent layers."""


@pytest.mark.parametrize("kind", KINDS)
def test_chains_of_other_recurrent_layers_have_the_logits_of_plain_decoding(library, tmp_path, kind):
    random_model(tmp_path / "random.gguf", kind)
    alone = runner(tmp_path / "random.gguf", library)

    def plain(text, rows):
        sequence, outputs, first = alone.open(), [], len(text) - rows + 1
        for pending in (text[:first], *([token] for token in text[first:])):
            outputs.append(forward(alone, [sequence], [pending], empty(1))[0])
        sequence.close()
        return torch.stack(outputs)

    error, again = 0.0, 0
    for seed in range(4):
        run_error, more = history(plain, runner(tmp_path / "random.gguf", library), seed)
        error, again = max(error, run_error), again + more
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
    output = forward(lm, sequences[:1], [[31]], empty(1))
    assert (worst(output, of_transformers(model, [11, 21, 100, 31], 1)) < 1e-3) != together


def test_a_runner_that_trusts_snapshots_of_earlier_calls_has_wrong_logits(model, file, library, monkeypatch):
    original = RecurrentSequence.append
    monkeypatch.setattr(
        RecurrentSequence, "append", lambda self, new, nodes, back: original(self, new, nodes, SNAPSHOTS)
    )
    assert max(history(partial(of_transformers, model), runner(file, library), seed)[0] for seed in range(6)) > 1e-2


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
    engine = Engine(Arm(target, proposer, Token(), CounterDraws(0)))
    for number, prompt in enumerate(prompts):
        engine.add(Request(number, f"p{number}", tuple(prompt), Sampling(0.0), 60))
    accepted = sum(len(done.path) for info in engine for done in info.committed)
    assert not engine.errors
    return {sequence.request.id: sequence.emitted for sequence in engine.sequences}, accepted


def test_greedy_decoding_with_ngram_chains_emits_what_plain_decoding_emits(tmp_path):
    """The model mostly repeats these texts."""
    write(lfm2(0.02), tmp_path / "repeats.gguf")
    target = gguf.load(str(tmp_path / "repeats.gguf"), dtype="float32", threads=1)
    assert isinstance(target.lm, LlamaRecurrent) and target.self_check < 1e-3 and target.lm.settings.snapshots == 10
    generator = np.random.default_rng(0)
    starts = [generator.integers(1, V, 8 + number).tolist() for number in range(6)]
    first, _ = decoded(target, Null(), starts)
    prompts = [start + first[number][:40] + start for number, start in enumerate(starts)]
    plain, _ = decoded(target, Null(), prompts)
    texts, accepted = decoded(target, Ngram(6, 3, 1), prompts)
    assert texts == plain and accepted > 60
    alone = [decoded(target, Ngram(6, 3, 1), [prompt])[0][0] for prompt in prompts]
    assert alone == [plain[number] for number in range(6)]
