"""The page that `pip --find-links` reads: one link for each wheel of the releases.

    gh api ... --jq '.[].assets[].browser_download_url' | python .ci/wheel_index.py > index.html

Reads the addresses of the files from standard input, a line each. Where one ends in #sha256=...,
pip checks the sum. In the name of a wheel, the + of the local version is %2B in an address.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Iterable
from urllib.parse import unquote, urlsplit

ENDINGS = (".whl", ".tar.gz")


def page(addresses: Iterable[str]) -> str:
    """The HTML of the page, newest name first."""
    links = {}
    for address in addresses:
        name = unquote(urlsplit(address).path.rpartition("/")[2])
        if name.endswith(ENDINGS):
            links[name] = address.replace("+", "%2B")
    lines = [
        f'<a href="{html.escape(links[name])}">{html.escape(name)}</a><br>'
        for name in sorted(links, reverse=True)
    ]
    return "\n".join(["<!DOCTYPE html>", "<title>fused_op</title>", *lines, ""])


if __name__ == "__main__":
    sys.stdout.write(page(sys.stdin.read().split()))
