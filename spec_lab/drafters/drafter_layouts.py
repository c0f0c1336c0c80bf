"""Names and shapes of the tensors of published drafters, as their authors save them.

They are EAGLE, EAGLE-3, Medusa, Hydra and Kangaroo.

Each function receives the shapes of a file's tensors by name, reads the sizes off a few of them, and returns the shapes
that a file of these sizes has. Numbers of heads and layers are counted, since published configs misstate them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

Shapes = Mapping[str, tuple[int, ...]]

EAGLE3 = ("midlayer.", "d2t", "t2d")
INDEX = r"(\d{1,3})"
"""Of a head or layer: a longer one is that of no published file."""


@dataclass(frozen=True)
class MedusaLayout:
    """Medusa heads with LM heads of their own.

    Args:
        heads: K; layers: L; hidden: H; rows: of an LM head.
        weight, bias, lm_head: names, with ``{k}`` for the head and ``{l}`` for the layer; bias: None without biases.
        mapped: the length of ``token_map``; None without one.
    """

    heads: int
    layers: int
    hidden: int
    rows: int
    weight: str
    bias: str | None
    lm_head: str
    mapped: int | None = None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor by name."""
        shapes: dict[str, tuple[int, ...]] = {}
        for head, layer in product(range(self.heads), range(self.layers)):
            shapes[self.weight.format(k=head, l=layer)] = (self.hidden, self.hidden)
            if self.bias:
                shapes[self.bias.format(k=head, l=layer)] = (self.hidden,)
        shapes |= {self.lm_head.format(k=head): (self.rows, self.hidden) for head in range(self.heads)}
        return shapes if self.mapped is None else shapes | {"token_map": (self.mapped,)}


def medusa_layout(held: Shapes) -> MedusaLayout:
    """FasterDecoding's layout: ``{k}.{l}.linear.{weight,bias}`` and ``{k}.{L}.weight``.

    Raises:
        ValueError: there is no LM head.
    """
    found = [match for name in held if (match := MEDUSA.fullmatch(name))]
    heads, layers = len({match[1] for match in found}), len({match[2] for match in found if match[3]})
    rows, hidden = matrix(held, f"0.{layers}.weight")
    lm_head = f"{{k}}.{layers}.weight"
    return MedusaLayout(heads, layers, hidden, rows, "{k}.{l}.linear.weight", "{k}.{l}.linear.bias", lm_head)


MEDUSA = re.compile(rf"{INDEX}\.{INDEX}\.(?:(linear)\.(?:weight|bias)|weight)")


def matrix(held: Shapes, name: str) -> tuple[int, int]:
    """The shape of a matrix.

    Raises:
        ValueError: there is none of that name.
    """
    shape = held.get(name)
    if shape is None or len(shape) != 2:
        what = "is missing" if shape is None else f"has shape {shape}, not that of a matrix"
        raise ValueError(f"'{name}' {what}")
    return shape[0], shape[1]


def _layer(held: Shapes, name: str, read: int, h: int, norms: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """A decoder layer of Llama, Qwen2 or Qwen3 whose attention reads inputs of width ``read``."""
    q, k = (matrix(held, f"{name}.self_attn.{kind}_proj.weight")[0] for kind in "qk")
    inner = matrix(held, f"{name}.mlp.gate_proj.weight")[0]
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.self_attn.q_proj.weight": (q, read), f"{name}.self_attn.k_proj.weight": (k, read),
        f"{name}.self_attn.v_proj.weight": (k, read), f"{name}.self_attn.o_proj.weight": (h, q),
        f"{name}.mlp.gate_proj.weight": (inner, h), f"{name}.mlp.up_proj.weight": (inner, h),
        f"{name}.mlp.down_proj.weight": (h, inner), **{f"{name}.{norm}.weight": (h,) for norm in norms},
    }  # fmt: skip
    for kind, rows in (("q", q), ("k", k), ("v", k)):
        if f"{name}.self_attn.{kind}_proj.bias" in held:
            shapes[f"{name}.self_attn.{kind}_proj.bias"] = (rows,)
    for norm in (f"{name}.self_attn.{kind}_norm.weight" for kind in "qk"):
        if norm in held:
            shapes[norm] = held[norm][:1]  # as wide as a head of attention
    return shapes


def _layers(held: Shapes, h: int, first: int, prefix: str = "") -> dict[str, tuple[int, ...]]:
    """The layers ``layers.{first}``, ``layers.{first + 1}`` and so on, of Llama's kind."""
    found = {match[1] for name in held if (match := re.match(rf"{re.escape(prefix)}layers\.{INDEX}\.", name))}
    norms = ("input_layernorm", "post_attention_layernorm")
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(first, first + max(len(found - set(map(str, range(first)))), 1 - first)):
        shapes |= _layer(held, f"{prefix}layers.{layer}", h, h, norms)
    return shapes


def _optional(held: Shapes, more: Shapes) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in more.items() if name in held}


