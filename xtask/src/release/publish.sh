#!/usr/bin/env bash
# Never run: it needs a registry, keys and a host for downloads.
# It pushes the image and the chart, and signs the image, its SBOMs and the checksums of all files. It takes skopeo, helm
# and cosign, with logins to the registry.
set -euo pipefail
cd "$(dirname "$0")"
: "${VERSION:?}" "${IMAGE:?}" "${DIGEST:?}"

if [[ -e NOT-A-RELEASE.txt ]]; then
    cat NOT-A-RELEASE.txt >&2
    exit 1
fi
sha256sum --check --quiet SHA256SUMS

skopeo copy --all --preserve-digests "oci-archive:dnsflow-$VERSION.tar:$VERSION" "docker://$IMAGE:$VERSION"
pushed=$(skopeo inspect --raw "docker://$IMAGE:$VERSION" | sha256sum)
[[ sha256:${pushed%% *} == "$DIGEST" ]] || {
    echo "the registry has another image: sha256:${pushed%% *}, not $DIGEST" >&2
    exit 1
}
helm push "dnsflow-$VERSION.tgz" "oci://${IMAGE%/*}/charts"

cosign sign --yes "$IMAGE@$DIGEST"
for list in dnsflow-"$VERSION".*.cdx.json; do
    cosign attest --yes --type cyclonedx --predicate "$list" "$IMAGE@$DIGEST"
done
cosign sign-blob --yes --bundle SHA256SUMS.sigstore.json SHA256SUMS

echo "Now publish all files of this directory as v$VERSION, and give dnsflow.yaml to krew's index."
