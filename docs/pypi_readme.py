"""Makes the links of README.md absolute, since PyPI shows it without the files beside it.

``python docs/pypi_readme.py https://github.com/OWNER/NAME v0.1.0`` changes README.md of a checkout
that is about to be built and then dropped.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def absolute(text: str, repository: str, tag: str) -> str:
    """Returns the text with links to files of the repository at a tag."""
    kinds = {"!": "raw", "": "blob"}  # pictures are fetched, pages are shown
    return re.sub(
        r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)]+)\)",
        lambda found: f"{found[1]}[{found[2]}]({repository}/{kinds[found[1]]}/{tag}/{found[3]})",
        text,
    )


if __name__ == "__main__":
    README.write_text(absolute(README.read_text(), *sys.argv[1:]))
