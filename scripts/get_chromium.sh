#!/usr/bin/env bash
# Fetches a headless Chromium into FOLDER for the test that opens a report, without installing anything: Debian's
# packages, and those of the libraries that this system lacks, are downloaded and unpacked.
#
#   scripts/get_chromium.sh FOLDER
set -euo pipefail
folder=${1:?name the folder to put Chromium into}
program="$folder/usr/lib/chromium/chromium-headless-shell"
if [ -x "$program" ]; then exit 0; fi
if ! command -v apt-get >/dev/null || ! command -v dpkg >/dev/null; then
    echo "No apt here: install Chromium by your system's own means, and the test will find it." >&2
    exit 1
fi
wanted() { apt-get --simulate install --no-install-recommends chromium-headless-shell 2>/dev/null | awk '/^Inst/ {print $2}'; }
packages=$(wanted || true)
if [ -z "$packages" ] && [ "$(id -u)" = 0 ]; then
    apt-get update >/dev/null
    packages=$(wanted || true)
fi
if [ -z "$packages" ]; then
    echo "This system offers no package chromium-headless-shell: install Chromium by hand." >&2
    exit 1
fi
rm -rf "$folder"
mkdir -p "$folder/packages"
# shellcheck disable=SC2086  # one word per package
(cd "$folder/packages" && apt-get download $packages >/dev/null 2>&1) \
    || { echo "The packages of Chromium cannot be downloaded: is there a network?" >&2; rm -rf "$folder"; exit 1; }
for package in "$folder"/packages/*.deb; do dpkg --extract "$package" "$folder"; done
rm -rf "$folder/packages"
test -x "$program"
