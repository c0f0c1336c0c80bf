"""Decoder layers for drafters, taken from transformers: Llama's, Qwen's or those of any family built like them.

The layers are described on torch's meta device, where they need no memory, until weights are read or made. Attention is
that of the engine (``runners.attention.SPANS``), so that ``runners.feature_lm`` can run them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from inspect import signature, unwrap
from typing import Any, TypeVar

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from spec_lab.core.cache_argument import cache_argument
from spec_lab.core.options import WrongOption, brief
from spec_lab.core.reading import Reading
from spec_lab.models.checkpoint import misfits_of, one_line
from spec_lab.models.fused import epsilon_of, fuse_attention
from spec_lab.models.merged import merge
from spec_lab.models.services import TargetServices, selected_rows
from spec_lab.models.support import NOT_FULL_ATTENTION, Unsupported, is_recurrent, refuse_by_name, refuse_changing_rope
from spec_lab.models.target import Target
from spec_lab.propose.expansion import Computed, DraftedLogits, RowLogits, over_all_tokens
from spec_lab.runners.attention import AttentionKind, layer_kinds, spans

LAYER_MODULES = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
"""Modules that a decoder layer must consist of."""
WHOLE_LAYER_MODULES = ("self_attn", "input_layernorm")
"""Modules that a layer which is only run whole must have."""
WHOLE_LAYER_ARGUMENTS = {"attention_mask", "position_ids", "position_embeddings"}
"""Arguments that such a layer must read besides its input and the KV cache."""
MAMBA_MODELS = {"mamba", "mamba2", "falcon_mamba", "jamba", "zamba"}
"""Kinds of models whose configs describe no such layers."""
MAX_BUFFERS = 2**20
"""Maximum size of the buffers of a config's model, which are made before weights are compared with the config."""
TURNED = 512
"""Positions by which a table of rotations grows."""


