"""A checkpoint of a billion parameters in several files loads and decodes within the estimated memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from spec_lab.models.float32_copy import MIN_LAYERS
from tests.checkpoints import LETTERS

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 18, 2048, 8192, 32, 8, 32000
SHARDS = 4

SLACK = 400 * 2**20
"""Bytes of the process beside the model: buffers of kernels, memory that was freed and not given back."""

LAYER = HIDDEN * (2 * HIDDEN + 2 * HIDDEN // HEADS * KV_HEADS + 3 * INNER)
COPY = (4 + 2) * (MIN_LAYERS * LAYER + VOCABULARY * HIDDEN)
"""Bytes of what the self-check copies: the first layers and the embedding, unpacked, then in float32."""

DECODE = """
import json, sys, threading, time
from pathlib import Path
import torch
from spec_lab.core.randomness import CounterDraws
from spec_lab.decode.arm import Arm
from spec_lab.decode.engine import fixed_group
from spec_lab.runners.memory_need import Decoding, need
from spec_lab.core.request import Request
from spec_lab.models.loading import describe
from spec_lab.models.placement import weight_bytes
from spec_lab.models.target import Target
from spec_lab.propose.ngram import Ngram
from spec_lab.verify import Token

torch.set_num_threads(2)

def anonymous(more=()):
    text = Path("/proc/self/status").read_text()
    return sum(int(text.split(f"{one}:")[1].split()[0]) * 1024 for one in ("RssAnon", *more))

peak, over = [anonymous()], threading.Event()
def watch():  # pages of the mapped files count as the process's too, but Linux can drop them
    while not over.wait(0.01):
        peak[0] = max(peak[0], anonymous())
threading.Thread(target=watch, daemon=True).start()
path, before = sys.argv[1], peak[0]
weights = weight_bytes(describe(path).model, torch.bfloat16, torch.device("cpu"))
target = Target.load(path, dtype="bfloat16")
loaded = peak[0]
mapped = anonymous(["RssFile"])  # weights of a data type that is not packed stay in the mapped files
proposer = Ngram(4, 3, 1)
requests = [Request(n, f"p{n}", tuple(range(5, 305 + n)), max_new_tokens=6) for n in range(2)]
run = Decoding([len(one.tokens) for one in requests], 2, 6, target.context, proposer.nodes, proposer.nodes)
decoding = need(target.lm.memory, run)
peak[0] = resident = anonymous()
group = fixed_group(Arm(target, proposer, Token(), CounterDraws(0)), requests)
list(group)
over.set()
print(json.dumps({
    "weights": weights, "loading": loaded - before, "resident": resident - before, "stated": target.lm.memory.weights,
    "mapped": mapped,
    "decoding": decoding.total, "decoded": peak[0] - resident, "emitted": [len(one.emitted) for one in group.sequences],
}))
"""


def write(folder: Path) -> Path:
    """Write a Llama with tied embeddings and random weights in bfloat16, file by file; all layers have the same."""
    torch.manual_seed(0)

    def random(*shape):
        return (0.02 * torch.randn(shape)).to(torch.bfloat16)

    layer = {
        "self_attn.q_proj": random(HIDDEN, HIDDEN), "self_attn.o_proj": random(HIDDEN, HIDDEN),
        "self_attn.k_proj": random(HIDDEN // HEADS * KV_HEADS, HIDDEN),
        "self_attn.v_proj": random(HIDDEN // HEADS * KV_HEADS, HIDDEN),
        "mlp.gate_proj": random(INNER, HIDDEN), "mlp.up_proj": random(INNER, HIDDEN),
        "mlp.down_proj": random(HIDDEN, INNER),
        "input_layernorm": torch.ones(HIDDEN).bfloat16(), "post_attention_layernorm": torch.ones(HIDDEN).bfloat16(),
    }  # fmt: skip
    files, held = {}, 0
    for shard in range(SHARDS):
        name, tensors = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors", {}
        for number in range(shard * LAYERS // SHARDS, (shard + 1) * LAYERS // SHARDS):
            tensors |= {f"model.layers.{number}.{part}.weight": tensor.clone() for part, tensor in layer.items()}
        if shard == 0:
            tensors["model.embed_tokens.weight"] = random(VOCABULARY, HIDDEN)
        if shard == SHARDS - 1:
            tensors["model.norm.weight"] = torch.ones(HIDDEN).bfloat16()
        save_file(tensors, folder / name, {"format": "pt"})
        files |= dict.fromkeys(tensors, name)
        held += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": held}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    AutoConfig.for_model(
        "llama", vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)  # fmt: skip
    tokenizer = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(LETTERS)}, unk_token=":"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=":").save_pretrained(folder)
    return folder


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the memory of a process is read from Linux")
def test_a_model_of_a_billion_parameters_loads_and_decodes_within_the_estimate(tmp_path):
    """It needs 2.5 GB of disk and 3 GB of memory."""
    done = subprocess.run(
        [sys.executable, "-c", DECODE, str(write(tmp_path))], capture_output=True, text=True, timeout=1800
    )
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout.splitlines()[-1])
    print(data)
    assert 2.2e9 < data["weights"] < 2.7e9 and data["emitted"] == [6, 6]
    assert data["loading"] <= data["weights"] + COPY + SLACK and data["resident"] <= data["weights"] + SLACK
    assert data["mapped"] >= 0.9 * data["weights"], "the estimate is no far larger number"
    assert data["decoded"] <= data["decoding"] + SLACK
