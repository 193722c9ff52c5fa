"""Every link of a built site is followed: pages, fragments, pictures, scripts, style sheets."""

import posixpath
import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser fetches by itself. A link that a reader clicks may lead outside, these may not.
_LOADED = {
    "img": ("src", "srcset"),
    "script": ("src",),
    "link": ("href",),
    "iframe": ("src",),
    "source": ("src", "srcset"),
    "video": ("src", "poster"),
    "audio": ("src",),
    "embed": ("src",),
    "object": ("data",),
    "image": ("href", "xlink:href"),
    "use": ("href", "xlink:href"),
}
_CSS_ADDRESS = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")


@dataclass
class Crawl:
    """What following all links of a site found."""

    problems: list[str] = field(default_factory=list)  # broken links and network loads, in words
    used: set[str] = field(default_factory=set)  # files of the site that some other file refers to


class _Page(HTMLParser):
    """The anchors and addresses of one HTML page or SVG picture."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.addresses: list[tuple[str, bool]] = []  # (address, does the browser load it)
        self.base = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by the parser at each tag: keeps its anchors and the addresses it names."""
        values = {name: value for name, value in attrs if value is not None}
        self.anchors.update(values[name] for name in ("id", "name") if name in values)
        if tag == "base":
            self.base = values.get("href", "")
        elif tag == "a" and "href" in values:
            self.addresses.append((values["href"], False))
        for name in _LOADED.get(tag, ()):
            if name in values:
                self.addresses.append((values[name], True))


def crawl(site: Path) -> Crawl:
    """Follows every link of every page, picture and style sheet under the folder `site`.

    A relative link must lead to a file of the site, its fragment to an anchor there. Nothing that
    a browser loads by itself may come from the network.
    """
    files = {path.relative_to(site).as_posix(): path for path in site.rglob("*") if path.is_file()}
    texts = {
        name: path.read_text(encoding="utf-8")
        for name, path in sorted(files.items())
        if path.suffix in (".html", ".svg", ".css")
    }
    pages = {name: _Page(text) for name, text in texts.items() if not name.endswith(".css")}
    found = Crawl()

    def follow(name: str, folder: str, address: str, loaded: bool) -> str | None:
        """What is wrong with one address on a page, if anything is."""
        parts = urlsplit(address)
        if parts.scheme == "data":
            return None
        if parts.scheme or parts.netloc:
            return "would be loaded from the network" if loaded else None
        if parts.path.startswith("/"):
            return "starts at a server's root, which a book opened as a file does not have"
        path = posixpath.normpath(posixpath.join(folder, unquote(parts.path)))
        target = path if parts.path else name
        if target not in files:
            return "leads out of the book" if target.startswith("../") else "there is no such page"
        found.used.add(target)
        fragment = unquote(parts.fragment)
        if fragment and target in pages and fragment not in pages[target].anchors:
            return f"{target} has no heading or anchor named {fragment!r}"
        return None

    for name, text in texts.items():
        page = pages.get(name)
        addresses = page.addresses if page else []
        if not name.endswith(".html"):
            css = (first or second for first, second in _CSS_ADDRESS.findall(text))
            addresses = [*addresses, *((address, True) for address in css)]
        folder = "" if page and page.base == "/" else posixpath.dirname(name)
        for address, loaded in addresses:
            if problem := follow(name, folder, address, loaded):
                found.problems.append(f"{name}: {address}: {problem}")
    found.problems += [f"{name}: no link can name a file with '#'" for name in files if "#" in name]
    return found
