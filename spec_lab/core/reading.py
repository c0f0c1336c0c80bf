"""How the conventions of a drafter's files are read: which hidden states, norms, windows and tables they mean.

Files of one layout leave some of them open, and a convention that is read otherwise than the author meant it makes the
drafts worse, while every emitted token stays right.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Source = Literal["file", "default", "guess", "option"]
"""Where a value comes from: the file states it; a rule for files that do not; a rule that is wrong for some files,
which is logged; or an option of the run."""


@dataclass(frozen=True)
class Convention:
    """How one convention is read.

    Args:
        value: in use, as the option of that name has it.
        why: it was chosen, in a few words.
        others: values of other readings that the file leaves open, by their description.
    """

    value: Any
    source: Source
    why: str
    others: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reading:
    """How a drafter's files are read.

    Args:
        conventions: by name, which is that of the drafter's option that sets it.
        trained_context: most positions that its files say it was made for; None where they do not.
    """

    conventions: Mapping[str, Convention] = field(default_factory=dict)
    trained_context: int | None = None

    @property
    def values(self) -> dict[str, Any]:
        """The value in use of each convention."""
        return {name: convention.value for name, convention in self.conventions.items()}

    @property
    def facts(self) -> dict[str, Any]:
        """Entries for records: each convention's value, where it comes from, and why."""
        return {
            name: {"value": convention.value, "source": convention.source, "why": convention.why}
            for name, convention in self.conventions.items()
        }

    @property
    def others(self) -> list[tuple[str, str, Any]]:
        """The other readings that the file leaves open: convention, description and value of each."""
        return [
            (name, label, value)
            for name, convention in self.conventions.items()
            for label, value in convention.others.items()
        ]
