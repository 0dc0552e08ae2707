#!/usr/bin/env python3
"""Checks the language of comments, and the checks that ARCHITECTURE.md names.

- A doc comment does not open with a word that hides its subject (OPENINGS). CONTRIBUTING.md has examples.
- A comment line in Rust or WGSL has at most 110 columns. Code in fences and tables are exempt.
- Every invariant in ARCHITECTURE.md names existing files in the parentheses after it.
"""

import glob
import re
import subprocess
import sys

WIDTH = 110
OPENINGS = re.compile(r"(What|Has|Those|Its|It) |The same\b")
COMMENT = re.compile(r"\s*//(?P<doc>[/!]?)(?!/) ?(?P<text>.*)")


def failures(file):
    """Yields the lines of a file that fail."""
    opens, fence = "", False
    with open(file, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            line = line.rstrip("\n")
            found = COMMENT.match(line)
            if not found:
                opens, fence = "", False
                continue
            doc, text = found["doc"], found["text"]
            if doc and doc != opens and not fence and OPENINGS.match(text):
                yield f"{file}:{number}: opens with a word that hides its subject: {text}"
            opens = doc
            if text.lstrip().startswith("```"):
                fence = not fence
            elif len(line) > WIDTH and not fence and not text.startswith("|") and " " in text[:-1]:
                yield f"{file}:{number}: has {len(line)} columns, more than {WIDTH}"


def invariants(page):
    """Yields the invariants of ARCHITECTURE.md that name no check, or one that does not exist."""
    with open(page, encoding="utf-8") as text:
        _, _, section = text.read().partition("\n## Invariants\n")
    section, _, _ = section.partition("\n## ")
    for item in re.split(r"^- ", section, flags=re.MULTILINE)[1:]:
        parts = " ".join(item.split()).split("**", 2)
        if len(parts) < 3:
            yield f"{page}: an invariant is not bold: {parts[0]}"
            continue
        _, statement, rest = parts
        named = re.findall(r"\(([^()]*)\)", rest)
        paths = [path for part in named for path in re.findall(r"`([\w./*-]+\.\w+|\.ci/run)`", part)]
        if not paths and not any("the same" in part for part in named):
            yield f"{page}: names no check: {statement}"
        for path in paths:
            if not glob.glob(path):
                yield f"{page}: names {path}, which does not exist: {statement}"


def main():
    listed = subprocess.run(["git", "ls-files", "*.rs", "*.wgsl"], capture_output=True, text=True, check=True)
    files = [file for file in listed.stdout.split() if not file.startswith("patches/")]
    wrong = [line for file in files for line in failures(file)]
    wrong += invariants("ARCHITECTURE.md")
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
