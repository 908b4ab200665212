#!/usr/bin/env bash
# Installs, once, the Debian packages whose libraries the Mooncake package loads. Where that can't be done it says so
# and succeeds: everything else works without them, and the Mooncake tests are skipped with the reason.
set -euo pipefail

packages=(libibverbs1 librdmacm1 libnuma1)

missing=()
for package in "${packages[@]}"; do
    dpkg-query --show --showformat='${Status}' "$package" 2>/dev/null | grep -q "install ok installed" || missing+=("$package")
done

if [ "${#missing[@]}" -eq 0 ]; then
    exit 0
fi
without="the Mooncake backend and its tests are skipped"
if ! command -v apt-get >/dev/null; then
    echo "system packages: no apt-get here; install the libraries of ${missing[*]} yourself, or $without" >&2
    exit 0
fi
if [ "$(id -u)" -ne 0 ]; then
    echo "system packages: ${missing[*]} are missing and only root can install them (apt-get install ${missing[*]}); $without" >&2
    exit 0
fi
echo "Installing the system packages ${missing[*]} ..."
export DEBIAN_FRONTEND=noninteractive
install=(apt-get install --yes --no-install-recommends -qq "${missing[@]}")
if ! "${install[@]}" >/dev/null 2>&1 && ! { apt-get update -qq >/dev/null 2>&1 && "${install[@]}" >/dev/null; }; then
    echo "system packages: apt-get could not install ${missing[*]}; $without" >&2
fi
