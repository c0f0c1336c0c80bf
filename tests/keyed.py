"""A part of a run that needs a secret, for the tests of redaction."""

from spec_lab.text.prompts import Prompt, jsonl


def load(
    path: str, limit: int | None, api_key: str, service: dict | None = None, accepted: bool = True
) -> list[Prompt]:
    """The prompts of a file.

    Raises:
        ValueError: the key is not accepted; the message contains it, as some services' do.
    """
    if not accepted:
        raise ValueError(f"the key {api_key} of {service} is not accepted")
    return jsonl(path, limit)
