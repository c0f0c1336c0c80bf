"""The sandbox of chat templates, in a process of its own: Jinja's, with the functions and tags of transformers.

``python -m spec_lab.text.template_sandbox`` is that process (``chat_template`` starts it, with limits of time and
memory), so this module imports only what is light. Templates are compiled there as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from spec_lab.core.limited_process import serve


class GenerationTag(Extension):
    """The tag "generation" of transformers, which marks what the model writes; its content is kept."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        """See Jinja's."""
        lineno = next(parser.stream).lineno
        content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_kept"), [], [], content).set_lineno(lineno)

    def _kept(self, caller: Any) -> Any:
        return caller()


class _Namespace(Namespace):
    """A namespace without names that begin with an underscore, as in transformers."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        Namespace.__init__(self, {})
        for name, value in given.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace may have no variable {name!r}")
        super().__setitem__(name, value)


class _Dict:
    """The function ``dict`` of transformers."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """See Python's."""
        return dict.fromkeys(*args)


def environment() -> ImmutableSandboxedEnvironment:
    """Return what transformers compiles templates with, without ``random`` and ``lipsum``, which are not repeatable."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _json
    made.globals |= {"raise_exception": _refuse, "strftime_now": _now, "dict": _Dict(), "namespace": _Namespace}
    del made.filters["random"], made.globals["lipsum"]
    return made


@lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
    """Return a template.

    Raises:
        jinja2.TemplateError: it is none.
    """
    return environment().from_string(source)


def variables(source: str) -> list[str]:
    """Return the names of the variables that a template reads, sorted. Errors as in ``compiled``."""
    return sorted(meta.find_undeclared_variables(environment().parse(source)))


def rendered(source: str, given: Mapping[str, Any]) -> str:
    """Return what a template writes.

    Raises:
        Exception: as the template does.
    """
    return compiled(source).render(given)


def _refuse(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(str(message))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _json(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Transformers' filter: unlike Jinja's it does not escape HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def answer(request: Mapping[str, Any]) -> Any:
    """Return the text that a template writes for its variables ``given``; without these, the names that it reads."""
    return rendered(request["source"], request["given"]) if "given" in request else variables(request["source"])


if __name__ == "__main__":
    serve(answer)
