"""A small llama.cpp in Python: its unified KV cache with its checks, and a "model" that hashes what a token attends to.

It is called as the library is, with the same structs, so that everything above it is tested without it. The checks are
those of ``llama_batch_allocr::init``, the cache is ``llama_kv_cache`` with one stream.
"""

import ctypes
import hashlib
from types import SimpleNamespace

import numpy as np


class Batch(ctypes.Structure):
    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.POINTER(ctypes.c_float)),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


def numbers(what, width, *key):
    """Standard normal float32 numbers that depend on ``what`` and nothing else."""
    digest = hashlib.blake2b(repr((what, key)).encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest)).standard_normal(width).astype(np.float32)


def logits_of(tokens, width):
    """The logits after a text."""
    return numbers([*enumerate(map(int, tokens))], width, "logits")


class FakeLlama:
    """The functions of ``llama_library.Library``.

    Args:
        vocabulary, hidden_size, layers: of the model.
        kind: "is_recurrent" and so on, for a model of such a kind.
        ends: end-of-text tokens.
        window: of a model with sliding windows, whose cells are used again as soon as possible; 0 for none.

    Attributes:
        fails: code that llama_decode returns once.
        most: largest number of cells that there is memory for.
        decoded: the rows of each forward: token, position, ids, whether it has outputs.
        made: the parameters of each context.
        freed: contexts and models, in order.
    """

    llama_batch = Batch
    ggml_backend_sched_eval_callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)

    def __init__(self, vocabulary=11, hidden_size=3, layers=2, kind="", ends=(0,), window=0):
        self.vocabulary, self.hidden_size, self.layers, self.kind, self.ends = (
            vocabulary,
            hidden_size,
            layers,
            kind,
            ends,
        )
        self.window = window
        self.fails, self.decoded, self.made, self.freed = 0, [], [], []
        self.tensors, self.most = {}, 2**31

    def __getattr__(self, name):
        if name.startswith("llama_model_is_") or name == "llama_model_has_encoder":
            return lambda _: name.removeprefix("llama_model_") == self.kind
        raise AttributeError(name)

    # Model

    def llama_model_default_params(self):
        return SimpleNamespace(n_gpu_layers=0)

    def llama_model_load_from_file(self, path, params):
        return None if b"broken" in path else "model"

    def llama_model_free(self, model):
        self.freed.append("model")

    def llama_model_get_vocab(self, model):
        return "vocab"

    def llama_model_n_layer(self, model):
        return self.layers

    def llama_model_n_embd(self, model):
        return self.hidden_size

    llama_model_n_embd_out = llama_model_n_embd

    def llama_model_n_ctx_train(self, model):
        return 1024

    def llama_model_n_params(self, model):
        return 12345

    def llama_model_n_swa(self, model):
        return self.window

    def llama_model_desc(self, model, text, size):
        text.value = b"llama 1B F32"

    def llama_vocab_n_tokens(self, vocab):
        return self.vocabulary

    def llama_vocab_is_eog(self, vocab, token):
        return token in self.ends

    def llama_tokenize(self, vocab, text, size, tokens, room, special, parse):
        for position, byte in enumerate(text):
            tokens[position] = byte % self.vocabulary
        return len(text)

    # Context

    def llama_context_default_params(self):
        return SimpleNamespace(cb_eval=None)

    def llama_init_from_model(self, model, params):
        if params.n_ctx > self.most:
            return None
        self.made.append(params)
        return FakeContext(params)

    def llama_free(self, context):
        context.cells = None
        self.freed.append("context")

    def llama_n_rs_seq(self, context):
        return 0

    def llama_get_memory(self, context):
        return context

    def llama_set_embeddings(self, context, on):
        context.params.embeddings = on

    def llama_state_get_size(self, context):
        return 8

    def llama_state_get_data(self, context, data, size):
        self.state = [(cell.pos, cell.token, set(cell.ids)) for cell in context.cells if cell.ids]
        return size

    def llama_state_set_data(self, context, data, size):
        assert len(self.state) <= len(context.cells)
        for cell, (pos, token, ids) in zip(context.cells, self.state, strict=False):
            assert max(ids) < context.params.n_seq_max
            cell.pos, cell.token, cell.ids = pos, token, ids
        return size

    def llama_memory_seq_rm(self, memory, number, start, end):
        assert 0 <= number < memory.params.n_seq_max and end == -1
        for cell in memory.cells:
            if number in cell.ids and cell.pos >= start:
                cell.ids.discard(number)
        return True

    def llama_memory_seq_cp(self, memory, source, number, start, end):
        assert 0 <= number < memory.params.n_seq_max and 0 <= start < end and source != number
        for cell in memory.cells:
            if source in cell.ids and start <= cell.pos < end:
                assert number not in cell.ids  # the library asserts it
                cell.ids.add(number)

    def llama_decode(self, context, batch):
        if self.fails:
            code, self.fails = self.fails, 0
            return code
        rows = [
            (batch.token[i], batch.pos[i], batch.seq_id[i][: batch.n_seq_id[i]], bool(batch.logits[i]))
            for i in range(batch.n_tokens)
        ]
        assert len(rows) <= min(context.params.n_batch, len(context.cells)), "the library aborts"
        if context.params.embeddings:
            assert all(output for *_, output in rows)
        assert all(0 <= token < self.vocabulary for token, *_ in rows)
        if not self.consistent(context, rows):
            return -1
        free = (self.left_behind(context) + [cell for cell in context.cells if not cell.ids])[: len(rows)]
        if len(free) < len(rows):
            return 1
        for cell, (token, pos, ids, _) in zip(free, rows, strict=True):
            cell.pos, cell.token, cell.ids = pos, token, set(ids)
        self.decoded.append(rows)
        self.advance(context, rows)
        logits, final, states = [], [], {}
        for _, pos, ids, output in rows:
            text = self.attended(context, pos, ids)
            for layer in range(self.layers + 1):
                states.setdefault(f"l_out-{layer - 1}" if layer else "embd", []).append(
                    numbers(text, self.hidden_size, layer)
                )
            if output:
                logits.append(numbers(text, self.vocabulary, "logits"))
                final.append(numbers(text, self.hidden_size, self.layers + 1))
        context.keep("logits", logits)
        context.keep("final", final)
        if context.params.cb_eval is not None:
            for number, (name, values) in enumerate(states.items(), start=1):
                self.tensors = {number: (name, np.array(values, dtype=np.float32))}
                if context.params.cb_eval(number, True, None):
                    assert context.params.cb_eval(number, False, None)
        return 0

    def advance(self, context, rows):
        """Do what a batch does beyond writing its cells: nothing in a model without recurrent layers."""

    def left_behind(self, context):
        """Cells of one id alone that none of its later tokens attends to in layers with a window."""
        ends = {number: cell.pos for cell in sorted(context.cells, key=lambda cell: cell.pos) for number in cell.ids}
        alone = [cell for cell in context.cells if len(cell.ids) == 1] if self.window else []
        return [cell for cell in alone if ends[next(iter(cell.ids))] + 1 - cell.pos >= self.window]

    def attended(self, context, pos, ids):
        """The (position, token) pairs that a row attends to."""
        return sorted((cell.pos, cell.token) for cell in context.cells if ids[0] in cell.ids and cell.pos <= pos)

    def consistent(self, context, rows):
        """The checks of ``llama_batch_allocr::init``."""
        ends, of = {}, {}
        for cell in context.cells:
            for number in cell.ids:
                ends.setdefault(number, []).append(cell.pos)
        for _, pos, ids, _ in rows:
            if not ids or len(set(ids)) < len(ids) or not all(0 <= number < context.params.n_seq_max for number in ids):
                return False
            for number in ids:
                of.setdefault(number, []).append((pos, set(ids)))
        for number, entries in of.items():
            positions = [pos for pos, _ in entries]
            if positions != sorted(positions) or set(positions) != set(range(positions[0], positions[-1] + 1)):
                return False
            if number in ends and positions[0] != max(ends[number]) + 1:
                return False
            if not set.intersection(*(ids for _, ids in entries)):
                return False
        coupled = {(ids[0], other) for _, _, ids, _ in rows for other in ids[1:]}
        return all(
            (min(ends.get(a, [-1])), max(ends.get(a, [-1]))) == (min(ends.get(b, [-1])), max(ends.get(b, [-1])))
            for a, b in coupled
        )

    def llama_get_logits(self, context):
        return context.pointer("logits")

    def llama_get_embeddings(self, context):
        return context.pointer("final")

    # Tensors

    def ggml_get_name(self, tensor):
        return self.tensors[tensor][0].encode()

    def ggml_nbytes(self, tensor):
        return self.tensors[tensor][1].nbytes

    def ggml_backend_tensor_get(self, tensor, address, offset, size):
        ctypes.memmove(address, self.tensors[tensor][1].ctypes.data + offset, size)


class FakeContext:
    """Cells, and memory for outputs that each forward overwrites."""

    def __init__(self, params):
        assert params.kv_unified and params.swa_full and 1 <= params.n_seq_max <= 256
        assert params.n_seq_max <= min(params.n_batch, params.n_ctx), "the library aborts"
        self.params = params
        self.cells = [SimpleNamespace(pos=-1, token=-1, ids=set()) for _ in range(params.n_ctx)]
        self.memory = {}

    @property
    def used(self):
        return sum(bool(cell.ids) for cell in self.cells)

    def keep(self, name, rows):
        values = np.array(rows, dtype=np.float32).ravel()
        memory = self.memory.setdefault(name, np.empty(1, dtype=np.float32))
        if len(memory) < len(values):
            memory = self.memory[name] = np.empty(2 * len(values), dtype=np.float32)
        memory[:] = np.nan
        memory[: len(values)] = values

    def pointer(self, name):
        return self.memory[name].ctypes.data_as(ctypes.POINTER(ctypes.c_float))
