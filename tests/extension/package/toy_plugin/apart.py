"""The constraint that ``spec-lab new constraint apart`` writes."""

from spec_lab.cli.new_part.constraint.part import After, MyConstraint

__all__ = ["After", "Apart"]


class Apart(MyConstraint):
    """No token comes twice in a row."""

    name = "apart"