class DraftLayers(nn.Module):
    """The decoder layers and rotary embedding that a config of transformers describes.

    Args:
        fields: of a config, ``model_type`` among them; what concerns embedding and output is not used.
        count: number of layers.
        whole: the layers are only called whole (``whole``), so any family with self-attention over a KV cache will do:
            multi-head latent attention, gated attention, experts. Every layer has full attention then, also where the
            family has other layers too.
        windows: W of each layer that attends to positions i - W + 1 to i only, None of others; empty: of none.
        anchored: whether they end at the anchor of drafted rows (``AttentionKind``).

    Raises:
        ValueError: fields that describe no model.
        Unsupported: a family whose layers are built otherwise, or that has layers without full attention.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        count: int,
        whole: bool = False,
        windows: Sequence[int | None] = (),
        anchored: bool = False,
    ) -> None:
        super().__init__()
        kind = fields.get("model_type")
        if not isinstance(kind, str):
            raise ValueError(f"model_type must be a text, not {brief(kind)}")
        if kind in NOT_FULL_ATTENTION | MAMBA_MODELS:
            raise Unsupported(
                f"layers of model_type '{kind}' are not supported in a drafter: they have no full attention"
            )
        try:
            more = {name: value for name, value in fields.items() if name not in ("model_type", "layer_types")}
            none = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # their defaults exceed vocab_size
            config = AutoConfig.for_model(kind, **more | none | {"num_hidden_layers": count, "vocab_size": 1})
            config._attn_implementation = spans()
            if whole and getattr(config, "layer_types", None):
                config.layer_types = ["full_attention"] * count
            refuse_by_name(config)
            refuse_changing_rope(config)
            if is_recurrent(config):
                raise Unsupported(
                    f"layers of model_type '{kind}' are not supported in a drafter: they have no full attention"
                )
            with torch.device("meta"):
                causal_lm = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
            numbers = sum(buffer.numel() for buffer in causal_lm.buffers())
            if numbers > MAX_BUFFERS:
                raise ValueError(f"its rotary embedding has {numbers} numbers, more than {MAX_BUFFERS}: check head_dim")
            model = causal_lm.model
            rotary = type(model.rotary_emb)(config=config)
            own_windows = layer_kinds(config)
        except Unsupported:
            raise
        except Exception as error:  # transformers raises errors of many types
            raise ValueError(
                f"transformers {transformers.__version__} cannot build layers of model_type {kind!r} from this config "
                f"({one_line(error)})"
            ) from error
        children = {name for layer in model.layers for name, _ in layer.named_children()}
        if own_windows:
            raise Unsupported(
                f"layers of model_type '{kind}' are not supported in a drafter: they have sliding windows or chunks, "
                "and drafters need full attention"
            )
        if whole:
            reads = {name for layer in model.layers for name in signature(layer.forward).parameters}
            fits = children >= {*WHOLE_LAYER_MODULES} and _uses_interface(model.layers[0].self_attn)
            if not (fits and reads >= WHOLE_LAYER_ARGUMENTS | {cache_argument(model.layers[0])}):
                raise Unsupported(
                    f"layers of model_type '{kind}' are not supported in a drafter: they need full attention with a KV "
                    "cache through transformers' AttentionInterface, and to have "
                    f"{' and '.join(WHOLE_LAYER_MODULES)}; linear attention and recurrent layers are not supported"
                )
        elif children != {*LAYER_MODULES} or any(hasattr(layer.self_attn, "sinks") for layer in model.layers):
            raise Unsupported(
                f"layers of model_type '{kind}' are not supported in a drafter: they need full attention without "
                f"sinks, and to consist of {', '.join(LAYER_MODULES)}"
            )
        self.config, self.rotary, self.layers, self._family = config, rotary, model.layers, type(causal_lm)
        self.windows, self.anchored = tuple(windows) or (None,) * count, anchored
        self.tabled = False  # whether rotations are read from a table
        self._turned: Tensor | None = None
        for decoder_layer, window in zip(model.layers, self.windows, strict=True):
            if hasattr(decoder_layer.self_attn, "sliding_window"):  # Qwen's, which passes it on
                decoder_layer.self_attn.sliding_window = window
        for parent in list(model.layers.modules()):
            for name, norm in list(parent.named_children()):
                if _is_plain_norm(norm):
                    setattr(parent, name, nn.RMSNorm(len(norm.weight), norm.variance_epsilon, device="meta"))

    def widen(self, width: int) -> None:
        """Let queries, keys and values of the first layer read inputs of this width."""
        attention = self.layers[0].self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(attention, name)
            setattr(attention, name, nn.Linear(width, old.out_features, old.bias is not None, device="meta"))

    def attend(self, layer: int, x: Tensor, rotation: tuple[Tensor, Tensor], cache: Any, mask: Any = None) -> Tensor:
        """Self-attention of one layer over inputs ``[1, N, X]`` -> ``[1, N, H]``.

        Args:
            x: normed.
            rotation: as in ``rotate``.
            cache: ``runners.attention.Pack``, or anything with its ``update``.
            mask: for attention that is not over cells.
        """
        attention, more = self.layers[layer].self_attn, {}
        if self.windows[layer] is not None and not hasattr(attention, "sliding_window"):
            more = {"sliding_window": self.windows[layer]}
        out: Tensor = attention(
            hidden_states=x, position_embeddings=rotation, attention_mask=mask,
            **{cache_argument(attention): cache}, **more,
        )[0]  # fmt: skip
        return out

    def rotate(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding at ``positions`` ``[1, N]``, in the dtype of ``x``."""
        if not self.tabled or x.device.type != "cpu":  # elsewhere the size of the table would have to be read back
            rotation: tuple[Tensor, Tensor] = self.rotary(x, positions)
            return rotation
        end, table = int(positions.numpy().max(initial=0)) + 1, self._turned
        if table is None or table.dtype != x.dtype or table.shape[1] < end:
            known = torch.arange(-(-end // TURNED) * TURNED)
            self._turned = table = torch.cat(self.rotary(x, known[None]))  # [2, positions, dim]
        cos, sin = table.index_select(1, positions[0])[:, None].unbind()
        return cos, sin

    def rest(self, layer: int, residual: Tensor, attended: Tensor) -> Tensor:
        """Both residual connections and the MLP of one layer, which follow its attention."""
        decoder_layer, hidden = self.layers[layer], residual + attended
        output: Tensor = hidden + decoder_layer.mlp(decoder_layer.post_attention_layernorm(hidden))
        return output

    def run(self, layer: int, x: Tensor, rotation: tuple[Tensor, Tensor], cache: Any, mask: Any = None) -> Tensor:
        """One whole layer as its family defines it, ``[1, N, H] -> [1, N, H]``."""
        return self.rest(layer, x, self.attend(layer, self.layers[layer].input_layernorm(x), rotation, cache, mask))

    def whole(
        self, layer: int, x: Tensor, positions: Tensor, rotation: tuple[Tensor, Tensor], cache: Any, mask: Any = None
    ) -> Tensor:
        """One layer called as its family defines it, ``[b, N, H] -> [b, N, H]``. Arguments as in ``attend``."""
        decoder_layer = self.layers[layer]
        latent = cache is not None and hasattr(type(decoder_layer.self_attn), "expand_kv")
        if latent:
            cache = _ExpandedCache(decoder_layer.self_attn, cache)
        try:
            read = {"position_embeddings": rotation, cache_argument(decoder_layer): cache}
            returned = decoder_layer(x, attention_mask=mask, position_ids=positions, **read)
        finally:
            if latent:
                del decoder_layer.self_attn.expand_kv
        output: Tensor = returned if isinstance(returned, Tensor) else returned[0]
        return output

    def fuse(self) -> int:
        """Compute in fewer calls from now on, in inference alone; return how many modules were changed."""
        self.tabled = True
        return merge(self) + fuse_attention(self)

    def norm(self) -> nn.Module:
        """A norm over H of the layers' own kind, on the meta device."""
        norm: nn.Module = deepcopy(self.layers[0].input_layernorm)
        return norm

    def read(self, tensors: Mapping[str, Any], dtype: torch.dtype) -> tuple[dict[str, Tensor], list[str]]:
        """Read the layers' weights as transformers does, which converts those that it names otherwise (experts).

        Args:
            tensors: of ``model.layers``, by the names of the family's checkpoints; slices of ``safe_open`` or tensors.
            dtype: of the weights from now on; transformers keeps some in float32.

        Returns:
            The state of this module, and what does not fit: missing, surplus and misshapen tensors.
        """
        with torch.device("meta"):
            other = self._family(deepcopy(self.config)).state_dict()
        others = {name: tensor for name, tensor in other.items() if not name.startswith("model.layers.")}
        given = {name: torch.zeros(tensor.shape, dtype=dtype) for name, tensor in others.items()}
        logging.disable_progress_bar()
        model, report = self._family.from_pretrained(
            None, config=deepcopy(self.config), state_dict={**given, **tensors}, dtype=dtype,
            ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
        state = model.model.layers.state_dict()
        return {f"layers.{name}": tensor for name, tensor in state.items()}, misfits_of(report)


class _ExpandedCache:
    """Stands in for the cache of multi-head latent attention, whose latents transformers caches and then expands.

    Attention over cells reads keys and values, so those are cached.
    """

    def __init__(self, attention: Any, cache: Any) -> None:
        self.attention, self.cache = attention, cache
        attention.expand_kv = self.expand

    def update(self, latent: Tensor, rotated: Tensor, layer_idx: int, **_: Any) -> tuple[Tensor, Tensor]:
        """The latents, which are not cached."""
        return latent, rotated

    def expand(self, latent: Tensor, rotated: Tensor) -> tuple[Any, Any]:
        """Expand the latents and cache the keys and values."""
        attention = self.attention
        keys, values = type(attention).expand_kv(attention, latent, rotated)
        cached: tuple[Any, Any] = self.cache.update(keys, values, attention.layer_idx)
        return cached


def read_interleaved(layers: DraftLayers) -> None:
    """Let layers read weights for a rotary embedding that turns neighbours, numbers 2j and 2j + 1 of a head.

    Theirs turns numbers j and j + D/2. Queries and keys are reordered alike, so that attention stays the same.
    """
    for layer in layers.layers:
        attention, size = layer.self_attn, layer.self_attn.head_dim
        order = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
        for name in ("q_proj", "k_proj", "q_norm", "k_norm"):
            for tensor in getattr(attention, name, nn.Identity()).parameters():
                heads = tensor.data.unflatten(0, (-1, size))
                tensor.data = heads.index_select(1, order.to(tensor.device)).flatten(0, 1)


def drafted_facts(tokens: int, vocab_size: int) -> dict[str, Any]:
    """Return what a record keeps of a drafter that drafts so many of V tokens."""
    return {"drafted_tokens": tokens, "drafted_share": tokens / vocab_size}


def rms_norm(width: int, layers: DraftLayers) -> nn.RMSNorm:
    """An RMSNorm of this width, on the meta device, with the layers' epsilon."""
    return nn.RMSNorm(width, eps=float(layers.config.rms_norm_eps), device="meta")


N = TypeVar("N", bound="DrafterNetwork")


class DrafterNetwork(nn.Module):
    """A drafter's network, which calls the target's embedding and LM head."""

    settings: Any
    """Its sizes and kind."""
    body: DraftLayers
    """Its decoder layers, where it has any."""
    reading = Reading()
    """How its files were read; empty for a network that was not read from files."""
    _services: TargetServices | None = None
    ids: Tensor
    """``[W]`` the target's number of each token that the rows of LM heads are of; empty: all V, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head: nn.Linear | None = None  # of its own; None: the target's
        self.trimmed = False
        self.register_buffer("ids", torch.empty(0, dtype=torch.long), persistent=False)

    @property
    def tokens(self) -> int:
        """The number of the target's tokens that it drafts."""
        return len(self.ids) or int(self.settings.vocab_size)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of a trimmed vocabulary; empty for another one. See ``Part``."""
        return drafted_facts(self.tokens, self.settings.vocab_size) if self.trimmed else {}

    @property
    def kept(self) -> Tensor | None:
        """The tokens that a trimmed vocabulary has; None of another one."""
        return self.ids.cpu() if self.trimmed else None

    @property
    def lm_heads(self) -> list[tuple[nn.Module, str]]:
        """Its own LM heads, each as a module and the name of the layer ``[W, H]`` in it; none: it uses the target's."""
        return [] if self.lm_head is None else [(self, "lm_head")]

    @property
    def token_layers(self) -> list[tuple[nn.Module, str]]:
        """Further layers with a row for each drafted token, likewise."""
        return []

    def row_logits(self, normed: Tensor) -> Tensor:
        """Normed states ``[.., H]`` -> logits ``[.., W]`` by its own LM head, or by the target's."""
        logits: Tensor = self.services.lm_head(normed) if self.lm_head is None else self.lm_head(normed)
        return logits

    def token_logits(self, logits: Tensor) -> Tensor:
        """Logits ``[n, W]`` -> ``[n, V]``, -inf of tokens that are not drafted."""
        v = int(self.settings.vocab_size)
        return over_all_tokens(logits, self.ids, v) if logits.shape[-1] < v else logits

    def computed(self, logits: Tensor) -> Computed:
        """Logits ``[n, W]`` or ``[n, V]`` as trees are grown from them."""
        v = int(self.settings.vocab_size) if len(self.ids) else logits.shape[-1]
        return DraftedLogits(logits, self.ids, v) if logits.shape[-1] < v else RowLogits.of(logits)

    def fuse(self) -> None:
        """Compute in fewer calls from now on, in inference alone; nothing changes where that is not possible."""

    def trim(self, tokens: Tensor) -> None:
        """Leave those rows of LM heads that are of these tokens; of the target's LM head they are copied.

        Args:
            tokens: ``[n]`` of the target; those that are not drafted already are left out.

        Raises:
            WrongOption: none is drafted.
        """
        known = self.ids.cpu() if len(self.ids) else torch.arange(self.settings.vocab_size)
        rows = torch.isin(known, tokens).nonzero()[:, 0]
        if not len(rows):
            raise WrongOption(f"tokens names none of the {len(known)} tokens that the drafter drafts")
        like = next(self.parameters())
        if not self.lm_heads:
            self.lm_head = self.services.lm_head_rows(known[rows]).to(like)
        else:
            self._select(self.lm_heads, rows)
        self._select(self.token_layers, rows)
        self.ids, self.trimmed = known[rows].to(like.device), True

    def _select(self, layers: list[tuple[nn.Module, str]], rows: Tensor) -> None:
        for module, name in layers:
            layer: Any = module.get_submodule(name)
            if isinstance(layer, nn.Embedding):
                weight = layer.weight.detach()[rows.to(layer.weight.device)]
                setattr(module, name, nn.Embedding.from_pretrained(weight))
            else:
                setattr(module, name, selected_rows(layer.weight, layer.bias, rows))

    def trimmed_like(self, network: N) -> N:
        """Return another network without its last token if this one is trimmed, else as it is."""
        if self.trimmed:
            network.trim(torch.arange(network.settings.vocab_size - 1))
        return network

    @property
    def services(self) -> TargetServices:
        """The target's embedding and LM head."""
        assert self._services is not None, "the network was not bound to a target"
        return self._services

    @services.setter
    def services(self, services: TargetServices) -> None:
        self._services = services

    @property
    def layers(self) -> int:
        """The number of layers that the settings state; of Hydra, of each head."""
        return int(self.settings.layers)

    @property
    def kinds(self) -> dict[int, AttentionKind]:
        """Kinds of attention, by layer; left out are layers with full attention."""
        anchored = self.body.anchored
        return {
            layer: AttentionKind(window, anchored=anchored) for layer, window in enumerate(self.body.windows) if window
        }


class TapNetwork(DrafterNetwork):
    """A network that reads features, which it computes from hidden states of the target (taps)."""

    hidden: tuple[int, ...]
    """Numbers of the target's hidden states that ``features`` reads, as in ``runner.Capabilities``."""

    @property
    def skip(self) -> int:
        """How many rotary positions are left out between computed rows and those that are drafted after them."""
        return int(self.settings.positions) - 1

    def features(self, hidden: Tensor) -> Tensor:
        """Hidden states of the target ``[n, k * H]`` -> features ``[n, F]``."""
        raise NotImplementedError


class FeatureNetwork(TapNetwork):
    """Layers that read features of the target. F is the width of a feature, X of an input, Y of an output."""

    def fuse(self) -> None:
        """See ``DrafterNetwork``."""
        self.body.fuse()

    def inputs(self, token: Tensor, feature: Tensor) -> Tensor:
        """Tokens ``[n]`` and the features one position before them ``[n, F]`` -> inputs ``[n, X]``."""
        raise NotImplementedError

    def forward(self, x: Tensor, positions: Tensor, cache: Any, mask: Any = None) -> Tensor:
        """Inputs ``[b, N, X]`` at positions ``[b, N]`` -> outputs ``[b, N, Y]``."""
        raise NotImplementedError

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs ``[n, Y]`` -> the features ``[n, F]`` to feed back, and logits ``[n, V]``.

        The logits may be those of the drafted tokens alone, ``[n, W]`` (``token_logits``).
        """
        raise NotImplementedError

    def toy(self, target: Target) -> FeatureNetwork:
        """The same kind of network with random weights, for another target."""
        raise NotImplementedError


def load_weights(network: N, tensors: Mapping[str, Tensor], target: Target) -> N:
    """The network with these weights, ready to draft for a target; the network itself is changed.

    Args:
        network: without weights.
        tensors: by the network's own names, in their data types; they must be exactly its parameters.
        target: whose embedding and LM head the network calls, and on whose device it is from now on.
    """
    device = target.lm.device
    network.load_state_dict({name: tensor.to(device) for name, tensor in tensors.items()}, strict=True, assign=True)
    network.services = target.services
    if any(tensor.dtype == torch.float64 for tensor in tensors.values()):
        for layers in (module for module in network.modules() if isinstance(module, DraftLayers)):
            layers.config._experts_implementation = "eager"  # the fused kernels have no float64
    return network.to(device).eval().requires_grad_(False)


def random_network(network: N, target: Target, dtype: torch.dtype | None = None, seed: int = 0) -> N:
    """The network with random weights, in ``dtype``; None: the target's."""
    dtype = dtype or target.lm.dtype
    weights = {name: tensor.to(dtype) for name, tensor in random_weights(network, seed).items()}
    return load_weights(network, weights, target)


def random_weights(module: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Random float32 weights for a module's parameters: matrices normal with variance 1 / inputs, norms 1, biases 0."""
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1:
            weights[name] = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
        else:
            weights[name] = torch.zeros(parameter.shape) if name.endswith("bias") else torch.ones(parameter.shape)
    return weights


def small_layer(hidden_size: int) -> dict[str, Any]:
    """The config of a small Llama layer, for toys and tests, with two heads where these divide the hidden size."""
    heads = 1 if hidden_size % 2 else 2  # transformers refuses others, although ``head_dim`` is given
    return {
        "model_type": "llama", "hidden_size": hidden_size, "intermediate_size": 8, "num_attention_heads": heads,
        "num_key_value_heads": 1, "head_dim": 4, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    }  # fmt: skip


def _uses_interface(attention: nn.Module) -> bool:
    """Whether attention calls the function that the config names, among them ``attention.SPANS``."""
    return "ALL_ATTENTION_FUNCTIONS" in unwrap(type(attention).forward).__code__.co_names


def _is_plain_norm(module: nn.Module) -> bool:
    """Whether a module of transformers is an RMSNorm times its weight, which torch computes faster and in float64."""
    epsilon = getattr(module, "variance_epsilon", None)
    if epsilon is None or not isinstance(getattr(module, "weight", None), nn.Parameter):
        return False
    probe: Any = type(module)(4, eps=epsilon)
    with torch.no_grad():
        probe.weight.copy_(torch.tensor([0.3, 1.2, -0.7, 2.0]))
    return epsilon_of(probe) is not None
