"""Names of repositories of the hub, as opposed to folders. Imports nothing that takes a while."""

from __future__ import annotations

import os
import re

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


def check_folder_or_name(path: str) -> None:
    """Refuse a path that is neither a folder or file that exists nor a possible name of the hub.

    Raises:
        OSError: it is neither.
    """
    if os.path.exists(path) or HUB_NAME.fullmatch(path):
        return
    hint = "" if "/" in path else "; give a model of the hub as owner/name, e.g. openai-community/gpt2"
    raise OSError(f"there is no folder {path}, and it is not a hub name (owner/name){hint}")