def eagle_shapes(held: Shapes) -> dict[str, tuple[int, ...]]:
    """EAGLE-1 and EAGLE-2: ``fc`` and layers of Llama, the first without an input norm."""
    h = matrix(held, "fc.weight")[0]
    more: dict[str, tuple[int, ...]] = {"fc.bias": (h,)}
    if "embed_tokens.weight" in held:
        more["embed_tokens.weight"] = (matrix(held, "embed_tokens.weight")[0], h)
    shapes = {"fc.weight": (h, 2 * h), **_optional(held, more), **_layers(held, h, 1)}
    return shapes | _layer(held, "layers.0", h, h, ("post_attention_layernorm",))


def eagle3_shapes(held: Shapes) -> dict[str, tuple[int, ...]]:
    """EAGLE-3 as its authors, SpecForge and SGLang write it."""
    h, read = matrix(held, "fc.weight")
    norms = sorted(name for name in held if re.fullmatch(rf"fc_norm\.{INDEX}\.weight", name))
    more: dict[str, tuple[int, ...]] = {"input_norm.weight": (read,)}
    for name in ("lm_head.weight", "embed_tokens.weight"):
        if name in held:
            more[name] = (matrix(held, name)[0], h)
    if "lm_head.weight" in more:
        more |= {"d2t": more["lm_head.weight"][:1], "t2d": held.get("t2d", ())[:1]}
    for number in range(len(norms)):
        more[f"fc_norm.{number}.weight"] = (read // len(norms),)
    shapes = {"fc.weight": (h, read), "norm.weight": (h,), **_optional(held, more), **_layers(held, h, 1)}
    return shapes | _layer(held, "midlayer", 2 * h, h, ("hidden_norm", "input_layernorm", "post_attention_layernorm"))


def hydra_shapes(held: Shapes) -> dict[str, tuple[int, ...]]:
    """Hydra heads of the kinds "mlp" and "prefix-mlp", grounded or not.

    With the prefix layer, which is a Llama model of one layer with an embedding that nothing reads, indices count the
    dropout before each block.
    """
    prefix = any(name.startswith(PREFIX) for name in held)
    step, at = (2, 1) if prefix else (1, 0)
    linear = re.compile(rf"hydra_mlp\.{INDEX}\.{INDEX}\.linear\.weight")
    found = [match for name in held if (match := linear.fullmatch(name))]
    heads, layers = len({match[1] for match in found}), len({match[2] for match in found})
    lm_head = "hydra_lm_head.{}.1" if prefix else "hydra_lm_head.{}"
    v, h = matrix(held, f"{lm_head.format(0)}.weight")
    shapes: dict[str, tuple[int, ...]] = {}
    for head, layer in product(range(heads), range(layers)):
        block, width = f"hydra_mlp.{head}.{at + step * layer}", h
        if layer == 0 and f"{block}.res_connection.weight" in held:
            width = (head + 2) * h
            shapes |= {f"{block}.res_connection.weight": (h, width), f"{block}.res_connection.bias": (h,)}
        shapes |= {f"{block}.linear.weight": (h, width), f"{block}.linear.bias": (h,)}
    for head in range(heads):
        shapes[f"{lm_head.format(head)}.weight"] = (v, h)
        shapes |= _optional(held, {f"{lm_head.format(head)}.bias": (v,)})
    if prefix:
        shapes |= _optional(held, {f"{PREFIX}embed_tokens.weight": (v, h)})
        shapes |= {f"{PREFIX}norm.weight": (h,), **_layers(held, h, 0, PREFIX)}
    return shapes


PREFIX = "prefix_embeding_layer."  # the authors' spelling


def kangaroo_shapes(held: Shapes) -> dict[str, tuple[int, ...]]:
    """Kangaroo's adapter: attention of Llama with a norm before it in each layer, and a norm after the last."""
    layers = {match[1] for name in held if (match := re.match(rf"layers\.{INDEX}\.", name))}
    h = matrix(held, f"{ATTENTION}.q_proj.weight")[1]
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (h,)}
    for layer in range(len(layers)):
        q, k = (matrix(held, f"layers.{layer}.self_attn.{kind}_proj.weight")[0] for kind in "qk")
        shapes |= {
            f"layers.{layer}.self_attn.q_proj.weight": (q, h), f"layers.{layer}.self_attn.k_proj.weight": (k, h),
            f"layers.{layer}.self_attn.v_proj.weight": (k, h), f"layers.{layer}.self_attn.o_proj.weight": (h, q),
            f"layers.{layer}.input_layernorm.weight": (h,),
        }  # fmt: skip
    return shapes


ATTENTION = "layers.0.self_attn"


def layout_of(held: Shapes) -> tuple[str, Callable[[Shapes], dict[str, tuple[int, ...]]]] | None:
    """The name of a file's layout and the function of its shapes; None for another layout than these five."""
    if any(name.startswith(("hydra_mlp.", "hydra_lm_head.")) for name in held):
        return "Hydra", hydra_shapes
    if any(MEDUSA.fullmatch(name) for name in held):
        return "Medusa", lambda held: medusa_layout(held).shapes()
    if any(name.startswith(EAGLE3) for name in held):
        return "EAGLE-3", eagle3_shapes
    if "fc.weight" in held:
        return "EAGLE", eagle_shapes
    if f"{ATTENTION}.q_proj.weight" in held and not any(".mlp." in name for name in held):
        return "Kangaroo", kangaroo_shapes
    return None
