#!/usr/bin/env bash
# Makes the archive of a release, from a clone: tools/release.sh [TARGET]
#
# target/release-archives/kiln-VERSION-TARGET.tar.gz (a zip on Windows), and its SHA-256 beside it. TARGET is a target of
# rustc, by default that of this machine; the binary must run here, because it writes its completions and manual pages.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${1:-$(rustc -vV | sed -n 's/^host: //p')}
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' Cargo.toml | head -n 1)
name="kiln-$version-$target"
archives=$PWD/target/release-archives
folder="$archives/$name"
built="${CARGO_TARGET_DIR:-target}"

if [ "${1:-}" ]; then
  cargo build --release --locked --bin kiln --target "$target"
  built+="/$target"
else
  cargo build --release --locked --bin kiln
fi
exe=kiln
[[ $target != *windows* ]] || exe=kiln.exe

rm -rf "$folder"
mkdir -p "$folder/completions" "$folder/man" "$folder/assets"
cp "$built/release/$exe" "$folder/"
cp README.md CHANGELOG.md LICENSE-APACHE LICENSE-MIT "$folder/"
# The binary looks for the demo model beside itself.
cp -R assets/demo "$folder/assets/"

# Help prints the values of these.
unset KILN_DEVICE KILN_SPEECH_MODEL
kiln() { "$folder/$exe" "$@"; }
kiln completions bash >"$folder/completions/kiln.bash"
kiln completions zsh >"$folder/completions/_kiln"
kiln completions fish >"$folder/completions/kiln.fish"
kiln completions powershell >"$folder/completions/_kiln.ps1"
kiln completions elvish >"$folder/completions/kiln.elv"
kiln man >"$folder/man/kiln.1"
for command in $(sed -n 's/^kiln\\-\(.*\)(1)$/\1/p' "$folder/man/kiln.1"); do
  kiln man "$command" >"$folder/man/kiln-$command.1"
done

cd "$archives"
if [ $exe = kiln.exe ]; then
  archive="$name.zip"
  rm -f "$archive"
  7z a -bso0 "$archive" "$name"
else
  archive="$name.tar.gz"
  tar czf "$archive" "$name"
fi
# macOS has shasum alone.
sum=$(command -v sha256sum || echo 'shasum -a 256')
$sum "$archive" >"$archive.sha256"
echo "$archives/$archive"
