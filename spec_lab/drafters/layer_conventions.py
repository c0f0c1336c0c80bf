"""How a drafter's config describes its layers: rotary embeddings, windows, and the target's states that they read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from spec_lab.core.options import Whole, WrongOption, brief
from spec_lab.core.reading import Source
from spec_lab.drafters.config_fields import OF_LAYERS
from spec_lab.drafters.drafter_files import DrafterFiles
from spec_lab.models.checkpoint import check_counts

INTERLEAVED = {"rope_is_neox_style": False, "is_neox_style": False}
"""Fields that tell whether the rotary embedding turns neighbours, and their value where it does."""
PLAIN_THETA = 10000.0
"""Base of the rotary embeddings of RoPE's authors, which many classes use where a config states none."""
MAX_TAPS = 64
"""Maximum number of hidden states of the target that a drafter reads."""
Taps = Sequence[Annotated[int, Whole(-1)]]
"""An option: the numbers of the hidden states that a drafter reads, in this order."""
Rope = Literal["neox", "interleaved"]
WindowFrom = Literal["query", "anchor"]
Positions = Annotated[int, Whole(0, 2)]
POSITIONS = {"one position is left out": 2, "the last position again": 0}
"""Values of the option ``positions`` beside 1."""
WeightSource = Literal["own", "target"]
Scaling = Literal["own", "target", "none"]
SCALINGS = {"none": "without scaling", "target": "the target's"}
"""Values of the option ``rope_scaling`` beside ``own``, and what they mean."""


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The scaling of rotary embeddings that a config states, in either of transformers' fields; empty for none."""
    for stated in (config.get("rope_scaling"), config.get("rope_parameters")):
        if isinstance(stated, dict) and stated.get("rope_type", stated.get("type", "default")) != "default":
            return {name: value for name, value in stated.items() if name != "rope_theta"}
    return {}


def _theta(config: Mapping[str, Any]) -> Any:
    """The base of rotary embeddings that a config states, which transformers 5 writes beside their scaling."""
    mappings = (config.get("rope_scaling"), config.get("rope_parameters"), config)
    thetas = (stated.get("rope_theta") for stated in mappings if isinstance(stated, Mapping))
    return next((theta for theta in thetas if theta is not None), None)


def layer_fields(
    files: DrafterFiles, config: Mapping[str, Any], positions: int | None = None, windows: bool = False
) -> dict[str, Any]:
    """The fields that describe decoder layers, apart from windows.

    Args:
        positions: that they have if the config states none; None: those of the target.
        windows: whether they may have windows, which ``layer_windows`` reads.

    Raises:
        ValueError: layers with windows where they may have none; no hidden size; rotary embeddings of a part of the
            numbers; more layers than the files have tensors.
    """
    types, h = config.get("layer_types"), files.whole("hidden_size", config=config)
    full = types is None or (isinstance(types, list) and all(kind == "full_attention" for kind in types))
    if not (full or windows):
        raise ValueError(f"{files.file}: layer_types must be full_attention in every layer, not {brief(types)}")
    files.whole("num_hidden_layers", 1, config=config)
    for name in ("rope_parameters", "rope_scaling"):
        part = config[name].get("partial_rotary_factor") if isinstance(config.get(name), Mapping) else None
        if part is not None and part != 1:
            raise ValueError(
                f"{files.file}: {name}.partial_rotary_factor is {brief(part)}, and only 1.0 is supported (rotary "
                "embeddings of a part of the numbers are not supported): choose another drafter"
            )
    check_counts(files.folder, config, len(files.held))
    fields = {name: config[name] for name in OF_LAYERS if name in config}
    _choose_rotation(files, config, fields)
    if fields.get("head_dim") is None and isinstance(heads := config.get("num_attention_heads"), int) and heads:
        fields["head_dim"] = h // heads
    positions = max(files.target.context, 1) if positions is None else positions
    return fields | {"max_position_embeddings": files.whole("max_position_embeddings", positions, config=config)}


