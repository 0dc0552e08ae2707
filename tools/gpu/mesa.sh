#!/usr/bin/env bash
# Another version of Mesa beside the one that is installed, for what that lacks. Nothing is installed: Debian's packages are unpacked into a folder, with
# every library that they need, and programs are started with those.
#
#     mesa.sh fetch FOLDER SUITE             Debian's mesa-vulkan-drivers of that suite, such as trixie-backports: 60 MB, once
#     mesa.sh with FOLDER DRIVER PROGRAM ..  runs a program with a driver of it: lvp (the CPU), radeon, intel (for the GPU of xe.c)
set -euo pipefail
gpu=$(cd "$(dirname "$0")" && pwd)/xe.c
mkdir -p "$2"
folder=$(cd "$2" && pwd)
libraries=usr/lib/x86_64-linux-gnu

fetch() {
  [ -e "$folder/root/$libraries/libvulkan_lvp.so" ] && return
  rm -rf "$folder/apt" "$folder/unpacked" "$folder/root"
  mkdir -p "$folder"/apt/lists/partial "$folder"/apt/cache/archives/partial
  : >"$folder/apt/status"
  printf 'deb http://deb.debian.org/debian %s main\n' "${1%-backports}" "$1" | sort -u >"$folder/apt/sources"
  local apt=(apt-get -qq -o Dir::Etc::SourceList="$folder/apt/sources" -o Dir::Etc::SourceParts=/dev/null -o Dir::State::Lists="$folder/apt/lists"
    -o Dir::Cache="$folder/apt/cache" -o Dir::State::status="$folder/apt/status" -o Debug::NoLocking=1 -o APT::Sandbox::User=root)
  "${apt[@]}" update
  # Nothing counts as installed, so that all libraries come along.
  "${apt[@]}" -y -t "$1" --no-install-recommends --download-only install mesa-vulkan-drivers libvulkan1 >/dev/null
  local package
  for package in "$folder"/apt/cache/archives/*.deb; do dpkg -x "$package" "$folder/unpacked"; done
  mv "$folder/unpacked" "$folder/root"
  rm -rf "$folder/apt"
}

with() {
  local root="$folder/root" icd="$folder/$1.json"
  printf '{"file_format_version": "1.0.0", "ICD": {"api_version": "1.3.0", "library_path": "%s"}}' "$root/$libraries/libvulkan_$1.so" >"$icd.$$"
  # Another program may be reading the file.
  mv "$icd.$$" "$icd"
  local preloaded=()
  if [ "$1" = intel ]; then
    if [ ! "$folder/xe.so" -nt "$gpu" ]; then
      ${CC:-cc} -O1 -shared -fPIC -o "$folder/xe.so.$$" "$gpu"
      mv "$folder/xe.so.$$" "$folder/xe.so"
    fi
    preloaded=(--preload "$folder/xe.so")
  fi
  # The programs' own libraries come last.
  VK_DRIVER_FILES="$icd" VK_ICD_FILENAMES="$icd" exec "$root/usr/lib64/ld-linux-x86-64.so.2" "${preloaded[@]}" --library-path "$root/$libraries:/$libraries" "${@:2}"
}

case $1 in
fetch) fetch "$3" ;;
with) with "${@:3}" ;;
*) sed -n '2,6s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
