"""Write docs/reference/configuration.md and commands.md: python scripts/render_reference.py"""

from pathlib import Path

from spec_lab.cli.commands import TRAIN, parser
from spec_lab.cli.explain import markdown, terminal
from spec_lab.cli.subcommands import COMMANDS

PAGES = Path(__file__).resolve().parents[1] / "docs" / "reference"


def pages() -> dict[Path, str]:
    """The text of each page."""
    parsers = parser()[1]
    return {
        PAGES / "configuration.md": markdown.configuration(terminal.reference()),
        PAGES / "commands.md": markdown.commands({name: parsers[name] for name in (*COMMANDS, TRAIN)}),
    }


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
        print(file)
