"""A Sphinx extension that writes ``llms.txt`` and ``llms-full.txt`` beside the pages.

The first lists the pages with their first sentences, the second holds all of them as Markdown: for
programs that read the documentation. See https://llmstxt.org.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, bool]:
    """Registers the extension with Sphinx."""
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True}


def _write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.format != "html":
        return
    first = app.config.root_doc
    documents = [first, *sorted(app.env.found_docs - {first})]
    texts = {name: Path(app.env.doc2path(name)).read_text() for name in documents}
    lines = [f"# {app.config.project}", "", f"> {_first_paragraph(texts[first])}", ""]
    for name in documents[1:]:
        title = app.env.titles[name].astext()
        lines.append(f"- [{title}]({name}.html): {_first_paragraph(texts[name])}")
    out = Path(app.outdir)
    (out / "llms.txt").write_text("\n".join(lines) + "\n")
    (out / "llms-full.txt").write_text("\n\n".join(texts.values()))


def _first_paragraph(text: str) -> str:
    prose = re.sub(r"^```.*?^```$|^:::.*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n{2,}", prose.strip()):
        if paragraph[0].isalpha() or paragraph[0] in "`[*{":
            without_links = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", paragraph)
            without_roles = re.sub(r"\{[\w:]+\}`(.*?)( <.*?>)?`", r"`\1`", without_links)
            return " ".join(without_roles.replace("**", "").split())
    return ""
