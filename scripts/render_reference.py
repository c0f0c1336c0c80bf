"""Write docs/reference/configuration.md and commands.md, the generated parts of extending.md and of the pages of api/,
and the comments of conf/ that say what options mean: python scripts/render_reference.py
"""

from pathlib import Path

from spec_lab.cli.bundled import conf
from spec_lab.cli.commands import SHORT, parser
from spec_lab.cli.declarations import package_sources
from spec_lab.cli.explain import api_page, contracts, markdown, terminal
from spec_lab.cli.explain.reference import commented
from spec_lab.cli.subcommands import COMMANDS

PAGES = Path(__file__).resolve().parents[1] / "docs" / "reference"


def pages() -> dict[Path, str]:
    """The text of each page and of each config file."""
    parsers, sources = parser()[1], package_sources()
    api = {file: api_page.page(file.read_text("utf-8"), sources) for file in sorted((PAGES / "api").glob("*.md"))}
    extending = PAGES / "extending.md"
    return (
        commented(Path(conf()), sources)
        | api
        | {
            extending: contracts.with_table(extending.read_text("utf-8")),
            PAGES / "configuration.md": markdown.configuration(terminal.reference()),
            PAGES / "commands.md": markdown.commands({name: parsers[name] for name in (*COMMANDS, *SHORT)}),
        }
    )


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for _ in range(2):  # the pages follow from the config files
        for file, text in pages().items():
            if not file.exists() or file.read_text(encoding="utf-8") != text:
                file.write_text(text, encoding="utf-8")
                print(file)
