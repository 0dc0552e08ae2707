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

# Files that are not rewritten yet.
NOT_YET = {
    "crates/kiln-generate/src/chooser.rs",
    "crates/kiln-generate/src/device_beams.rs",
    "crates/kiln-generate/src/device_sampler.rs",
    "crates/kiln-generate/src/feeder.rs",
    "crates/kiln-generate/src/feeder/chunks.rs",
    "crates/kiln-generate/src/feeder/decode.rs",
    "crates/kiln-generate/src/generation.rs",
    "crates/kiln-generate/src/generation/assisted.rs",
    "crates/kiln-generate/src/generation/assisted/constraint.rs",
    "crates/kiln-generate/src/generation/assisted/draft_model.rs",
    "crates/kiln-generate/src/generation/assisted/prompt_lookup.rs",
    "crates/kiln-generate/src/generation/assisted/round.rs",
    "crates/kiln-generate/src/generation/assisted/settings.rs",
    "crates/kiln-generate/src/generation/assisted/tests.rs",
    "crates/kiln-generate/src/generation/assisted/translation.rs",
    "crates/kiln-generate/src/generation/assisted/verify.rs",
    "crates/kiln-generate/src/generation/beams.rs",
    "crates/kiln-generate/src/generation/beams/candidates.rs",
    "crates/kiln-generate/src/generation/beams/group.rs",
    "crates/kiln-generate/src/generation/beams/log_probs.rs",
    "crates/kiln-generate/src/generation/beams/settings.rs",
    "crates/kiln-generate/src/generation/beams/tests.rs",
    "crates/kiln-generate/src/generation/beams/words.rs",
    "crates/kiln-generate/src/generation/contrastive.rs",
    "crates/kiln-generate/src/generation/contrastive/settings.rs",
    "crates/kiln-generate/src/generation/dola.rs",
    "crates/kiln-generate/src/generation/dola/tests.rs",
    "crates/kiln-generate/src/generation/guidance.rs",
    "crates/kiln-generate/src/generation/options.rs",
    "crates/kiln-generate/src/generation/rows.rs",
    "crates/kiln-generate/src/generation/tests.rs",
    "crates/kiln-generate/src/oom_policy.rs",
    "crates/kiln-generate/src/sampler.rs",
    "crates/kiln-generate/src/settings.rs",
    "crates/kiln-generate/src/stopping.rs",
    "crates/kiln-generate/src/text.rs",
    "crates/kiln/src/request.rs",
    "crates/kiln/src/sequence.rs",
    "crates/kiln/src/text.rs",
}


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
        _, statement, rest = " ".join(item.split()).split("**", 2)
        named = re.findall(r"\(([^()]*)\)", rest)
        paths = [path for part in named for path in re.findall(r"`([\w./*-]+\.\w+)`", part)]
        if not paths and not any("the same" in part for part in named):
            yield f"{page}: names no check: {statement}"
        for path in paths:
            if not glob.glob(path):
                yield f"{page}: names {path}, which does not exist: {statement}"


def main():
    listed = subprocess.run(["git", "ls-files", "*.rs", "*.wgsl"], capture_output=True, text=True, check=True)
    files = [file for file in listed.stdout.split() if not file.startswith("patches/")]
    failed = {file: found for file in files if (found := list(failures(file)))}
    wrong = [line for file, found in failed.items() if file not in NOT_YET for line in found]
    wrong += invariants("ARCHITECTURE.md")
    for file in sorted(NOT_YET - failed.keys()):
        print(f"note: {file} passes, and can be removed from NOT_YET")
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
