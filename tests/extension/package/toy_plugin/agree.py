"""The verifier that ``spec-lab new verifier agree`` writes."""

from spec_lab.cli.new_part.verifier.part import MyVerifier


class Agree(MyVerifier):
    """Draws each token from the target, and follows the draft while it holds the drawn token."""

    name = "agree"
