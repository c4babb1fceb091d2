#!/usr/bin/env bash
# The image of all pods, and of their sandboxes: a shell, curl, the lab's helper, and CoreDNS. An archive as `docker save`
# writes it, with one layer (moby, image/spec/spec.md).
set -euo pipefail
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"

root=$WORK/image
mkdir -p "$root"/{bin,etc,tmp,usr/bin}
cp "$BIN/node/usr/bin/busybox" "$root/bin/busybox"
for applet in $("$root/bin/busybox" --list); do
    [ "$applet" = busybox ] || ln -s busybox "$root/bin/$applet"
done
cp "$BIN/coredns" "$HELPER" "$BIN/node/usr/bin/curl" "$root/usr/bin/"
echo root:x:0:0:root:/:/bin/sh >"$root/etc/passwd"
# The helper was linked here, and runs with the libraries of the node's release, which must not be older.
for library in $({ ldd "$HELPER"; chroot "$BIN/node" ldd /usr/bin/curl; } | grep -oE '/[^ ]+' | sort -u); do
    mkdir -p "$root$(dirname "$library")"
    cp --dereference "$BIN/node$library" "$root$library"
done

cd "$WORK/images"
tar --create --file layer.tar --owner 0 --group 0 --directory "$root" .
rm -r "$root"
cat >config.json <<EOF
{"architecture": "amd64", "os": "linux",
 "config": {"Entrypoint": ["/bin/sleep", "infinity"], "Env": ["PATH=/usr/bin:/bin"]},
 "rootfs": {"type": "layers", "diff_ids": ["sha256:$(sha256sum layer.tar | cut -d ' ' -f 1)"]}}
EOF
echo '[{"Config": "config.json", "RepoTags": ["docker.io/library/cluster:local"], "Layers": ["layer.tar"]}]' >manifest.json
tar --create --file pods.tar config.json layer.tar manifest.json
rm config.json layer.tar manifest.json
