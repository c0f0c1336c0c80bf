"""llama.cpp through the low-level interface of llama-cpp-python: its functions, and a loaded model."""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections import deque
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import numpy as np

LOG = logging.getLogger(__name__)

FAILURES: deque[str] = deque(maxlen=4)
"""The last warnings and errors of llama.cpp: its log is one for the whole process."""

WARNING, ERROR = 3, 4
"""Levels of its log (``ggml_log_level``)."""

VERSION = "0.3.36"
"""The version of llama-cpp-python; the layout of its structs changes from version to version."""

SIZES = {"llama_batch": 56, "llama_model_params": 80, "llama_context_params": 160}
"""Bytes of the structs of ``VERSION`` that are passed by value, on 64-bit platforms."""


Library = Any
"""``FUNCTIONS`` of llama.cpp and ggml, as llama-cpp-python declares them."""

FUNCTIONS = """
    llama_batch llama_model_default_params llama_model_load_from_file llama_model_free llama_model_get_vocab
    llama_model_n_layer llama_model_n_embd llama_model_n_embd_out llama_model_n_ctx_train llama_model_n_params
    llama_model_n_swa llama_model_desc llama_model_is_recurrent llama_model_is_hybrid llama_model_is_diffusion
    llama_model_has_encoder llama_vocab_n_tokens llama_vocab_is_eog llama_tokenize llama_context_default_params
    llama_init_from_model llama_free llama_n_rs_seq llama_get_memory llama_memory_seq_rm llama_memory_seq_cp
    llama_state_get_size llama_state_get_data llama_state_set_data llama_set_embeddings llama_decode llama_get_logits
    llama_get_embeddings ggml_backend_sched_eval_callback
""".split()  # and ggml_get_name, ggml_nbytes, ggml_backend_tensor_get


def load_library() -> Library:
    """Import llama-cpp-python, check that it is the expected one, and send its log to Python's.

    Raises:
        ImportError: it is missing, of another version, or built for another interface; says what to install.
    """
    advice = "pip install 'spec-lab[llamacpp]' (it compiles llama.cpp, which takes five to ten minutes)"
    try:
        installed = version("llama-cpp-python")
        from llama_cpp import llama_cpp as lib
        from llama_cpp._ggml import libggml
    except (ImportError, PackageNotFoundError, OSError, RuntimeError) as error:
        raise ImportError(
            f"target=gguf requires llama-cpp-python, which cannot be imported ({error}): {advice}"
        ) from error
    if installed != VERSION:
        raise ImportError(f"target=gguf requires llama-cpp-python {VERSION}, but {installed} is installed: {advice}")
    library = SimpleNamespace(**{name: getattr(lib, name) for name in FUNCTIONS})
    pointer = ctypes.c_void_p
    for name, result, arguments in (
        ("ggml_get_name", ctypes.c_char_p, [pointer]),
        ("ggml_nbytes", ctypes.c_size_t, [pointer]),
        ("ggml_backend_tensor_get", None, [pointer, pointer, ctypes.c_size_t, ctypes.c_size_t]),
    ):
        function = getattr(libggml, name)
        function.restype, function.argtypes = result, arguments
        setattr(library, name, function)
    check_layout({name: ctypes.sizeof(getattr(lib, name)) for name in SIZES}, lib.llama_context_default_params())
    lib.llama_log_set(_log, None)
    lib.llama_backend_init()
    return library


def check_layout(sizes: Mapping[str, int], defaults: Any) -> None:
    """Check that Python's structs are laid out as the compiled library's.

    Args:
        sizes: bytes of the structs in Python (``SIZES``).
        defaults: what ``llama_context_default_params`` returned, whose first and last fields have known values.

    Raises:
        ImportError: they are not.
    """
    known = {"n_ctx": 512, "n_batch": 2048, "n_seq_max": 1, "type_k": 1, "type_v": 1, "embeddings": False,
             "offload_kqv": True, "swa_full": True, "n_samplers": 0}  # fmt: skip
    wrong = [name for name, size in SIZES.items() if sizes[name] != size]
    wrong += [name for name, value in known.items() if getattr(defaults, name) != value]
    if wrong:
        raise ImportError(
            f"llama-cpp-python {VERSION} has another layout than expected ({', '.join(wrong)}): it was built from "
            "other sources; install it again with pip install --force-reinstall 'spec-lab[llamacpp]'"
        )


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _log(level: int, text: bytes, _data: int) -> None:
    line = text.decode(errors="replace").rstrip()
    LOG.debug("%s", line)
    if level in (WARNING, ERROR) and line:
        FAILURES.append(line[:200])


