"""Write trained weights as bfloat16 safetensors, with config and tokenizer, as ``from_pretrained`` reads them."""

from pathlib import Path

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from spec_lab.core.files import file_hash
from spec_lab.core.tensors import save_tensors
from spec_lab.models.checkpoint import SINGLE, one_line


def export_model(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> str:
    """Write model and tokenizer; return the SHA-256 of the weights file.

    Raises:
        OSError: a file cannot be written.
    """
    model = model.bfloat16()
    model.set_attn_implementation("sdpa")
    model.config.use_cache = True
    model.config.architectures, model.config.dtype = [type(model).__name__], "bfloat16"
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.eos_token_id
    weights = model.state_dict()
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(weights, folder / SINGLE, {"format": "pt"})
    try:
        for part in (model.config, model.generation_config, tokenizer):
            part.save_pretrained(folder)
    except Exception as error:  # tokenizers raises plain Exceptions
        raise OSError(f"config and tokenizer cannot be written to {folder} ({one_line(error)})") from error
    return file_hash(folder / SINGLE)
