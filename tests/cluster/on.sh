#!/usr/bin/env bash
# on.sh NODE COMMAND...: runs it in the node.
set -euo pipefail
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
on "$@"