def logged() -> str:
    """Return the last warnings and errors of llama.cpp, for the end of a message, and forget them."""
    lines = "; ".join(FAILURES)
    FAILURES.clear()
    return f" ({lines})" if lines else ""


class Model:
    """A model that llama.cpp has loaded.

    Args:
        library: of ``load_library``.
        path: a GGUF file that was checked; llama.cpp reads it again.
        gpu_layers: how many layers are computed on a GPU, where the library was built for one; -1 for all.

    Raises:
        ValueError: llama.cpp cannot load it, or the model is no decoder, or recurrent with sliding windows.

    Attributes:
        recurrent: whether some layers have a state that is overwritten by each token, so that rejected tokens can be
            removed only as far as snapshots of it are kept (``llama_recurrent``).
    """

    def __init__(self, library: Library, path: str, gpu_layers: int = 0) -> None:
        self.library, self.path, self.gpu_layers = library, path, gpu_layers
        params = library.llama_model_default_params()
        params.n_gpu_layers = gpu_layers
        FAILURES.clear()
        self.handle = library.llama_model_load_from_file(path.encode(), params)
        if not self.handle:
            raise ValueError(f"llama.cpp cannot load {path}{logged()}")
        FAILURES.clear()
        self._free = weakref.finalize(self, library.llama_model_free, self.handle)
        self.recurrent = bool(
            library.llama_model_is_recurrent(self.handle) or library.llama_model_is_hybrid(self.handle)
        )
        self.window = int(library.llama_model_n_swa(self.handle))
        self._refuse_by_kind()
        self.vocab = library.llama_model_get_vocab(self.handle)
        self.vocabulary = int(library.llama_vocab_n_tokens(self.vocab))
        self.layers = int(library.llama_model_n_layer(self.handle))
        self.hidden_size = int(library.llama_model_n_embd(self.handle))
        self.output_size = int(library.llama_model_n_embd_out(self.handle))
        self.context = int(library.llama_model_n_ctx_train(self.handle))
        self.parameters = int(library.llama_model_n_params(self.handle))
        text = ctypes.create_string_buffer(128)
        library.llama_model_desc(self.handle, text, len(text))
        self.description = text.value.decode(errors="replace")

    def _refuse_by_kind(self) -> None:
        lib = self.library
        for is_it, what in (
            (lib.llama_model_is_diffusion(self.handle), "a diffusion model"),
            (lib.llama_model_has_encoder(self.handle), "an encoder-decoder"),
            (self.recurrent and self.window, "recurrent with sliding windows"),
        ):
            if is_it:
                raise ValueError(
                    f"{self.path} is {what}: rejected tokens cannot be removed from its state; choose another model"
                )

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end a generation: those that the file names, and those that llama.cpp knows by their text."""
        is_end, vocab = self.library.llama_vocab_is_eog, self.vocab
        return frozenset(token for token in range(self.vocabulary) if is_end(vocab, token))

    def tokenize(self, text: str, special: bool) -> list[int]:
        """Return the tokens of a text by llama.cpp's own tokenizer.

        Args:
            special: whether to add the tokens that begin or end a text, where the file asks for them.

        Raises:
            ValueError: the file has no tokenizer.
        """
        data = text.encode()
        tokens = np.empty(len(data) + 8, dtype=np.int32)
        pointer = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        count = self.library.llama_tokenize(self.vocab, data, len(data), pointer, len(tokens), special, True)
        if count < 0:
            raise ValueError(f"{self.path}: llama.cpp cannot tokenize {text[:40]!r}")
        return tokens[:count].tolist()
