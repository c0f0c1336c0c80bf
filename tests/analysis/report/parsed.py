"""A page as a reader sees it, and texts that try to break out of it."""

import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>\u2028\u202eRTL\x00]]>--><!--{{7*7}}"
)


class Parsed(HTMLParser):
    """Tags with their attributes, and the text outside scripts and styles."""

    def __init__(self, page: Path):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.text = self.scripts = ""
        self.inside = ""
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self.inside = tag

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "script":
            self.scripts += data
        elif self.inside != "style":
            self.text += data

    def values(self, attribute: str) -> list[str]:
        return [attributes[attribute] for _, attributes in self.tags if attribute in attributes]


def cells(page: Path, table: int = 1) -> list[dict[str, str]]:
    """The texts of the rows of a page's table, the first is 1, by heading."""
    text = page.read_text().split("<thead>")[table]
    headings = [unescape(heading) for heading in re.findall(r"<th[^>]*>([^<]*)</th>", text.partition("</thead>")[0])]
    rows = text.partition("<tbody>")[2].partition("</tbody>")[0].split("<tr>")[1:]
    rows_of_cells = (
        [unescape(re.sub("<[^>]*>", "", cell)).strip() for cell in re.findall(r"<td.*?</td>", row, re.DOTALL)]
        for row in rows
    )
    return [dict(zip(headings, row, strict=True)) for row in rows_of_cells]
