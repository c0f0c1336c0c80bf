"""Write trained weights as bfloat16 safetensors, with config and tokenizer, as ``from_pretrained`` reads them."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def export_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> str:
    """Write model and tokenizer; return the SHA-256 of the weights file."""
    model = model.bfloat16()
    model.set_attn_implementation("sdpa")
    model.config.use_cache = True
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return file_sha256(folder / "model.safetensors")


def export_medusa(tensors: dict[str, torch.Tensor], vocab_size: int, target_sha256: str, folder: Path) -> str:
    """Write heads, given as ``distill.shipped`` returns them; return the SHA-256 of the weights file."""
    folder.mkdir(parents=True, exist_ok=True)
    heads, layers, hidden, _ = tensors["weight"].shape
    config = {
        "hidden_size": hidden,
        "vocab_size": vocab_size,
        "num_heads": heads,
        "num_layers": layers,
        "trunk_size": len(tensors["trunk_in.bias"]),
        "shared_lm_head": True,
        "target_sha256": target_sha256,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    halves = {name: tensor.detach().bfloat16().contiguous() for name, tensor in tensors.items()}
    save_file(halves, folder / "model.safetensors", metadata={"format": "pt"})
    return file_sha256(folder / "model.safetensors")
