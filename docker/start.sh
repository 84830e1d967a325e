#!/usr/bin/env bash
# "lab" (or nothing) starts JupyterLab on port 8888; any other command runs as it is: docker run … torchrun …
# JUPYTER_TOKEN is the password of the notebooks; empty or not set, a new one is made and printed. It cannot be switched off.
set -euo pipefail
[ "${1:-lab}" = lab ] || exec "$@"
shift || true

for option in "$@"; do
    case $option in
        *.token* | *.password* | *allow_unauthenticated* | *.identity_provider_class*)
            echo "start: $option: set JUPYTER_TOKEN instead; the notebooks can run any command, so they always ask for a token" >&2
            exit 2
            ;;
    esac
done
JUPYTER_TOKEN=${JUPYTER_TOKEN//[[:space:]]/}
export JUPYTER_TOKEN=${JUPYTER_TOKEN:-$(python -c 'import secrets; print(secrets.token_hex(24))')}

if ! [ -w . ]; then
    owner=$(stat -c %u .)
    echo "start: $PWD belongs to id $owner, and this container runs as id $(id -u): notebooks cannot be saved here." >&2
    if [ "$owner" -eq 0 ]; then
        echo "start: give the folder to that id, on the host: sudo chown -R $(id -u) FOLDER" >&2
    else
        echo "start: run the container as the folder's owner: docker run --user $(stat -c %u:%g .) …" >&2
    fi
fi
echo "JupyterLab: http://127.0.0.1:${JUPYTER_PORT:-8888}/lab?token=$JUPYTER_TOKEN (if this port was published)"
home=/lab
[ ! -e book/00_ranks.ipynb ] || home=/lab/tree/book/00_ranks.ipynb
exec jupyter lab --no-browser --ServerApp.ip=0.0.0.0 --ServerApp.port="${JUPYTER_PORT:-8888}" --ServerApp.port_retries=0 \
    --ServerApp.root_dir="$PWD" --ServerApp.default_url="$home" "$@"
