#!/usr/bin/env bash
# An SSH server that belongs to the user it lets in: no root, no password, one port that needs no privilege.
# SSH_PUBLIC_KEY holds one public key a line. A session has the variables that this container was started with.
set -euo pipefail
if ! ssh-keygen -l -f - <<< "${SSH_PUBLIC_KEY:-}" > /dev/null 2>&1; then
    echo "start-ssh: SSH_PUBLIC_KEY holds no public key; give one: docker run -e SSH_PUBLIC_KEY=\"\$(cat ~/.ssh/id_ed25519.pub)\" …" >&2
    exit 2
fi
umask 077
folder=$HOME/.ssh
mkdir -p "$folder"
[ -e "$folder/host_key" ] || ssh-keygen -q -t ed25519 -N '' -f "$folder/host_key"
printf '%s\n' "$SSH_PUBLIC_KEY" > "$folder/authorized_keys"
# One NAME=VALUE a line: values of several lines cannot be passed on.
env -0 | grep -zvP '\n|^(HOME|PWD|OLDPWD|SHLVL|_|SSH_PUBLIC_KEY)=' | tr '\0' '\n' > "$folder/environment"
ssh-keygen -l -f "$folder/host_key"
exec /usr/sbin/sshd -D -e -f /dev/null -p "${SSH_PORT:-2222}" -h "$folder/host_key" -o "AuthorizedKeysFile=$folder/authorized_keys" \
    -o PidFile=none -o UsePAM=no -o AuthenticationMethods=publickey -o PermitUserEnvironment=yes -o StrictModes=no \
    -o "Subsystem=sftp internal-sftp"
