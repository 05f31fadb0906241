#!/usr/bin/env python3
"""Builds the book in docs/, and refuses dead links.      (make book)

    book.py                 builds docs/ into target/book, and checks every link and anchor in it
    book.py preprocess      what mdBook itself calls, by docs/book.toml

mdBook is built once by cargo, from the crates' registry, into $GPIPE_HOME/mdbook-VERSION.
Pages link to sources outside of docs/, which the book does not have: such a link becomes the path
as text. Whether the file exists is checked all the same.
"""

import html.parser
import json
import os
import re
import subprocess
import sys
import urllib.parse
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
sys.path[:0] = [str(SCRIPTS)]
import packages  # noqa: E402

ROOT = SCRIPTS.parent
DOCS = ROOT / "docs"
BOOK = ROOT / "target" / "book"
VERSION = "0.5.4"
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```.*?^```)", re.DOTALL | re.MULTILINE)
# Pages that are files of the repository's root: their links begin there.
OF_ROOT = {"design/architecture.md"}


def mdbook():
    """The program, built if it is not there."""
    folder = packages.home() / f"mdbook-{VERSION}"
    program = folder / "bin" / "mdbook"
    if not program.exists():
        # A debug build takes half the time, and is fast enough.
        command = ["cargo", "install", "mdbook", "--version", VERSION, "--locked", "--debug"]
        features = ["--no-default-features", "--features", "search"]
        subprocess.run([*command, *features, "--quiet", "--root", folder], check=True, cwd=ROOT)
    return program


def outside(page, link):
    """(the path in the book or none, the path in the repository or none) of a relative link."""
    path, _, anchor = link.partition("#")
    if not path or urllib.parse.urlparse(link).scheme:
        return None, None
    base = ROOT if page in OF_ROOT else (DOCS / page).parent
    target = (base / path).resolve()
    if not target.exists():
        sys.exit(f"book: docs/{page}: {link} does not exist")
    if DOCS in target.parents and target.suffix in {".md", ".svg", ".png"}:
        inside = os.path.relpath(target, (DOCS / page).parent)
        return inside + (f"#{anchor}" if anchor else ""), None
    return None, str(target.relative_to(ROOT))


def mended(page, text):
    """A page's text with links that hold in the book."""

    def mend(match):
        mark, words, link = match.groups()
        inside, source = outside(page, link)
        if inside:
            return f"{mark}[{words}]({inside})"
        if source:
            return words if source in words else f"{words} (`{source}`)"
        return match.group(0)

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(mend, part) for part in parts)


def preprocess():
    """Reads mdBook's book from standard input, and writes it with mended links."""
    _, book = json.load(sys.stdin)

    def walk(items):
        for item in items:
            if chapter := isinstance(item, dict) and item.get("Chapter"):
                if chapter.get("path"):
                    chapter["content"] = mended(chapter["path"], chapter["content"])
                walk(chapter.get("sub_items", []))

    walk(book.get("items", book.get("sections", [])))
    json.dump(book, sys.stdout)


class Page(html.parser.HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.anchors |= {attributes[key] for key in ("id", "name") if attributes.get(key)}
        self.links += [attributes[key] for key in ("href", "src") if attributes.get(key)]


def dead(book):
    """The dead links of a built book: page and link."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in book.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links:
            parsed = urllib.parse.urlparse(link)
            if parsed.scheme or parsed.netloc:
                continue
            target = path
            if parsed.path:
                target = (path.parent / urllib.parse.unquote(parsed.path)).resolve()
            if not target.exists():
                yield path, link
            elif parsed.fragment and target in pages:
                if urllib.parse.unquote(parsed.fragment) not in pages[target].anchors:
                    yield path, link


def main():
    if sys.argv[1:2] == ["preprocess"]:
        return preprocess() if sys.argv[2:3] != ["supports"] else None
    ran = subprocess.run([mdbook(), "build", DOCS], capture_output=True, text=True)
    if ran.returncode or "WARN" in ran.stderr or "ERROR" in ran.stderr:
        sys.exit(f"book: {ran.stdout}{ran.stderr}")
    problems = [f"{path.relative_to(BOOK)}: {link}" for path, link in dead(BOOK)]
    if problems:
        sys.exit("book: dead links:\n  " + "\n  ".join(sorted(set(problems))))
    print(f"{BOOK.relative_to(ROOT)}: {len(list(BOOK.rglob('*.html')))} pages, no dead link")


if __name__ == "__main__":
    main()