def layer_windows(files: DrafterFiles, config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The window W of each decoder layer, None of one with full attention.

    ``layer_types`` names the layers that have one; without it and with ``use_sliding_window`` they are those from
    ``max_window_layers`` on (Qwen2). ``sliding_window`` alone states nothing, since no Llama layer reads it.

    Raises:
        ValueError: layers of another type; fields that contradict each other; no window.
    """
    layers, types = files.whole("num_hidden_layers", 1, config=config), config.get("layer_types")
    if types is None:
        first = files.whole("max_window_layers", 28, 0, config=config)
        first = first if files.flag("use_sliding_window", config=config) else layers
        types = ["full_attention"] * min(first, layers) + ["sliding_attention"] * (layers - first)
    names = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in names for kind in types):
        raise ValueError(
            f"{files.file}: layer_types must name one of {', '.join(names)} for each of {layers} layers, not "
            f"{brief(types)}"
        )
    if "sliding_attention" not in types:
        return (None,) * layers
    if not files.flag("use_sliding_window", True, config=config):
        raise ValueError(f"{files.file}: use_sliding_window is false, but layer_types has sliding_attention")
    window = files.whole("sliding_window", config=config)
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def window_fields(windows: Sequence[int | None]) -> dict[str, Any]:
    """Return the fields that ``layer_windows`` reads; none where no layer has a window."""
    sizes = {window for window in windows if window}
    if not sizes:
        return {}
    types = ["sliding_attention" if window else "full_attention" for window in windows]
    return {"layer_types": types, "sliding_window": max(sizes)}


def choose_window(
    files: DrafterFiles, config: Mapping[str, Any], windows: Sequence[int | None], why: str
) -> tuple[int | None, ...]:
    """Settle the window of each decoder layer, None of one with full attention.

    Args:
        config: of the layers. Its ``sliding_window`` is another reading where no layer has a window.
        windows: as the files state them, all of one size.
        why: they are read so.
    """
    largest = max(window or 0 for window in windows)
    unused = files.whole("sliding_window", 0, 0, config=config)
    chosen = files.choose("window", largest, "file", why, {"none": 0, "as stated": unused})
    return tuple((chosen or None) if window or not largest else None for window in windows)


def choose_anchored(files: DrafterFiles, windows: Sequence[int | None], trained: bool) -> bool:
    """Return whether the windows of drafted rows end at their anchor; recorded where layers have windows.

    speculators trains so: rows of a block (``dflash/attention.py``: keys from the anchor minus W on) and those below
    the first level of an EAGLE-3 head (``eagle3/attention.py``) attend to what their anchor attends to, and to each
    other. vLLM serves these drafters, as all others, with windows that end at each row.

    Args:
        windows: W of each layer that the files state or an option sets; None of one without.
        trained: whether speculators has written the files.
    """
    if not any(windows):
        return False
    why = "speculators trains with windows that end at the anchor" if trained else "windows end at each row"
    value: WindowFrom = "anchor" if trained else "query"
    others = {"at each row, as vLLM serves it": "query", "at the anchor, as speculators trains": "anchor"}
    return bool(files.choose("window_from", value, "default", why, others) == "anchor")


def choose_positions(files: DrafterFiles) -> int:
    """Return by how many rotary positions the first drafted row comes after the last computed one.

    Rotary embeddings tell only the distance of positions, so that the number of the first does not matter; a jump
    between computed and drafted rows does, which SGLang had until its pull request 25015.
    """
    return int(files.choose("positions", 1, "default", "drafted rows follow the computed ones", POSITIONS))


def stated_flag(files: DrafterFiles, config: Mapping[str, Any], fields: Mapping[str, bool]) -> bool | None:
    """Return whether flags with one meaning have the values in ``fields``; None where none of them is stated.

    Raises:
        ValueError: flags that contradict each other.
    """
    stated = {
        name: files.flag(name, config=config) == value for name, value in fields.items() if config.get(name) is not None
    }
    if len({*stated.values()}) > 1:
        values = " and ".join(f"{name} is {brief(config[name])}" for name in stated)
        raise ValueError(f"{files.file}: {values}, which contradict each other")
    return next(iter(stated.values()), None)


def choose_of_two(
    files: DrafterFiles, convention: str, stated: bool | None, default: bool, names: tuple[str, str]
) -> bool:
    """Choose between two values of a convention; return whether it is the second.

    Args:
        stated: whether the files state the second; None: they state nothing.
        default: what is meant then.
    """
    value = names[default if stated is None else stated]
    why = "files that state nothing mean it" if stated is None else "the config states it"
    other = names[1 - names.index(value)]
    chosen = files.choose(convention, value, "default" if stated is None else "file", why, {other: other})
    return bool(chosen == names[1])


def choose_rope(files: DrafterFiles, config: Mapping[str, Any], default: bool = False) -> bool:
    """Return whether rotary embeddings turn neighbours, which ``default`` says where ``config`` does not."""
    return choose_of_two(files, "rope", stated_flag(files, config, INTERLEAVED), default, ("neox", "interleaved"))


def _choose_rotation(files: DrafterFiles, config: Mapping[str, Any], fields: dict[str, Any]) -> None:
    """Settle how the layers rotate queries and keys, in their ``fields``.

    Sections of ``mrope`` are of images; of text their positions are the same, and it is plain RoPE.
    """
    stated, theta = _rope(config), _theta(config)
    scaling, changed = stated, False
    if stated.get("rope_type", stated.get("type")) == "mrope":
        theta, scaling, changed = theta or PLAIN_THETA, {}, True
        why = "SpecForge has trained heads with rope_scaling of type mrope both with rope_theta and with 10000"
        source: Source = "file" if theta == PLAIN_THETA else "guess"
        theta = files.choose("rope_theta", theta, source, why, {"as some versions of SpecForge": PLAIN_THETA})
    elif files.options.get("rope_theta") is not None:
        theta = files.choose("rope_theta", theta or PLAIN_THETA, "file", "rope_theta of its config")
        changed = True
    if "rope_scaling" in files.options:
        model = getattr(files.target.lm, "hf_model", None)
        of_target = _rope({} if model is None else {"rope_parameters": getattr(model.config, "rope_parameters", None)})
        values = {"own": scaling, "none": {}, "target": of_target}
        others = {
            label: name
            for name, label in SCALINGS.items()
            if values[name] != scaling and (of_target or name != "target")
        }
        rope = files.choose("rope_scaling", "own", "file", "rope_scaling of its config", others)
        scaling, changed = values[rope], changed or rope != "own"
    if changed:
        base = {} if theta is None else {"rope_theta": theta}
        fields |= {"rope_scaling": None, "rope_parameters": (scaling or {"rope_type": "default"}) | base, **base}


def numbered_taps(files: DrafterFiles, where: str, named: Any, shift: int) -> list[int]:
    """The numbers of the hidden states that a drafter reads, as in ``runner.Capabilities``.

    Args:
        named: its value, a list of layers.
        shift: what is added to each: 0 for numbers of hidden states, 1 for numbers of layers whose outputs are
            read.

    Raises:
        ValueError: no list of layers, or a layer that the target does not have.
    """
    last = files.target.lm.capabilities.hidden_layers
    plain = isinstance(named, list) and 0 < len(named) <= MAX_TAPS
    if not plain or any(isinstance(layer, bool) or not isinstance(layer, int) for layer in named):
        raise ValueError(f"{files.file}: {where} must be a list of layers, not {brief(named)}")
    if wrong := [layer for layer in named if not 0 <= layer + shift <= last]:
        raise ValueError(
            f"{files.file}: {where} names layer {wrong[0]}, but the target {files.target.name} has {last} layers, of "
            f"which {-shift} to {last - shift} can be named here: the drafter is for another target"
        )
    return [layer + shift for layer in named]


def settle_taps(
    files: DrafterFiles, taps: list[int], source: Source, why: str, others: Mapping[str, list[int]] | None = None
) -> tuple[int, ...]:
    """Settle the hidden states that are read (``DrafterFiles.choose``).

    Among the other readings are those numbered one less or more, where no tap is after the final norm. Published
    drafters read the last state either before or after the target's final norm, so that one is a guess.

    Raises:
        ValueError: the option names a state that the target does not have.
    """
    last = files.target.lm.capabilities.hidden_layers
    every = {**(others or {})}
    if min(taps) >= 0:
        every |= {"each one less": [tap - 1 for tap in taps], "each one more": [tap + 1 for tap in taps]}
    exist = {label: other for label, other in every.items() if min(other) >= 0 and max(other) <= last}
    for before, after, label in ((last, -1, "after"), (-1, last, "before")):
        if before in taps:
            swapped = [after if tap == before else tap for tap in taps]
            exist[f"the last state {label} the final norm"] = swapped
            source = "guess" if source == "file" else source
    chosen = list(files.choose("taps", taps, source, why, exist))
    if wrong := [tap for tap in chosen if not -1 <= tap <= last]:
        raise WrongOption(
            f"taps names hidden state {wrong[0]}, but the target {files.target.name} has states 0 to {last}, and "
            "-1 after its final norm"
        )
    return tuple(chosen)


def settle_last_state(files: DrafterFiles, why: str) -> tuple[int, ...]:
    """Settle which state a drafter of one hidden state reads: by its authors the one after the final norm.

    Raises:
        ValueError: the option names several states, or one that the target does not have.
    """
    taps = settle_taps(files, [-1], "default", why)
    if len(taps) != 1:
        raise WrongOption(f"taps must name one hidden state of {files.what}, not {brief(list(taps))}")
    return taps


def ordered_taps(
    files: DrafterFiles, where: str, named: Any, shift: int, source: Source = "file", why: str = "", order: str = ""
) -> tuple[int, ...]:
    """Settle the hidden states that a config names, which are read in the order of the layers, as engines collect them.

    Args:
        named, shift: as in ``numbered_taps``.
        source: of what the numbers are.
        why: they are those; empty: the format says so.
        order: why they are read in the order of the list; empty: they are not.

    Raises:
        ValueError: as in ``numbered_taps`` and ``settle_taps``.
    """
    listed = numbered_taps(files, where, named, shift)
    why = f"{where} is {brief(named)}, " + (
        why or f"numbers of {'layers whose outputs are read' if shift else 'hidden states'}"
    )
    if (taps := sorted(listed)) == listed:
        return settle_taps(files, taps, source, why)
    if order:
        return settle_taps(files, listed, "guess", f"{why}, {order}", {"in the order of the layers": taps})
    why += ", and engines read taps in the order of the layers"
    return settle_taps(files, taps, "guess", why, {"in the order of the list": listed})
